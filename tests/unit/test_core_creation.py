"""Deployments wanted: what starts, what is left alone, and how a start ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.commands import (
    PublishChange,
    SaveDeployment,
    SaveFailure,
    StartOperation,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.events import DeploymentRequested
from stagekeeper.core.ids import Generation
from stagekeeper.core.model import MemoryNeed, ModelInfo
from stagekeeper.core.states import DeploymentState, OperationState, ReplicaState, ShardState
from tests.plain import (
    AgentProbed,
    CreationAccepted,
    Failure,
    FailureOrigin,
    OperationEnded,
    OperationStarted,
    Placement,
    RollbackRecord,
)
from tests.worlds import (
    REIGN,
    World,
    desired,
    gen,
    on_cards,
    only,
    replica_shards,
    shard,
    spec,
    started_shards,
    stops,
)


def ready_world(*workers: str) -> World:
    world = World()
    for worker in workers or ("w1",):
        world.register(worker)
    return world


def refused(world: World, made) -> Refused:
    before = (world.registry.deployments(), world.registry.revision, list(world.written))
    with pytest.raises(Refused) as caught:
        world.deploy(made)
    assert before == (world.registry.deployments(), world.registry.revision, world.written)
    return caught.value


def test_a_wish_is_answered_then_written_then_started() -> None:
    world = ready_world()
    wish = spec(stages=2, replicas=2, entry="s1", model=ModelInfo("M"))

    accepted, saved, *rest = world.apply(DeploymentRequested(wish, 2_000.0))

    assert accepted == CreationAccepted((0, 1))
    assert saved.desired == desired(wish, is_creating=True, create_time=2_000.0)
    plans = [it.start.parts[0] for it in only(StartOperation, rest)]
    assert [it.replica_index for it in plans] == [0, 1]
    assert [it.operation_id for it in plans] == ["5-supervis-1", "5-supervis-2"]
    assert [it.generation for it in plans] == [Generation(REIGN, 1), Generation(REIGN, 2)]
    assert {(it.worker_id, it.stage_count, it.entry_stage_id) for it in plans} == {("w1", 2, 1)}
    assert [it.stage_id for it in plans[0].stages] == [0, 1]
    assert (plans[0].model, plans[0].spec_revision) == (ModelInfo("M"), 1)
    assert only(StartOperation, rest)[0].targets[0].incarnation == 1
    assert [it.name for it in only(PublishChange, rest)] == ["m"]
    assert world.view().state is DeploymentState.CREATING
    assert world.registry.creation_of("m").starting == (0, 1)


def test_a_start_is_done_when_the_report_shows_it_committed_and_ready() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec(stages=2))

    world.end(plan)
    assert world.replica().state is ReplicaState.STARTING, "the report is still on its way"
    assert world.registry.creation_of("m").starting == (0,)
    told = world.register(shards=started_shards(plan), revision=2)

    assert world.view().state is DeploymentState.READY
    assert world.registry.creation_of("m").is_settled
    assert world.registry.creation_of("m").failures == ()
    assert [it.desired.is_creating for it in only(SaveDeployment, told)] == [False]
    assert [it.name for it in only(PublishChange, told)] == ["m"]


def test_a_start_is_done_with_the_report_though_its_outcome_comes_later() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    world.apply(OperationStarted(plan.operation_id))

    told = world.register(shards=started_shards(plan), revision=2)
    assert world.replica().state is ReplicaState.READY
    assert world.registry.creation_of("m").is_settled
    assert [it.desired.is_creating for it in only(SaveDeployment, told)] == [False]
    assert world.commit(plan) == [], "its word is late"


@pytest.mark.parametrize(("waited_s", "is_starting"), [(9.999, True), (10.0, False)])
def test_a_committed_start_that_is_never_reported_is_given_up(waited_s, is_starting) -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    world.end(plan)

    world.tick(waited_s)

    assert (world.registry.creation_of("m").starting == (0,)) is is_starting
    if not is_starting:
        assert "not reported it for 10 s" in world.replica().reason


def test_a_stall_of_the_supervisors_own_is_no_wait_for_a_committed_starts_report() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    world.end(plan)

    world.tick(12.0, stalled_s=5.0)
    assert world.registry.creation_of("m").starting == (0,)

    world.tick(3.0)
    assert world.registry.creation_of("m").starting == ()


def test_a_failed_start_is_told_with_stage_cause_and_rollback() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec(stages=2))
    cause = Failure(
        "f1", "INIT_RAISED", FailureOrigin("w1", "m", 0, 1, "s1", 0, "i"), "stage 1 raised: boom"
    )
    rollback = (RollbackRecord(1, True), RollbackRecord(0, False, "still there"))

    ended = world.end(
        plan, OperationState.ROLLED_BACK, failure=cause, rollback=rollback, reason="stage 1"
    )

    (told,) = world.registry.creation_of("m").failures
    assert (told.replica_index, told.worker_id) == (0, "w1")
    assert (told.failure, told.rollback) == (cause, rollback)
    assert "stage 1 raised: boom" in told.message
    assert "rollback left stage 0 (still there)" in told.message
    assert world.replica().state is ReplicaState.FAILED
    assert world.view().state is DeploymentState.FAILED
    assert "boom" in world.view().reason
    assert [it.failure for it in only(SaveFailure, ended)] == [cause]
    assert [it.desired.is_creating for it in only(SaveDeployment, ended)] == [False]


def test_a_start_without_an_outcome_is_failed_with_what_was_met() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())

    world.apply(OperationEnded(plan.operation_id, None, "w1 does not answer", "AGENT_UNREACHABLE"))

    assert "w1 does not answer [AGENT_UNREACHABLE]" in world.replica().reason


def test_an_outcome_that_nobody_waits_for_is_ignored() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    world.end(plan, OperationState.ROLLED_BACK, reason="first word")
    before = world.registry.deployments()

    assert world.end(plan, OperationState.COMMITTED) == []
    assert world.registry.deployments() == before


def test_one_replica_ready_and_one_failed_is_degraded() -> None:
    world = ready_world("w1", "w2")
    first, second = world.deploy(spec(replicas=2))
    world.register(first.worker_id, started_shards(first), revision=2)
    world.end(first)

    world.end(second, OperationState.ROLLED_BACK, reason="no luck")

    assert world.view().state is DeploymentState.DEGRADED
    assert world.view().reason.startswith("1 of 2 replicas READY: replica 1 FAILED")
    assert [it.replica_index for it in world.registry.creation_of("m").failures] == [1]


def test_the_same_wish_again_joins_what_is_under_way_and_writes_nothing() -> None:
    world = ready_world()
    world.deploy(spec())

    assert world.apply(DeploymentRequested(spec(), 3_000.0)) == [CreationAccepted(())]
    assert world.view().create_time == 2_000.0


def test_the_same_wish_again_starts_only_what_failed_or_nobody_reports() -> None:
    world = ready_world("w1", "w2", "w3")
    zero, one, two = world.deploy(spec(replicas=3))
    world.register(zero.worker_id, started_shards(zero), revision=2)
    world.end(zero)
    world.end(one, OperationState.ROLLED_BACK, reason="no luck")

    (again,) = world.deploy(spec(replicas=3))

    assert again.replica_index == 1
    assert again.generation > two.generation
    assert world.registry.creation_of("m").starting == (1, 2)
    assert world.registry.creation_of("m").failures == (), "an old story is not told of a new start"


def test_what_is_left_of_a_failed_replica_is_stopped_first() -> None:
    world = World(desired=[desired(spec(stages=2))], is_new=True)
    left = replica_shards(stages=2)
    left[1] = replace(left[1], state=ShardState.FAILED)
    world.register(shards=left)

    commands = world.apply(DeploymentRequested(spec(stages=2), 3_000.0))

    (start,) = only(StartOperation, commands)
    assert stops(start.stop_first) == [("w1", "m", 0, 0, 1), ("w1", "m", 0, 1, 1)]
    assert start.start.generation > gen(1)
    assert world.replica().state is ReplicaState.STARTING


def test_what_a_silent_worker_has_left_is_not_waited_for() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register("w1", [shard(state=ShardState.FAILED)])
    world.tick(10.0)
    world.register("w2")

    commands = world.apply(DeploymentRequested(spec(), 3_000.0))

    (start,) = only(StartOperation, commands)
    assert start.start.worker_ids == ("w2",)
    assert start.stop_first == ()


@pytest.mark.parametrize(
    "left",
    [
        replica_shards(stages=2)[:1],
        replica_shards(stages=2, state=ShardState.ADOPTING),
        replica_shards(stages=2, state=ShardState.STALLED),
        replica_shards(stages=2, stage_name="else"),
    ],
)
def test_what_is_half_known_is_left_alone(left) -> None:
    world = World(desired=[desired(spec(stages=2))], is_new=True)
    world.register(shards=left)

    assert world.deploy(spec(stages=2)) == []


def test_the_same_wish_however_it_is_written_is_the_same() -> None:
    world = ready_world()
    one = replace(spec().stages[0], args_json='{"a": 1, "b": 2}', env=(("A", "1"), ("B", "2")))
    world.deploy(replace(spec(), stages=(one,)))
    other = replace(one, args_json='{"b":2,"a":1}', env=(("B", "2"), ("A", "1")))

    assert world.deploy(replace(spec(), stages=(other,), entry="s0")) == []


@pytest.mark.parametrize(
    "other",
    [
        spec(replicas=2),
        spec(stages=2),
        replace(spec(), stages=(replace(spec().stages[0], args_json='{"a": 1}'),)),
        spec(placement=Placement(workers=("w1",))),
    ],
)
def test_another_wish_under_the_same_name_is_refused(other) -> None:
    world = ready_world()
    world.deploy(spec())

    refusal = refused(world, other)

    assert refusal.reason is Reason.DEPLOYMENT_EXISTS
    assert "delete it, then deploy" in refusal.message


def test_a_wish_joins_replicas_that_only_workers_knew_of() -> None:
    world = World()
    world.register(shards=[shard(replica=1, spec_revision=4)])
    assert world.view().spec is None

    (plan,) = world.deploy(spec(replicas=2))

    assert plan.replica_index == 0
    assert world.view().spec_revision == plan.spec_revision == 4
    assert world.replica(1).state is ReplicaState.READY


def test_a_wish_of_another_shape_than_what_workers_run_is_refused() -> None:
    world = World()
    world.register(shards=replica_shards(stages=2))

    refusal = refused(world, spec())

    assert refusal.reason is Reason.DEPLOYMENT_EXISTS
    assert "worker w1 runs another m" in refusal.message


def test_without_any_worker_the_refusal_says_to_start_an_agent() -> None:
    refusal = refused(World(), spec())

    assert refusal.reason is Reason.ADMISSION_REFUSED
    assert "start an agent" in refusal.message


def test_each_worker_that_cannot_take_it_is_named_with_why() -> None:
    world = World()
    world.register("silent")
    world.tick(4.0)
    world.register("unreachable")
    world.apply(AgentProbed("unreachable", 1, False))
    world.register("blind", inventory_unknown=True, inventory_reason="NVML hangs", devices=())
    world.register("other")

    refusal = refused(world, spec(placement=Placement(workers=("silent", "unreachable", "blind"))))

    assert refusal.reason is Reason.ADMISSION_REFUSED
    for why in (
        "silent is SUSPECT",
        "unreachable is AGENT_UNREACHABLE at 127.0.0.1:7071",
        "blind could not read its devices: NVML hangs",
        "other is not among placement.workers",
    ):
        assert why in refusal.message


def test_workers_that_have_yet_to_register_with_the_reign_are_waited_for() -> None:
    world = World()
    world.register("w1")
    world.register("w2", highest_epoch=replace(REIGN, number=8))
    made = spec(placement=Placement(workers=("w1",)))

    assert refused(world, made).reason is Reason.SUPERVISOR_RECOVERING
    world.register("w1")
    assert world.deploy(made)


def test_a_bad_spec_is_refused_with_every_problem_and_before_everything_else() -> None:
    world = World(roster=["w1"])

    refusal = refused(world, spec(name="a/b", replicas=0))

    assert refusal.reason is Reason.BAD_FIELD
    assert [it.path for it in refusal.problems] == ["name", "replicas"]


def test_no_room_means_nothing_is_wanted() -> None:
    world = ready_world()

    refusal = refused(world, on_cards(([0], 1.0), ([0], 0.1)))

    assert refusal.reason is Reason.ADMISSION_REFUSED
    assert "device gpu-0" in refusal.message
    assert world.view() is None


def test_memory_needs_travel_with_the_plan_in_the_order_of_the_specs_cards() -> None:
    world = ready_world()
    made = on_cards(([1, 0], 0.5), ([1], 0.4))

    (plan,) = world.deploy(made)

    assert plan.stages[0].device_ids == ("gpu-1", "gpu-0")
    assert plan.stages[1].device_ids == ("gpu-1",)
    assert plan.stages[0].spec.memory == MemoryNeed(utilization=0.5)
