"""One step of an operation said to one agent: the call, its progress, and its outcome.

Decided here: what an agent's answers to `InitStage` are worth. Not decided here: which step is said
(`operation_run`, `executor`). Invariant: a stream that ends without an outcome says nothing, and is
joined again for as long as its agent is heard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.commands import AgentTarget
from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import StageId
from stagekeeper.core.model import OperationPlan, OperationRecord, Peer
from stagekeeper.runtime.convert import operation_from_proto, plan_to_proto
from stagekeeper.supervisor.agent_calls import AgentCalls, AgentError
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2 as pb2


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What is asked of a worker: a step for its part, and what goes with that step."""

    part: OperationPlan
    step: agent_pb2.OperationStep.ValueType
    start_stage_ids: tuple[StageId, ...] = ()
    peers: tuple[Peer, ...] = ()
    leaders: tuple[StagePorts, ...] = ()


class StepCall:
    """Says steps.

    Args:
        calls: says commands to agents.
        on_progress: gets every sign of progress.
    """

    def __init__(self, calls: AgentCalls, on_progress: Callable[[pb2.StageProgress], None]) -> None:
        self._calls = calls
        self._on_progress = on_progress

    async def say(
        self, request: StepRequest, target: AgentTarget, *, limit_s: float
    ) -> OperationRecord:
        """Say a step, or join it where it is under way; return its outcome.

        Args:
            request: what is asked.
            target: the life of the worker that it is asked of.
            limit_s: seconds of silence after which an agent that is not reached is given up.

        Raises:
            AgentError: the agent refused, was not reached, or lives another life by now.
        """
        heard_at = float("-inf")

        async def attempt(newest: AgentTarget) -> OperationRecord:
            nonlocal heard_at
            message = plan_to_proto(
                request.part,
                self._calls.header(newest),
                request.step,
                start_stage_ids=request.start_stage_ids,
                peers=request.peers,
                leaders=request.leaders,
            )
            async with self._calls.channels.agent(newest.address) as agent:
                async for response in agent.InitStage(message):
                    heard_at = self._calls.clock.monotonic()
                    if response.WhichOneof("event") == "progress":
                        progress = response.progress
                        progress.worker_id = progress.worker_id or newest.worker_id
                        self._on_progress(progress)
                    elif response.HasField("outcome"):
                        return _record(response.outcome)
            raise AgentError(
                f"the agent of worker {newest.worker_id} ended the stream without an outcome",
                may_pass=True,
            )

        return await self._calls.persist(
            target, attempt, limit_s=limit_s, heard_at=lambda: heard_at
        )


def _record(message: pb2.OperationRecord) -> OperationRecord:
    try:
        return operation_from_proto(message)
    except Refused as refused:
        raise AgentError(f"the agent answered nonsense: {refused}") from refused
