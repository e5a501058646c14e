"""What a creation would do at this moment, and every reason why it would be refused.

Decided here: whether a wish can be taken, which replicas it starts and leaves alone, where they go
(with `placement`), and in which groups their stages start (with `planner`). Not decided here: what
is wrong in the spec itself (`spec_check`); the starting (`wishes`, which does what the plan says).

Invariant: a creation is refused exactly when its plan has an obstacle, and otherwise starts exactly
the plan's replicas at the plan's places: there is one way to work that out, and it is this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.counted import counted
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeviceId, ReplicaIndex, ReplicaKey, StageId, WorkerId
from stagekeeper.core.model import DeploymentSpec, ShardRecord
from stagekeeper.core.offers import UnfitWorker, build_offers, judge_workers
from stagekeeper.core.placement import NOTHING_PLACED, Placing, Shortage, place_replicas
from stagekeeper.core.planned_commands import PlannedCommand, planned_commands
from stagekeeper.core.planner import init_groups
from stagekeeper.core.spec_check import is_same_wish
from stagekeeper.core.start_times import start_times_s
from stagekeeper.core.states import DeploymentState, ReplicaState

RETRY_AFTER_S = 1.0
UNFIT_SHOWN = 4
CARDS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """One reason why a creation would be refused; worker and card are empty where it has none."""

    reason: Reason
    message: str
    worker_id: WorkerId = WorkerId("")
    device_id: DeviceId = DeviceId("")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A ground on which a creation is refused: what its caller is told, and all that it is made of.

    `parts` are empty where the message is all there is to say.
    """

    reason: Reason
    message: str
    parts: tuple[PlanRefusal, ...] = ()
    worker_id: WorkerId = WorkerId("")
    retry_after_s: float | None = None

    def refused(self) -> Refused:
        metadata = {"worker_id": self.worker_id} if self.worker_id else {}
        return Refused(
            self.reason, self.message, metadata=metadata, retry_after_s=self.retry_after_s
        )


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Stages that share a card of the replica, directly or through others, in starting order.

    `devices` ascend; `estimated_s` is None unless all of its stages have been started before.
    """

    stage_ids: tuple[StageId, ...]
    devices: tuple[int, ...]
    estimated_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a creation of `spec` would do now.

    `starting` and `kept` ascend, and are the wanted replicas together, but for a supervisor that
    recovers: which of those that nobody reports yet would be started is not known then, and they
    are in neither. `obstacles` come in the order in which a creation meets them. `exists`: this
    very wish is written down already. `commands` is what command stages would execute.
    """

    spec: DeploymentSpec
    groups: tuple[PlannedGroup, ...]
    exists: bool
    starting: tuple[ReplicaIndex, ...] = ()
    kept: tuple[ReplicaIndex, ...] = ()
    placing: Placing = NOTHING_PLACED
    obstacles: tuple[Obstacle, ...] = ()
    commands: tuple[PlannedCommand, ...] = ()

    @property
    def estimated_s(self) -> float | None:
        """The longest group: groups go side by side. None when one is unknown."""
        known = [it.estimated_s for it in self.groups if it.estimated_s is not None]
        return max(known) if len(known) == len(self.groups) else None

    @property
    def refusals(self) -> list[PlanRefusal]:
        """Every reason why a creation would be refused now; empty means that it would not be."""
        return [
            part
            for it in self.obstacles
            for part in it.parts or (PlanRefusal(it.reason, it.message, it.worker_id),)
        ]


