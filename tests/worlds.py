"""A registry with hand-made workers, for tests of the core: no socket, no clock, no store.

`World` applies events at its own `now`, keeps what was written and asked, and checks after every
event that the kept views are what a derivation from scratch says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import (
    CancelOperation,
    Command,
    Desired,
    PublishChange,
    Reply,
    SavedOperation,
    StartOperation,
    StopSlot,
    Work,
    Write,
)
from stagekeeper.core.derive import derive_replica
from stagekeeper.core.event_log import PublishEvent
from stagekeeper.core.events import (
    CommitEnded,
    DeploymentDeleted,
    DeploymentRequested,
    Event,
    HeartbeatReceived,
    OperationEnded,
    OperationStarted,
    Ticked,
    WorkerRegistered,
)
from stagekeeper.core.ids import (
    ClusterName,
    DeviceId,
    Epoch,
    Generation,
    HostId,
    InstanceId,
    OperationId,
    ReplicaIndex,
    ReplicaKey,
)
from stagekeeper.core.model import (
    DeploymentSpec,
    DeploymentView,
    Device,
    DeviceClaim,
    Failure,
    MemoryNeed,
    OperationPlan,
    OperationRecord,
    ShardAddress,
    ShardRecord,
    StageSpec,
    WorkerReport,
)
from stagekeeper.core.rederivation import context_of
from stagekeeper.core.registry import Registry, RegistrySettings
from stagekeeper.core.stage_sets import Claim
from stagekeeper.core.states import OperationState, ReplicaState, ShardState, WorkerState

GIB = 2**30
REIGN = Epoch(5, "supervisor-five")
EARLIER = Epoch(4, "supervisor-four")


def gen(n: int, epoch: Epoch = EARLIER) -> Generation:
    return Generation(epoch, n)


def shard(deployment="m", replica=0, stage=0, n=1, **changes) -> Any:
    """A READY, committed shard of the only stage of a replica, of the n-th generation."""
    record = ShardRecord(
        deployment=deployment,
        replica_index=replica,
        stage_id=stage,
        stage_name=f"s{stage}",
        stage_count=1,
        shard_index=0,
        shard_count=1,
        generation=gen(n),
        operation_id=OperationId(f"4-x-{n}"),
        instance_id=InstanceId(f"{deployment}/{replica}/{stage}/{n}"),
        state=ShardState.READY,
        committed=True,
        spec_revision=1,
        addresses=(ShardAddress("stage", "grpc", f"127.0.0.1:{4000 + n}"),),
    )
    return replace(record, **changes)


def replica_shards(deployment="m", replica=0, stages=3, n=1, **changes) -> list[Any]:
    return [
        shard(deployment, replica, stage, n, stage_count=stages, **changes)
        for stage in range(stages)
    ]


def device(index: int, total_bytes: int = 10 * GIB, **changes) -> Any:
    return replace(Device(DeviceId(f"gpu-{index}"), "cuda", "H200", index, total_bytes), **changes)


def report(worker="w1", shards: Iterable[ShardRecord] = (), **changes) -> WorkerReport:
    made = WorkerReport(
        worker_id=worker,
        host_id=HostId(f"host-of-{worker}"),
        incarnation=1,
        revision=1,
        agent_address="127.0.0.1:7071",
        hostname=f"{worker}.local",
        devices=(device(0), device(1)),
        shards=tuple(shards),
    )
    return replace(made, **changes)


def operation(n=1, state=OperationState.STARTING, deployment="m", replica=0, **changes):
    """A record of the operation that `shard(n=n)` belongs to."""
    record = OperationRecord(OperationId(f"4-x-{n}"), deployment, replica, gen(n), state)
    return replace(record, **changes)


def stage_spec(name="s0", **changes) -> Any:
    return replace(StageSpec(name, "models:Stage"), **changes)


def spec(name="m", stages=1, replicas=1, **changes) -> Any:
    made = DeploymentSpec(name, tuple(stage_spec(f"s{k}") for k in range(stages)), replicas)
    return replace(made, **changes)


def on_cards(*cards_and_shares, name="m", replicas=1, **changes) -> Any:
    """A spec whose k-th stage wants (cards, utilization)."""
    stages = tuple(
        stage_spec(f"s{k}", devices=tuple(cards), memory=MemoryNeed(utilization=share))
        for k, (cards, share) in enumerate(cards_and_shares)
    )
    return DeploymentSpec(name, stages, replicas, **changes)


def desired(made: DeploymentSpec | None = None, **changes) -> Any:
    return replace(Desired(made or spec(), 1, False, False, 1_000.0), **changes)


def started_shards(plan: OperationPlan, **changes) -> list[Any]:
    """What an agent reports of a plan once it is READY and committed."""
    return [
        replace(
            ShardRecord(
                deployment=plan.deployment,
                replica_index=plan.replica_index,
                stage_id=stage.stage_id,
                stage_name=stage.spec.name,
                stage_count=plan.stage_count,
                shard_index=stage.shard_index,
                shard_count=stage.shard_count,
                generation=plan.generation,
                operation_id=plan.operation_id,
                instance_id=InstanceId(f"{plan.operation_id}/{stage.stage_id}/{stage.shard_index}"),
                addresses=(
                    ShardAddress("stage", "grpc", f"{plan.worker_id}:{5000 + stage.stage_id}"),
                ),
                state=ShardState.READY,
                committed=True,
                spec_revision=plan.spec_revision,
                devices=tuple(
                    DeviceClaim(it, (stage.spec.memory or MemoryNeed()).on_card(10 * GIB))
                    for it in stage.device_ids
                ),
            ),
            **changes,
        )
        for stage in plan.stages
    ]


def record_of(plan: OperationPlan, state: OperationState, **changes) -> OperationRecord:
    made = OperationRecord(
        plan.operation_id, plan.deployment, plan.replica_index, plan.generation, state
    )
    return replace(made, **changes)


def timeless(views: Iterable[DeploymentView]) -> list[DeploymentView]:
    """Leave out since when anything is so: that depends on who reported first."""
    return [
        replace(view, since=None, replicas=tuple(replace(it, since=None) for it in view.replicas))
        for view in views
    ]


def only(kind: Any, commands: Iterable[Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


@dataclass
class World:
    """One registry and the time. A roster, wishes or tombstones make it begin in HOLD.

    `is_checked` is False where many events are told and the books are checked at the end.
    """

    desired: Collection[Any] = ()
    tombstones: dict[Any, Generation] = field(default_factory=dict)
    roster: Collection[Any] = ()
    settings: RegistrySettings = field(default_factory=RegistrySettings)
    durable: bool = True
    is_new: bool | None = None
    failures: Collection[Failure] = ()
    operations: Collection[SavedOperation] = ()
    now: float = 100.0
    epoch: Epoch = REIGN
    is_checked: bool = True

    def __post_init__(self) -> None:
        self.registry: Any = Registry(
            cluster=ClusterName("default"),
            epoch=self.epoch,
            settings=self.settings,
            desired=self.desired,
            tombstones=self.tombstones,
            roster=self.roster,
            failures=self.failures,
            operations=self.operations,
            durable=self.durable,
            now=self.now,
            is_new=self.is_new,
        )
        self.written: list[Write] = []

    def apply(self, event: Event) -> list[Any]:
        try:
            commands = self.registry.apply(event, now=self.now)
        finally:
            if self.is_checked:
                self.check()
        ranks = [_rank(command) for command in commands]
        assert ranks == sorted(ranks), "reply, writes, work, changes"
        assert ranks.count(0) <= 1
        self.written += only(Write, commands)
        return commands

    def register(self, worker="w1", shards: Iterable[ShardRecord] = (), **changes) -> list[Any]:
        """Register; the digest is made of the revision."""
        made = report(worker, shards, **changes)
        return self.apply(WorkerRegistered(made, b"%d" % made.revision))

    def beat(self, worker="w1", incarnation=1, revision=1, digest: bytes | None = None):
        return self.apply_beat(worker, incarnation, revision, digest)[0]

    def apply_beat(self, worker="w1", incarnation=1, revision=1, digest: bytes | None = None):
        known = b"%d" % revision if digest is None else digest
        return self.apply(HeartbeatReceived(worker, incarnation, revision, known))

    def tick(self, seconds: float = 0.0, stalled_s: float = 0.0) -> list[Any]:
        self.now += seconds
        return self.apply(Ticked(stalled_s))

    def deploy(self, made: DeploymentSpec) -> list[Any]:
        """Return the plans that start, of replicas on one worker each."""
        return [part for start in self.deploy_starts(made) for part in start.parts]

    def deploy_starts(self, made: DeploymentSpec) -> list[Any]:
        return [it.start for it in only(StartOperation, self.deploy_commands(made))]

    def deploy_commands(self, made: DeploymentSpec) -> list[Any]:
        return self.apply(DeploymentRequested(made, 2_000.0))

    def delete(self, name="m") -> list[Any]:
        return self.apply(DeploymentDeleted(name))

    def end(self, plan: OperationPlan, state=OperationState.COMMITTED, **changes) -> list[Any]:
        """Have a start end: all of it is up and this worker's part committed, or it fails here."""
        record = record_of(plan, state, **changes)
        if state is not OperationState.COMMITTED:
            return self.apply(OperationEnded(plan.operation_id, record, worker_id=plan.worker_id))
        told = self.apply(OperationStarted(plan.operation_id))
        return told + self.commit(plan, **changes)

    def commit(
        self, plan: OperationPlan, state: Any = OperationState.COMMITTED, **changes
    ) -> list[Any]:
        """Answer a commit; no state is an agent that was not reached."""
        record = None if state is None else record_of(plan, state)
        life = self.registry.target_of(plan.worker_id)
        return self.apply(
            CommitEnded(plan.worker_id, life.incarnation, plan.operation_id, record, **changes)
        )

    def check(self) -> None:
        check_books(self.registry._cluster)

    def view(self, name="m"):
        return self.registry.deployment(name)

    def replica(self, index=0, name="m"):
        return next(it for it in self.view(name).replicas if it.key.index == index)

    def worker(self, worker="w1"):
        return next(it for it in self.registry.workers(self.now) if it.worker_id == worker)


