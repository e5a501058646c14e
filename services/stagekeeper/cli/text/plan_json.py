"""A plan as a document for programs. Keys are added, never renamed or removed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types


def plan_json(endpoint: str, name: str, plan: pb2.PlanDeploymentResponse) -> dict[str, Any]:
    """Make the document. What is unknown is null; sizes are bytes, times seconds."""
    return {
        "endpoint": endpoint,
        "deployment": name,
        "plan_id": plan.plan_id,
        "fits": not plan.refusals,
        "exists": plan.exists,
        "estimated_s": plan.estimated_s if plan.HasField("estimated_s") else None,
        "groups": [_group(group) for group in plan.groups],
        "replicas": [_replica(replica) for replica in plan.replicas],
        "kept_replicas": list(plan.kept_replicas),
        "devices": [_device(device) for device in plan.devices],
        "commands": [
            {
                "replica_index": it.replica_index,
                "stage_id": it.stage_id,
                "stage": it.stage_name,
                "shard_index": it.shard_index,
                "worker_id": it.worker_id,
                "argv": list(it.argv),
            }
            for it in plan.commands
        ],
        "refusals": [
            {
                "reason": refusal.reason,
                "worker_id": refusal.worker_id or None,
                "device_id": refusal.device_id or None,
                "message": refusal.message,
            }
            for refusal in plan.refusals
        ],
    }


def _group(group: pb2.StageGroup) -> dict[str, Any]:
    return {
        "stage_ids": list(group.stage_ids),
        "stages": list(group.stage_names),
        "cards": list(group.devices),
        "estimated_s": group.estimated_s if group.HasField("estimated_s") else None,
    }


def _replica(replica: pb2.PlannedReplica) -> dict[str, Any]:
    return {
        "replica_index": replica.replica_index,
        "worker_id": replica.worker_id or None,
        "cards": _cards(replica.cards),
        "parts": [
            {
                "worker_id": part.worker_id,
                "shard_index": part.shard_index,
                "stage_ids": list(part.stage_ids),
                "cards": _cards(part.cards),
            }
            for part in replica.parts
        ],
    }


def _cards(cards: Iterable[pb2.PlannedCard]) -> list[dict[str, Any]]:
    return [{"card": it.device, "device_id": it.device_id} for it in cards]


def _device(device: pb2.PlannedDevice) -> dict[str, Any]:
    return {
        "worker_id": device.worker_id,
        "device_id": device.device_id,
        "model": device.model,
        "total_bytes": device.total_bytes,
        "need_bytes": device.need_bytes,
        "is_over": device.is_over,
        "stages": [
            {
                "replica_index": term.replica_index,
                "stage_id": term.stage_id,
                "stage": term.stage_name,
                "memory_bytes": term.memory_bytes,
                "shard_index": term.shard_index,
                **_need(term.need),
            }
            for term in device.stages
        ],
        "holdings": [
            {"holder": it.holder, "memory_bytes": it.memory_bytes} for it in device.holdings
        ],
    }


def _need(need: types.MemoryNeed) -> dict[str, Any]:
    amount = need.WhichOneof("amount")
    return {
        "utilization": need.utilization if amount == "utilization" else None,
        "bytes": need.bytes if amount == "bytes" else None,
        "reserve_bytes": need.reserve_bytes,
    }
