"""What users want: deployments created and deleted.

Decided here: whether a wish is taken, which replicas it starts, and what is left alone. Not decided
here: where a replica goes (`placement`), and how a deletion goes on (`reconcile`).

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
    StartOperation,
    StopSlot,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.events import DeploymentDeleted, DeploymentRequested
from stagekeeper.core.ids import ReplicaIndex, ReplicaKey, SlotKey, StageId
from stagekeeper.core.model import DeploymentSpec, OperationPlan, StageStart
from stagekeeper.core.offers import build_offers, fit_workers
from stagekeeper.core.operations import Operation
from stagekeeper.core.placement import Place, place_replicas
from stagekeeper.core.spec_check import check_spec, is_same_wish
from stagekeeper.core.states import DeploymentState, ReplicaState, ShardState

STARTED_ANEW = "its replica is started anew"
RETRY_AFTER_S = 1.0


def deployment_requested(
    cluster: Cluster, event: DeploymentRequested, now: float
) -> CreationAccepted:
    """Take a wish, and start the replicas that nobody reports or that have failed.

    READY and starting replicas are left alone, and so are half known ones: a PARTIAL replica may
    be whole again when a worker returns.

    Raises:
        Refused: those of `check_spec`, DEPLOYMENT_EXISTS, REPLICA_DRAINING,
            SUPERVISOR_RECOVERING, ADMISSION_REFUSED.
    """
    spec = event.spec
    check_spec(spec)
    desired = cluster.desired.get(spec.name)
    _check_name(cluster, spec, desired)
    if cluster.is_recovering:
        raise Refused(
            Reason.SUPERVISOR_RECOVERING,
            f"the supervisor started {now - cluster.started_at:.1f} s ago and waits for the "
            "workers that were there before; nothing is started until then: repeat",
            retry_after_s=RETRY_AFTER_S,
        )
    starting = _replicas_to_start(cluster, spec)
    places = _places(cluster, spec, starting)
    is_creating = bool(starting) or spec.name in cluster.operations.by_deployment
    if desired is None:
        revision = max(1, _reported_revision(cluster, spec))
        wish = Desired(spec, revision, is_creating, create_time=event.wall_time)
    else:
        wish = replace(desired, is_creating=is_creating)
    if wish != desired:
        cluster.put_desired(wish)
    if starting:
        cluster.save_roster()  # whoever is given something is waited for by the next reign
    for index in starting:
        _start(cluster, wish, index, places[index])
    return CreationAccepted(tuple(starting))


def _check_name(cluster: Cluster, spec: DeploymentSpec, desired: Desired | None) -> None:
    """Refuse a name that is being deleted, or that stands for something else."""
    known = cluster.compose(spec.name)
    if known is not None and known.state is DeploymentState.DELETING:
        raise Refused(
            Reason.REPLICA_DRAINING,
            f"{spec.name} is being deleted ({known.reason}): wait until it is gone, then deploy",
            retry_after_s=RETRY_AFTER_S,
        )
    if desired is not None and not is_same_wish(desired.spec, spec):
        raise Refused(
            Reason.DEPLOYMENT_EXISTS,
            f"{spec.name} exists with another spec: delete it, then deploy",
        )
    if desired is None and known is not None:
        names = [stage.name for stage in spec.stages]
        for replica in known.replicas:
            for shard in replica.shards:
                record = shard.record
                if record.stage_count != len(names) or names[record.stage_id] != record.stage_name:
                    raise Refused(
                        Reason.DEPLOYMENT_EXISTS,
                        f"worker {shard.worker_id} runs another {spec.name} (stage "
                        f"{record.stage_id} of {record.stage_count}, {record.stage_name!r}): "
                        "delete it, then deploy",
                    )


def _replicas_to_start(cluster: Cluster, spec: DeploymentSpec) -> list[ReplicaIndex]:
    """Return the replicas that nobody reports or that have failed, ascending."""
    starting = []
    for number in range(spec.replicas):
        key = ReplicaKey(spec.name, ReplicaIndex(number))
        view = cluster.views.get(key)
        if view is None or view.state in (ReplicaState.PENDING, ReplicaState.FAILED):
            starting.append(key.index)
    return starting


def _places(
    cluster: Cluster, spec: DeploymentSpec, starting: Sequence[ReplicaIndex]
) -> dict[ReplicaIndex, Place]:
    if not starting:
        return {}
    candidates = fit_workers(cluster, spec)
    restarting = {ReplicaKey(spec.name, index) for index in starting}
    return place_replicas(
        spec, starting, lambda: build_offers(cluster, spec, candidates, restarting)
    )


def _reported_revision(cluster: Cluster, spec: DeploymentSpec) -> int:
    known = cluster.compose(spec.name)
    return known.spec_revision if known is not None else 0


def _start(cluster: Cluster, wish: Desired, index: ReplicaIndex, place: Place) -> None:
    """Put the start of one replica on the books, and have it carried out."""
    spec = wish.spec
    operation_id, generation = cluster.operations.mint(cluster.epoch)
    plan = OperationPlan(
        operation_id=operation_id,
        deployment=spec.name,
        replica_index=index,
        generation=generation,
        worker_id=place.worker_id,
        stages=tuple(
            StageStart(
                StageId(number), stage, tuple(place.devices[device] for device in stage.devices)
            )
            for number, stage in enumerate(spec.stages)
        ),
        stage_count=len(spec.stages),
        entry_stage_id=spec.entry_stage_id,
        spec_revision=wish.spec_revision,
        model=spec.model,
    )
    target = cluster.workers[place.worker_id].target
    cluster.notes.pop(plan.replica, None)
    cluster.operations.add(Operation(plan, target))
    cluster.touched[plan.replica] = None
    cluster.work.append(StartOperation(target, plan, _leftovers(cluster, plan.replica)))


def _leftovers(cluster: Cluster, key: ReplicaKey) -> tuple[StopSlot, ...]:
    """Stop what is still reported of a replica, where its agent can be asked to."""
    stops: dict[tuple[str, SlotKey], StopSlot] = {}
    for worker_id, records in sorted(cluster.claims.get(key, {}).items()):
        worker = cluster.workers[worker_id]
        if not worker.takes_commands:
            continue
        for record in records:
            known = stops.get((worker_id, record.slot))
            is_highest = known is None or known.up_to < record.generation
            if record.state is not ShardState.STOPPED and is_highest:
                stops[worker_id, record.slot] = StopSlot(
                    worker.target, record.slot, record.generation, STARTED_ANEW
                )
    return tuple(stops.values())


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
    desired = cluster.desired.get(name)
    if desired is None:
        cluster.entomb(name)
        return DeletionAccepted()
    for operation in cluster.operations.of_deployment(name):
        operation.is_cancelled = True
        cluster.due[operation.plan.worker_id] = None
    cluster.put_desired(replace(desired, is_deleting=True))
    return DeletionAccepted()
