"""Views of deployments as a supervisor would send them, for tests of those who read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stagekeeper.v1 import deployment_service_pb2 as pb
from stagekeeper.v1 import types_pb2 as types

READY = types.REPLICA_STATE_READY


def shard(
    instance_id: str,
    url: str,
    *,
    stage_id: int = 0,
    stage_name: str = "encoder",
    worker_id: str = "w0",
    worker_state: Any = types.WORKER_STATE_ALIVE,
    idempotent: Iterable[str] = (),
) -> pb.RoutedShard:
    """One shard that serves at `url`."""
    record = types.ShardRecord(
        stage_id=stage_id,
        stage_name=stage_name,
        shard_count=1,
        instance_id=instance_id,
        state=types.SHARD_STATE_READY,
        committed=True,
        endpoints=[types.EndpointInfo(name=name, idempotent=True) for name in idempotent],
    )
    if url:
        record.addresses.add(name="stage", protocol=types.ADDRESS_PROTOCOL_GRPC, url=url)
    return pb.RoutedShard(record=record, worker_id=worker_id, worker_state=worker_state)


def replica(
    index: int, *shards: pb.RoutedShard, state: Any = READY, reason: str = "", next_action: str = ""
) -> pb.Replica:
    """One replica."""
    return pb.Replica(
        replica_index=index, state=state, shards=shards, reason=reason, next_action=next_action
    )


def deployment(
    name: str,
    *replicas: pb.Replica,
    stages: Iterable[str] = ("encoder",),
    entry: str = "",
    state: Any = types.DEPLOYMENT_STATE_READY,
    reason: str = "",
) -> pb.Deployment:
    """One deployment, with a spec unless `stages` is empty."""
    view = pb.Deployment(name=name, state=state, reason=reason, replicas=replicas)
    names = list(stages)
    if names:
        view.spec.name = name
        view.spec.entry = entry
        for stage in names:
            view.spec.stages.add(name=stage, entrypoint="m:C")
    return view


def revision(n: int, epoch: int = 1) -> types.ChangeRevision:
    """A position in the change log."""
    return types.ChangeRevision(epoch=types.Epoch(number=epoch, supervisor_id=f"s{epoch}"), n=n)
