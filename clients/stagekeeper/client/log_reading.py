"""Reading a stage's log from the agent that holds it: the supervisor is asked only for the way.

Decided here: which agent is asked. A stage that was rolled back is in no view any more, and its log
still lies with its agent: then all agents are asked, the likely one first.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import grpc

from stagekeeper.client.errors import NotFound, StagekeeperError, from_rpc
from stagekeeper.client.pool import ChannelPool
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.client.view import NoRoute, stage_id_of
from stagekeeper.v1.agent_service_pb2 import ReadStageLogRequest, ReadStageLogResponse
from stagekeeper.v1.agent_service_pb2_grpc import AgentServiceStub
from stagekeeper.v1.deployment_service_pb2 import (
    Deployment,
    GetDeploymentRequest,
    ListWorkersRequest,
)
from stagekeeper.wire.error_details import released

_ASK_TIMEOUT_S = 10.0


async def read_stage_log(
    link: SupervisorLink,
    agents: ChannelPool,
    request: ReadStageLogRequest,
    stage: str | int | None,
) -> AsyncGenerator[ReadStageLogResponse, None]:
    """Yield pieces of a log; `Client.stage_log` says the rest. `stage` fills in the stage's id."""
    view = await _view(link, request.deployment)
    stage_id = stage_id_of(view, stage)
    if isinstance(stage_id, NoRoute):
        raise NotFound(stage_id.message, reason="STAGE_UNKNOWN")
    request.stage_id = stage_id
    last_error: StagekeeperError | None = None
    for address in await _addresses(link, view, request):
        pieces = _read(agents, address, request)
        try:
            first = await anext(pieces, None)
        except StagekeeperError as error:
            # The likely agent's word counts most, unless it only says that it cannot be reached.
            if last_error is None or not isinstance(last_error, NotFound):
                last_error = error
            continue
        async with contextlib.aclosing(pieces):
            while first is not None:
                yield first
                first = await anext(pieces, None)
        return
    raise last_error or NotFound(
        f"no agent is known that could have a log of {request.deployment!r}",
        reason="STAGE_UNKNOWN",
    )


async def _view(link: SupervisorLink, name: str) -> Deployment:
    answer = await link.ask(
        lambda stub: stub.GetDeployment, GetDeploymentRequest(name=name), _ASK_TIMEOUT_S
    )
    return answer.deployment


async def _addresses(
    link: SupervisorLink, view: Deployment, request: ReadStageLogRequest
) -> list[str]:
    """Return agents' addresses, those that hold the stage first."""
    workers = (
        await link.ask(lambda stub: stub.ListWorkers, ListWorkersRequest(), _ASK_TIMEOUT_S)
    ).workers
    holders = {
        shard.worker_id
        for replica in view.replicas
        if replica.replica_index == request.replica_index
        for shard in replica.shards
        if shard.record.stage_id == request.stage_id
    }
    likely = sorted(workers, key=lambda worker: worker.worker_id not in holders)
    return [worker.agent_address for worker in likely if worker.agent_address]


async def _read(
    agents: ChannelPool, address: str, request: ReadStageLogRequest
) -> AsyncGenerator[ReadStageLogResponse, None]:
    with agents.link(address) as link:
        call = link.stub(AgentServiceStub).ReadStageLog(request)
        try:
            async for piece in call:
                yield piece
        except grpc.RpcError as error:
            agents.drop(link)
            raise from_rpc(error, where=f"the agent at {address}") from released(error)
        finally:
            call.cancel()
            del call  # see `released`
