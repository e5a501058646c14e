"""After a restart of the supervisor: holding still, and what is settled when that is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagekeeper.core.commands import (
    DeletionAccepted,
    PublishChange,
    SaveDeployment,
    StartOperation,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.model import Failure, FailureOrigin
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import (
    DeploymentState,
    HoldReason,
    Mode,
    OperationState,
    ReplicaState,
    ShardState,
)
from tests.plain import EntombDeployment
from tests.worlds import (
    World,
    cancels,
    desired,
    gen,
    only,
    operation,
    replica_shards,
    shard,
    spec,
    stops,
    timeless,
)


def is_holding(world: World) -> bool:
    registry = world.registry
    if registry.is_complete:
        assert (registry.mode, registry.hold_reason) == (Mode.NORMAL, None)
        return False
    assert (registry.mode, registry.hold_reason) == (Mode.HOLD, HoldReason.RECOVERING)
    return True


def test_a_brand_new_store_waits_for_nobody() -> None:
    assert not is_holding(World())


@pytest.mark.parametrize(
    "known",
    [
        {"roster": ["w1"]},
        {"desired": [desired()]},
        {"tombstones": {"m": gen(1)}},
        {"is_new": False},
    ],
)
def test_whatever_was_there_before_makes_it_hold_still(known) -> None:
    assert is_holding(World(**known))


@pytest.mark.parametrize(("seconds", "holds"), [(9.999, True), (10.0, False)])
def test_the_recovery_window_closes(seconds, holds) -> None:
    world = World(roster=["w1", "w2"])
    world.register("w1")

    world.tick(seconds)

    assert is_holding(world) is holds


def test_the_recovery_ends_with_the_last_worker_of_the_roster() -> None:
    world = World(roster=["w1", "w2"])

    world.register("w1")
    world.register("stranger")
    assert is_holding(world)
    world.register("w2")

    assert not is_holding(world)


def test_without_a_roster_only_the_window_ends_it() -> None:
    world = World(desired=[desired()])

    world.register()
    world.tick(9.999)
    assert is_holding(world)
    world.tick(0.001)

    assert not is_holding(world)


def test_nobody_of_the_roster_is_given_up_while_it_is_waited_for() -> None:
    world = World(roster=["w1"], settings=RegistrySettings(recovery_window_s=90.0))

    world.tick(89.0)

    assert is_holding(world)
    assert world.worker("w1")


def test_a_stall_of_the_supervisor_does_not_close_the_window() -> None:
    world = World(roster=["w1"])

    world.tick(30.0, stalled_s=29.0)
    assert is_holding(world)
    world.tick(8.999)
    assert is_holding(world)
    world.tick(0.001)
    assert not is_holding(world)


def test_only_a_tick_closes_the_window_since_it_knows_of_stalls() -> None:
    world = World(roster=["w1", "w2"])
    world.now += 60.0

    world.register("w1")

    assert is_holding(world)


def test_the_registry_is_rebuilt_from_what_workers_hold() -> None:
    made = [desired(spec(stages=2, replicas=6)), desired(spec("n"), create_time=7.0)]
    before, after = World(desired=made, is_new=True), World(
        desired=made, roster=["w0", "w1", "w2"]
    )  # fmt: skip

    for world, order in ((before, (0, 1, 2)), (after, (2, 0, 1))):
        for number in order:
            held = [it for k in (number, number + 3) for it in replica_shards("m", k, 2, k + 1)]
            world.register(f"w{number}", [*held, *([shard("n")] if number == 1 else [])])

    assert timeless(after.registry.deployments()) == timeless(before.registry.deployments())
    assert after.view("n").create_time == 7.0
    assert after.view("m").state is DeploymentState.READY
    assert after.registry.registration_count == 3
    assert not is_holding(after)


def test_only_replica_two_of_three_comes_back_as_replica_two() -> None:
    world = World(roster=["w1"])
    world.register(shards=[shard(replica=2)])

    assert [(it.key.index, it.state) for it in world.view().replicas] == [(2, ReplicaState.READY)]


def test_a_replica_beyond_those_wanted_that_serves_keeps_the_deployment_from_failed() -> None:
    world = World(desired=[desired()], roster=["w1"])
    world.register(shards=[shard(replica=2)])

    assert world.view().state is DeploymentState.DEGRADED
    assert [(it.key.index, it.state) for it in world.view().replicas] == [
        (0, ReplicaState.PENDING),
        (2, ReplicaState.READY),
    ]


def test_a_missing_replica_is_waited_for_then_missed() -> None:
    world = World(desired=[desired(spec(replicas=2))], roster=["w1", "w2"])
    world.register("w1", [shard(replica=0)])

    assert world.view().state is DeploymentState.DEGRADED
    assert world.replica(1).state is ReplicaState.PENDING
    assert "waiting for workers to come back" in world.replica(1).next_action
    assert "workers are awaited" in world.view().reason
    told = world.tick(10.0)

    assert world.view().state is DeploymentState.DEGRADED
    assert world.replica(1).reason == "no worker that is registered reports it"
    assert "not registered holds it, start its agent" in world.replica(1).next_action
    assert "m" in [it.name for it in only(PublishChange, told)]
    assert only(StartOperation, told) == []


def test_a_deployment_without_a_ready_replica_has_not_failed_while_it_is_waited_for() -> None:
    world = World(desired=[desired()], roster=["w1"])

    assert world.view().state is DeploymentState.DEGRADED
    world.tick(10.0)
    assert world.view().state is DeploymentState.FAILED


def test_a_deployment_whose_replicas_all_failed_has_failed_while_holding_too() -> None:
    world = World(desired=[desired()], roster=["w1", "w2"])

    world.register(shards=[shard(state=ShardState.FAILED)])

    assert world.view().state is DeploymentState.FAILED


def test_two_of_three_shards_back_are_partial_and_waited_for_in_both_modes() -> None:
    world = World(desired=[desired(spec(stages=3))], roster=["w1", "w2", "w3"])
    world.register("w1", replica_shards(stages=3)[:1])
    world.register("w2", replica_shards(stages=3)[1:2])

    assert world.replica().state is ReplicaState.PARTIAL
    assert "waiting for workers" in world.replica().next_action
    world.tick(10.0)
    assert world.replica().state is ReplicaState.PARTIAL
    assert "delete the deployment, then deploy it" in world.replica().next_action
    world.register("w3", replica_shards(stages=3)[2:])
    assert world.replica().state is ReplicaState.READY


def test_a_wish_is_put_off_while_holding_and_a_bad_one_refused_at_once() -> None:
    world = World(desired=[desired(spec("n"))], roster=["w1"])

    for made, reason in (
        (spec(), Reason.SUPERVISOR_RECOVERING),
        (spec("a/b"), Reason.BAD_FIELD),
        (spec("n", replicas=2), Reason.DEPLOYMENT_EXISTS),
    ):
        with pytest.raises(Refused) as caught:
            world.deploy(made)
        assert caught.value.reason is reason
    world.register("w1")

    assert world.deploy(spec())


def test_a_deletion_is_written_down_while_holding_and_carried_out_afterwards() -> None:
    world = World(desired=[desired()], roster=["w1", "w2"])
    world.register("w1", [shard()])

    told = world.delete()
    assert told[:2] == [DeletionAccepted(), SaveDeployment(desired(is_deleting=True))]
    assert stops(told) == []
    assert stops(world.tick(9.999)) == []
    world.beat()
    told = world.tick(0.001)

    assert stops(told) == [("w1", "m", 0, 0, 1)]


def test_a_deletion_is_not_over_while_workers_may_still_come_back_with_shards() -> None:
    world = World(desired=[desired(is_deleting=True)], roster=["w1", "w2"])

    assert only(EntombDeployment, world.register("w1")) == []
    assert world.view().state is DeploymentState.DELETING
    told = world.tick(10.0)

    assert only(EntombDeployment, told)
    assert world.view() is None


def test_a_deletion_that_was_interrupted_goes_on() -> None:
    world = World(desired=[desired(is_deleting=True)], roster=["w1"])

    told = world.register("w1", [shard()])

    assert stops(told) == [("w1", "m", 0, 0, 1)]


def test_leftovers_of_a_deleted_name_are_not_stopped_while_holding() -> None:
    world = World(tombstones={"m": gen(3)}, roster=["w1", "w2"])

    assert stops(world.register("w1", [shard(n=1)])) == []
    told = world.register("w2")

    assert stops(told) == [("w1", "m", 0, 0, 3)]


def test_an_older_set_is_not_stopped_while_holding() -> None:
    world = World(desired=[desired()], roster=["w1", "w2", "w3"])
    world.register("w1", [shard(n=1)])

    assert stops(world.register("w2", [shard(n=2)])) == []
    assert stops(world.register("w3")) == [("w1", "m", 0, 0, 1)]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (OperationState.RESERVED, "the supervisor that ran it ended"),
        (OperationState.STARTING, "the supervisor that ran it ended"),
        (OperationState.STARTED, "the supervisor that ran it ended"),
        (OperationState.INTERRUPTED, "its agent ended while it was under way"),
    ],
)
def test_a_start_of_an_earlier_reign_is_cancelled_once_the_workers_are_back(state, why) -> None:
    world = World(desired=[desired(is_creating=True)], roster=["w1", "w2"])
    half = shard(committed=False, state=ShardState.STARTING)

    told = world.register("w1", [half], operations=(operation(1, state),))
    assert cancels(told) == []
    assert world.replica().state is ReplicaState.STARTING
    assert world.view().state is DeploymentState.CREATING
    told = world.register("w2")

    assert cancels(told) == [("w1", "4-x-1")]
    assert world.replica().state is ReplicaState.FAILED
    assert f"was interrupted ({why}) and cancelled; deploy again" in world.replica().reason
    assert world.view().state is DeploymentState.FAILED
    assert [it.desired.is_creating for it in only(SaveDeployment, told)] == [False]
    world.register("w1", revision=2)
    assert "was interrupted" in world.replica().reason, "the story outlives its shards"


@pytest.mark.parametrize("state", [OperationState.COMMITTED, OperationState.ROLLING_BACK])
def test_a_start_that_is_over_or_ends_by_itself_is_not_cancelled(state) -> None:
    world = World(desired=[desired()], is_new=True)

    assert cancels(world.register(operations=(operation(1, state),))) == []


def test_a_rollback_that_was_reported_while_holding_keeps_its_own_story() -> None:
    world = World(desired=[desired(is_creating=True)], roster=["w1", "w2"])
    rolled_back = operation(1, OperationState.ROLLED_BACK, reason="stage 0 raised: boom")
    world.register("w1", operations=(rolled_back,))

    world.register("w2")

    assert "stage 0 raised: boom" in world.replica().reason


def test_what_only_workers_know_of_and_is_starting_is_being_created() -> None:
    world = World()
    world.register(shards=[shard(committed=False, state=ShardState.STARTING)])

    assert world.view().state is DeploymentState.CREATING


def test_a_committed_start_of_an_earlier_reign_is_simply_there() -> None:
    world = World(desired=[desired(is_creating=True)], roster=["w1"])

    told = world.register(shards=[shard()], operations=(operation(1, OperationState.COMMITTED),))

    assert cancels(told) == []
    assert world.view().state is DeploymentState.READY
    assert [it.desired.is_creating for it in only(SaveDeployment, told)] == [False]


def test_a_creation_of_an_earlier_reign_that_no_worker_has_begun_is_told_as_interrupted() -> None:
    world = World(desired=[desired(spec(replicas=2), is_creating=True)], roster=["w1"])

    world.register("w1", [shard(replica=0)])

    assert world.replica(0).state is ReplicaState.READY
    assert world.replica(1).state is ReplicaState.FAILED
    assert "creation of m replica 1 was interrupted" in world.replica(1).reason
    assert [it.replica_index for it in world.registry.creation_of("m").failures] == [1]


def test_a_replica_that_comes_back_late_is_not_told_as_interrupted() -> None:
    world = World(desired=[desired(is_creating=True)], roster=["w1"])
    world.tick(10.0)
    assert world.replica().state is ReplicaState.FAILED

    world.register(shards=[shard(state=ShardState.ADOPTING)])
    assert world.replica().state is ReplicaState.PARTIAL
    world.register(shards=[shard()], revision=2)

    assert world.view().state is DeploymentState.READY


def test_a_story_ends_when_its_replica_is_ready() -> None:
    world = World(desired=[desired(is_creating=True)], roster=["w1"])
    world.tick(10.0)
    assert "was interrupted" in world.replica().reason
    world.register(shards=[shard()])

    world.register(revision=2)

    assert world.replica().reason == "no worker that is registered reports it"


def failed(n: int, message: str, failure_id: str = "f1") -> Any:
    origin = FailureOrigin("w1", "m", 0, 0, "a", 0, "i1", generation=gen(n))  # type: ignore[arg-type]
    return Failure(failure_id, "EXITED", origin, message)  # type: ignore[arg-type]


DIED = "stage a (pid 3186) in LOAD exited with code 7"


def test_after_a_takeover_a_start_that_failed_keeps_its_reason() -> None:
    world = World(desired=[desired()], roster=["w1"], failures=[failed(1, DIED)])
    world.register()  # its worker is here, and has nothing of it any more

    assert world.view().state is DeploymentState.FAILED
    assert world.replica().state is ReplicaState.PENDING
    assert world.replica().reason == (
        "no worker that is registered reports it; its last recorded failure, on worker w1: " + DIED
    )
    assert world.replica().next_action == "deploy again to start it"


def test_the_newest_start_that_failed_is_told_whatever_was_recorded_last() -> None:
    late = failed(1, "an older one, told late", "f2")
    world = World(desired=[desired()], roster=["w1"], failures=[failed(2, DIED), late])
    world.register()

    assert world.replica().reason.endswith(DIED)


def test_a_failure_from_before_it_came_up_is_not_its_reason() -> None:
    world = World(desired=[desired()], roster=["w1"], failures=[failed(1, DIED)])
    world.register(shards=[shard(n=2)])
    assert world.view().state is DeploymentState.READY

    world.register(revision=2)

    assert world.replica().reason == "no worker that is registered reports it"


def test_a_failure_of_a_deployment_that_was_deleted_is_not_that_of_its_namesake() -> None:
    world = World(
        desired=[desired()], roster=["w1"], tombstones={"m": gen(1)}, failures=[failed(1, DIED)]
    )
    world.register()

    assert world.replica().reason == "no worker that is registered reports it"


def test_a_failure_that_the_log_forgets_is_told_no_more() -> None:
    settings = RegistrySettings(failure_limit=1)
    world = World(desired=[desired()], roster=["w1"], failures=[failed(1, DIED)], settings=settings)
    another = failed(1, "another", "f2")
    other = replace(another, origin=replace(another.origin, deployment="other"))

    world.register()
    assert world.replica().reason.endswith(DIED)

    world.register(failures=(other,), revision=2)

    assert world.replica().reason == "no worker that is registered reports it"


def test_an_interrupted_creation_can_be_deployed_again() -> None:
    world = World(desired=[desired(is_creating=True)], roster=["w1"])
    world.register(
        shards=[shard(committed=False, state=ShardState.STARTING)], operations=(operation(1),)
    )

    (plan,) = world.deploy(spec())

    assert plan.generation > gen(1)
    assert world.view().state is DeploymentState.CREATING


def test_what_is_only_reported_is_shown_and_never_stopped() -> None:
    world = World(roster=["w1"])

    told = world.register(shards=[shard(), shard("half", stage_count=2)])
    later = world.tick(100.0)

    assert stops([*told, *later]) == []
    view = world.view()
    assert (view.state, view.spec, view.spec_revision, view.durable) == (
        DeploymentState.READY, None, 1, False,
    )  # fmt: skip
    assert world.view("half").state is DeploymentState.FAILED


@pytest.mark.parametrize(("seconds", "holds"), [(1.999, True), (2.0, False)])
def test_without_a_roster_every_agent_gets_two_of_its_longest_pauses(seconds, holds) -> None:
    settings = RegistrySettings(recovery_window_s=0.5, longest_backoff_s=1.0)
    world = World(is_new=False, settings=settings)

    world.tick(seconds)

    assert is_holding(world) is holds


def test_with_a_roster_the_window_is_as_short_as_it_was_set() -> None:
    world = World(roster=["w1"], settings=RegistrySettings(recovery_window_s=0.5))

    world.tick(0.5)

    assert not is_holding(world)
