"""Reading a stage's log from the agent that holds it: the supervisor is asked only for the way.

Decided here: which agent is asked. A stage that was rolled back is in no view any more, and its log
still lies with its agent: then all agents are asked, the likely one first. A worker holds at most
one shard of a stage, so the worker that is asked says which shard is meant.

Invariant: as long as an agent that could have the log does not answer, nobody is told that there is
none.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping

import grpc

from stagekeeper.client.errors import (
    UNREACHABLE,
    NotFound,
    StagekeeperError,
    Unavailable,
    from_rpc,
)
from stagekeeper.client.pool import ChannelPool
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.client.view import NoRoute, stage_id_of
from stagekeeper.v1.agent_service_pb2 import ReadStageLogRequest, ReadStageLogResponse
from stagekeeper.v1.agent_service_pb2_grpc import AgentServiceStub
from stagekeeper.v1.deployment_service_pb2 import (
    Deployment,
    GetDeploymentRequest,
    ListWorkersRequest,
    Worker,
)
from stagekeeper.wire.error_details import released

_ASK_TIMEOUT_S = 10.0


async def read_stage_log(
    link: SupervisorLink,
    agents: ChannelPool,
    request: ReadStageLogRequest,
    stage: str | int | None,
    shard: int,
) -> AsyncGenerator[ReadStageLogResponse, None]:
    """Yield pieces of a log; `Client.stage_log` says the rest. `stage` fills in the stage's id."""
    view = await _view(link, request.deployment)
    stage_id = stage_id_of(view, stage)
    if isinstance(stage_id, NoRoute):
        raise NotFound(stage_id.message, reason="STAGE_UNKNOWN")
    request.stage_id = stage_id
    holders = _holders(view, request)
    # Of what is gone from the view, only the order of the workers tells shards apart.
    to_skip = 0 if shard in holders else sum(it not in holders for it in range(shard))
    found_errors: list[StagekeeperError] = []
    for worker in await _workers(link, holders, shard):
        pieces = _read(agents, worker, request)
        try:
            first = await anext(pieces, None)
        except StagekeeperError as error:
            found_errors.append(error)
            if worker.worker_id == holders.get(shard) and not isinstance(error, NotFound):
                break  # nobody else has what it has
            continue
        async with contextlib.aclosing(pieces):
            if to_skip:
                to_skip -= 1
                continue
            while first is not None:
                yield first
                first = await anext(pieces, None)
        return
    silent = [error for error in found_errors if not isinstance(error, NotFound)]
    raise (silent or found_errors or [_no_agent(request.deployment)])[0]


def _no_agent(name: str) -> NotFound:
    return NotFound(f"no agent is known that could have a log of {name!r}", reason="STAGE_UNKNOWN")


async def _view(link: SupervisorLink, name: str) -> Deployment:
    answer = await link.ask(
        lambda stub: stub.GetDeployment, GetDeploymentRequest(name=name), _ASK_TIMEOUT_S
    )
    return answer.deployment


def _holders(view: Deployment, request: ReadStageLogRequest) -> dict[int, str]:
    """Return shard index → worker, of the stage that is meant, as far as the view has it."""
    return {
        shard.record.shard_index: shard.worker_id
        for replica in view.replicas
        if replica.replica_index == request.replica_index
        for shard in replica.shards
        if shard.record.stage_id == request.stage_id
    }


async def _workers(link: SupervisorLink, holders: Mapping[int, str], shard: int) -> list[Worker]:
    """Return whom to ask, in order: who holds the shard first, who holds another one never."""
    answer = await link.ask(lambda stub: stub.ListWorkers, ListWorkersRequest(), _ASK_TIMEOUT_S)
    holder = holders.get(shard)
    others = {worker_id for index, worker_id in holders.items() if index != shard}
    found = [worker for worker in answer.workers if worker.worker_id not in others - {holder}]
    if holder is not None and all(worker.worker_id != holder for worker in found):
        found.append(Worker(worker_id=holder))
    return sorted(found, key=lambda worker: worker.worker_id != holder)


async def _read(
    agents: ChannelPool, worker: Worker, request: ReadStageLogRequest
) -> AsyncGenerator[ReadStageLogResponse, None]:
    if not worker.agent_address:
        raise _silent(worker, "where it is is not known")
    with agents.link(worker.agent_address) as link:
        call = link.stub(AgentServiceStub).ReadStageLog(request)
        try:
            async for piece in call:
                yield piece
        except grpc.RpcError as error:
            agents.drop(link)
            found = from_rpc(error, where=f"the agent at {worker.agent_address}")
            if isinstance(found, Unavailable):
                why = found.message.rpartition(": ")[2]  # gRPC's last word, as `Connection refused`
                found = _silent(worker, f"{worker.agent_address}: {why}")
            raise found from released(error)
        finally:
            call.cancel()
            del call  # see `released`


def _silent(worker: Worker, why: str) -> Unavailable:
    return Unavailable(
        f"the agent of worker {worker.worker_id} does not answer ({why})",
        reason=UNREACHABLE,
        next_move="repeat when it is back; the log lies with it",
    )
