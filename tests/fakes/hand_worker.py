"""A worker by hand: real gRPC to a real supervisor, and no agent behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from stagekeeper.v1 import (
    discovery_service_pb2,
    discovery_service_pb2_grpc,
    supervisor_service_pb2,
    supervisor_service_pb2_grpc,
    types_pb2,
)
from stagekeeper.wire.transport import CLIENT_OPTIONS

NOBODY = "127.0.0.1:1"
"""An address at which no agent answers."""

EARLIER = types_pb2.Epoch(number=0, supervisor_id="earlier")


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        yield channel


def shard(
    deployment: str = "m",
    *,
    replica: int = 0,
    stage: int = 0,
    of: int = 1,
    n: int = 1,
    instance: str = "",
    state: types_pb2.ShardState.ValueType = types_pb2.SHARD_STATE_READY,
    url: str = "127.0.0.1:9",
    **changes: object,
) -> types_pb2.ShardRecord:
    """Build a committed shard as its agent would report it."""
    fields: dict[str, object] = {
        "deployment": deployment,
        "replica_index": replica,
        "spec_revision": 1,
        "model_name": "model",
        "abilities": ["chat", "audio"],
        "stage_id": stage,
        "stage_name": f"stage-{stage}",
        "stage_count": of,
        "shard_count": 1,
        "generation": types_pb2.Generation(epoch=EARLIER, n=n),
        "operation_id": f"op-{deployment}-{replica}-{n}",
        "committed": True,
        "instance_id": instance or f"{deployment}-{replica}-{stage}-{n}",
        "addresses": [
            types_pb2.ShardAddress(name="stage", protocol=types_pb2.ADDRESS_PROTOCOL_GRPC, url=url)
        ],
        "endpoints": [types_pb2.EndpointInfo(name="run", idempotent=True)],
        "state": state,
        "pid": 4711,
        **changes,
    }
    record = types_pb2.ShardRecord(**fields)  # type: ignore[arg-type]
    record.create_time.seconds = 1_700_000_000 + stage
    return record


class HandWorker:
    """Says what it is told to say, finding the supervisor through the endpoint every time."""

    def __init__(self, endpoint: str, worker_id: str = "w1", **slice_fields: object) -> None:
        self.endpoint = endpoint
        fields: dict[str, object] = {
            "cluster": "default",
            "worker_id": worker_id,
            "host_id": f"host-of-{worker_id}",
            "hostname": worker_id,
            "incarnation": 1,
            "revision": 1,
            "agent_address": NOBODY,
            "stages_outlive_agent": True,
            "digest": b"1",
            **slice_fields,
        }
        self.slice = supervisor_service_pb2.RegisterWorkerRequest(**fields)  # type: ignore[arg-type]

    def hold(self, *shards: types_pb2.ShardRecord) -> HandWorker:
        """Hold exactly `shards` from now on: a new revision, if anything was put before."""
        del self.slice.replica_states[:]
        self.slice.replica_states.extend(shards)
        self.slice.revision += 1
        self.slice.digest = str(self.slice.revision).encode()
        return self

    async def register(self) -> supervisor_service_pb2.RegisterWorkerResponse:
        async with channel_to(await self.supervisor_address()) as channel:
            stub = supervisor_service_pb2_grpc.SupervisorServiceStub(channel)
            return await stub.RegisterWorker(self.slice, timeout=10)

    async def heartbeat(self, **changes: object) -> supervisor_service_pb2.HeartbeatResponse:
        fields: dict[str, object] = {
            "cluster": self.slice.cluster,
            "worker_id": self.slice.worker_id,
            "incarnation": self.slice.incarnation,
            "revision": self.slice.revision,
            "digest": self.slice.digest,
            **changes,
        }
        request = supervisor_service_pb2.HeartbeatRequest(**fields)  # type: ignore[arg-type]
        async with channel_to(await self.supervisor_address()) as channel:
            return await supervisor_service_pb2_grpc.SupervisorServiceStub(channel).Heartbeat(
                request, timeout=10
            )

    async def report(
        self, failure: types_pb2.Failure | None, **changes: object
    ) -> supervisor_service_pb2.ReportFailureResponse:
        fields: dict[str, object] = {
            "cluster": self.slice.cluster,
            "worker_id": self.slice.worker_id,
            "incarnation": self.slice.incarnation,
            "failure": failure,
            **changes,
        }
        request = supervisor_service_pb2.ReportFailureRequest(**fields)  # type: ignore[arg-type]
        async with channel_to(await self.supervisor_address()) as channel:
            return await supervisor_service_pb2_grpc.SupervisorServiceStub(channel).ReportFailure(
                request, timeout=10
            )

    async def supervisor_address(self) -> str:
        async with channel_to(self.endpoint) as channel:
            answer = await discovery_service_pb2_grpc.DiscoveryServiceStub(channel).GetSupervisor(
                discovery_service_pb2.GetSupervisorRequest(), timeout=10
            )
        return answer.worker_address
