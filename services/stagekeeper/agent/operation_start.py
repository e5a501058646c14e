"""START and its undoing: the stages of one operation brought up, or taken down again.

Decided here: what one stage's start and clean-up are made of. The order (groups that share a card
serially, others side by side, the rollback in reverse) is `run_init_async`'s. One lock per card
keeps the starts of different operations from overlapping on it.

Invariant: a start that does not return its stage has left no process of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog

from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.initializer import run_init_async
from stagekeeper.agent.load_limit import LoadLimit
from stagekeeper.agent.operation import Operation
from stagekeeper.agent.readiness import StartFailed, until_ready
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.ids import DeviceId, StageId
from stagekeeper.core.model import OperationPlan, RollbackRecord, StageStart
from stagekeeper.core.names import cut
from stagekeeper.runtime import crash_points

_log = structlog.get_logger(__name__)

_RAISED_BUDGET_S: Final = 1.0
"""For a stage that said itself that its start raised: it only waits to be read."""


class OperationStart:
    """Starts and cleans the stages of one agent's operations.

    Args:
        spawn: starts a stage's process and holds it.
        rollback_budget_s: what a stage gets to end by itself that never was in service.
        max_loads: stages in LOAD at once at most; None is no limit.
    """

    def __init__(
        self,
        spawn: Callable[[OperationPlan, StageStart], StageProcess],
        stages: Stages,
        deaths: Deaths,
        *,
        rollback_budget_s: float,
        max_loads: int | None = None,
    ) -> None:
        self._spawn = spawn
        self._stages = stages
        self._deaths = deaths
        self._rollback_budget_s = rollback_budget_s
        self._loads = LoadLimit(stages, max_loads)
        self._device_locks: dict[DeviceId, asyncio.Lock] = {}

    async def run(self, operation: Operation, plan: OperationPlan) -> None:
        """Bring up all stages of an operation.

        Raises:
            InitError: one did not come up, and all that had is cleaned.
            asyncio.CancelledError: the operation is to be undone, and all is cleaned.
        """
        starts = {start.stage_id: start for start in plan.stages}

        async def bring_up(stage_id: StageId) -> StageProcess:
            return await self._bring_up(operation, plan, starts[stage_id])

        async def clean(stage_id: StageId, stage: StageProcess) -> None:
            await self.clean(operation, stage)

        await run_init_async(
            {stage_id: start.device_ids for stage_id, start in starts.items()}, bring_up, clean
        )

    async def clean(self, operation: Operation, stage: StageProcess) -> None:
        """Undo one stage of an operation and note how it went."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        error = ""
        try:
            reason = operation.record.reason
            await self._stages.take_down(stage, self._rollback_budget_s, reason)
        except Exception as raised:
            error = cut(f"{type(raised).__name__}: {raised}")
            _log.error("a stage's clean-up failed", stage=str(stage), exc_info=raised)
        operation.rollback.append(
            RollbackRecord(stage.shard.stage_id, not error, error, loop.time() - began)
        )

    def left_of(self, operation: Operation) -> list[StageProcess]:
        """Return the stages of an operation that are still held, the last to come up first."""
        held = self._stages.of_operation(operation.operation_id)
        return sorted(
            held,
            key=lambda it: (it.shard.ready_time or float("inf"), it.shard.stage_id),
            reverse=True,
        )

    async def _bring_up(
        self, operation: Operation, plan: OperationPlan, start: StageStart
    ) -> StageProcess:
        async with self._alone_on(start.device_ids):
            self._forget_failed(plan, start)
            try:
                async with self._loads.turn():
                    stage = self._spawn(plan, start)
            except OSError:
                await self._forget_unborn(plan, start)
                raise
            try:
                await until_ready(stage, start.spec, self._deaths)
            except StartFailed:
                budget_s = 0.0 if stage.raised is None else _RAISED_BUDGET_S
                await self._stages.take_down(stage, budget_s, "its start failed")
                raise
            except asyncio.CancelledError:
                await self.clean(operation, stage)
                raise
            crash_points.reached("ready-written")
            operation.up.append(stage)
            return stage

    def _forget_failed(self, plan: OperationPlan, start: StageStart) -> None:
        """Make room in the slot: what failed in it earlier and holds nothing is replaced now."""
        for stage in self._stages:
            shard = stage.shard
            if (
                shard.replica == plan.replica
                and shard.stage_id == start.stage_id
                and not stage.holds_processes
            ):
                self._stages.forget(stage)

    async def _forget_unborn(self, plan: OperationPlan, start: StageStart) -> None:
        for stage in self._stages.of_operation(plan.operation_id):
            if stage.shard.stage_id == start.stage_id and not stage.record.pid:
                self._stages.forget(stage)

    @asynccontextmanager
    async def _alone_on(self, device_ids: Iterable[DeviceId]) -> AsyncIterator[None]:
        """Hold the locks of these cards, taken in one order by everybody."""
        async with AsyncExitStack() as held:
            for device_id in sorted(device_ids):
                lock = self._device_locks.setdefault(device_id, asyncio.Lock())
                await held.enter_async_context(lock)
            yield
