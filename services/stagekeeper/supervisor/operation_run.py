"""One operation, step by step: stop what is in the way, reserve, start, commit.

Decided here: the order of the steps, and that a step whose stream broke, or a stop that takes
longer than a call, is joined again; the agent goes on with it meanwhile. Not decided here: what
follows from the outcome.

Invariant: no step is begun before the one before it has ended well; COMMIT is said once at most
after a START whose outcome was STARTED.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from stagekeeper.core.commands import AgentTarget, StartOperation, StopSlot
from stagekeeper.core.errors import Refused
from stagekeeper.core.events import OperationEnded
from stagekeeper.core.model import OperationRecord
from stagekeeper.core.states import OperationState
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.convert import operation_from_proto, plan_to_proto
from stagekeeper.supervisor.agent_calls import AgentCalls, AgentError
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2 as pb2

_log = structlog.get_logger(__name__)

LONGEST_DEFAULT_BUDGET_S = 600.0
"""For stages that name no stop budget: they have their agent's, which is not known here."""

_S = OperationState
_STEPS = (
    (
        agent_pb2.OPERATION_STEP_RESERVE,
        {_S.RESERVED, _S.STARTING, _S.STARTED, _S.COMMITTED},
        "operation-reserved",
    ),
    (agent_pb2.OPERATION_STEP_START, {_S.STARTED, _S.COMMITTED}, "operation-started"),
    (agent_pb2.OPERATION_STEP_COMMIT, {_S.COMMITTED}, "operation-committed"),
)
"""Each step, the states in which it has ended well (a repeat may find the operation further), and
the hand-off point behind it."""


class OperationRun:
    """Carries one operation through.

    Args:
        command: what to start, where, and what to stop before.
        calls: says commands to the agent.
        rejoin_s: how long an agent that is not reached is tried.
        stop_timeout_s: how long one call to stop is waited for; it is repeated, to join the stop,
            for as long beyond the stage's own budget.
        on_progress: gets every sign of progress.
    """

    def __init__(
        self,
        command: StartOperation,
        calls: AgentCalls,
        *,
        rejoin_s: float,
        stop_timeout_s: float,
        on_progress: Callable[[pb2.StageProgress], None],
    ) -> None:
        self._command = command
        self._calls = calls
        self._rejoin_s = rejoin_s
        self._stop_timeout_s = stop_timeout_s
        self._on_progress = on_progress
        self._heard_at = float("-inf")

    async def run(self) -> OperationEnded:
        """Take all steps, as far as they go; return how it ended."""
        plan = self._command.plan
        record: OperationRecord | None = None
        try:
            for stop in self._command.stop_first:
                await self._stop(stop)
            for step, good_states, hand_off in _STEPS:
                record = await self._take(step)
                if record.state not in good_states:
                    break
                crash_points.reached(hand_off)
        except AgentError as error:
            _log.warning("an operation ended", operation=plan.operation_id, why=str(error))
            return OperationEnded(plan.operation_id, record, str(error), error.reason)
        return OperationEnded(plan.operation_id, record)

    async def _stop(self, stop: StopSlot) -> None:
        """Stop what is in the way, for as long as its budget lets it take."""
        named = {it.stage_id: it.spec.stop_budget_s for it in self._command.plan.stages}
        budget_s = named.get(stop.slot.stage_id)
        if budget_s is None:
            budget_s = LONGEST_DEFAULT_BUDGET_S
        give_up_at = self._calls.clock.monotonic() + budget_s + self._stop_timeout_s
        while True:
            try:
                return await self._calls.stop_slot(stop, self._stop_timeout_s)
            except AgentError as error:
                if not error.is_late or self._calls.clock.monotonic() >= give_up_at:
                    raise

    async def _take(self, step: agent_pb2.OperationStep.ValueType) -> OperationRecord:
        async def attempt(target: AgentTarget) -> OperationRecord:
            return await self._join(step, target)

        return await self._calls.persist(
            self._command.target,
            attempt,
            limit_s=self._rejoin_s,
            heard_at=lambda: self._heard_at,
        )

    async def _join(
        self, step: agent_pb2.OperationStep.ValueType, target: AgentTarget
    ) -> OperationRecord:
        """Say the step, or join it where it is under way; return its outcome."""
        plan = self._command.plan
        request = plan_to_proto(plan, self._calls.header(target), step)
        async with self._calls.channels.agent(target.address) as agent:
            async for response in agent.InitStage(request):
                self._heard_at = self._calls.clock.monotonic()
                if response.WhichOneof("event") == "progress":
                    progress = response.progress
                    progress.worker_id = progress.worker_id or plan.worker_id
                    self._on_progress(progress)
                elif response.HasField("outcome"):
                    try:
                        return operation_from_proto(response.outcome)
                    except Refused as refused:
                        raise AgentError(f"the agent answered nonsense: {refused}") from refused
        raise AgentError(
            f"the agent of worker {plan.worker_id} ended the stream without an outcome",
            may_pass=True,
        )
