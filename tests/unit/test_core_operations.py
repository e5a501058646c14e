"""Starts that end in another way than by their outcome, and older sets that make way."""

from __future__ import annotations

import pytest

from stagekeeper.core.commands import (
    CommitOperation,
    RejoinOperation,
)
from stagekeeper.core.states import DeploymentState, OperationState, ReplicaState, ShardState
from tests.plain import (
    OperationCancelled,
    OperationEnded,
    OperationStarted,
    SlotKey,
    SlotStopped,
)
from tests.worlds import (
    World,
    cancels,
    desired,
    only,
    operation,
    record_of,
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


@pytest.mark.parametrize("shows", ["operation", "shards"])
def test_recovery_R11_a_restart_of_the_agent_with_the_start_at_hand_is_joined(shows) -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    half = started_shards(plan, committed=False, state=ShardState.STARTING)
    held = record_of(plan, OperationState.STARTING)

    told = world.register(
        shards=half if shows == "shards" else (),
        operations=(held,) if shows == "operation" else (),
        incarnation=2,
    )

    (rejoin,) = only(RejoinOperation, told)
    assert (rejoin.operation_id, rejoin.target.incarnation) == (plan.operation_id, 2)
    assert cancels(told) == []
    assert world.registry.creation_of("m").starting == (0,)
    (commit,) = only(CommitOperation, world.apply(OperationStarted(plan.operation_id)))
    assert commit.target.incarnation == 2


def test_a_start_that_its_next_agent_cannot_go_on_with_is_cancelled() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    held = record_of(plan, OperationState.INTERRUPTED, reason="its agent died in mid-start")
    half = started_shards(plan, committed=False, state=ShardState.STARTING)
    world.register(shards=half, operations=(held,), incarnation=2)

    told = world.end(plan, OperationState.INTERRUPTED, reason="its agent died in mid-start")

    assert cancels(told) == [("w1", plan.operation_id)]
    (failure,) = world.registry.creation_of("m").failures
    assert "its agent died in mid-start" in failure.message
    assert world.replica().state is ReplicaState.FAILED
    assert world.end(plan) == [], "an old word is late"


def test_a_restart_of_the_agent_before_it_had_the_start_fails_it() -> None:
    world = ready_world()
    world.deploy(spec())

    told = world.register(incarnation=2)

    assert cancels(told) == []
    assert "its agent was restarted" in world.replica().reason


def test_a_restart_of_the_agent_after_the_commit_loses_nothing() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())

    told = world.register(shards=started_shards(plan), incarnation=2)

    assert cancels(told) == []
    assert world.registry.creation_of("m").is_settled
    assert world.view().state is DeploymentState.READY


def test_a_registration_of_the_same_life_leaves_a_start_alone() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    held = record_of(plan, OperationState.STARTING)

    told = world.register(operations=(held,), revision=2)

    assert cancels(told) == []
    assert world.registry.creation_of("m").starting == (0,)


def test_a_start_without_an_outcome_that_the_agent_still_holds_is_cancelled() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    world.register(operations=(record_of(plan, OperationState.STARTING),), revision=2)

    told = world.apply(OperationEnded(plan.operation_id, None, "the stream broke"))

    assert cancels(told) == [("w1", plan.operation_id)]
    assert "the stream broke" in world.replica().reason


def test_a_start_on_a_lost_worker_is_given_up() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())

    world.tick(59.999)
    assert world.registry.creation_of("m").starting == (0,)
    world.tick(0.001)

    assert world.registry.creation_of("m").is_settled
    assert "its worker is LOST" in world.replica().reason
    told = world.register(operations=(record_of(plan, OperationState.STARTED),), revision=2)
    assert cancels(told) == [("w1", plan.operation_id)]


def test_a_cancellation_that_failed_is_asked_for_again_after_a_pause_and_only_then() -> None:
    world = World(desired=[desired()], is_new=True)
    told = world.register(operations=(operation(1),))
    assert cancels(told) == [("w1", "4-x-1")]

    world.now += 0.5
    assert cancels(world.tick()) == [], "under way"
    world.apply(OperationCancelled("w1", 1, "4-x-1", "no answer"))
    assert cancels(world.tick(0.999)) == []
    assert cancels(world.tick(0.001)) == [("w1", "4-x-1")]
    world.apply(OperationCancelled("w1", 1, "4-x-1"))
    world.register(revision=2)
    assert cancels(world.tick(5.0)) == []


