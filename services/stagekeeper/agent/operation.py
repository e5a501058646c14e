"""One operation on this worker: what it is to start, how far it is, who listens.

Kept here: the record as it is reported, and the progress for those that joined. Invariant: the
record moves as its table says, and every move is on disk before anybody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final

from stagekeeper.agent.operation_store import OperationFile, OperationStore
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import OperationId, StageId
from stagekeeper.core.limits import LONGEST_MESSAGE
from stagekeeper.core.model import OperationPlan, OperationRecord, RollbackRecord, ShardRecord
from stagekeeper.core.names import cut
from stagekeeper.core.states import OPERATION_MOVES, OperationState, check_move

_MOVING: Final = frozenset(
    {OperationState.RESERVED, OperationState.STARTING, OperationState.ROLLING_BACK}
)
_ENDED: Final = frozenset({OperationState.COMMITTED, OperationState.ROLLED_BACK})


class Operation:
    """An operation that no reign has settled.

    Attributes:
        plan: None for one that an earlier life of the agent was given: it cannot go on.
        up: its stages that came up, in the order in which they did.
        rollback: what the rollback has done so far, in its order.
        starting: the task that runs START.
        rolling_back: the task that rolls back.
        lease: the task that waits for a reign to join.
        joined_count: calls that are joined to it now.
        committing: held by the call that commits.
    """

    def __init__(
        self,
        record: OperationRecord,
        stage_ids: tuple[StageId, ...],
        store: OperationStore,
        on_change: Callable[[], None],
        plan: OperationPlan | None = None,
    ) -> None:
        self.record = record
        self.stage_ids = stage_ids
        self.plan = plan
        self.up: list[StageProcess] = []
        self.rollback: list[RollbackRecord] = list(record.rollback)
        self.starting: asyncio.Task[None] | None = None
        self.rolling_back: asyncio.Task[None] | None = None
        self.lease: asyncio.Task[None] | None = None
        self.joined_count = 0
        self.committing = asyncio.Lock()
        self._store = store
        self._on_change = on_change
        self._news: dict[StageId, ShardRecord] = {}
        self._rung = asyncio.Event()

    @property
    def operation_id(self) -> OperationId:
        return self.record.operation_id

    @property
    def state(self) -> OperationState:
        return self.record.state

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it: it is committed, or rolled back."""
        return self.state in _ENDED

    def __str__(self) -> str:
        return f"operation {self.operation_id} of {self.record.replica}"

    def write(self) -> None:
        """Put it on disk as it is."""
        self._store.write(OperationFile(self.record, self.stage_ids))

    def move(self, state: OperationState, *, reason: str | None = None, **changes: Any) -> None:
        """Enter a state, on disk first.

        Args:
            reason: cut to what a supervisor takes; None leaves the one that it has.
            changes: further fields of the record.

        Raises:
            IllegalMove: the table does not have it.
        """
        check_move(OPERATION_MOVES, self.state, state, str(self))
        if reason is not None:
            changes["reason"] = cut(reason, LONGEST_MESSAGE)
        self.record = replace(self.record, state=state, **changes)
        self.write()
        self._on_change()
        self._ring()

    def note_progress(self, stage: StageProcess) -> None:
        """Tell those that joined about a stage."""
        self._news[stage.shard.stage_id] = stage.shard
        self._ring()

    async def progress(self) -> AsyncIterator[ShardRecord]:
        """Yield the newest word on each stage, until the operation stands; slow readers miss some.

        It stands when it is STARTED, COMMITTED, ROLLED_BACK or INTERRUPTED.
        """
        told: dict[StageId, ShardRecord] = {}
        while True:
            rung = self._rung
            for stage_id, shard in sorted(self._news.items()):
                if told.get(stage_id) != shard:
                    told[stage_id] = shard
                    yield shard
            if self.state not in _MOVING:
                return
            await rung.wait()

    def _ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()
