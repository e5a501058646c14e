"""One operation on this worker: what it is to start, how far it is, who listens.

Kept here: the record as it is reported, and the progress for those that joined. Decided here: when
all of it is STARTED. Invariant: the record moves as its table says, and every move is on disk
before anybody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import msgspec

from stagekeeper.agent.operation_store import (
    ENDED_OPERATION_STATES,
    OperationFile,
    OperationStore,
)
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.ids import DeviceId, OperationId, StageId
from stagekeeper.core.limits import LONGEST_MESSAGE
from stagekeeper.core.model import (
    OperationRecord,
    Peer,
    RollbackRecord,
    ShardRecord,
    StageStart,
)
from stagekeeper.core.names import cut
from stagekeeper.core.states import OPERATION_MOVES, OperationState, check_move

_MOVING: Final = frozenset(
    {OperationState.RESERVED, OperationState.STARTING, OperationState.ROLLING_BACK}
)


class Operation:
    """An operation that no reign has settled.

    Attributes:
        plan: None for one that cannot go on: an earlier release of the agent was given it, or its
            file is lost.
        up: its stages that came up, in the order in which they did.
        starts: the tasks that bring its stages up, one for each START that had something to start.
        waiting: those of their tasks that wait for a card or a turn, and have begun nothing yet.
        rolling_back: the task that rolls back.
        lease: the task that waits for a reign to join.
        joined_count: calls that are joined to it now.
        committing: held by the call that commits.
    """

    def __init__(
        self, file: OperationFile, store: OperationStore, on_change: Callable[[], None]
    ) -> None:
        self._file = file
        self.plan = file.plan
        self.up: list[StageProcess] = []
        self.starts: set[asyncio.Task[None]] = set()
        self.waiting: set[asyncio.Task[Any]] = set()
        self.rolling_back: asyncio.Task[None] | None = None
        self.lease: asyncio.Task[None] | None = None
        self.joined_count = 0
        self.committing = asyncio.Lock()
        self._store = store
        self._on_change = on_change
        self._news: dict[StageId, ShardRecord] = {}
        self._rung = asyncio.Event()

    @property
    def record(self) -> OperationRecord:
        return self._file.record

    @property
    def operation_id(self) -> OperationId:
        return self.record.operation_id

    @property
    def stage_ids(self) -> tuple[StageId, ...]:
        return self._file.stage_ids

    @property
    def asked_stage_ids(self) -> tuple[StageId, ...]:
        """What START was asked for so far."""
        return self._file.asked_stage_ids

    @property
    def peers(self) -> tuple[Peer, ...]:
        return self._file.peers

    @property
    def leaders(self) -> tuple[StagePorts, ...]:
        """Where command stages whose shard 0 is on another worker find it."""
        return self._file.leaders

    @property
    def state(self) -> OperationState:
        return self.record.state

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it: it is committed, or rolled back."""
        return self.state in ENDED_OPERATION_STATES

    @property
    def is_halted(self) -> bool:
        """Whether nothing new of it may start."""
        return self.rolling_back is not None or self.state is not OperationState.STARTING

    def __str__(self) -> str:
        return f"operation {self.operation_id} of {self.record.replica}"

    def start_of(self, stage_id: StageId) -> StageStart | None:
        """Return what the plan says of a stage; None without a plan."""
        stages = () if self.plan is None else self.plan.stages
        return next((it for it in stages if it.stage_id == stage_id), None)

    def cards_of(self, stage_id: StageId) -> tuple[DeviceId, ...]:
        """Return the cards that were set aside for a stage."""
        for it in self._file.claims:
            if it.stage_id == stage_id:
                return tuple([claim.device_id for claim in it.claims])
        return ()

    def is_up(self, stage_ids: Collection[StageId]) -> bool:
        return set(stage_ids) <= set(self.record.up_stage_ids)

    def write(self) -> None:
        """Put it on disk as it is; of one that has ended not what nobody will need any more."""
        if self.has_ended:
            record = replace(self.record, ports=())
            self._file = msgspec.structs.replace(self._file, plan=None, record=record)
        self._store.write(self._file)

    def move(self, state: OperationState, *, reason: str | None = None, **changes: Any) -> None:
        """Enter a state, on disk first.

        Args:
            state: may be the one that it is in.
            reason: cut to what a supervisor takes; None leaves the one that it has.
            changes: further fields of the record.

        Raises:
            IllegalMove: the table does not have it.
        """
        check_move(OPERATION_MOVES, self.state, state, str(self))
        if reason is not None:
            changes["reason"] = cut(reason, LONGEST_MESSAGE)
        self._set_record(state=state, **changes)
        self.write()
        self._tell()

    def ask_for(
        self, stage_ids: Collection[StageId], leaders: tuple[StagePorts, ...] = ()
    ) -> tuple[StageId, ...]:
        """Note what START asks for, on disk; return what of it was not asked for before."""
        known = set(self.asked_stage_ids)
        new = tuple(sorted(set(stage_ids) - known))
        if new:
            asked = tuple(sorted(known.union(new)))
            told = leaders or self.leaders
            self._file = msgspec.structs.replace(self._file, asked_stage_ids=asked, leaders=told)
            self.move(OperationState.STARTING)
        return new

    def peers_are(self, peers: tuple[Peer, ...]) -> None:
        """Keep where the shards on other workers are, on disk."""
        if peers != self.peers:
            self._file = msgspec.structs.replace(self._file, peers=peers)
            self.write()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Mark the current task as one that has begun nothing: it is cancelled by a rollback."""
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            yield
        finally:
            self.waiting.discard(task)

    def came_up(self, stage: StageProcess) -> None:
        """Note that a stage is READY. With the last one all of it is STARTED, at the same moment:
        nobody is told that all are up of an operation that still starts."""
        self.up.append(stage)
        self._up_changed()
        if not self.is_halted and self.is_up(self.stage_ids):
            self.move(OperationState.STARTED)
        else:
            self._tell()

    def found_up(self, stages: Iterable[StageProcess]) -> None:
        """Take these for up, in the order in which they came up; what was told before is over."""
        self.up = sorted(stages, key=lambda it: (it.shard.ready_time or 0.0, it.shard.stage_id))
        self._up_changed()

    def cleaned(self, stage: StageProcess, entry: RollbackRecord) -> None:
        """Note what became of a stage in the rollback, on disk."""
        self.up = [it for it in self.up if it is not stage]
        self._up_changed()
        self._set_record(rollback=(*self.record.rollback, entry))
        self.write()
        self._tell()

    def note_progress(self, stage: StageProcess) -> None:
        """Tell those that joined about a stage."""
        self._news[stage.shard.stage_id] = stage.shard
        self._ring()

    async def progress(self, stage_ids: Collection[StageId]) -> AsyncIterator[ShardRecord]:
        """Yield the newest word on each of these stages; slow readers miss some.

        Ends when they are up, or when the operation stands: when it is STARTED, COMMITTED,
        ROLLED_BACK or INTERRUPTED.
        """
        told: dict[StageId, ShardRecord] = {}
        while True:
            rung = self._rung
            # Asked before the news are told: what is over by then has told its last.
            is_over = self.state not in _MOVING or (
                self.state is OperationState.STARTING and self.is_up(stage_ids)
            )
            for stage_id, shard in sorted(self._news.items()):
                if stage_id in stage_ids and told.get(stage_id) != shard:
                    told[stage_id] = shard
                    yield shard
            if is_over:
                return
            await rung.wait()

    def _up_changed(self) -> None:
        self._set_record(up_stage_ids=tuple(sorted({it.shard.stage_id for it in self.up})))

    def _set_record(self, **changes: Any) -> None:
        self._file = msgspec.structs.replace(self._file, record=replace(self.record, **changes))

    def _tell(self) -> None:
        self._on_change()
        self._ring()

    def _ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()
