"""What the supervisor lists at one moment, as far as the demo compares it.

Decided here: what "every replica is listed again" means. Not decided here: what must not change
(`report`). All of it is asked over the public API, by a client of its own beside the load's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from stagekeeper.client import Client, StagekeeperError
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.discovery_service_pb2 import GetSupervisorRequest
from stagekeeper.v1.discovery_service_pb2_grpc import DiscoveryServiceStub
from stagekeeper.wire.transport import CLIENT_OPTIONS

LOOK_TIMEOUT_S = 2.0

Place = tuple[int, str]
"""A replica's index and the name of one of its stages."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One look.

    Attributes:
        epoch: number of the supervisor's reign; every supervisor has a higher one than the last.
        is_complete: the supervisor waits for no worker any more.
        incarnations: of each worker that is ALIVE; every agent has a higher one than the last.
        stage_pids: of each stage whose replica is READY.
        supervisor_address: where agents reach the supervisor.
    """

    epoch: int
    is_complete: bool
    incarnations: Mapping[str, int]
    stage_pids: Mapping[Place, int]
    supervisor_address: str = ""


async def look(client: Client, deployment: str) -> Listing:
    """Ask what is listed now, the supervisor's address excepted.

    Raises:
        StagekeeperError: nobody answers.
    """
    workers = await client.workers(timeout=LOOK_TIMEOUT_S)
    listed = await client.list(timeout=LOOK_TIMEOUT_S)
    return Listing(
        epoch=workers.epoch.number,
        is_complete=workers.complete and listed.complete,
        incarnations={
            worker.worker_id: worker.incarnation
            for worker in workers.workers
            if worker.state == types_pb2.WORKER_STATE_ALIVE
        },
        stage_pids={
            (replica.replica_index, shard.record.stage_name): shard.record.pid
            for found in listed.deployments
            if found.name == deployment
            for replica in found.replicas
            if replica.state == types_pb2.REPLICA_STATE_READY
            for shard in replica.shards
        },
    )


async def supervisor_address(endpoint: str) -> str:
    """Ask, as an agent does, where the supervisor takes its workers' calls.

    Raises:
        StagekeeperError: nobody answers.
    """
    async with grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS) as channel:
        try:
            answer = await DiscoveryServiceStub(channel).GetSupervisor(
                GetSupervisorRequest(), timeout=LOOK_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise StagekeeperError(f"nobody answers at {endpoint}: {error.code().name}") from error
    return answer.worker_address
