"""Workers made by hand: registrations as an agent would send them, without the agent.

Each holds the stages of one replica. They stand for many machines, so that the supervisor alone is
measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import time

import grpc

from benchmarks.ceiling import channel_to
from stagekeeper.v1 import (
    deployment_service_pb2,
    deployment_service_pb2_grpc,
    discovery_service_pb2,
    discovery_service_pb2_grpc,
    supervisor_service_pb2,
    supervisor_service_pb2_grpc,
    types_pb2,
)

IN_FLIGHT = 64


def registration(
    number: int, stage_count: int, agent_address: str, deployment: str = "bench"
) -> supervisor_service_pb2.RegisterWorkerRequest:
    """Build the slice of worker `number`: replica `number` of `deployment`, all READY.

    Something has to answer at `agent_address`: the supervisor dials it back.
    """
    request = supervisor_service_pb2.RegisterWorkerRequest(
        cluster="default",
        worker_id=f"worker-{number}",
        host_id=f"host-{number}",
        hostname=f"host-{number}",
        incarnation=1,
        revision=1,
        agent_address=agent_address,
        stages_outlive_agent=True,
        devices=[
            types_pb2.Device(
                device_id="cpu:0", kind="cpu", model="host memory", total_bytes=1 << 30
            )
        ],
        replica_states=[
            types_pb2.ShardRecord(
                deployment=deployment,
                replica_index=number,
                spec_revision=1,
                model_name="bench",
                abilities=["chat"],
                stage_id=stage,
                stage_name=f"stage-{stage}",
                stage_count=stage_count,
                shard_count=1,
                generation=types_pb2.Generation(
                    epoch=types_pb2.Epoch(number=1, supervisor_id="earlier"), n=number + 1
                ),
                operation_id=f"op-{number}",
                committed=True,
                instance_id=hashlib.md5(f"{number}/{stage}".encode()).hexdigest(),
                devices=[types_pb2.DeviceClaim(device_id="cpu:0", reserved_bytes=1 << 20)],
                addresses=[
                    types_pb2.ShardAddress(
                        name="stage",
                        protocol=types_pb2.ADDRESS_PROTOCOL_GRPC,
                        url=f"127.0.0.1:{20000 + stage}",
                    )
                ],
                endpoints=[types_pb2.EndpointInfo(name="echo", idempotent=True)],
                state=types_pb2.SHARD_STATE_READY,
                pid=1000 + number,
                entry=stage == 0,
            )
            for stage in range(stage_count)
        ],
    )
    request.digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
    return request


def heartbeat(
    request: supervisor_service_pb2.RegisterWorkerRequest,
) -> supervisor_service_pb2.HeartbeatRequest:
    return supervisor_service_pb2.HeartbeatRequest(
        cluster=request.cluster,
        worker_id=request.worker_id,
        incarnation=request.incarnation,
        revision=request.revision,
        digest=request.digest,
    )


async def worker_address(endpoint: str, *, within_s: float = 20.0) -> str:
    """Ask the stable endpoint, again and again until somebody answers."""
    deadline = time.monotonic() + within_s
    async with channel_to(endpoint) as channel:
        stub = discovery_service_pb2_grpc.DiscoveryServiceStub(channel)
        while True:
            try:
                found = await stub.GetSupervisor(
                    discovery_service_pb2.GetSupervisorRequest(), timeout=1.0, wait_for_ready=True
                )
                return found.worker_address
            except grpc.aio.AioRpcError:
                if time.monotonic() > deadline:
                    raise


async def register_all(
    address: str, requests: list[supervisor_service_pb2.RegisterWorkerRequest]
) -> None:
    """Put every slice, IN_FLIGHT at a time."""
    pending = iter(requests)
    async with channel_to(address) as channel:
        stub = supervisor_service_pb2_grpc.SupervisorServiceStub(channel)

        async def sender() -> None:
            for request in pending:
                reply = await stub.RegisterWorker(request, timeout=30.0)
                assert not reply.refused, reply.refused[0].message

        await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))


async def routable_replicas(endpoint: str) -> int:
    """Return how many replicas a reader of the list may route to."""
    async with channel_to(endpoint) as channel:
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        listed = await stub.ListDeployments(
            deployment_service_pb2.ListDeploymentsRequest(), timeout=30.0
        )
    return sum(
        replica.state == types_pb2.REPLICA_STATE_READY
        for deployment in listed.deployments
        for replica in deployment.replicas
    )
