"""The hosts of a cluster, as whoever spawns actors on them finds them: by the stable endpoint.

Decided here: which workers count as hosts (those that are heard of, at an address). Not decided
here: how processes are started there (`owning.remote_procs`). Invariant: nothing is kept; an
address is a hint, and whoever uses it later asks anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from stagekeeper.client.errors import BadEndpoint, NotFound, Unavailable, from_rpc
from stagekeeper.client.pool import ChannelPool
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.deployment_service_pb2 import ListWorkersRequest, ListWorkersResponse, Worker
from stagekeeper.v1.discovery_service_pb2 import GetSupervisorRequest
from stagekeeper.v1.discovery_service_pb2_grpc import DiscoveryServiceStub
from stagekeeper.wire.error_details import released
from stagekeeper.wire.stable_endpoint import endpoint_problem

_ASK_TIMEOUT_S: Final = 10.0
_PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class AgentHost:
    """A host of a cluster, by its agent.

    Attributes:
        name: the agent's worker id.
        address: of its AgentService, `host:port`.
        cluster: which it belongs to.
        hostname: for people.
    """

    name: str
    address: str
    cluster: str
    hostname: str = ""


async def hosts_of(
    endpoint: str, *, workers: Sequence[str] | None = None, count: int | None = None
) -> list[AgentHost]:
    """Find the hosts of a cluster.

    Args:
        endpoint: of its supervisor.
        workers: their worker ids, in the order that is wanted; None means every one that is heard
            of, in the order of their ids.
        count: how many, the first ones; None means all.

    Raises:
        BadEndpoint: the endpoint cannot be dialled.
        NotFound: no such worker is known.
        Unavailable: one that is named is not heard of, or there are too few.
        SupervisorUnreachable: nobody answers at the endpoint.
    """
    if problem := endpoint_problem(endpoint):
        raise BadEndpoint(f"endpoint {problem}", violations=[("endpoint", problem)])
    link, pool = SupervisorLink(endpoint, patience_s=_PATIENCE_S), ChannelPool()
    try:
        listed = await link.ask(lambda stub: stub.ListWorkers, ListWorkersRequest(), _ASK_TIMEOUT_S)
        cluster = await _cluster_of(endpoint, pool)
    finally:
        await link.close()
        await pool.close()
    chosen = _chosen(listed, endpoint, workers, count)
    return [AgentHost(it.worker_id, it.agent_address, cluster, it.hostname) for it in chosen]


async def _cluster_of(endpoint: str, pool: ChannelPool) -> str:
    with pool.link(endpoint) as link:
        stub = link.stub(DiscoveryServiceStub)
        try:
            found = await stub.GetSupervisor(GetSupervisorRequest(), timeout=_ASK_TIMEOUT_S)
        except grpc.RpcError as error:
            failure = from_rpc(error, where=f"the supervisor at {endpoint}")
            raise failure from released(error)
    return str(found.cluster)


def _chosen(
    listed: ListWorkersResponse,
    endpoint: str,
    workers: Sequence[str] | None,
    count: int | None,
) -> list[Worker]:
    known = {it.worker_id: it for it in listed.workers}
    if workers is None:
        found = [it for it in listed.workers if not _problem(it)]
    else:
        if missing := [name for name in workers if name not in known]:
            raise NotFound(
                f"no worker {', '.join(missing)} at {endpoint}; there are "
                f"{', '.join(known) or 'none'}",
                reason="WORKER_UNKNOWN",
            )
        found = [known[name] for name in workers]
        if problems := [problem for it in found if (problem := _problem(it))]:
            raise Unavailable("; ".join(problems))
    wanted = 1 if count is None else count
    if len(found) < wanted:
        silent = "; ".join(filter(None, map(_problem, listed.workers)))
        recovering = "" if listed.complete else "; the supervisor still waits for workers"
        raise Unavailable(
            f"{wanted} hosts are wanted, and the cluster at {endpoint} has {len(found)}"
            f"{f' ({silent})' if silent else ''}{recovering}"
        )
    return found[:count]


def _problem(worker: Worker) -> str:
    """Say why nothing can be started on a worker now; empty when it can."""
    if worker.state != types_pb2.WORKER_STATE_ALIVE:
        state = types_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
        return f"{worker.worker_id} is {state}: {worker.reason or 'it is not heard of'}"
    if not worker.agent_address:
        return f"{worker.worker_id} has told no address"
    return ""
