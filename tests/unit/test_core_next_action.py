"""What happens next to a replica, for each state and cause, and when the clock brings it about."""

from __future__ import annotations

from typing import Any

import pytest

from stagekeeper.core.ids import OperationId
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import OperationState, ReplicaState, ShardState, Timer, WorkerState
from tests.plain import AgentProbed, SlotStopped
from tests.worlds import World, desired, operation, replica_shards, shard, spec, started_shards


def in_s(world: World, index: int = 0, name: str = "m") -> float | None:
    seconds: float | None = world.registry.next_action_in_s(world.replica(index, name), world.now)
    return seconds


def said(world: World, index: int = 0, name: str = "m") -> str:
    text: str = world.replica(index, name).next_action
    return text


# Nobody reports it.


def test_while_workers_are_awaited_it_says_for_how_long() -> None:
    world = World(desired=[desired()], roster=["w1"])

    assert in_s(world) == 10.0
    world.tick(4.0)
    assert in_s(world) == 6.0
    assert "then it is judged without them" in said(world)
    world.tick(6.0)
    assert in_s(world) is None
    assert "if a worker that is not registered holds it, start its agent; or deploy again" in said(
        world
    )


def test_a_stall_of_the_supervisor_moves_what_the_clock_brings() -> None:
    world = World(desired=[desired()], roster=["w1"])

    world.tick(5.0, stalled_s=5.0)

    assert in_s(world) == 10.0


# It starts.


def test_a_start_says_what_makes_it_ready_and_a_committed_one_waits_for_its_report() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    assert (said(world), in_s(world)) == (
        "it is READY when all of its stages are; the first failure undoes the start",
        None,
    )

    world.end(plan)
    assert "committed on worker w1, whose report is awaited" in world.replica().reason
    assert said(world) == "it counts as failed unless its worker reports it"
    assert in_s(world) == 10.0
    world.now += 3.0
    assert in_s(world) == 7.0
    world.register(shards=started_shards(plan), revision=2)
    assert (world.replica().state, said(world), in_s(world)) == (ReplicaState.READY, "", None)


@pytest.mark.parametrize("state", [ShardState.STARTING, ShardState.READY])
def test_a_start_of_an_earlier_reign_is_undone_once_the_workers_are_back(state) -> None:
    world = World(roster=["w1", "w2"])
    half = shard(state=state, committed=False, operation_id=OperationId("4-x-1"))

    world.register("w1", [half], operations=(operation(),))
    assert "the supervisor that started it is gone" in said(world)
    assert in_s(world) == 10.0
    world.tick(10.0)
    assert said(world).startswith("nobody runs this start any more")
    assert in_s(world) is None


def test_a_start_on_a_worker_that_falls_silent_says_when_that_is_judged() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    starting = started_shards(plan, state=ShardState.STARTING, committed=False)
    world.register(shards=starting, revision=2)

    world.tick(4.0)

    assert "worker w1 is late" in said(world)
    assert in_s(world) == 6.0


# A worker is not heard.


def test_silence_says_what_is_next_at_each_step_and_when() -> None:
    world = World()
    world.register(shards=[shard()])
    assert (said(world), in_s(world)) == ("", None)

    world.tick(4.0)
    assert (said(world), in_s(world)) == (
        "worker w1 is late: it is UNREACHABLE unless it is heard", 6.0
    )  # fmt: skip
    world.tick(6.0)
    assert "given up on (LOST) unless it is heard" in said(world)
    assert in_s(world) == 50.0
    world.tick(49.999)
    assert world.worker().state is WorkerState.UNREACHABLE
    assert in_s(world) == pytest.approx(0.001)
    world.tick(0.001)
    assert world.worker().state is WorkerState.LOST
    assert in_s(world) is None
    assert "start its agent again, or delete the deployment" in said(world)
    world.beat()
    assert (world.replica().state, said(world)) == (ReplicaState.READY, "")


def test_nobody_is_lost_before_the_recovery_is_over() -> None:
    settings = RegistrySettings(recovery_window_s=300.0)
    world = World(roster=["w1", "w2"], settings=settings)
    world.register("w1", [shard()])

    world.tick(100.0)

    assert world.worker("w1").state is WorkerState.UNREACHABLE
    assert in_s(world) == 200.0