def plan_deployment(cluster: Cluster, spec: DeploymentSpec, now: float) -> Plan:
    """Say what a creation of a checked spec would do. Changes nothing.

    Where the name stands for something that has to be deleted first, the plan shows where all
    replicas would go once that is gone. While the supervisor recovers nothing is placed: too much
    depends on who is still missing.
    """
    desired = cluster.desired.get(spec.name)
    wanted = [ReplicaIndex(number) for number in range(spec.replicas)]
    taken = _taken_name(cluster, spec)
    starting = wanted if taken is not None else _unstarted(cluster, spec, wanted)
    kept = [index for index in wanted if index not in set(starting)]
    obstacles = [] if taken is None else [taken]
    placing = NOTHING_PLACED
    if cluster.is_recovering:
        obstacles.append(_recovering(cluster, now))
        starting = []
    elif starting:
        gone = {ReplicaKey(spec.name, index) for index in starting}
        if taken is not None:
            gone |= {ReplicaKey(spec.name, it) for it in cluster.indexes.get(spec.name, ())}
        placing, no_room = _place(cluster, spec, starting, gone)
        obstacles += [] if no_room is None else [no_room]
    is_wanted = desired is not None and not desired.is_deleting and is_same_wish(desired.spec, spec)
    return Plan(
        spec=spec,
        groups=_groups(cluster, spec),
        exists=is_wanted,
        starting=tuple(starting),
        kept=tuple(kept),
        placing=placing,
        obstacles=tuple(obstacles),
        commands=tuple(planned_commands(spec, placing, _hosts(cluster, placing))),
    )


def _hosts(cluster: Cluster, placing: Placing) -> dict[WorkerId, str]:
    """Return where the workers of a placing are reached; their stages are at the same host."""
    used = {place.worker_id for places in placing.places.values() for place in places}
    return {
        worker_id: cluster.workers[worker_id].target.address.rpartition(":")[0].strip("[]")
        for worker_id in used
    }


def _taken_name(cluster: Cluster, spec: DeploymentSpec) -> Obstacle | None:
    """Say why a name cannot be had: it is being deleted, or it stands for something else."""
    known, desired = cluster.compose(spec.name), cluster.desired.get(spec.name)
    if known is None:
        return None
    if known.state is DeploymentState.DELETING:
        return Obstacle(
            Reason.REPLICA_DRAINING,
            f"{spec.name} is being deleted ({known.reason}): wait until it is gone, then deploy",
            retry_after_s=RETRY_AFTER_S,
        )
    if desired is not None:
        if is_same_wish(desired.spec, spec):
            return None
        return Obstacle(
            Reason.DEPLOYMENT_EXISTS,
            f"{spec.name!r} exists with another spec: delete it, then deploy",
        )
    for replica in known.replicas:
        for shard in replica.shards:
            if difference := _other_shape(spec, shard.record):
                return Obstacle(
                    Reason.DEPLOYMENT_EXISTS,
                    f"worker {shard.worker_id} runs another {spec.name} ({difference}): "
                    "delete it, then deploy",
                    worker_id=shard.worker_id,
                )
    return None


def _other_shape(spec: DeploymentSpec, record: ShardRecord) -> str:
    """Say in what a reported shard is of another deployment than `spec`; nothing when in none."""
    stages = spec.stages
    is_known = record.stage_count == len(stages)
    if not is_known or stages[record.stage_id].name != record.stage_name:
        return f"stage {record.stage_id} of {record.stage_count}, {record.stage_name!r}"
    if stages[record.stage_id].shard_count != record.shard_count:
        return f"stage {record.stage_id}, {record.stage_name!r}, in {record.shard_count} shards"
    return ""


def _recovering(cluster: Cluster, now: float) -> Obstacle:
    return Obstacle(
        Reason.SUPERVISOR_RECOVERING,
        f"the supervisor started {now - cluster.started_at:.1f} s ago and waits for the "
        "workers that were there before; nothing is started until then: repeat",
        retry_after_s=RETRY_AFTER_S,
    )


def _unstarted(
    cluster: Cluster, spec: DeploymentSpec, wanted: Sequence[ReplicaIndex]
) -> list[ReplicaIndex]:
    """Return the replicas that nobody reports or that have failed.

    READY and starting replicas are left alone, and so are half known ones: a PARTIAL replica may
    be whole again when a worker returns.
    """
    unstarted = (None, ReplicaState.PENDING, ReplicaState.FAILED)
    views = ((index, cluster.views.get(ReplicaKey(spec.name, index))) for index in wanted)
    return [index for index, view in views if (view.state if view else None) in unstarted]