def _rank(command: Command) -> int:
    ranked: tuple[Any, ...] = (Reply, Write, Work, PublishEvent, PublishChange)
    for rank, kinds in enumerate(ranked):
        if isinstance(command, kinds):
            return rank
    raise AssertionError(f"{command} is of no known kind")


def stops(commands: Iterable[Command]) -> list[tuple]:
    """(worker, deployment, replica, stage, n up to which) of each StopSlot."""
    return [
        (it.target.worker_id, it.slot.deployment, it.slot.index, it.slot.stage_id, it.up_to.n)
        for it in only(StopSlot, commands)
    ]


def cancels(commands: Iterable[Command]) -> list[tuple]:
    return [(it.target.worker_id, it.operation_id) for it in only(CancelOperation, commands)]


def check_books(cluster: Cluster) -> None:
    """Check the kept indexes and views against what the reports say, the slow way."""
    claims: dict = {}
    for worker in cluster.workers.values():
        for record in worker.shards:
            claims.setdefault(record.replica, {}).setdefault(worker.worker_id, [])
            claims[record.replica][worker.worker_id].append(record)
    assert {
        key: {worker_id: list(records) for worker_id, records in by_worker.items()}
        for key, by_worker in cluster.claims.items()
    } == claims
    kept = dict(cluster.views)
    assert {(key.deployment, key.index) for key in kept} == {
        (name, index) for name, indexes in cluster.indexes.items() for index in indexes
    }
    assert not cluster.touched and not cluster.touched_names and not cluster.due
    assert {key.deployment for key in cluster.notes} <= cluster.desired.keys()
    assert {key.deployment for key in cluster.came_up} <= cluster.desired.keys()
    assert not cluster.writes and not cluster.work
    running = cluster.operations.by_id.values()
    assert {it.start.replica: it for it in running} == cluster.operations.by_replica
    assert len(running) == len(cluster.operations.by_replica)
    assert cluster.visible == cluster.desired.keys() | cluster.indexes.keys()
    wanted = {
        ReplicaKey(name, ReplicaIndex(index))
        for name, it in cluster.desired.items()
        for index in range(it.spec.replicas)
    }
    for key in wanted | kept.keys() | claims.keys():
        made = [
            Claim(worker_id, cluster.workers[worker_id].state, record)
            for worker_id, records in reversed(claims.get(key, {}).items())
            for record in reversed(records)
        ]
        view = kept.get(key)
        replica_since = None if view is None else view.since
        derived = derive_replica(key, made, context_of(cluster, key))
        assert (derived and replace(derived, since=replica_since)) == view
    counted = {
        name: Counter(kept[it].state for it in kept if it.deployment == name)
        for name in cluster.indexes
    }
    assert {name: +counts for name, counts in cluster.counts.items() if +counts} == counted
    assert not cluster.moved and not cluster.news
    for view in kept.values():
        is_well = view.state is ReplicaState.READY and all(
            shard.worker_state is WorkerState.ALIVE for shard in view.shards
        )
        assert bool(view.next_action) is not is_well, "what happens next is said where it matters"
        assert view.next_action or view.timer is None
    for name in cluster.visible:
        composed = cluster.compose(name)
        assert composed is not None
        assert cluster.deployment_states[name] == (composed.state, composed.since)
    assert cluster.deployment_states.keys() == cluster.visible
