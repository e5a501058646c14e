"""What is on disk about operations, and the highest generation that each slot has seen.

An operation is written before its first spawn and after each step, with all that it takes to go on
with it in another life of the agent; its file is the one place that says whether it is committed.
Generations outlive the operations and the stages that used them: that is what a late command is
fenced by. Of the slots, those with the newest generations are kept: a command that is late by a
thousand starts is none that anybody still waits with.

Invariant: a generation that a stage was started with is on disk, in an operation or in its slot,
until so many newer ones are.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from stagekeeper.agent.directory import AgentDirectory, file_name
from stagekeeper.agent.durable_file import remove_durably, rename_durably, write_durably
from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.ids import Generation, OperationId, SlotKey, StageId
from stagekeeper.core.model import (
    DeviceClaim,
    OperationPlan,
    OperationRecord,
    Peer,
    ShardRecord,
)
from stagekeeper.core.states import OperationState

_log = structlog.get_logger(__name__)

KEPT_SLOTS: Final = 1_000

ENDED_OPERATION_STATES: Final = frozenset({OperationState.COMMITTED, OperationState.ROLLED_BACK})
"""In these nothing more happens to an operation."""


_UNENDED: Final = frozenset(
    {OperationState.RESERVED, OperationState.STARTING, OperationState.STARTED}
)


class StageClaims(msgspec.Struct, frozen=True):
    """What was set aside for one stage, as its cards were known then."""

    stage_id: StageId
    claims: tuple[DeviceClaim, ...]


class OperationFile(msgspec.Struct, frozen=True):
    """An operation as the disk knows it.

    Attributes:
        stage_ids: its stages on this worker.
        plan: all that it takes to go on with it; None in files of an earlier release, in those made
            up of a stage's record, and once it has ended.
        asked_stage_ids: what START was asked for so far, ascending.
        peers: the shards of the replica on other workers, as the last COMMIT named them.
        claims: one for each stage with cards.
        leaders: where command stages whose shard 0 is elsewhere find it, as START named them.
    """

    record: OperationRecord
    stage_ids: tuple[StageId, ...]
    plan: OperationPlan | None = None
    asked_stage_ids: tuple[StageId, ...] = ()
    peers: tuple[Peer, ...] = ()
    claims: tuple[StageClaims, ...] = ()
    leaders: tuple[StagePorts, ...] = ()

    @property
    def can_go_on(self) -> bool:
        """Whether another life of the agent can go on with it."""
        return self.plan is not None and self.record.state in _UNENDED

    @property
    def has_ended(self) -> bool:
        return self.record.state in ENDED_OPERATION_STATES

    @property
    def slots(self) -> Iterable[SlotKey]:
        for stage_id in self.stage_ids:
            yield SlotKey(self.record.deployment, self.record.replica_index, stage_id)


def is_committed(shard: ShardRecord, file: OperationFile | None) -> bool:
    """Return whether a recorded shard was put into service; the operation's file knows it first."""
    return shard.committed or (file is not None and file.record.state is OperationState.COMMITTED)


def file_from(shard: ShardRecord) -> OperationFile:
    """Make up the file of an operation of which only a stage's record is left."""
    return OperationFile(
        OperationRecord(
            shard.operation_id,
            shard.deployment,
            shard.replica_index,
            shard.generation,
            OperationState.INTERRUPTED,
            reason="its agent died, and its file is gone",
        ),
        (shard.stage_id,),
    )


class _Slot(msgspec.Struct, frozen=True):
    slot: SlotKey
    generation: Generation


class OperationStore:
    """The operations and generations of one agent."""

    def __init__(self, directory: AgentDirectory) -> None:
        self._directory = directory
        self._generations: dict[SlotKey, Generation] = {}
        self._written: dict[SlotKey, Generation] = {}

    def load(self) -> list[OperationFile]:
        """Read all; a file that cannot be read is set aside alone, and told."""
        self._written = self._load_generations()
        for slot, generation in self._written.items():
            self._raise(slot, generation)
        found = []
        for path in sorted(self._directory.operations.glob("*.json")):
            if not path.is_file():
                _log.warning("what is no file of an operation is left alone", path=str(path))
                continue
            try:
                operation = msgspec.json.decode(path.read_bytes(), type=OperationFile)
            except msgspec.DecodeError as error:
                rename_durably(path, path.with_suffix(".damaged"))
                _log.error(
                    "an operation's file is damaged and was set aside",
                    file=str(path.with_suffix(".damaged")),
                    error=str(error),
                )
                continue
            found.append(operation)
            for slot in operation.slots:
                self._raise(slot, operation.record.generation)
        return found

    def write(self, operation: OperationFile) -> None:
        """Replace an operation's file; it is on disk when this returns."""
        for slot in operation.slots:
            self._raise(slot, operation.record.generation)
        write_durably(self._path(operation.record.operation_id), msgspec.json.encode(operation))

    def remove(self, operation_id: OperationId) -> None:
        """Forget an operation; its generation is kept."""
        self.write_generations()
        remove_durably(self._path(operation_id))

    def highest_generation(self, slot: SlotKey) -> Generation | None:
        """Return the highest generation that the slot has seen, stopped ones too."""
        return self._generations.get(slot)

    def note_generation(self, slot: SlotKey, generation: Generation) -> None:
        """Count a generation that a record or a stop shows; it is not written for that alone."""
        self._raise(slot, generation)

    def write_generations(self) -> None:
        """Put the generations of all slots on disk, unless they are there."""
        if len(self._generations) > KEPT_SLOTS:
            ascending = sorted(self._generations.items(), key=lambda entry: entry[1])
            self._generations = dict(ascending[-KEPT_SLOTS:])
        if self._generations == self._written:
            return
        entries = [_Slot(slot, generation) for slot, generation in self._generations.items()]
        write_durably(self._directory.generations_file, msgspec.json.encode(entries))
        self._written = dict(self._generations)

    def _raise(self, slot: SlotKey, generation: Generation) -> None:
        known = self._generations.get(slot)
        if known is None or generation > known:
            self._generations[slot] = generation

    def _load_generations(self) -> dict[SlotKey, Generation]:
        path = self._directory.generations_file
        try:
            entries = msgspec.json.decode(path.read_bytes(), type=list[_Slot])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            rename_durably(path, path.with_suffix(".damaged"))
            _log.error("the generations of slots are damaged and were set aside", error=str(error))
            return {}
        return {entry.slot: entry.generation for entry in entries}

    def _path(self, operation_id: OperationId) -> Path:
        return self._directory.operations / f"{file_name(operation_id)}.json"
