"""What users want: deployments created and deleted.

Decided here: what taking a wish writes down and starts. Not decided here: whether it can be taken,
which replicas start and where they go (`plan`), how a start goes on (`starts`) and a deletion
(`reconcile`).

Invariant: a wish that is refused is not wanted, and starts nothing; the intent is written down
before anything is started or stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import (
    CreationAccepted,
    DeletionAccepted,
    Desired,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.event_log import EventKind, Subject
from stagekeeper.core.events import DeploymentDeleted, DeploymentRequested
from stagekeeper.core.ids import DeploymentName, ReplicaIndex, StageId
from stagekeeper.core.model import DeploymentSpec, OperationPlan, ReplicaStart, StageStart
from stagekeeper.core.placement import Place
from stagekeeper.core.plan import plan_deployment
from stagekeeper.core.plan_id import check_plan_id
from stagekeeper.core.spec_check import check_spec
from stagekeeper.core.starts import advance, begin
from stagekeeper.core.states import DeploymentState


def deployment_requested(
    cluster: Cluster, event: DeploymentRequested, now: float
) -> CreationAccepted:
    """Take a wish, and do what its plan of this moment says.

    A plan that the caller looked at is compared only where something starts: a wish that is said
    twice finds its own start under way, and that is no reason to refuse it.

    Raises:
        Refused: those of `check_spec`; the first obstacle of the plan (DEPLOYMENT_EXISTS,
            REPLICA_DRAINING, SUPERVISOR_RECOVERING, ADMISSION_REFUSED); PLAN_STALE.
    """
    spec = event.spec
    check_spec(spec)
    plan = plan_deployment(cluster, spec, now)
    if plan.obstacles:
        raise plan.obstacles[0].refused()
    if event.plan_id and plan.starting:
        check_plan_id(event.plan_id, plan)
    desired = cluster.desired.get(spec.name)
    is_creating = bool(plan.starting) or spec.name in cluster.operations.by_deployment
    if desired is None:
        revision = max(1, _reported_revision(cluster, spec))
        wish = Desired(spec, revision, is_creating, create_time=event.wall_time)
    else:
        wish = replace(desired, is_creating=is_creating)
    if wish != desired or plan.starting:
        _log_request(cluster, wish, plan.starting)
    if wish != desired:
        cluster.put_desired(wish)
    if plan.starting:
        cluster.save_roster()  # whoever is given something is waited for by the next reign
    for index in plan.starting:
        begin(cluster, _start(cluster, wish, index, plan.placing.places[index]))
    return CreationAccepted(plan.starting)


def _log_request(cluster: Cluster, wish: Desired, starting: Sequence[ReplicaIndex]) -> None:
    spec = wish.spec
    if len(starting) == 1:
        start = f"replica {starting[0]} starts"
    elif starting:
        start = f"replicas {', '.join(str(index) for index in starting)} start"
    else:
        start = "there is nothing to start"
    told = f"{spec.name} is wanted: replicas: {spec.replicas}, stages: {len(spec.stages)}; {start}"
    cluster.log(EventKind.DEPLOYMENT_REQUESTED, told, Subject(deployment=spec.name))


def _log_deletion(cluster: Cluster, name: DeploymentName) -> None:
    told = f"{name} is not wanted any more: what is left of it is stopped"
    cluster.log(EventKind.DEPLOYMENT_DELETED, told, Subject(deployment=name))


def _reported_revision(cluster: Cluster, spec: DeploymentSpec) -> int:
    known = cluster.compose(spec.name)
    return known.spec_revision if known is not None else 0


def _start(
    cluster: Cluster, wish: Desired, index: ReplicaIndex, places: Sequence[Place]
) -> ReplicaStart:
    """Make the start of one replica: the k-th of its places has the k-th shards."""
    spec = wish.spec
    operation_id, generation = cluster.operations.mint(cluster.epoch)
    return ReplicaStart(
        tuple(
            OperationPlan(
                operation_id=operation_id,
                deployment=spec.name,
                replica_index=index,
                generation=generation,
                worker_id=place.worker_id,
                stages=tuple(
                    StageStart(
                        StageId(number),
                        stage,
                        tuple(place.devices[device] for device in stage.devices),
                        shard_index=shard_index,
                        shard_count=stage.shard_count,
                    )
                    for number, stage in enumerate(spec.stages)
                    if stage.shard_count > shard_index
                ),
                stage_count=len(spec.stages),
                entry_stage_id=spec.entry_stage_id,
                spec_revision=wish.spec_revision,
                model=spec.model,
                overlap_loads=spec.overlap_loads,
            )
            for shard_index, place in enumerate(places)
        )
    )


def deployment_deleted(cluster: Cluster, event: DeploymentDeleted, now: float) -> DeletionAccepted:
    """Want a deployment no longer. Deleting twice changes nothing.

    One that is only known from reports has no wish to take back: its tombstone is the intent.

    Raises:
        Refused: DEPLOYMENT_UNKNOWN.
    """
    name = event.name
    known = cluster.compose(name)
    if known is None:
        raise Refused(
            Reason.DEPLOYMENT_UNKNOWN, f"no deployment {name!r} is wanted, and no worker reports it"
        )
    if known.state is DeploymentState.DELETING:
        return DeletionAccepted()
    _log_deletion(cluster, name)
    desired = cluster.desired.get(name)
    if desired is None:
        cluster.entomb(name)
        return DeletionAccepted()
    for operation in cluster.operations.of_deployment(name):
        operation.is_cancelled = True
        cluster.due.update(dict.fromkeys(operation.start.worker_ids))
        advance(cluster, operation)
    cluster.put_desired(replace(desired, is_deleting=True))
    return DeletionAccepted()