def _groups(cluster: Cluster, spec: DeploymentSpec) -> tuple[PlannedGroup, ...]:
    times_s = start_times_s(cluster, spec)
    numbered = {StageId(number): stage.devices for number, stage in enumerate(spec.stages)}
    groups = []
    for stage_ids in init_groups(numbered):
        known = [times_s[stage_id] for stage_id in stage_ids if stage_id in times_s]
        devices = {device for stage_id in stage_ids for device in numbered[stage_id]}
        estimated_s = sum(known) if len(known) == len(stage_ids) else None
        groups.append(PlannedGroup(tuple(stage_ids), tuple(sorted(devices)), estimated_s))
    return tuple(groups)


def _place(
    cluster: Cluster,
    spec: DeploymentSpec,
    starting: Sequence[ReplicaIndex],
    gone: Collection[ReplicaKey],
) -> tuple[Placing, Obstacle | None]:
    """Find places. What the replicas of `gone` hold is free by then."""
    fit, unfit = judge_workers(cluster, spec)
    if len(fit) < spec.worker_count:
        return NOTHING_PLACED, _no_worker(spec, len(fit), unfit)
    placing = place_replicas(spec, starting, lambda: build_offers(cluster, spec, fit, gone))
    if placing.shortage is None:
        return placing, None
    return placing, _no_room(spec, len(starting), placing.shortage, unfit)


def _no_worker(spec: DeploymentSpec, fit_count: int, unfit: Sequence[UnfitWorker]) -> Obstacle:
    listed = "; ".join(f"{it.worker_id} {it.why}" for it in unfit[:UNFIT_SHOWN])
    more = len(unfit) - UNFIT_SHOWN
    listed += f"; and {more} more" if more > 0 else ""
    how_many = "no worker can take"
    if fit_count:
        how_many = f"its shards want {spec.worker_count} workers, and only {fit_count} can take"
    if any(it.reason is Reason.SUPERVISOR_RECOVERING for it in unfit):
        return Obstacle(
            Reason.SUPERVISOR_RECOVERING,
            f"{how_many} {spec.name} yet: {listed}",
            _unfit_parts(unfit),
            retry_after_s=RETRY_AFTER_S,
        )
    if unfit:
        why = f"{how_many} it: {listed}"
    elif fit_count:
        why = f"{how_many} it: start more agents (stagekeeper agent), then deploy again"
    else:
        why = "no worker is registered: start an agent (stagekeeper agent), then deploy again"
    return Obstacle(
        Reason.ADMISSION_REFUSED, f"{spec.name} cannot start: {why}", _unfit_parts(unfit)
    )


def _no_room(
    spec: DeploymentSpec, count: int, shortage: Shortage, unfit: Sequence[UnfitWorker]
) -> Obstacle:
    what = f"{spec.name} replica {shortage.replica_index}"
    others = ""
    if spec.worker_count > 1:
        what = f"shard {shortage.shard_index} of {what}"
        others = "other " if shortage.shard_index else ""
    workers = counted(shortage.offer_count, f"{others}worker")
    aside = f" (of {count} to start; nothing is started)" if count > 1 else ""
    said = "; ".join(message for _, message in shortage.refusals[:CARDS_SHOWN])
    parts = [
        PlanRefusal(
            Reason.ADMISSION_REFUSED,
            f"no room for {what}: {message}",
            shortage.worker_id,
            device_id,
        )
        for device_id, message in shortage.refusals
    ]
    return Obstacle(
        Reason.ADMISSION_REFUSED,
        f"no room for {what}{aside} on any of {workers}; closest is {shortage.worker_id}: {said}",
        (*parts, *_unfit_parts(unfit)),
        worker_id=shortage.worker_id,
    )


def _unfit_parts(unfit: Iterable[UnfitWorker]) -> tuple[PlanRefusal, ...]:
    return tuple(
        PlanRefusal(it.reason, f"worker {it.worker_id} {it.why}", it.worker_id) for it in unfit
    )
