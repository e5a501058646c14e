"""Silence and what it is called; probes; who is forgotten, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.commands import ProbeAgent, PublishChange
from stagekeeper.core.limits import LONGEST_REASON, MOST_NOTES
from stagekeeper.core.registry import RegistrySettings
from stagekeeper.core.states import WORKER_MOVES, ReplicaState, WorkerState
from tests.plain import AgentProbed, SaveRoster
from tests.worlds import World, only, shard, spec


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [
        (3.999, WorkerState.ALIVE),
        (4.0, WorkerState.SUSPECT),
        (9.999, WorkerState.SUSPECT),
        (10.0, WorkerState.UNREACHABLE),
        (59.999, WorkerState.UNREACHABLE),
        (60.0, WorkerState.LOST),
    ],
)
def test_a_silence_is_judged_on_both_sides_of_every_edge(silent_s, state) -> None:
    world = World()
    world.register()

    world.tick(silent_s)

    assert world.worker().state is state
    assert world.worker().silent_for_s == pytest.approx(silent_s)
    assert bool(world.worker().reason) is (state is not WorkerState.ALIVE)


def test_shards_of_a_silent_worker_stay_routed_and_their_watchers_are_told() -> None:
    world = World()
    world.register(shards=[shard()])

    told = world.tick(60.0)

    assert world.replica().state is ReplicaState.READY
    assert world.replica().shards[0].worker_state is WorkerState.LOST
    assert [it.name for it in only(PublishChange, told)] == ["m"]


@pytest.mark.parametrize("silent_s", [4.0, 10.0, 60.0])
def test_a_heartbeat_brings_a_silent_worker_back(silent_s) -> None:
    world = World()
    world.register(shards=[shard()])
    world.tick(silent_s)

    world.beat()

    assert world.worker().state is WorkerState.ALIVE
    assert world.replica().shards[0].worker_state is WorkerState.ALIVE


def test_a_stall_of_the_supervisor_is_nobodys_silence() -> None:
    world = World()
    world.register()

    world.tick(100.0, stalled_s=97.0)

    assert world.worker().state is WorkerState.ALIVE
    world.tick(1.0)
    assert world.worker().state is WorkerState.SUSPECT


def test_a_stall_does_not_put_off_what_was_heard_after_it() -> None:
    world = World()
    world.register()
    world.now += 50.0
    world.beat()

    world.tick(0.0, stalled_s=50.0)
    world.tick(4.0)

    assert world.worker().state is WorkerState.SUSPECT


def test_nobody_is_declared_lost_while_the_supervisor_recovers() -> None:
    settings = RegistrySettings(recovery_window_s=90.0)
    world = World(roster=["w1", "w2"], settings=settings)
    world.register()

    world.tick(80.0)
    assert world.worker().state is WorkerState.UNREACHABLE

    world.tick(10.0)
    world.tick(0.1)
    assert world.worker().state is WorkerState.LOST


def test_silence_is_measured_by_the_pace_that_the_worker_was_told() -> None:
    slow = RegistrySettings(heartbeat_budget_per_s=0.1)
    world = World(settings=slow)
    world.register()

    world.tick(19.9)
    assert world.worker().state is WorkerState.ALIVE
    world.tick(0.1)
    assert world.worker().state is WorkerState.SUSPECT
    world.tick(9.9)
    assert world.worker().state is WorkerState.SUSPECT
    world.tick(0.1)
    assert world.worker().state is WorkerState.UNREACHABLE


@pytest.mark.parametrize(("workers", "pace_s"), [(1, 2.0), (20, 2.0), (40, 4.0)])
def test_the_pace_keeps_the_sum_of_heartbeats_under_its_budget(workers, pace_s) -> None:
    world = World(settings=RegistrySettings(heartbeat_budget_per_s=10.0))
    answer = None
    for number in range(workers):
        answer, *_ = world.register(f"w{number}")

    assert answer is not None
    assert answer.next_heartbeat_s == pace_s
    assert world.beat("w0").next_heartbeat_s == pace_s


def test_each_new_life_of_an_agent_is_dialled_back_once() -> None:
    world = World()

    first = world.register()
    repeated = world.register()
    moved = world.register(incarnation=2, agent_address="127.0.0.1:9")
    restarted = world.register(incarnation=3, agent_address="127.0.0.1:9")

    probes = [only(ProbeAgent, it) for it in (first, repeated, moved, restarted)]
    assert [len(it) for it in probes] == [1, 0, 1, 1]
    assert probes[2][0].target.address == "127.0.0.1:9"
    assert probes[3][0].target.incarnation == 3


def test_an_agent_that_does_not_answer_says_so_with_the_address_and_is_tried_again() -> None:
    world = World()
    world.register(shards=[shard()])

    world.apply(AgentProbed("w1", 1, False, "connection refused"))

    view = world.worker()
    assert view.is_agent_reachable is False
    assert "AGENT_UNREACHABLE" in view.reason
    assert "127.0.0.1:7071 (connection refused)" in view.reason
    assert world.replica().state is ReplicaState.READY, "kept and routed"
    world.now += 9.0
    world.beat()
    assert only(ProbeAgent, world.tick(0.999)) == []
    assert len(only(ProbeAgent, world.tick(0.001))) == 1
    assert only(ProbeAgent, world.tick(0.1)) == [], "once, until it is answered"
    world.apply(AgentProbed("w1", 1, True))
    assert world.worker().is_agent_reachable is True
    assert world.worker().reason == ""


def test_a_probe_of_an_earlier_life_says_nothing() -> None:
    world = World()
    world.register(incarnation=2)

    world.apply(AgentProbed("w1", 1, False, "gone"))
    world.apply(AgentProbed("w9", 1, False, "never seen"))

    assert world.worker().is_agent_reachable is None


def test_a_lost_worker_without_shards_is_forgotten_and_one_with_shards_is_not() -> None:
    world = World(settings=RegistrySettings(forget_s=100.0))
    world.register("empty")
    world.register("full", shards=[shard()])

    world.tick(99.9)
    assert [it.worker_id for it in world.registry.workers(world.now)] == ["empty", "full"]
    world.tick(0.1)

    assert [it.worker_id for it in world.registry.workers(world.now)] == ["full"]


def test_the_roster_is_written_by_ticks_and_only_when_it_changed() -> None:
    world = World()
    registered = [*world.register("w2"), *world.register("w1")]

    assert only(SaveRoster, registered) == [], "not on the caller's path"
    assert only(SaveRoster, world.tick()) == [SaveRoster(("w1", "w2"))]
    world.register("w1", revision=2)
    assert only(SaveRoster, world.tick()) == []
    world.now += 59.0
    world.beat("w1", revision=2)
    assert only(SaveRoster, world.tick(1.0)) == [SaveRoster(("w1",))], "w2 is LOST"


def test_a_worker_that_is_given_something_is_on_the_roster_before() -> None:
    world = World()
    world.register("w1")

    commands = world.deploy_commands(spec())

    assert only(SaveRoster, commands) == [SaveRoster(("w1",))]


def test_workers_of_the_roster_are_listed_until_they_are_given_up() -> None:
    world = World(roster=["w1", "w2"])
    world.register("w1")

    view = world.worker("w2")
    assert (view.state, view.incarnation) == (WorkerState.UNREACHABLE, 0)
    assert "waited for" in view.reason
    world.tick(10.0)
    assert "waited for" not in world.worker("w2").reason
    world.tick(49.9)
    assert world.worker("w2")
    world.tick(0.1)
    assert [it.worker_id for it in world.registry.workers(world.now)] == ["w1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"heartbeat_s": 5.0},
        {"lease_s": 4.0},
        {"lease_s": 60.0},
        {"forget_s": 59.0},
        {"recovery_window_s": 0.0},
        {"retry_s": float("nan")},
        {"lost_s": float("inf")},
    ],
)
def test_settings_that_do_not_nest_are_refused(changes) -> None:
    with pytest.raises(ValueError, match=r"nest|finite"):
        replace(RegistrySettings(), **changes)


def test_notes_of_a_worker_are_shown_and_cut_where_they_are_too_much() -> None:
    world = World()

    world.register(notes=("short", "x" * 5_000, *map(str, range(100))))

    notes = world.worker().notes
    assert notes[0] == "short"
    assert len(notes[1]) == LONGEST_REASON
    assert len(notes) == MOST_NOTES


@pytest.mark.parametrize("silent_s", [0.0, 4.0, 10.0, 60.0])
def test_whatever_an_older_life_was_it_is_superseded_by_a_newer_one(silent_s) -> None:
    world = World()
    world.register()
    older = world.registry._cluster.workers["w1"]
    world.tick(silent_s)

    world.register(incarnation=2)

    assert older.state is WorkerState.SUPERSEDED
    assert world.worker().state is WorkerState.ALIVE
    assert WORKER_MOVES[WorkerState.SUPERSEDED] == frozenset()
