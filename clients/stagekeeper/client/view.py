"""Questions to a deployment's view that more than one part of the client asks.

Answers are read from the message alone. Invariant: a deployment that only workers know of (no spec)
answers too, from its shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from stagekeeper.v1 import types_pb2 as types
from stagekeeper.v1.deployment_service_pb2 import Deployment


class Missing(Enum):
    """Why there is no route."""

    DEPLOYMENT = auto()
    STAGE = auto()
    READY_REPLICA = auto()
    OTHER_REPLICA = auto()


@dataclass(frozen=True, slots=True)
class NoRoute:
    """There is no route, and `message` says why, for a person."""

    what: Missing
    message: str


def stage_names(view: Deployment) -> list[str]:
    """Return the names of a deployment's stages by stage id, from its spec or its shards."""
    if view.HasField("spec"):
        return [stage.name for stage in view.spec.stages]
    found: dict[int, str] = {}
    for replica in view.replicas:
        for shard in replica.shards:
            found[shard.record.stage_id] = shard.record.stage_name
    return [found.get(stage_id, "") for stage_id in range(max(found, default=-1) + 1)]


def stage_id_of(view: Deployment, stage: str | int | None) -> int | NoRoute:
    """Return the id of a stage named by name or id; None names the entry stage."""
    if stage is None:
        return entry_stage_id_of(view)
    names = stage_names(view)
    if isinstance(stage, str) and stage in names:
        return names.index(stage)
    if isinstance(stage, int) and (0 <= stage < len(names) or not names):
        return stage
    there = ", ".join(names) or "not known yet"
    return NoRoute(
        Missing.STAGE, f"deployment {view.name!r} has no stage {stage!r} (there are: {there})"
    )


def entry_stage_id_of(view: Deployment) -> int:
    """Return the id of the stage that a call without a stage reaches."""
    if view.HasField("spec"):
        names = [stage.name for stage in view.spec.stages]
        return names.index(view.spec.entry) if view.spec.entry in names else 0
    for replica in view.replicas:
        for shard in replica.shards:
            if shard.record.entry:
                return shard.record.stage_id
    return 0


def why_none_is_ready(view: Deployment) -> str:
    """Say, for a person, in which state everything is and what happens next; nothing twice."""
    state = types.DeploymentState.Name(view.state).removeprefix("DEPLOYMENT_STATE_")
    parts = [f"deployment {view.name!r} is {state} and no replica of it is READY"]
    if view.reason:
        parts.append(view.reason)
    for replica in view.replicas:
        name = types.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_")
        if replica.reason not in view.reason:
            parts.append(f"replica {replica.replica_index} is {name}: {replica.reason}")
    next_actions = [replica.next_action for replica in view.replicas if replica.next_action]
    text = "; ".join(parts)
    new = [action for action in next_actions if action not in text]
    return "; ".join([text, *new[:1]])
