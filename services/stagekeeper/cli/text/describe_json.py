"""A description as JSON: the keys that programs may rely on, each listed in docs/cli.md.

Decided here: names and shapes. Keys are added, never renamed or removed.
"""

from __future__ import annotations

from stagekeeper.cli.text.cards import claims_by_card
from stagekeeper.cli.text.describe import Answers
from stagekeeper.cli.text.events import event_json
from stagekeeper.cli.text.status_json import (
    Json,
    deployment_json,
    failure_json,
    supervisor_json,
    worker_json,
)
from stagekeeper.v1 import types_pb2 as types


def describe_json(endpoint: str, answers: Answers) -> Json:
    """Make the whole document."""
    deployment, workers = answers.deployment, answers.workers
    claims = claims_by_card([deployment])
    holding = {shard.worker_id for replica in deployment.replicas for shard in replica.shards}
    return {
        "supervisor": supervisor_json(endpoint, workers),
        "deployment": {
            **deployment_json(deployment),
            "spec": _spec(deployment.spec) if deployment.HasField("spec") else None,
        },
        "workers": [worker_json(it, claims) for it in workers.workers if it.worker_id in holding],
        "failures": [failure_json(failure) for failure in answers.failures],
        "events": [event_json(event) for event in answers.events],
    }


def _spec(spec: types.DeploymentSpec) -> Json:
    return {
        "replicas": spec.replicas or 1,
        "entry": spec.entry or None,
        "model": {
            "name": spec.model.name or None,
            "version": spec.model.version or None,
            "abilities": list(spec.model.abilities),
        },
        "stages": [_stage(stage) for stage in spec.stages],
    }


def _stage(stage: types.StageSpec) -> Json:
    need = stage.memory if stage.HasField("memory") else None
    amount = need.WhichOneof("amount") if need is not None else None
    return {
        "stage": stage.name,
        "entrypoint": stage.entrypoint or None,
        "command": list(stage.command.argv) or None,
        "devices": list(stage.devices),
        "shard_count": stage.shard_count or 1,
        "utilization": need.utilization if need is not None and amount == "utilization" else None,
        "bytes": need.bytes if need is not None and amount == "bytes" else None,
        "reserve_bytes": need.reserve_bytes if need is not None else 0,
    }
