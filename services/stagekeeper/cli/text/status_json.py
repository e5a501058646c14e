"""The status as JSON: the keys that programs may rely on, each listed in docs/cli.md.

Decided here: names and shapes. Keys are added, never renamed or removed. Values that are unknown
are null; states are the protocol's names without their prefixes; sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from stagekeeper.cli.text import states
from stagekeeper.cli.text.cards import Claim, Claims, claims_by_card, foreign_bytes
from stagekeeper.cli.text.times import utc_text
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

Json = dict[str, Any]

FAILURES_SHOWN: Final = 20
"""The newest ones; the supervisor keeps more."""


def status_json(
    endpoint: str,
    workers: pb2.ListWorkersResponse,
    deployments: pb2.ListDeploymentsResponse,
    failures: Sequence[types.Failure],
) -> Json:
    """Make the whole document."""
    claims = claims_by_card(deployments.deployments)
    return {
        "supervisor": {
            **supervisor_json(endpoint, workers),
            "complete": workers.complete and deployments.complete,
        },
        "workers": [worker_json(worker, claims) for worker in workers.workers],
        "deployments": [deployment_json(item) for item in deployments.deployments],
        "failures": [failure_json(failure) for failure in failures],
    }


def supervisor_json(endpoint: str, workers: pb2.ListWorkersResponse) -> Json:
    """Make the document of the supervisor that listed these workers."""
    hold_reason = states.mode(0, workers.hold_reason).partition("(")[2].rstrip(")")
    return {
        "endpoint": endpoint,
        "epoch": workers.epoch.number,
        "supervisor_id": workers.epoch.supervisor_id,
        "mode": states.mode(workers.mode, 0),
        "hold_reason": hold_reason or None,
        "complete": workers.complete,
        "registration_count": workers.registration_count,
    }


def worker_json(worker: pb2.Worker, claims: Claims) -> Json:
    """Make the document of one worker; `claims` tell who has what of its cards."""
    return {
        "worker_id": worker.worker_id,
        "state": states.worker_state(worker.state),
        "reason": worker.reason or None,
        "hostname": worker.hostname,
        "incarnation": worker.incarnation,
        "agent_address": worker.agent_address,
        "agent_reachable": _optional(worker, "agent_reachable"),
        "stages_outlive_agent": worker.stages_outlive_agent,
        "outlive_reason": worker.outlive_reason or None,
        "silent_for_s": worker.silent_for_s,
        "shard_count": worker.shard_count,
        "registration_count": worker.registration_count,
        "inventory_unknown": worker.inventory_unknown,
        "inventory_reason": worker.inventory_reason or None,
        "notes": list(worker.notes),
        "devices": [
            _device(device, claims.get((worker.worker_id, device.device_id), []))
            for device in worker.devices
        ],
    }


def _device(device: types.Device, claims: Sequence[Claim]) -> Json:
    return {
        "device_id": device.device_id,
        "kind": device.kind,
        "model": device.model,
        "index": device.index,
        "total_bytes": device.total_bytes,
        "used_bytes": _optional(device, "used_bytes"),
        "reserved_bytes": device.reserved_bytes,
        "foreign_bytes": foreign_bytes(device),
        "sick_reason": device.sick_reason or None,
        "stages": [
            {
                "deployment": it.deployment,
                "replica_index": it.replica_index,
                "stage": it.record.stage_name,
                "shard_index": it.record.shard_index,
                "reserved_bytes": it.claim.reserved_bytes,
                "used_bytes": _optional(it.claim, "used_bytes"),
            }
            for it in claims
        ],
        "foreign": [
            {
                "pid": holder.pid or None,
                "name": holder.name,
                "memory_bytes": holder.memory_bytes,
                "worker_id": holder.worker_id or None,
            }
            for holder in device.foreign
        ],
    }


def deployment_json(deployment: pb2.Deployment) -> Json:
    """Make the document of one deployment, with its replicas and their stages."""
    wanted = (deployment.spec.replicas or 1) if deployment.HasField("spec") else None
    return {
        "name": deployment.name,
        "state": states.deployment_state(deployment.state),
        "reason": deployment.reason or None,
        "replicas_wanted": wanted,
        "spec_revision": deployment.spec_revision or None,
        "durable": deployment.durable,
        "create_time": _time(deployment, "create_time"),
        "state_time": _time(deployment, "state_time"),
        "replicas": [_replica(replica) for replica in deployment.replicas],
    }


def _replica(replica: pb2.Replica) -> Json:
    return {
        "replica_index": replica.replica_index,
        "state": states.replica_state(replica.state),
        "reason": replica.reason or None,
        "state_time": _time(replica, "state_time"),
        "next_action": replica.next_action or None,
        "next_action_in_s": _optional(replica, "next_action_in_s"),
        "ready_shard_count": replica.ready_shard_count,
        "shard_count": replica.shard_count,
        "stages": [_stage(shard) for shard in replica.shards],
    }


def _stage(shard: pb2.RoutedShard) -> Json:
    record = shard.record
    return {
        "stage_id": record.stage_id,
        "stage": record.stage_name,
        "shard_index": record.shard_index,
        "state": states.shard_state(record.state),
        "phase": states.phase(record.phase) or None,
        "reason": record.state_reason or None,
        "committed": record.committed,
        "entry": record.entry,
        "worker_id": shard.worker_id,
        "worker_state": states.worker_state(shard.worker_state),
        "instance_id": record.instance_id,
        "pid": record.pid or None,
        "attempt": record.attempt,
        "create_time": _time(record, "create_time"),
        "ready_time": _time(record, "ready_time"),
        "progress": {
            "done": record.progress.done,
            "total": record.progress.total or None,
            "note": record.progress.note or None,
        },
        "failure_id": record.failure_id or None,
        "memory_bytes": _optional(record, "memory_bytes"),
        "predicted_memory": _profile_json(record, "predicted_memory"),
        "measured_memory": _profile_json(record, "measured_memory"),
        "busy_for_s": _optional(record, "busy_for_s"),
        "devices": [
            {
                "device_id": claim.device_id,
                "reserved_bytes": claim.reserved_bytes,
                "used_bytes": _optional(claim, "used_bytes"),
            }
            for claim in record.devices
        ],
        "addresses": [{"name": address.name, "url": address.url} for address in record.addresses],
        "endpoints": [
            {
                "name": endpoint.name,
                "idempotent": endpoint.idempotent,
                "streaming": endpoint.streaming,
            }
            for endpoint in record.endpoints
        ],
    }


def _profile_json(record: types.ShardRecord, name: str) -> Json | None:
    if not record.HasField(name):  # type: ignore[arg-type]
        return None
    profile: types.MemoryProfile = getattr(record, name)
    return {
        "weights_bytes": profile.weights_bytes,
        "peak_bytes": profile.peak_bytes,
        "graph_bytes": _optional(profile, "graph_bytes"),
    }


def failure_json(failure: types.Failure) -> Json:
    """Make the document of one recorded failure."""
    origin = failure.origin
    return {
        "failure_id": failure.failure_id,
        "kind": states.failure_kind(failure.kind),
        "message": failure.message,
        "detected_by": failure.detected_by or None,
        "detect_time": failure.detect_time.ToJsonString()
        if failure.HasField("detect_time")
        else None,
        "worker_id": origin.worker_id,
        "deployment": origin.deployment,
        "replica_index": origin.replica_index,
        "stage": origin.stage_name,
        "phase": states.phase(origin.phase) or None,
        "instance_id": origin.instance_id,
        "pid": origin.pid or None,
        "exit_code": _optional(failure.exit, "code"),
        "exit_signal": _optional(failure.exit, "signal"),
        "last_log_lines": list(failure.last_log_lines),
    }


def _time(message: Any, field: str) -> str | None:
    return utc_text(getattr(message, field)) if message.HasField(field) else None


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
