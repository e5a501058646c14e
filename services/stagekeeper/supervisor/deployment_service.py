"""DeploymentService: what users ask of the supervisor.

Reads answer from memory, whatever workers do. Decided here: which rpcs are not built yet, and what
to do instead. Invariant: a request that makes no sense is refused with every wrong field named.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from stagekeeper.core.commands import DeletionAccepted
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.events import DeploymentDeleted
from stagekeeper.core.ids import DeploymentName
from stagekeeper.core.model import DeploymentSpec
from stagekeeper.core.names import name_problem
from stagekeeper.core.spec_check import check_spec
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.convert import (
    epoch_to_proto,
    failure_to_proto,
    hold_reason_to_proto,
    mode_to_proto,
    revision_to_proto,
    spec_from_proto,
)
from stagekeeper.runtime.errors import Context, answers_refusals
from stagekeeper.supervisor.convert import worker_to_proto
from stagekeeper.supervisor.creation import Creations
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.plan_messages import plan_response
from stagekeeper.supervisor.watch_request import read_watch
from stagekeeper.supervisor.watchers import Watchers
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2
from stagekeeper.v1 import deployment_service_pb2_grpc as deployment_grpc
from stagekeeper.wire.transport import MAX_MESSAGE_BYTES

DEFAULT_FAILURES = 100
MOST_FAILURE_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Of one answer; what is left is more than enough for the framing of each failure."""


class DeploymentServicer(deployment_grpc.DeploymentServiceServicer):
    """Deployments: wanted, started, watched, deleted.

    Args:
        engine: decides, and is read.
        creations: followed by callers that create.
        watchers: followed by callers that watch.
        messages: deployments as messages.
        clock: for how long workers have been silent, and this supervisor waits for them.
        is_durable: whether what is wanted survives this process.
    """

    def __init__(
        self,
        engine: Engine,
        creations: Creations,
        watchers: Watchers,
        messages: DeploymentMessages,
        clock: Clock,
        *,
        is_durable: bool,
    ) -> None:
        self._engine = engine
        self._registry = engine.registry
        self._creations = creations
        self._watchers = watchers
        self._messages = messages
        self._clock = clock
        self._is_durable = is_durable

    def end_streams(self) -> None:
        """End every open stream: the supervisor ends."""
        self._creations.end()
        self._watchers.end()

    @answers_refusals
    async def PlanDeployment(
        self, request: deployment_pb2.PlanDeploymentRequest, context: Context
    ) -> deployment_pb2.PlanDeploymentResponse:
        spec = _checked_spec(request)
        return plan_response(self._registry.plan(spec, self._clock.monotonic()))

    @answers_refusals
    async def UpdateDeployment(
        self, request: deployment_pb2.UpdateDeploymentRequest, context: Context
    ) -> deployment_pb2.UpdateDeploymentResponse:
        raise _not_yet("UpdateDeployment", "delete the deployment, then create it again")

    @answers_refusals
    async def CreateDeployment(
        self, request: deployment_pb2.CreateDeploymentRequest, context: Context
    ) -> AsyncIterator[deployment_pb2.CreateDeploymentResponse]:
        spec = _checked_spec(request)
        following = self._creations.follow(spec, request.plan_id, context.time_remaining)
        async for response in following:
            yield response

    @answers_refusals
    async def DeleteDeployment(
        self, request: deployment_pb2.DeleteDeploymentRequest, context: Context
    ) -> deployment_pb2.DeleteDeploymentResponse:
        name = _checked_name(request.name)
        self._engine.ask(DeploymentDeleted(name), DeletionAccepted)
        return deployment_pb2.DeleteDeploymentResponse(durable=self._is_durable)

    @answers_refusals
    async def GetDeployment(
        self, request: deployment_pb2.GetDeploymentRequest, context: Context
    ) -> deployment_pb2.GetDeploymentResponse:
        name = _checked_name(request.name)
        view = self._registry.deployment(name)
        if view is None:
            raise Refused(
                Reason.DEPLOYMENT_UNKNOWN,
                f"nothing is known of a deployment {name!r}: nobody wants it and no worker "
                "reports it",
            )
        return deployment_pb2.GetDeploymentResponse(
            deployment=self._messages.of(view),
            revision=revision_to_proto(self._registry.revision),
            complete=self._registry.is_complete,
        )

    @answers_refusals
    async def ListDeployments(
        self, request: deployment_pb2.ListDeploymentsRequest, context: Context
    ) -> deployment_pb2.ListDeploymentsResponse:
        registry = self._registry
        return deployment_pb2.ListDeploymentsResponse(
            deployments=self._messages.of_all(registry.deployments()),
            revision=revision_to_proto(registry.revision),
            complete=registry.is_complete,
            mode=mode_to_proto(registry.mode),
            hold_reason=hold_reason_to_proto(registry.hold_reason),
        )

    @answers_refusals
    async def ListWorkers(
        self, request: deployment_pb2.ListWorkersRequest, context: Context
    ) -> deployment_pb2.ListWorkersResponse:
        registry = self._registry
        return deployment_pb2.ListWorkersResponse(
            workers=[worker_to_proto(view) for view in registry.workers(self._clock.monotonic())],
            complete=registry.is_complete,
            registration_count=registry.registration_count,
            epoch=epoch_to_proto(registry.epoch),
            mode=mode_to_proto(registry.mode),
            hold_reason=hold_reason_to_proto(registry.hold_reason),
        )

    @answers_refusals
    async def ListFailures(
        self, request: deployment_pb2.ListFailuresRequest, context: Context
    ) -> deployment_pb2.ListFailuresResponse:
        name = _checked_name(request.deployment, "deployment") if request.deployment else None
        response, room = deployment_pb2.ListFailuresResponse(), MOST_FAILURE_BYTES
        for failure in self._registry.failures(name, limit=request.limit or DEFAULT_FAILURES):
            message = failure_to_proto(failure)
            room -= message.ByteSize()
            if room < 0:
                break  # each brings the end of a log: a thousand do not fit one message
            response.failures.append(message)
        return response

    @answers_refusals
    async def WatchDeployments(  # type: ignore[override]
        self, request: deployment_pb2.WatchDeploymentsRequest, context: Context
    ) -> None:
        # It writes by itself: a generator could not notice that nobody takes what it yields.
        after, choice = read_watch(request)
        await self._watchers.tell(after, choice, context.write, reader=context.peer())


def _checked_spec(
    request: deployment_pb2.CreateDeploymentRequest | deployment_pb2.PlanDeploymentRequest,
) -> DeploymentSpec:
    if not request.HasField("spec"):
        raise bad_fields([FieldProblem("spec", "is missing")])
    spec = spec_from_proto(request.spec)
    check_spec(spec)
    return spec


def _checked_name(name: str, field: str = "name") -> DeploymentName:
    problem = name_problem(name)
    if problem:
        raise bad_fields([FieldProblem(field, problem)])
    return DeploymentName(name)


def _not_yet(rpc: str, instead: str) -> Refused:
    return Refused(Reason.NOT_YET, f"{rpc} is not built yet: {instead}")
