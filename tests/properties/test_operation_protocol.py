"""Starts over several workers, with deaths of supervisor and agents between any two steps.

Both halves are pure here: the supervisor is a `Registry` with a store of what it wrote and the
order of `StartRun`; the agents are models of what their disks hold. Whatever dies, whenever: in the
end a replica is READY, once, or nothing of it is left and no claim is booked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stagekeeper.core.commands import (
    AgentTarget,
    CancelOperation,
    CommitOperation,
    EndRun,
    EntombDeployment,
    RejoinOperation,
    RemoveOperation,
    SaveDeployment,
    SaveOperation,
    StartOperation,
    StopSlot,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.events import (
    CommitEnded,
    OperationCancelled,
    OperationEnded,
    OperationStarted,
    SlotStopped,
)
from stagekeeper.core.ids import Epoch
from stagekeeper.core.model import MemoryNeed, OperationRecord
from stagekeeper.core.planner import init_groups
from stagekeeper.core.start_run import Reserve, StartRun, StartStages, Undo
from stagekeeper.core.states import OperationState, ReplicaState
from tests.fakes.agent_models import MAY_START, ModelAgent, ModelOperation, ModelRefused
from tests.worlds import REIGN, World, spec, stage_spec

_S = OperationState
WORKERS = ("w1", "w2", "w3")
RESERVED = (_S.RESERVED, _S.STARTING, _S.STARTED, _S.COMMITTED)
GOING_DOWN = (_S.ROLLING_BACK, _S.ROLLED_BACK, _S.INTERRUPTED)


@dataclass
class Store:
    """What the supervisor's disk holds."""

    desired: dict[str, Any] = field(default_factory=dict)
    tombstones: dict[str, Any] = field(default_factory=dict)
    operations: dict[str, Any] = field(default_factory=dict)

    def write(self, write: Any) -> None:
        if isinstance(write, SaveDeployment):
            self.desired[write.desired.spec.name] = write.desired
        elif isinstance(write, EntombDeployment):
            self.desired.pop(write.name, None)
            self.tombstones[write.name] = write.ceiling
        elif isinstance(write, SaveOperation):
            self.operations[write.saved.start.operation_id] = write.saved
        elif isinstance(write, RemoveOperation):
            self.operations.pop(write.operation_id, None)


class Run:
    """What carries a start out, as `OperationRun` does, one answer at a time."""

    def __init__(self, command: StartOperation) -> None:
        self.start = command.start
        self.targets = dict(zip(self.start.worker_ids, command.targets, strict=True))
        self.stops = list(command.stop_first)
        stages = {it.stage_id: it.spec.devices for it in self.start.parts[0].stages}
        self.run = StartRun(
            {part.worker_id: [it.stage_id for it in part.stages] for part in self.start.parts},
            init_groups(stages),
        )
        self.open: list[Any] = []
        self.reserved: set[str] = set()
        self.first: OperationEnded | None = None

    def take_orders(self) -> None:
        self.open += self.run.next_orders()

    def fail(self, worker_id: Any, record: OperationRecord | None, reason: str = "") -> None:
        if self.first is None:
            self.first = OperationEnded(self.start.operation_id, record, "no", reason, worker_id)