def test_of_several_silent_workers_the_one_that_is_judged_first_is_named() -> None:
    world = World()
    one, two = replica_shards(stages=2)
    world.register("w1", [one])
    world.tick(6.0)
    world.beat("w1")
    world.register("w2", [two])
    world.tick(5.0)
    world.beat("w2", revision=1)
    world.tick(5.0)

    assert world.worker("w1").state is WorkerState.UNREACHABLE
    assert world.worker("w2").state is WorkerState.SUSPECT
    assert said(world).startswith("worker w2 is late")
    assert in_s(world) == 5.0


def test_a_worker_that_is_listed_says_when_its_silence_counts_for_more() -> None:
    world = World(roster=["w1", "w9"])
    world.register()
    world.tick(4.0)

    assert "UNREACHABLE in 6 s unless it is heard" in world.worker().reason
    assert "being waited for, 6 s at most" in world.worker("w9").reason
    world.apply(AgentProbed("w1", 1, False, "refused"))
    world.beat()
    world.tick(1.0)
    assert "dialled again in 9 s" in world.worker().reason


# It is half there.


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ShardState.ADOPTING, "taking it over"),
        (ShardState.STALLED, "when its stage goes on"),
        (ShardState.DRAINING, "its stage ends"),
        (ShardState.STOPPING, "then deploy again"),
        (ShardState.STARTING, "as soon as all of its shards are READY"),
        (ShardState.PENDING, "as soon as all of its shards are READY"),
    ],
)
def test_a_stage_that_is_not_ready_says_what_becomes_of_it(state, words) -> None:
    world = World()
    world.register(shards=[shard(state=state)])

    assert world.replica().state is ReplicaState.PARTIAL
    assert words in said(world)
    assert in_s(world) is None


def test_half_a_replica_on_a_silent_worker_says_when_that_is_judged() -> None:
    world = World()
    world.register(shards=[shard(state=ShardState.STALLED)])
    world.tick(4.0)

    assert said(world).startswith("worker w1 is late")


# It failed, or contradicts itself.


def test_what_failed_says_to_deploy_again_and_a_conflict_to_delete_first() -> None:
    world = World()
    world.register(shards=[shard(state=ShardState.FAILED)])
    assert said(world).startswith("deploy again")
    world.register("w2", [shard("n")])
    world.register("w3", [shard("n")])
    assert said(world, name="n").startswith("nothing is repaired by guessing: delete")


# It goes.


def test_a_deletion_says_what_it_waits_for() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard()])
    world.delete()
    assert (said(world), in_s(world)) == ("its shards are stopped, then it is gone", None)

    world.apply(SlotStopped("w1", 1, shard().slot, "the agent was busy"))
    assert in_s(world) == 1.0, "the pause before the stop is asked for again"
    world.tick(1.0)
    assert in_s(world) is None
    world.tick(9.0)
    assert "its shards are stopped when it is heard" in said(world)
    assert in_s(world) == 50.0


def test_a_deletion_of_an_earlier_reign_waits_for_the_workers() -> None:
    world = World(desired=[desired(is_deleting=True)], roster=["w1", "w2"])
    world.register("w1", [shard()])

    assert said(world) == "its shards are stopped once the workers are back"
    assert in_s(world) == 10.0


def test_every_timer_is_met_by_some_test_of_this_module() -> None:
    """Each is looked up in books of its own."""
    met: dict[Any, float | None] = {}
    world = World(desired=[desired()], roster=["w1"])
    met[world.replica().timer] = in_s(world)
    world = World()
    world.register(shards=[shard()])
    world.tick(4.0)
    met[world.replica().timer] = in_s(world)
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.end(plan, OperationState.COMMITTED)
    met[world.replica().timer] = in_s(world)
    world = World()
    world.register(shards=[shard()])
    world.delete()
    world.apply(SlotStopped("w1", 1, shard().slot, "busy"))
    met[world.replica().timer] = in_s(world)

    assert met.keys() == set(Timer)
    assert None not in met.values()
