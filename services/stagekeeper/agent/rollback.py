"""All of an operation undone: once, the last stage to come up first, and with a report.

Decided here: when it begins (nothing new starts from then on), that what is in flight ends by
itself unless somebody is in a hurry, and what is told of each stage. Not decided here: why an
operation is undone, and what the start of a stage is made of.

Invariant: a rollback is run once; what it has done is on disk before anybody is told; the claims of
a stage are free only when its memory is back, or was waited for in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.agent.operation import Operation
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.ids import DeviceId, WorkerId
from stagekeeper.core.model import Failure, RollbackRecord
from stagekeeper.core.names import cut
from stagekeeper.core.states import OperationState, RollbackEnding
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime import crash_points

_log = structlog.get_logger(__name__)


class Rollback:
    """The rollbacks of one agent.

    Args:
        worker_id: named in the reports.
        budget_s: what a stage gets to end by itself that never was in service.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        stages: Stages,
        ledger: Ledger,
        owner: TaskOwner,
        *,
        budget_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._stages = stages
        self._ledger = ledger
        self._owner = owner
        self._budget_s = budget_s

    def begin(self, operation: Operation, reason: str, failure: Failure | None = None) -> None:
        """Begin to undo an operation; the first reason counts. One that has ended is left alone."""
        if operation.rolling_back is not None or operation.has_ended:
            return
        if operation.lease is not None:
            operation.lease.cancel()
            operation.lease = None
        if operation.state is not OperationState.ROLLING_BACK:
            operation.move(OperationState.ROLLING_BACK, reason=reason, failure=failure)
            crash_points.reached("rollback-written")
        operation.rolling_back = self._owner.start(
            f"rollback of {operation.operation_id}", self._run(operation)
        )
        for task in operation.waiting:
            task.cancel()

    def hurry(self, operation: Operation) -> None:
        """End what is in flight; once, since a second time would hit its clean-up."""
        for task in operation.starts:
            if not task.done() and not task.cancelling():
                task.cancel()

    async def clean(self, operation: Operation, stage: StageProcess) -> None:
        """Undo one stage of an operation, and note how it went."""
        loop = asyncio.get_running_loop()
        began, shard, handle = loop.time(), stage.shard, stage.handle
        is_gone = handle is None or handle.has_exited or not stage.holds_processes
        cards = operation.cards_of(shard.stage_id)
        before_bytes = await self._used_bytes(cards)
        error, killed = "", False
        try:
            killed = await self._stages.take_down(stage, self._budget_s, operation.record.reason)
            error = stage.memory_note
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            _log.error("a stage's clean-up failed", stage=str(stage), exc_info=raised)
        ending = RollbackEnding.WAS_GONE if is_gone else RollbackEnding.ASKED
        entry = RollbackRecord(
            stage_id=shard.stage_id,
            cleaned=not stage.holds_processes,
            error=cut(error),
            duration_s=loop.time() - began,
            stage_name=shard.stage_name,
            worker_id=self._worker_id,
            was=shard.state,
            phase=shard.phase,
            ending=RollbackEnding.KILLED if killed else ending,
            memory_before_bytes=before_bytes,
            memory_after_bytes=await self._used_bytes(cards),
        )
        operation.cleaned(stage, entry)
        crash_points.reached("clean-written")
        _log.info(
            "a stage was rolled back",
            stage=str(stage),
            was=f"{entry.was} {entry.phase or ''}".strip(),
            ending=entry.ending,
            duration_s=round(entry.duration_s, 3),
            memory_before_bytes=entry.memory_before_bytes,
            memory_after_bytes=entry.memory_after_bytes,
            error=entry.error,
        )

    def left_of(self, operation: Operation) -> list[StageProcess]:
        """Return the stages of an operation that are still held, the last to come up first."""
        held = self._stages.of_operation(operation.operation_id)
        return sorted(
            held,
            key=lambda it: (it.shard.ready_time or float("inf"), it.shard.stage_id),
            reverse=True,
        )

    def end(self, operation: Operation) -> None:
        """Free what nothing of it holds any more, and call it rolled back."""
        # A stage whose clean-up failed may still hold its memory: it is freed when it is gone.
        left = self._stages.of_operation(operation.operation_id)
        holding = {it.shard.stage_id for it in left if it.holds_processes}
        for stage_id in operation.stage_ids:
            if stage_id not in holding:
                self._ledger.free(Booking(operation.operation_id, stage_id))
        if not operation.has_ended:
            operation.move(OperationState.ROLLED_BACK)
            crash_points.reached("rolled-back")
            _log.warning("rolled back", operation=str(operation), reason=operation.record.reason)

    async def _run(self, operation: Operation) -> None:
        """Wait for what is starting to end, then undo what is left."""
        if operation.starts:
            await asyncio.wait(operation.starts)
        for stage in self.left_of(operation):
            await self.clean(operation, stage)
        self.end(operation)

    async def _used_bytes(self, cards: Collection[DeviceId]) -> int | None:
        memory = self._stages.memory
        return None if memory is None else await memory.used_bytes(cards, self._stages)