class Protocol(RuleBasedStateMachine):
    @initialize(
        shards=st.lists(st.sampled_from([2, 2, 1]), min_size=1, max_size=3),
        cards=st.lists(st.sampled_from([(), (0,), (1,), (0, 1)]), min_size=3, max_size=3),
    )
    def begin(self, shards: list[int], cards: list[tuple[int, ...]]) -> None:
        self.spec = replace(
            spec(),
            stages=tuple(
                stage_spec(
                    f"s{number}",
                    shard_count=count,
                    devices=cards[number],
                    memory=MemoryNeed(utilization=0.2) if cards[number] else None,
                )
                for number, count in enumerate(shards)
            ),
        )
        self.agents = {worker: ModelAgent(worker) for worker in WORKERS}
        self.store = Store()
        self.runs: dict[str, Run] = {}
        self.queue: list[Any] = []
        self.reign = REIGN
        self.world = World(is_new=True)
        for agent in self.agents.values():
            self.register(agent)
        self.listen(self.world.deploy_commands(self.spec))

    # The supervisor's outside.

    def tell(self, event: Any) -> None:
        self.listen(self.world.apply(event))

    def listen(self, commands: list[Any]) -> None:
        for write in self.world.written:
            self.store.write(write)
        self.world.written.clear()
        for command in commands:
            if isinstance(command, StartOperation):
                run = self.runs[command.start.operation_id] = Run(command)
                if not run.stops:
                    run.take_orders()
            elif isinstance(command, RejoinOperation):
                if command.operation_id in self.runs:
                    run = self.runs[command.operation_id]
                    run.targets[command.target.worker_id] = command.target
                    self.join(run, command.target.worker_id)
            elif isinstance(command, EndRun):
                self.runs.pop(command.operation_id, None)
            elif isinstance(command, CancelOperation):
                self.runs.pop(command.operation_id, None)
                self.queue.append(command)
            elif isinstance(command, CommitOperation):
                saved = self.store.operations[command.operation_id]
                is_ready = saved.is_decided or not saved.start.is_spanning
                assert is_ready, "told before it was written down"
                self.queue.append(command)
            elif isinstance(command, StopSlot):
                self.queue.append(command)
        self.end_runs()

    def end_runs(self) -> None:
        for operation_id, run in list(self.runs.items()):
            if run.stops or not run.run.is_over:
                continue
            del self.runs[operation_id]
            if run.run.is_started:
                self.tell(OperationStarted(run.start.operation_id))
            else:
                assert run.first is not None
                self.tell(run.first)

    def register(self, agent: ModelAgent) -> None:
        fields = agent.report()
        shards = fields.pop("shards")
        try:
            reply, *rest = self.world.register(
                agent.worker_id, shards, agent_address=f"{agent.worker_id}:{agent.incarnation}",
                **fields,
            )  # fmt: skip
        except Refused:
            return
        agent.epoch = reply.epoch
        agent.settle(reply.settled_operations)
        self.listen(rest)

    def reached(self, target: AgentTarget) -> ModelAgent | None:
        agent = self.agents[target.worker_id]
        is_here = agent.is_alive and agent.epoch == self.world.registry.epoch
        return agent if is_here and agent.incarnation == target.incarnation else None

    # Rules: what may happen next.

    @rule()
    def a_user_deploys(self) -> None:
        try:
            self.listen(self.world.deploy_commands(self.spec))
        except Refused as refused:
            assert refused.reason in (
                Reason.SUPERVISOR_RECOVERING, Reason.REPLICA_DRAINING, Reason.ADMISSION_REFUSED,
            )  # fmt: skip

    @precondition(lambda self: self.world.view() is not None)
    @rule(is_sure=st.integers(0, 7))
    def a_user_deletes(self, is_sure: int) -> None:
        if not is_sure:
            self.listen(self.world.delete())

    @precondition(lambda self: any(run.open or run.stops for run in self.runs.values()))
    @rule(data=st.data(), is_answer_lost=st.integers(0, 4), gives_up=st.integers(0, 9))
    def an_order_is_said(self, data: Any, is_answer_lost: int, gives_up: int) -> None:
        run = data.draw(st.sampled_from([it for it in self.runs.values() if it.open or it.stops]))
        order = data.draw(st.sampled_from(run.open)) if run.open else None
        self.say(run, order, is_lost=not is_answer_lost, gives_up=not gives_up)

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), is_answer_lost=st.integers(0, 4))
    def a_command_is_said(self, data: Any, is_answer_lost: int) -> None:
        command = data.draw(st.sampled_from(self.queue))
        self.command(command, is_lost=not is_answer_lost)

    @precondition(lambda self: self.runs or self.decided())
    @rule(
        data=st.data(),
        worker=st.sampled_from([0, 1]),
        after=st.sampled_from(["undone", "dies", "is deleted", "supervisor"]),
    )
    def half_of_it_is_committed(self, data: Any, worker: int, after: str) -> None:
        """All goes well until one part is committed; then something happens to the other one."""
        for _ in range(8):
            if not self.decided():
                self.a_start_gets_on(1)
        commits = [it for it in self.queue if isinstance(it, CommitOperation)]
        if len(commits) != 2:
            return
        one, other = commits[worker], self.agents[commits[1 - worker].target.worker_id]
        self.command(one, is_lost=data.draw(st.booleans()))
        operation = other.operations.get(one.operation_id)
        if after == "undone" and operation is not None and operation.state is _S.STARTED:
            other.roll_back(operation, to_the_end=data.draw(st.booleans()))
        elif after == "dies":
            other.die()
        elif after == "is deleted":
            self.listen(self.world.delete())
        elif after == "supervisor":
            self.the_supervisor_dies(0)

    @rule(worker=st.sampled_from(WORKERS), reports=st.booleans())
    def an_agent_gets_on(self, worker: str, reports: bool) -> None:
        """What is under way there comes to its end."""
        agent = self.agents[worker]
        if agent.is_alive:
            self.get_on(agent)
            if reports:
                self.register(agent)

    @precondition(lambda self: self.runs)
    @rule(rounds=st.integers(1, 3))
    def a_start_gets_on(self, rounds: int) -> None:
        """All orders that are open are said, and the agents carry them out."""
        for _ in range(rounds):
            for agent in self.agents.values():
                if agent.is_alive:
                    self.get_on(agent)
                    self.register(agent)
            self.say_all()

    @precondition(lambda self: any(self.undoable()))
    @rule(data=st.data(), to_the_end=st.booleans(), reports=st.booleans())
    def a_part_is_undone(self, data: Any, to_the_end: bool, reports: bool) -> None:
        """A stage of it fails, or nobody has joined it for long."""
        agent, operation = data.draw(st.sampled_from(list(self.undoable())))
        agent.roll_back(operation, to_the_end=to_the_end)
        if reports:
            self.register(agent)

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_reports(self, worker: str) -> None:
        agent = self.agents[worker]
        if agent.is_alive:
            self.register(agent)

    @rule(worker=st.sampled_from(WORKERS), comes_back=st.booleans())
    def an_agent_dies(self, worker: str, comes_back: bool) -> None:
        agent = self.agents[worker]
        if agent.is_alive:
            agent.die()
        if comes_back:
            agent.live_again()
            self.register(agent)

    @rule(is_spared=st.integers(0, 2))
    def the_supervisor_dies(self, is_spared: int) -> None:
        """All but what it wrote is gone; agents find the next one in their own time."""
        if is_spared:
            return
        self.reign = Epoch(self.reign.number + 1, REIGN.supervisor_id)
        self.world = World(
            desired=list(self.store.desired.values()),
            tombstones=dict(self.store.tombstones),
            operations=list(self.store.operations.values()),
            roster=WORKERS,
            now=self.world.now,
            epoch=self.reign,
        )
        self.runs.clear()
        self.queue.clear()

    @rule(seconds=st.sampled_from([0.5, 1.0, 1.0, 3.0, 3.0, 11.0, 70.0]), are_heard=st.booleans())
    def time_passes(self, seconds: float, are_heard: bool) -> None:
        self.world.now += seconds
        for agent in self.agents.values():
            if are_heard and agent.is_alive:
                self.register(agent)
        self.listen(self.world.tick())

    @invariant()
    def what_is_kept_of_starts_is_what_is_written(self) -> None:
        book = self.world.registry._cluster.operations
        kept = {it.operation_id: it.is_decided for it in book.by_id.values()}
        written = {it: saved.is_decided for it, saved in self.store.operations.items()}
        assert written.keys() == kept.keys() | book.condemned.keys()
        for operation_id, is_decided in written.items():
            if operation_id in kept and self.store.operations[operation_id].start.is_spanning:
                assert kept[operation_id] == is_decided

    @invariant()
    def one_generation_lives_in_a_slot(self) -> None:
        for agent in self.agents.values():
            living = [it.plan.generation for it in agent.operations.values() if it.living]
            assert len(set(living)) == len(living) <= 1

    @invariant()
    def what_is_ready_is_whole_and_committed(self) -> None:
        view = self.world.view()
        for replica in view.replicas if view is not None else ():
            if replica.state is ReplicaState.READY:
                assert len({it.record.operation_id for it in replica.shards}) == 1
                assert len(replica.shards) == self.spec.shard_count
                for it in replica.shards:
                    assert it.record.operation_id in self.agents[it.worker_id].committed_ever

    # How.

    def say(self, run: Run, order: Any, *, is_lost: bool = False, gives_up: bool = False) -> None:
        if run.stops:
            stop = run.stops[0]
            agent = self.reached(stop.target)
            if agent is None:
                self.runs.pop(run.start.operation_id)
                self.tell(OperationEnded(run.start.operation_id, None, "not stopped"))
                return
            agent.stop(stop.slot, stop.up_to)
            self.register(agent)
            run.stops.pop(0)
            if not run.stops:
                run.take_orders()
            return
        worker_id = order.worker_id
        agent = self.reached(run.targets[worker_id])
        if isinstance(order, Undo):
            if agent is not None:
                agent.cancel(run.start.operation_id)
            run.open.remove(order)
            run.run.undone(worker_id)
        elif agent is None:
            # Another life is waited for; an agent that is not reached for long is given up.
            if not gives_up or self.agents[worker_id].is_alive:
                return
            run.open.remove(order)
            run.fail(worker_id, None)
            run.run.failed(order, is_clean=False)
        else:
            self.step(run, order, agent, is_lost=is_lost)
        run.take_orders()
        self.end_runs()

    def step(self, run: Run, order: Any, agent: ModelAgent, *, is_lost: bool) -> None:
        part = run.start.part_of(order.worker_id)
        try:
            if isinstance(order, Reserve):
                record: OperationRecord | None = agent.reserve(part)
            else:
                record = agent.start(part, order.stage_ids)
        except ModelRefused as refused:
            run.open.remove(order)
            run.fail(order.worker_id, None, refused.reason)
            run.run.failed(order, is_clean=isinstance(order, Reserve))
            return
        if is_lost or record is None:
            return  # it is joined again
        run.open.remove(order)
        if isinstance(order, Reserve) and record.state in RESERVED:
            run.reserved.add(order.worker_id)
            run.run.reserved(order)
        elif isinstance(order, StartStages) and record.state not in GOING_DOWN:
            run.run.started(order)
        else:
            run.fail(order.worker_id, record)
            run.run.failed(order, is_clean=record.state is _S.ROLLED_BACK)

    def join(self, run: Run, worker_id: Any) -> None:
        """Join a part that has nothing to do, as is done now and then."""
        agent = self.reached(run.targets[worker_id])
        is_busy = any(it.worker_id == worker_id for it in run.open)
        if agent is None or is_busy or worker_id not in run.reserved or run.run.has_failed:
            return
        try:
            record: OperationRecord | None = agent.reserve(run.start.part_of(worker_id))
        except ModelRefused:
            record = None
        if record is None or record.state in GOING_DOWN:
            run.fail(worker_id, record)
            run.run.part_lost(worker_id)
            run.take_orders()
            self.end_runs()

    def command(self, command: Any, *, is_lost: bool = False) -> None:
        self.queue.remove(command)
        target = command.target
        agent = self.reached(target)
        error = "" if agent is not None and not is_lost else "it was not reached"
        where = target.worker_id, target.incarnation
        if isinstance(command, StopSlot):
            if agent is not None:
                agent.stop(command.slot, command.up_to)
            self.tell(SlotStopped(*where, command.slot, error))
        elif isinstance(command, CancelOperation):
            if agent is not None:
                agent.cancel(command.operation_id)
            self.tell(OperationCancelled(*where, command.operation_id, error))
        else:
            record, reason = None, ""
            try:
                if agent is not None:
                    record = agent.commit(command.plan, command.peers)
            except ModelRefused as refused:
                reason = refused.reason.value
            if is_lost:
                record, reason = None, ""
            self.tell(CommitEnded(*where, command.operation_id, record, error, reason))

    def decided(self) -> list[Any]:
        book = self.world.registry._cluster.operations
        return [it for it in book.by_id.values() if it.is_beyond_recall]

    def undoable(self) -> Iterator[tuple[ModelAgent, ModelOperation]]:
        for agent in self.agents.values():
            for operation in agent.operations.values() if agent.is_alive else ():
                if operation.state in (*MAY_START, _S.STARTED):
                    yield agent, operation

    def get_on(self, agent: ModelAgent) -> None:
        for operation in agent.operations.values():
            if operation.state is _S.ROLLING_BACK:
                agent.roll_back(operation)
            for stage_id in sorted(operation.asked - operation.up):
                if operation.state is _S.STARTING:
                    agent.come_up(operation, stage_id)

    def say_all(self) -> None:
        for run in list(self.runs.values()):
            for worker_id in run.start.worker_ids:
                self.join(run, worker_id)
            for order in [*run.open] or [None]:
                if run.start.operation_id in self.runs and (run.stops or order in run.open):
                    self.say(run, order)

    def teardown(self) -> None:
        """Let everybody live and be heard until nothing moves any more; then look."""
        if not hasattr(self, "world"):
            return
        for _ in range(60):
            self.settle_once()
        book = self.world.registry._cluster.operations
        assert not self.runs and not self.queue
        assert not book.by_id and not book.condemned and not self.store.operations
        held = {
            (agent.worker_id, it.plan.operation_id)
            for agent in self.agents.values()
            for it in agent.operations.values()
            if it.claims
        }
        view = self.world.view()
        ready = [it for it in view.replicas if it.state is ReplicaState.READY] if view else []
        if not ready:
            assert not held, "neither READY nor gone"
            return
        (replica,) = ready
        assert held == {(it.worker_id, it.record.operation_id) for it in replica.shards}
        for it in replica.shards:
            operation = self.agents[it.worker_id].operations[it.record.operation_id]
            others = {
                (other.record.stage_id, other.record.shard_index)
                for other in replica.shards
                if other.worker_id != it.worker_id
            }
            assert {(peer.stage_id, peer.shard_index) for peer in operation.peers} == others

    def settle_once(self) -> None:
        for agent in self.agents.values():
            if not agent.is_alive:
                agent.live_again()
            self.get_on(agent)
            self.register(agent)
        for command in list(self.queue):
            if command in self.queue:
                self.command(command)
        self.say_all()
        self.world.now += 1.0
        self.listen(self.world.tick())


def test_whoever_dies_between_any_two_steps_a_start_becomes_one_replica_or_nothing() -> None:
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            deadline=None,
            max_examples=50,
            stateful_step_count=60,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
