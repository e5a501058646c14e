"""A new agent takes over what an earlier one left: every recorded process, and every operation.

Each record ends up in one of three ways before the agent registers: held (a live process that does
not answer in time is reported as ADOPTING), proven gone and reported as failed, or proven gone and
forgotten. Stopped here is only what the records say was never let go, or was asked to stop already.
What is not recorded is never touched. An operation that was under way goes on later (`go_on` of
`operations`), unless one of its stages ended meanwhile: then it is rolled back.

Invariant: a process is ours only if pid, start ticks, boot and instance id all say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import structlog

from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.ending import kill_processes
from stagekeeper.agent.operation_store import (
    OperationFile,
    OperationStore,
    file_from,
    is_committed,
)
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.records import RecordStore, StageRecord, open_process
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.agent.stopping import Stopping
from stagekeeper.core.model import Failure
from stagekeeper.core.states import ShardState
from stagekeeper.host.process import ProcessHandle, boot_id

_FIRST_WORD_S: Final = 10.0
"""What a process takes at most from its spawn to the first line of its log, on a busy host. One
that says nothing for so long, and lives, is held like any other."""
_LOOK_S: Final = 0.02

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """How many recorded processes are held, were found gone, and were cleaned away."""

    held_count: int
    gone_count: int
    cleaned_count: int


class Adoption:
    """One start of an agent. Used once."""

    def __init__(
        self,
        stages: Stages,
        operations: Operations,
        store: OperationStore,
        deaths: Deaths,
        stopping: Stopping,
        record_store: RecordStore,
    ) -> None:
        self._stages = stages
        self._operations = operations
        self._store = store
        self._deaths = deaths
        self._stopping = stopping
        self._record_store = record_store
        self._boot_id = boot_id()
        self._held: list[StageProcess] = []
        self._gone_count = 0
        self._cleaned_count = 0

    async def run(
        self,
        records: Iterable[StageRecord],
        operations: Iterable[OperationFile],
        *,
        wait_s: float,
    ) -> Adopted:
        """Take everything over; return when each held process has answered, or `wait_s` is over."""
        by_id = {file.record.operation_id: self._usable(file) for file in operations}
        for record in records:
            shard = record.shard
            file = by_id.get(shard.operation_id)
            self._store.note_generation(shard.slot, shard.generation)
            committed = is_committed(shard, file)
            if file is None:
                file = file_from(shard)
                if not committed:
                    by_id[shard.operation_id] = file
            await self._take_over(record, file, committed=committed)
        for file in by_id.values():
            self._operations.take_over(file, self._failed_of(file))
        await self._answers(wait_s)
        return Adopted(len(self._held), self._gone_count, self._cleaned_count)

    async def _take_over(
        self, record: StageRecord, file: OperationFile, *, committed: bool
    ) -> None:
        handle = open_process(record, self._boot_id)
        state = record.shard.state
        may_live = handle is not None and state not in (ShardState.STOPPING, ShardState.FAILED)
        if (
            handle is not None
            and may_live
            and (committed or not await self._ends_wordless(record, handle))
        ):
            stage = self._stages.add(_with_state(record, ShardState.ADOPTING))
            self._stages.hold(stage, handle)
            self._held.append(stage)
            return
        stage = self._stages.add(record)
        # Of an operation that is open, the rollback sees to what was its stage, and tells of it.
        is_open = not committed and not file.has_ended
        if handle is not None and state is ShardState.STOPPING:
            self._stages.hold(stage, handle)
            if not is_open:
                _ = self._stopping.stop(stage, None, record.shard.state_reason)
            self._cleaned_count += 1
            return
        stage.handle = handle
        was_asked = state is ShardState.STOPPING  # then its end is no failure, whoever saw it
        was_let_go = record.process is not None and (
            committed or self._record_store.has_spoken(record.instance_id)
        )
        if (
            was_let_go
            and (committed or is_open)
            and not was_asked
            and state is not ShardState.FAILED
        ):
            stage.update(committed=committed)
            self._deaths.found_gone(stage)
        # Nothing watches it yet, and its children may have outlived it.
        await kill_processes(stage)
        if stage.state is ShardState.FAILED and (committed or is_open):
            stage.persist()
            self._gone_count += 1
        elif not (was_asked and is_open):
            # Never let go, never committed, or to be stopped anyway: nobody waits for it.
            self._stages.forget(stage)
            self._cleaned_count += 1

    async def _ends_wordless(self, record: StageRecord, handle: ProcessHandle) -> bool:
        """Wait until a process has said a word, or has ended without one: it was never let go.

        One that its agent left on its start pipe ends as soon as it looks there.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _FIRST_WORD_S
        while not self._record_store.has_spoken(record.instance_id) and loop.time() < until:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await handle.wait()
                return not self._record_store.has_spoken(record.instance_id)
            except TimeoutError:
                pass
        return False

    def _usable(self, file: OperationFile) -> OperationFile:
        """Take the plan from an operation that cannot go on: of one of its stages too little is
        known, since its record is damaged, and nothing is started beside a process of it."""
        unclear = {it.slot for it in self._record_store.damaged}
        if unclear.isdisjoint(file.slots):
            return file
        return msgspec.structs.replace(file, plan=None)

    def _failed_of(self, file: OperationFile) -> tuple[str, Failure | None] | None:
        """Return why an operation cannot go on: the first failure among its stages."""
        for stage in self._stages.of_operation(file.record.operation_id):
            if stage.state in (ShardState.FAILED, ShardState.STOPPING):
                return stage.shard.state_reason, self._deaths.known_of(stage)
        return None

    async def _answers(self, wait_s: float) -> None:
        waits = [asyncio.ensure_future(_until_reached(stage)) for stage in self._held]
        if not waits:
            return
        _, pending = await asyncio.wait(waits, timeout=wait_s)
        for wait in pending:
            wait.cancel()
        if pending:
            await asyncio.wait(pending)
        for stage in self._held:
            if stage.state is ShardState.ADOPTING:
                _log.warning("a live stage has not answered; it is held", stage=str(stage))


async def _until_reached(stage: StageProcess) -> None:
    while stage.state is ShardState.ADOPTING:
        await stage.changed()


def _with_state(record: StageRecord, state: ShardState) -> StageRecord:
    return msgspec.structs.replace(record, shard=replace(record.shard, state=state))