def test_a_rollback_that_is_reported_is_settled_and_told() -> None:
    world = World(desired=[desired()], is_new=True)

    answer, *rest = world.register(
        operations=(operation(1, OperationState.ROLLED_BACK, reason="its lease was over"),)
    )

    assert answer.settled_operations == ("4-x-1",)
    assert cancels(rest) == []
    assert "its lease was over" in world.replica().reason
    assert world.view().state is DeploymentState.FAILED


def test_the_outcome_of_a_running_start_is_not_settled_before_its_executor_has_it() -> None:
    world = ready_world()
    (plan,) = world.deploy(spec())
    rolled_back = record_of(plan, OperationState.ROLLED_BACK)

    answer, *_ = world.register(operations=(rolled_back,), revision=2)
    assert answer.settled_operations == ()
    world.end(plan, OperationState.ROLLED_BACK)
    answer, *_ = world.register(operations=(rolled_back,), revision=3)

    assert answer.settled_operations == (plan.operation_id,)


def test_an_older_set_is_stopped_once_its_successor_is_ready_on_a_live_worker() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register("w1", [shard(n=1)])

    told = world.register("w2", [shard(n=2)])

    assert stops(told) == [("w1", "m", 0, 0, 1)]
    assert world.replica().shards[0].worker_id == "w2"


@pytest.mark.parametrize(
    "winner",
    [
        shard(n=2, committed=False),
        shard(n=2, state=ShardState.ADOPTING),
        shard(n=2, shard_count=2),
        shard(n=1, instance_id="x"),
    ],
)
def test_an_older_set_is_kept_while_nothing_better_is_ready(winner) -> None:
    world = World(desired=[desired()], is_new=True)
    world.register("w1", [shard(n=1)])

    assert stops(world.register("w2", [winner])) == []


def test_an_older_set_is_kept_while_its_successors_worker_is_silent() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register("w2", [shard(n=2)])
    world.tick(4.0)

    assert stops(world.register("w1", [shard(n=1)])) == []
    assert stops(world.apply_beat("w2")) == [("w1", "m", 0, 0, 1)]


def test_an_older_set_is_kept_while_neither_is_ready() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register("w1", [shard(n=1, state=ShardState.ADOPTING)])

    assert stops(world.register("w2", [shard(n=2, state=ShardState.ADOPTING)])) == []


def test_a_ready_replica_with_an_interrupted_start_beside_it_has_the_start_cancelled() -> None:
    world = World(desired=[desired()], is_new=True)
    half = shard(n=2, committed=False, state=ShardState.STARTING)

    told = world.register(shards=[shard(n=1), half], operations=(operation(2),))

    assert cancels(told) == [("w1", "4-x-2")]
    assert world.view().state is DeploymentState.READY


def test_a_start_that_was_committed_and_then_died_tells_its_own_cause() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.end(plan, OperationState.ROLLED_BACK, reason="an old story")
    (plan,) = world.deploy(spec())
    world.end(plan)

    dead = started_shards(plan, state=ShardState.FAILED, state_reason="signal 9")
    world.register(shards=dead, revision=2)

    (failure,) = world.registry.creation_of("m").failures
    assert "signal 9" in failure.message
    assert world.registry._cluster.notes == {}


@pytest.mark.parametrize("ends", ["dead", "silent", "gone"])
def test_an_older_set_no_longer_makes_way_once_its_successor_is_not_ready(ends) -> None:
    world = World(desired=[desired()], is_new=True)
    world.register("w1", [shard(n=1)])
    told = world.register("w2", [shard(n=2)])
    assert stops(told) == [("w1", "m", 0, 0, 1)]
    world.apply(SlotStopped("w1", 1, SlotKey("m", 0, 0), "no answer"))

    if ends == "dead":
        world.register("w2", [shard(n=2, state=ShardState.FAILED)], revision=2)
    elif ends == "gone":
        world.register("w2", revision=2)
    world.now += 3.0
    world.beat("w1")
    told = world.tick(1.0)

    assert stops(told) == []
    assert world.replica().state is ReplicaState.READY


def test_nothing_that_only_workers_know_of_is_stopped_by_itself() -> None:
    world = World()
    world.register("w1", [shard(n=1)])

    assert stops(world.register("w2", [shard(n=2)])) == []
