"""A whole reign, with restarts of everything, against what must hold after each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagekeeper.core.commands import (
    EntombDeployment,
    HeartbeatVerdict,
    SaveDeployment,
    StartOperation,
    StopSlot,
)
from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import Epoch
from stagekeeper.core.states import (
    DeploymentState,
    OperationState,
    ReplicaState,
    ShardState,
    WorkerState,
)
from tests.plain import OperationCancelled, OperationEnded, SlotKey, SlotStopped
from tests.worlds import (
    REIGN,
    World,
    on_cards,
    only,
    record_of,
    started_shards,
)

WORKERS = ("w1", "w2", "w3")
NAMES = ("m", "m-1")


class Reign(RuleBasedStateMachine):
    """A reign with a few workers that keep their word, in any order of events.

    The agents are models: what they are asked, they have done by their next report, or never.
    """

    @initialize()
    def begin(self) -> None:
        self.world = World(durable=True)
        self.held: dict[str, dict] = {worker: {} for worker in WORKERS}
        self.lives = dict.fromkeys(WORKERS, (1, 0))
        self.running: dict[str, Any] = {}
        for worker in WORKERS:
            self.report(worker)

    def listen(self, commands: list) -> None:
        for one in only(StartOperation, commands):
            self.running[one.start.operation_id] = one.start.parts[0]
        for stop in only(StopSlot, commands):
            assert self.world.registry.is_complete, "nothing is stopped in HOLD"
            self.may_stop(stop)

    def may_stop(self, stop: StopSlot) -> None:
        """A live shard is stopped only if it was deleted, or something newer is READY."""
        known = self.world.view(stop.slot.deployment)
        cluster = self.world.registry._cluster
        ceiling = cluster.tombstones.get(stop.slot.deployment)
        is_deleted = known is None or known.state is DeploymentState.DELETING
        is_buried = ceiling is not None and stop.up_to <= ceiling
        if not (is_deleted or is_buried):
            replica = self.world.replica(stop.slot.index, stop.slot.deployment)
            assert replica.state is ReplicaState.READY
            assert min(it.record.generation for it in replica.shards) > stop.up_to

    def report(self, worker: str, is_new_life: bool = False) -> None:
        incarnation, revision = self.lives[worker]
        if is_new_life:
            incarnation, revision = incarnation + 1, 0
        self.lives[worker] = incarnation, revision + 1
        self.listen(
            self.world.register(
                worker,
                [it for held in self.held[worker].values() for it in held],
                incarnation=incarnation,
                revision=revision + 1,
            )
        )

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_reports(self, worker: str) -> None:
        self.report(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def an_agent_restarts(self, worker: str) -> None:
        self.report(worker, is_new_life=True)

    @rule(name=st.sampled_from(NAMES), replicas=st.integers(1, 3))
    def a_user_wants(self, name: str, replicas: int) -> None:
        wanted = self.world.registry._cluster.desired.get(name)
        made = on_cards(([0], 0.4), ([1], 0.2), name=name, replicas=replicas)
        try:
            commands = self.world.deploy_commands(made if wanted is None else wanted.spec)
        except Refused as refusal:
            assert refusal.reason in ("REPLICA_DRAINING", "SUPERVISOR_RECOVERING",
                                      "ADMISSION_REFUSED", "DEPLOYMENT_EXISTS")  # fmt: skip
        else:
            self.listen(commands)

    @precondition(lambda self: self.world.registry.deployments())
    @rule(data=st.data())
    def a_user_deletes(self, data: st.DataObject) -> None:
        names = [view.name for view in self.world.registry.deployments()]
        self.listen(self.world.delete(data.draw(st.sampled_from(names))))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        state=st.sampled_from([OperationState.COMMITTED, OperationState.ROLLED_BACK, None]),
        is_reported_first=st.booleans(),
    )
    def an_operation_ends(
        self, data: st.DataObject, state: OperationState | None, is_reported_first: bool
    ) -> None:
        operation_id = data.draw(st.sampled_from(sorted(self.running)))
        plan = self.running.pop(operation_id)
        if state is OperationState.COMMITTED:
            self.held[plan.worker_id][plan.replica] = started_shards(plan)
            if is_reported_first:
                self.report(plan.worker_id)
        record = None if state is None else record_of(plan, state)
        self.listen(self.world.apply(OperationEnded(operation_id, record, "gone")))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), is_dead=st.booleans(), is_told=st.booleans())
    def a_replica_dies_or_is_stopped(
        self, data: st.DataObject, is_dead: bool, is_told: bool
    ) -> None:
        places = sorted((worker, key) for worker, held in self.held.items() for key in held)
        worker, key = data.draw(st.sampled_from(places))
        if is_dead:
            dead = self.held[worker][key]
            self.held[worker][key] = [replace(it, state=ShardState.FAILED) for it in dead]
        else:
            del self.held[worker][key]
        if is_told:
            for stage in range(2):
                slot = SlotKey(key.deployment, key.index, stage)
                self.listen(self.world.apply(SlotStopped(worker, self.lives[worker][0], slot)))

    @rule(
        seconds=st.sampled_from([0.5, 0.5, 2.0, 5.0, 15.0, 70.0]),
        silent=st.sets(st.sampled_from(WORKERS), max_size=1),
    )
    def time_passes(self, seconds: float, silent: set[str]) -> None:
        """All but the silent beat, and put their slices when they are asked to."""
        self.world.now += seconds
        for worker in sorted(set(WORKERS) - silent):
            answer, *rest = self.world.apply_beat(worker, *self.lives[worker])
            self.listen(rest)
            if answer.verdict is HeartbeatVerdict.REGISTER:
                self.report(worker)
        self.listen(self.world.tick())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), error=st.sampled_from(["", "no"]))
    def a_cancellation_is_answered(self, data: st.DataObject, error: str) -> None:
        plan = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        life = self.lives[plan.worker_id][0]
        ended = OperationCancelled(plan.worker_id, life, plan.operation_id, error)
        self.listen(self.world.apply(ended))

    @rule()
    def the_supervisor_restarts(self) -> None:
        """Everything in memory is gone; the store has what was written."""
        cluster = self.world.registry._cluster
        self.world = World(
            desired=list(cluster.desired.values()),
            tombstones=dict(cluster.tombstones),
            roster=cluster.saved_roster,
            now=self.world.now,
            epoch=Epoch(cluster.epoch.number + 1, REIGN.supervisor_id),
        )
        self.running.clear()

    @invariant()
    def starting_replicas_are_those_on_the_books(self) -> None:
        for view in self.world.registry.deployments():
            creation = self.world.registry.creation_of(view.name)
            failed = {it.replica_index for it in creation.failures}
            assert not failed & set(creation.starting)

    @invariant()
    def what_is_written_is_what_is_kept(self) -> None:
        last: dict[str, Any] = {}
        for write in self.world.written:
            if isinstance(write, SaveDeployment):
                last[write.desired.spec.name] = write.desired
            elif isinstance(write, EntombDeployment):
                last[write.name] = None
        kept = self.world.registry._cluster.desired
        for name, wanted in last.items():
            assert kept.get(name) == wanted

    @invariant()
    def ready_replicas_stand_on_reports(self) -> None:
        for view in self.world.registry.deployments():
            for replica in view.replicas:
                if replica.state is ReplicaState.READY:
                    for it in replica.shards:
                        assert it.record.committed
                        assert it.record.state is ShardState.READY
                        assert it.worker_state is not WorkerState.SUPERSEDED


TestReign = Reign.TestCase
TestReign.settings = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
