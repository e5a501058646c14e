"""Deployments deleted: what is stopped, how often it is asked for, and when it is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.commands import ChangeKind, DeletionAccepted, PublishChange, SaveDeployment
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import Generation
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import DeploymentState, OperationState, ReplicaState, ShardState
from tests.plain import EntombDeployment, OperationCancelled, OperationEnded, SlotKey, SlotStopped
from tests.worlds import (
    EARLIER,
    REIGN,
    World,
    cancels,
    desired,
    gen,
    only,
    operation,
    record_of,
    replica_shards,
    shard,
    spec,
    started_shards,
    stops,
)


def serving(replicas=1, stages=1, n=1) -> World:
    """m is READY on w1, as it was when this reign began."""
    world = World(desired=[desired(spec(stages=stages, replicas=replicas))], is_new=True)
    world.register(shards=[it for k in range(replicas) for it in replica_shards("m", k, stages, n)])
    return world


def kinds(commands) -> list[tuple]:
    return [(it.kind, it.name) for it in only(PublishChange, commands)]


def test_a_deletion_is_answered_then_written_then_carried_out() -> None:
    world = serving(stages=2)

    accepted, saved, *rest = world.delete()

    assert accepted == DeletionAccepted()
    assert saved == SaveDeployment(desired(spec(stages=2), is_deleting=True))
    assert stops(rest) == [("w1", "m", 0, 0, 1), ("w1", "m", 0, 1, 1)]
    assert kinds(rest) == [(ChangeKind.MODIFIED, "m")]
    assert world.view().state is DeploymentState.DELETING
    assert world.replica().state is ReplicaState.DRAINING
    assert "2 shards of it are still to be stopped" in world.view().reason


def test_a_deletion_is_over_when_nobody_reports_a_shard_any_more() -> None:
    world = serving(stages=2)
    world.delete()

    half = world.register(shards=replica_shards(stages=2)[:1], revision=2)
    assert only(EntombDeployment, half) == []
    gone = world.register(revision=3)

    assert only(EntombDeployment, gone) == [EntombDeployment("m", Generation(REIGN, 0))]
    assert kinds(gone) == [(ChangeKind.REMOVED, "m")]
    assert world.view() is None
    assert world.registry.deployments() == []


def test_a_story_ends_with_its_deployment() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.end(plan, OperationState.ROLLED_BACK, reason="no luck")

    world.delete()

    assert world.view() is None
    assert world.registry._cluster.notes == {}


def test_deleting_twice_changes_nothing() -> None:
    world = serving()
    world.delete()

    assert world.delete() == [DeletionAccepted()]


@pytest.mark.parametrize("is_gone", [False, True])
def test_deleting_what_nobody_wants_or_reports_is_refused(is_gone) -> None:
    world = serving()
    if is_gone:
        world.delete()
        world.register(revision=2)
    name = "m" if is_gone else "other"

    with pytest.raises(Refused) as caught:
        world.delete(name)

    assert caught.value.reason is Reason.DEPLOYMENT_UNKNOWN


@pytest.mark.parametrize(
    "state", [it for it in ShardState if it not in (ShardState.STOPPED, ShardState.CONFLICT)]
)
def test_shards_in_any_state_are_stopped(state) -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard(state=state)])

    assert stops(world.delete()) == [("w1", "m", 0, 0, 1)]


def test_stopped_shards_are_nothing_to_wait_for() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard(state=ShardState.STOPPED)])

    told = world.delete()

    assert stops(told) == []
    assert only(EntombDeployment, told)


def test_a_slot_is_stopped_up_to_its_highest_generation() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard(n=1), shard(n=3, state=ShardState.FAILED), shard(n=2)])

    assert stops(world.delete()) == [("w1", "m", 0, 0, 3)]


def test_a_stop_that_failed_is_asked_for_again_after_a_pause_and_only_then() -> None:
    world = serving()
    world.delete()
    slot = SlotKey("m", 0, 0)

    assert stops(world.tick(5.0)) == [], "under way"
    world.beat()
    world.apply(SlotStopped("w1", 1, slot, "DEADLINE_EXCEEDED"))
    assert stops(world.tick(0.999)) == []
    assert stops(world.tick(0.001)) == [("w1", "m", 0, 0, 1)]
    world.apply(SlotStopped("w1", 1, slot))
    assert stops(world.tick(1.0)) == [("w1", "m", 0, 0, 1)], "it is still reported"
    world.register(revision=2)
    assert stops(world.tick(1.0)) == []


def test_a_report_while_a_stop_is_under_way_does_not_repeat_it() -> None:
    world = serving()
    world.delete()

    assert stops(world.register(shards=[shard(state=ShardState.STOPPING)], revision=2)) == []


def test_a_new_life_of_the_agent_is_asked_anew_at_once() -> None:
    world = serving()
    world.delete()

    told = world.register(shards=[shard()], incarnation=2)

    assert stops(told) == [("w1", "m", 0, 0, 1)]


def test_a_silent_worker_is_asked_when_it_is_heard_again() -> None:
    world = serving()
    world.tick(10.0)

    assert stops(world.delete()) == []
    assert stops(world.tick(10.0)) == []
    assert "workers that are not heard: w1 (UNREACHABLE)" in world.view().reason
    assert stops(world.apply_beat()) == [("w1", "m", 0, 0, 1)]


@pytest.mark.parametrize(("silent_s", "is_over"), [(59.999, False), (60.0, True)])
def test_a_lost_worker_does_not_hold_a_deletion_up_and_is_stopped_if_it_returns(
    silent_s, is_over
) -> None:
    world = serving()
    world.delete()

    told = world.tick(silent_s)

    assert bool(only(EntombDeployment, told)) is is_over
    assert (world.view() is None) is is_over
    back = world.register(shards=[shard()], incarnation=2)
    assert stops(back) == [("w1", "m", 0, 0, 1 if not is_over else 0)]
    assert world.view().state is DeploymentState.DELETING


def test_a_running_start_is_cancelled_and_the_deletion_waits_for_its_end() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    held = record_of(plan, OperationState.STARTING)
    half = started_shards(plan, committed=False, state=ShardState.STARTING)
    world.register(shards=half, operations=(held,), revision=2)

    told = world.delete()
    assert cancels(told) == [("w1", plan.operation_id)]
    assert stops(told) == [], "the cancellation does it"
    told = world.register(revision=3)
    assert only(EntombDeployment, told) == [], "the operation is still on the books"
    told = world.apply(OperationCancelled("w1", 1, plan.operation_id))

    assert only(EntombDeployment, told) == [EntombDeployment("m", plan.generation)]
    assert world.registry.failures() == []


def test_a_start_that_ends_while_it_is_cancelled_leaves_no_story() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.delete()

    told = world.apply(OperationEnded(plan.operation_id, None, "cancelled"))

    assert only(EntombDeployment, told)
    assert world.view() is None
    assert world.registry.creation_of("m").failures == ()


def test_a_cancellation_that_failed_keeps_the_start_on_the_books() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.delete()

    told = world.apply(OperationCancelled("w1", 1, plan.operation_id, "no answer"))
    assert only(EntombDeployment, told) == []
    assert cancels(world.tick(0.999)) == []
    assert cancels(world.tick(0.001)) == [("w1", plan.operation_id)]


def test_a_start_that_was_committed_in_spite_of_its_cancellation_is_stopped() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.delete()

    world.end(plan, OperationState.COMMITTED)
    told = world.register(shards=started_shards(plan), revision=2)

    assert stops(told) == [("w1", "m", 0, 0, plan.generation.n)]


def test_a_start_that_is_committed_by_its_report_is_stopped_and_not_cancelled() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.register(shards=started_shards(plan), revision=2)

    told = world.delete()

    assert cancels(told) == []
    assert stops(told) == [("w1", "m", 0, 0, plan.generation.n)]


def test_leftovers_of_a_rollback_are_stopped_too() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    failed = started_shards(plan, committed=False, state=ShardState.FAILED)
    world.register(shards=failed, revision=2)
    world.delete()

    told = world.end(plan, OperationState.ROLLED_BACK)

    assert stops(told) == []
    told = world.register(shards=failed, revision=3)
    assert stops(told) == [("w1", "m", 0, 0, plan.generation.n)]


def test_deleting_a_deployment_that_only_workers_know_of_entombs_it_at_once() -> None:
    world = World()
    world.register(shards=[shard(n=4)])

    told = world.delete()

    assert told[:2] == [DeletionAccepted(), EntombDeployment("m", Generation(REIGN, 0))]
    assert stops(told) == [("w1", "m", 0, 0, 0)]
    assert world.view().state is DeploymentState.DELETING
    assert world.delete() == [DeletionAccepted()]
    gone = world.register(revision=2)
    assert kinds(gone) == [(ChangeKind.REMOVED, "m")]
    assert only(EntombDeployment, gone) == []


@pytest.mark.parametrize(("n", "is_stopped"), [(3, True), (4, False)])
def test_shards_up_to_the_tombstones_ceiling_are_stopped_and_later_ones_kept(n, is_stopped) -> None:
    world = World(tombstones={"m": gen(3)}, is_new=True)

    told = world.register(shards=[shard(n=n)])

    assert stops(told) == ([("w1", "m", 0, 0, 3)] if is_stopped else [])
    state = DeploymentState.DELETING if is_stopped else DeploymentState.READY
    assert world.view().state is state


def test_a_name_that_is_being_deleted_is_not_taken_until_it_is_gone() -> None:
    world = serving()
    world.delete()

    with pytest.raises(Refused) as caught:
        world.deploy(spec())
    assert caught.value.reason is Reason.REPLICA_DRAINING
    world.register(revision=2)

    (plan,) = world.deploy(spec())
    assert plan.generation > Generation(REIGN, 0)


def test_leftovers_of_a_name_are_stopped_though_it_is_wanted_anew() -> None:
    world = serving()
    world.delete()
    world.register(revision=2)
    (plan,) = world.deploy(spec())
    world.register(shards=started_shards(plan), revision=3)
    world.end(plan)

    told = world.register("late", [shard(instance_id="late")])

    assert stops(told) == [("late", "m", 0, 0, 0)]
    assert world.view().state is DeploymentState.READY
    assert [it.worker_id for it in world.replica().shards] == ["w1"]


def test_a_leftover_of_a_deleted_name_being_stopped_keeps_the_name_taken() -> None:
    world = World(tombstones={"m": gen(3)}, is_new=True)
    world.register(shards=[shard(n=1)])

    with pytest.raises(Refused) as caught:
        world.deploy(spec())

    assert caught.value.reason is Reason.REPLICA_DRAINING


def test_an_interrupted_start_of_a_deployment_being_deleted_is_cancelled_not_told() -> None:
    world = World(desired=[desired(is_deleting=True)], is_new=True)

    told = world.register(
        shards=[shard(committed=False, state=ShardState.STARTING)], operations=(operation(1),)
    )

    assert cancels(told) == [("w1", "4-x-1")]
    assert stops(told) == []
    (told_failure,) = world.registry.creation_of("m").failures
    assert told_failure.message == "its deployment was deleted"


def test_the_ceiling_covers_what_this_reign_minted_for_any_name() -> None:
    world = serving()
    world.register(shards=[shard(), shard("x", generation=Generation(REIGN, 17))], revision=2)
    world.delete()

    told = world.register(shards=[shard("x", generation=Generation(REIGN, 17))], revision=3)

    assert only(EntombDeployment, told) == [EntombDeployment("m", Generation(REIGN, 17))]
    assert Generation(EARLIER, 10**9) < Generation(REIGN, 0)


def test_a_deletion_of_one_name_stops_nothing_of_another() -> None:
    world = World(desired=[desired(), desired(spec("n"))], is_new=True)
    world.register(shards=[shard("m"), shard("n"), replace(shard("n"), replica_index=1,
                                                           instance_id="x")])  # fmt: skip

    told = world.delete("m")

    assert stops(told) == [("w1", "m", 0, 0, 1)]
    assert world.view("n").state is DeploymentState.READY


def test_only_the_newest_deletions_are_remembered() -> None:
    """A worker that comes back with what was deleted long ago is shown, and left alone."""
    names = ["a", "b", "c"]
    world = World(settings=RegistrySettings(tombstone_limit=2), is_new=True)
    for revision, name in enumerate(names, start=1):
        world.register(shards=[shard(name)], revision=2 * revision)
        world.delete(name)
        world.register(revision=2 * revision + 1)

    commands = world.register("w2", [shard(name) for name in names])

    assert stops(commands) == [("w2", "b", 0, 0, 0), ("w2", "c", 0, 0, 0)]
    assert world.view("a").state is DeploymentState.READY
    assert world.registry._cluster.tombstones.keys() == {"b", "c"}


def test_shards_whose_deletion_is_no_longer_remembered_are_shown_again() -> None:
    world = World(settings=RegistrySettings(tombstone_limit=1), is_new=True)
    world.register(shards=[shard("a"), shard("b")])
    world.delete("a")
    assert world.view("a").state is DeploymentState.DELETING

    world.delete("b")

    assert world.view("a").state is DeploymentState.READY
