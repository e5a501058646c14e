"""What is derived from the reports of all workers.

Invariant: a view is never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.ids import DeploymentName, ReplicaKey, WorkerId
from stagekeeper.core.model.reports import ShardRecord
from stagekeeper.core.model.specs import DeploymentSpec
from stagekeeper.core.states import DeploymentState, ReplicaState, Timer, WorkerState


@dataclass(frozen=True, slots=True)
class RoutedShard:
    """A shard, and the worker that holds it as the supervisor knows that worker now."""

    record: ShardRecord
    worker_id: WorkerId
    worker_state: WorkerState


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One copy of a deployment, derived from the claims on it.

    `shards` are the shards of the set that is shown, in the order of (stage_id, shard_index).
    `timer` is what brings `next_action` about, where the clock does. `since` is when it came into
    its state (monotonic); None when it was in it before this reign.
    """

    key: ReplicaKey
    state: ReplicaState
    ready_shard_count: int
    shard_count: int
    reason: str = ""
    next_action: str = ""
    shards: tuple[RoutedShard, ...] = ()
    timer: Timer | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment: what is wanted (`spec` None when only workers know of it) and what is there.

    `since` is when it came into its state (monotonic); None when it was in it before this reign.
    """

    name: DeploymentName
    state: DeploymentState
    reason: str = ""
    spec: DeploymentSpec | None = None
    spec_revision: int = 0
    replicas: tuple[ReplicaView, ...] = ()
    durable: bool = False
    create_time: float | None = None
    since: float | None = None
