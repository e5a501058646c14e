"""The supervisor's views as messages. What it receives is converted by `runtime.convert`.

Invariant: nothing is decided here; whatever the core derived is what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from stagekeeper.core.event_log import PublishEvent
from stagekeeper.core.ids import ReplicaIndex
from stagekeeper.core.model import DeploymentView, ReplicaView
from stagekeeper.core.operations import ReplicaFailure
from stagekeeper.core.workers import WorkerView
from stagekeeper.runtime.convert import (
    deployment_state_to_proto,
    device_to_proto,
    failure_to_proto,
    replica_state_to_proto,
    rollback_to_proto,
    shard_to_proto,
    spec_to_proto,
    time_to_proto,
    worker_state_to_proto,
)
from stagekeeper.supervisor.wall_times import WallTimes
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2


def replica_to_proto(view: ReplicaView, times: WallTimes) -> deployment_pb2.Replica:
    return deployment_pb2.Replica(
        replica_index=view.key.index,
        state=replica_state_to_proto(view.state),
        ready_shard_count=view.ready_shard_count,
        shard_count=view.shard_count,
        reason=view.reason,
        next_action=view.next_action,
        shards=[
            deployment_pb2.RoutedShard(
                record=shard_to_proto(shard.record),
                worker_id=shard.worker_id,
                worker_state=worker_state_to_proto(shard.worker_state),
            )
            for shard in view.shards
        ],
        state_time=None if view.since is None else time_to_proto(times.of(view.since)),
    )


def deployment_to_proto(
    view: DeploymentView,
    replicas: Mapping[ReplicaIndex, deployment_pb2.Replica],
    times: WallTimes,
) -> deployment_pb2.Deployment:
    """Convert a deployment whose replicas were converted before."""
    return deployment_pb2.Deployment(
        name=view.name,
        spec=None if view.spec is None else spec_to_proto(view.spec),
        spec_revision=view.spec_revision,
        state=deployment_state_to_proto(view.state),
        reason=view.reason,
        replicas=[replicas[replica.key.index] for replica in view.replicas],
        durable=view.durable,
        create_time=None if view.create_time is None else time_to_proto(view.create_time),
        state_time=None if view.since is None else time_to_proto(times.of(view.since)),
    )


def event_to_proto(event: PublishEvent, times: WallTimes) -> deployment_pb2.Event:
    subject = event.subject
    return deployment_pb2.Event(
        kind=deployment_pb2.EventKind.Value(f"EVENT_KIND_{event.kind.value}"),
        time=time_to_proto(times.of(event.at)),
        message=event.message,
        is_warning=event.is_warning,
        deployment=subject.deployment,
        replica_index=subject.replica_index,
        stage_id=subject.stage_id,
        worker_id=subject.worker_id,
        failure_id=subject.failure_id,
    )


def replica_failure_to_proto(failed: ReplicaFailure) -> deployment_pb2.ReplicaFailure:
    return deployment_pb2.ReplicaFailure(
        replica_index=failed.replica_index,
        worker_id=failed.worker_id,
        message=failed.message,
        failure=None if failed.failure is None else failure_to_proto(failed.failure),
        rollback=[rollback_to_proto(record) for record in failed.rollback],
    )


def worker_to_proto(view: WorkerView) -> deployment_pb2.Worker:
    return deployment_pb2.Worker(
        worker_id=view.worker_id,
        state=worker_state_to_proto(view.state),
        reason=view.reason,
        hostname=view.hostname,
        incarnation=view.incarnation,
        revision=view.revision,
        agent_address=view.agent_address,
        agent_reachable=view.is_agent_reachable,
        stages_outlive_agent=view.stages_outlive_agent,
        outlive_reason=view.outlive_reason,
        devices=[device_to_proto(device) for device in view.devices],
        silent_for_s=view.silent_for_s,
        shard_count=view.shard_count,
        registration_count=view.registration_count,
        inventory_unknown=view.inventory_unknown,
        inventory_reason=view.inventory_reason,
        notes=view.notes,
    )
