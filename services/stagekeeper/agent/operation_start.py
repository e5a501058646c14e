"""START: stages of an operation brought up, each spawned or, after an earlier life, found alive.

Decided here: what the start of one stage is made of. The order (stages of one call that share a
card serially, others side by side) is `run_init_async`'s; `CardTurns` keeps the starts of different
calls and operations from overlapping on a card. A stage that came up stays up when another one
fails: it is the rollback's, which undoes all of the operation in one order.

Invariant: a start that does not return its stage has left no process of it; nothing is spawned for
an operation that is being undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import Final

import structlog

from stagekeeper.agent.cards.card_turns import CardTurns
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.initializer import run_init_async
from stagekeeper.agent.load_limit import LoadLimit
from stagekeeper.agent.operation import Operation
from stagekeeper.agent.readiness import StartFailed, until_ready
from stagekeeper.agent.rollback import Rollback
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.errors import InitError
from stagekeeper.core.ids import StageId
from stagekeeper.core.model import OperationPlan, StageStart
from stagekeeper.host.process import age_s
from stagekeeper.runtime import crash_points

_log = structlog.get_logger(__name__)

_RAISED_BUDGET_S: Final = 1.0
"""For a stage that said itself that its start raised: it only waits to be read."""


class _Halted(Exception):
    """Another stage failed, or the operation is not wanted any more, before this one began."""


class OperationStart:
    """Starts the stages of one agent's operations.

    Args:
        spawn: starts a stage's process and holds it; is told where its shard 0 is, when that is on
            another worker.
        rollback: undoes what has begun.
        max_loads: stages in LOAD at once at most; None is no limit.
    """

    def __init__(
        self,
        spawn: Callable[[OperationPlan, StageStart, StagePorts | None], StageProcess],
        stages: Stages,
        deaths: Deaths,
        rollback: Rollback,
        *,
        max_loads: int | None = None,
    ) -> None:
        self._spawn = spawn
        self._stages = stages
        self._deaths = deaths
        self._rollback = rollback
        self._loads = LoadLimit(stages, max_loads)
        self._cards = CardTurns()

    def living(self, operation: Operation) -> dict[StageId, StageProcess]:
        """Return the stages of an operation that live already: an earlier agent started them."""
        return {
            it.shard.stage_id: it
            for it in self._stages.of_operation(operation.operation_id)
            if it.holds_processes and not it.is_asked
        }

    async def run(
        self, operation: Operation, stage_ids: Collection[StageId], *, in_turn: bool = True
    ) -> None:
        """Bring up some stages of an operation. The first failure begins its rollback.

        Args:
            operation: has a plan.
            stage_ids: some of the plan's.
            in_turn: those that share a card one after another. Not for such as live already.

        Raises:
            asyncio.CancelledError: the operation is to be undone at once, or the agent ends; what
                was in flight is cleaned.
        """
        plan = operation.plan
        assert plan is not None
        starts = {start.stage_id: start for start in plan.stages if start.stage_id in stage_ids}
        # What overlaps are the loads: each stage measures alone under its cards' phase lock.
        is_side_by_side = plan.overlap_loads or not in_turn

        async def bring_up(stage_id: StageId) -> StageProcess:
            try:
                return await self._bring_up(operation, plan, starts[stage_id])
            except (StartFailed, _Halted):
                raise  # its rollback has begun
            except Exception as error:
                name = starts[stage_id].spec.name
                self._rollback.begin(
                    operation,
                    f"stage {name} could not be started: {type(error).__name__}: {error}",
                )
                raise

        async def leave(stage_id: StageId, stage: StageProcess) -> None:
            """Leave it to the rollback, which also knows what other calls brought up."""

        try:
            await run_init_async(
                {it: () if is_side_by_side else start.device_ids for it, start in starts.items()},
                bring_up,
                leave,
            )
        except InitError as error:
            _log.warning("a start ended", operation=str(operation), why=str(error))

    async def _bring_up(
        self, operation: Operation, plan: OperationPlan, start: StageStart
    ) -> StageProcess:
        stage = self.living(operation).get(start.stage_id)
        if stage is not None and stage.shard.ready_time is not None:
            return await self._see_up(operation, stage, start)  # it needs no card for itself
        async with AsyncExitStack() as held:
            if stage is None:
                stage = await self._begin(operation, plan, start, held)
            else:
                with operation.waits():
                    await held.enter_async_context(self._turn(plan, start))
            return await self._see_up(operation, stage, start)

    async def _begin(
        self, operation: Operation, plan: OperationPlan, start: StageStart, held: AsyncExitStack
    ) -> StageProcess:
        """Spawn a stage when it is its turn to load, and then on its cards, which are held.

        A shard does not wait for a turn to load: that may be held by shards of other stages, which
        wait for theirs on a worker where this stage had its turn.
        """
        turn = self._loads.turn() if start.shard_count == 1 else nullcontext()
        try:
            with operation.waits():
                async with turn:
                    await held.enter_async_context(self._turn(plan, start))
                    if operation.is_halted:
                        raise _Halted(f"{operation} is being undone")
                    self._forget_failed(plan, start)
                    leaders = {it.stage_id: it for it in operation.leaders}
                    return self._spawn(plan, start, leaders.get(start.stage_id))
        except OSError:
            self._forget_unborn(plan, start)
            raise

    def _turn(self, plan: OperationPlan, start: StageStart) -> AbstractAsyncContextManager[None]:
        """Return the turn on a stage's cards, which loads that may overlap have together."""
        together_with = plan.operation_id if plan.overlap_loads else ""
        return self._cards.alone_on(start.device_ids, together_with=together_with)

    async def _see_up(
        self, operation: Operation, stage: StageProcess, start: StageStart
    ) -> StageProcess:
        process = stage.record.process
        try:
            await until_ready(
                stage, start.spec, self._deaths, age_s=age_s(process) if process else 0.0
            )
        except StartFailed:
            budget_s = 0.0 if stage.raised is None else _RAISED_BUDGET_S
            await self._stages.take_down(stage, budget_s, "its start failed")
            raise
        except asyncio.CancelledError:
            await self._rollback.clean(operation, stage)
            raise
        crash_points.reached("ready-written")
        operation.came_up(stage)
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

    def _forget_unborn(self, plan: OperationPlan, start: StageStart) -> None:
        for stage in self._stages.of_operation(plan.operation_id):
            if stage.shard.stage_id == start.stage_id and not stage.record.pid:
                self._stages.forget(stage)
