"""Events: each kind is put down once, where it is decided; repeats and refusals add none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.core.commands import StopSlot
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.event_log import LONGEST_MESSAGE, EventKind, PublishEvent
from stagekeeper.core.ids import ChangeRevision, Epoch, StageId, WorkerId
from stagekeeper.core.model import RefusedEntry, RollbackRecord
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import OperationState, RollbackEnding, ShardState
from tests.plain import AgentProbed, Failure, FailureOrigin, FailureReported, SlotStopped
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
)

K = EventKind


def kinds(commands: Iterable[Any]) -> list[EventKind]:
    return [it.kind for it in only(PublishEvent, commands)]


def kept(world: World, *, kind: EventKind | None = None) -> list[PublishEvent]:
    """Return all events that are kept, or those of one kind."""
    events = world.registry.newest_events(10_000)
    return [it for it in events if kind in (None, it.kind)]


def told(world: World, kind: EventKind) -> str:
    """Return the message of the only event of one kind."""
    (event,) = kept(world, kind=kind)
    return event.message


def death(failure_id: str = "f1") -> Any:
    origin = FailureOrigin("w1", "m", 0, 0, "s0", 0, "m/0/0/1")
    return Failure(failure_id, "SIGNALED", origin, "killed by signal 9")


# The supervisor itself.


def test_a_reign_begins_with_an_event_that_says_for_whom_it_waits() -> None:
    assert told(World(), K.REIGN_BEGAN) == f"reign {REIGN} began"
    waiting = World(roster=["w1", "w2"])
    assert told(waiting, K.REIGN_BEGAN).endswith("it waits for 2 workers, 10 s at most")
    assert "whoever was there" in told(World(is_new=False), K.REIGN_BEGAN)


def test_a_raised_reign_is_told_and_what_happened_before_is_still_shown() -> None:
    world = World()
    world.register("w1")
    before = world.registry.revision

    commands = world.register("w2", highest_epoch=Epoch(9, "other"))

    assert kinds(commands) == [K.EPOCH_RAISED, K.WORKER_JOINED]
    assert [it.kind for it in kept(world)] == [
        K.REIGN_BEGAN, K.WORKER_JOINED, K.EPOCH_RAISED, K.WORKER_JOINED
    ]  # fmt: skip
    revisions = [it.revision for it in kept(world)]
    assert revisions == sorted(revisions)
    for read in (world.registry.events_since, world.registry.changes_since):
        with pytest.raises(Refused) as caught:
            read(before)
        assert caught.value.reason is Reason.REVISION_GONE


def test_the_end_of_holding_still_is_told_once_with_who_is_missing() -> None:
    back = World(roster=["w1"])
    assert kinds(back.register("w1")) == [K.WORKER_JOINED, K.HOLD_ENDED]
    back.tick(20.0)
    assert len(kept(back, kind=K.HOLD_ENDED)) == 1

    late = World(roster=["w1", *(f"x{n}" for n in range(7))])
    late.register("w1")
    late.tick(10.0)
    (event,) = kept(late, kind=K.HOLD_ENDED)
    assert event.is_warning
    assert "x0, x1, x2, x3, x4 and 2 more" in event.message


# Workers.


def test_a_worker_joins_once_however_often_it_registers() -> None:
    world = World()

    assert kinds(world.register()) == [K.WORKER_JOINED]
    assert kinds(world.register()) == []
    assert kinds(world.register(revision=2)) == []
    assert kinds(world.apply_beat(revision=2)) == []


def test_silence_is_told_step_by_step_and_the_return_once() -> None:
    world = World()
    world.register()

    assert kinds(world.tick(4.0)) == [K.WORKER_SUSPECTED]
    assert kinds(world.tick(1.0)) == []
    assert kinds(world.tick(5.0)) == [K.WORKER_UNREACHABLE]
    assert kinds(world.tick(50.0)) == [K.WORKER_LOST]
    assert kinds(world.apply_beat()) == [K.WORKER_RECONNECTED]
    assert "after 60.0 s (it was LOST)" in told(world, K.WORKER_RECONNECTED)
    assert kinds(world.apply_beat()) == []


def test_a_silent_worker_that_registers_again_is_reconnected_not_joined() -> None:
    world = World()
    world.register()
    world.tick(4.0)

    assert kinds(world.register()) == [K.WORKER_RECONNECTED]


def test_another_life_of_an_agent_is_a_restart() -> None:
    world = World()
    world.register()
    world.tick(4.0)

    assert kinds(world.register(incarnation=2)) == [K.WORKER_RESTARTED]
    assert "incarnation 2 follows 1" in told(world, K.WORKER_RESTARTED)


def test_an_older_life_is_told_once_and_not_with_every_heartbeat() -> None:
    world = World()
    world.register(incarnation=5)

    assert kinds(world.apply_beat(incarnation=3)) == [K.WORKER_SUPERSEDED]
    assert kinds(world.apply_beat(incarnation=3)) == []
    assert kinds(world.apply_beat(incarnation=4)) == [K.WORKER_SUPERSEDED]
    assert kinds(world.apply_beat(incarnation=3)) == []
    world.register(incarnation=6)
    assert kinds(world.apply_beat(incarnation=3)) == []


def test_older_lives_without_number_fill_no_memory() -> None:
    world = World()
    world.register(incarnation=1_000)

    for incarnation in range(1, 500):
        world.apply_beat(incarnation=incarnation)

    assert len(kept(world, kind=K.WORKER_SUPERSEDED)) == 16


def test_a_refused_registration_leaves_no_event() -> None:
    world = World()
    world.register(incarnation=2)
    before = world.registry.revision

    for changes in ({"incarnation": 1}, {"host_id": "another", "incarnation": 3}):
        with pytest.raises(Refused):
            world.register(**changes)

    assert world.registry.revision == before


def test_a_forgotten_worker_is_told() -> None:
    world = World()
    world.register()
    world.tick(3_600.0)
    world.tick(1.0)

    assert "holds nothing" in told(world, K.WORKER_FORGOTTEN)


def test_an_agent_that_does_not_answer_is_told_when_that_changes() -> None:
    world = World()
    world.register()

    def probed(is_reachable: bool) -> list[EventKind]:
        return kinds(world.apply(AgentProbed("w1", 1, is_reachable, "refused")))

    assert probed(True) == []
    assert probed(False) == [K.AGENT_UNREACHABLE]
    assert probed(False) == []
    assert probed(True) == [K.AGENT_REACHED]


def test_refused_entries_are_told_once_while_they_stay_the_same() -> None:
    world = World()
    wrong = shard(shard_index=7)

    assert kinds(world.register(shards=[wrong])) == [K.WORKER_JOINED, K.ENTRIES_REFUSED]
    assert kinds(world.register(shards=[wrong], revision=2)) == []
    (event,) = kept(world, kind=K.ENTRIES_REFUSED)
    assert event.is_warning
    assert isinstance(world.register(shards=[wrong])[0].refused[0], RefusedEntry)


# Deployments.


def test_a_creation_is_told_from_the_wish_to_its_end() -> None:
    world = World()
    world.register()

    (plan,) = world.deploy(spec())
    assert [it.kind for it in kept(world)][2:] == [
        K.DEPLOYMENT_REQUESTED, K.START_BEGAN, K.REPLICA_CHANGED, K.DEPLOYMENT_CHANGED
    ]  # fmt: skip
    assert world.deploy(spec()) == [], "and a repeat says nothing"
    assert len(kept(world)) == 6

    ended = kinds(world.end(plan))
    assert ended == [], "the worker's report is awaited"
    ended = kinds(world.register(shards=started_shards(plan), revision=2))

    assert ended == [K.START_ENDED, K.REPLICA_CHANGED, K.DEPLOYMENT_CHANGED]
    messages = [it.message for it in kept(world)]
    assert messages[-3:] == [
        "m replica 0 has started: all of its stages are READY and committed",
        "m replica 0 is READY (it was STARTING)",
        "m is READY (it was CREATING)",
    ]
    assert not any(it.is_warning for it in kept(world))


def test_a_start_that_fails_ends_with_its_failure_recorded_once() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())

    commands = world.end(plan, OperationState.ROLLED_BACK, failure=death())

    assert kinds(commands) == [
        K.FAILURE_RECORDED, K.START_ENDED, K.REPLICA_CHANGED, K.DEPLOYMENT_CHANGED
    ]  # fmt: skip
    assert all(it.is_warning for it in only(PublishEvent, commands))
    assert kinds(world.apply(FailureReported("w1", 1, death()))) == []


def test_the_end_of_a_failed_start_tells_what_was_rolled_back_and_how() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    rollback = (
        RollbackRecord(
            StageId(0),
            cleaned=True,
            duration_s=0.31,
            stage_name="first",
            worker_id=WorkerId("w1"),
            ending=RollbackEnding.KILLED,
        ),
        RollbackRecord(StageId(1), cleaned=False, error="it does not die"),
    )

    world.end(plan, OperationState.ROLLED_BACK, failure=death(), rollback=rollback)

    (ended,) = kept(world, kind=K.START_ENDED)
    assert ended.message.endswith("; rolled back: first on w1 (KILLED in 0.3 s), stage 1 (LEFT)")


def test_what_a_worker_knows_of_a_replica_after_a_failure_of_one_stage_is_told() -> None:
    world = World()
    world.register(shards=[shard()])

    world.apply(FailureReported("w1", 1, death()))
    failed = shard(state=ShardState.FAILED, state_reason="killed by signal 9")
    world.register(shards=[failed], revision=2, failures=(death(),))

    (event,) = kept(world, kind=K.FAILURE_RECORDED)
    assert (event.subject.failure_id, event.subject.stage_id) == ("f1", 0)
    changed = kept(world, kind=K.REPLICA_CHANGED)[-1]
    assert changed.is_warning
    assert changed.message.startswith("m replica 0 is FAILED (it was READY): 0 of 1 shard READY")


def test_a_deletion_is_told_to_its_end() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.end(plan)
    world.register(shards=started_shards(plan), revision=2)
    before = len(kept(world))

    world.delete()
    world.delete()
    world.register(shards=[], revision=3)

    assert [it.kind for it in kept(world)][before:] == [
        K.DEPLOYMENT_DELETED, K.STOP_REQUESTED, K.REPLICA_CHANGED, K.DEPLOYMENT_CHANGED,
        K.REPLICA_CHANGED, K.DEPLOYMENT_CHANGED,
    ]  # fmt: skip
    assert kept(world)[-1].message == "m is gone: nobody wants it and no worker reports it"
    assert kept(world)[-2].message == "m replica 0 is gone (it was DRAINING)"


def test_a_stop_that_has_to_be_asked_for_again_is_told_once() -> None:
    world = World()
    world.register(shards=[shard()])
    world.delete()

    for _ in range(3):
        (stop,) = only(StopSlot, world.tick(1.0)) or [None]
        world.apply(SlotStopped("w1", 1, shard().slot, "the agent was busy"))
        assert stop is None or stop.slot == shard().slot

    assert len(kept(world, kind=K.STOP_REQUESTED)) == 1


def test_a_new_start_tells_what_it_stops_first() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard(state=ShardState.FAILED)])

    assert len(world.deploy(spec())) == 1

    assert told(world, K.STOP_REQUESTED).endswith("its replica is started anew")


def test_a_refused_wish_leaves_no_event() -> None:
    world = World()
    world.register()
    before = world.registry.revision

    with pytest.raises(Refused):
        world.deploy(on_cards(([0], 0.9), ([0], 0.9)))
    with pytest.raises(Refused):
        world.delete("unknown")

    assert world.registry.revision == before


# Since when.


def test_a_state_has_a_time_only_when_this_reign_saw_it_begin() -> None:
    world = World(roster=["w1", "w2"], desired=[desired(spec(stages=2))])
    began = world.now
    one, two = replica_shards(stages=2)
    assert (world.replica().since, world.view().since) == (began, began)

    world.now += 1.0
    world.register("w1", [one])
    assert world.replica().since is None, "half of it is late, and so was the other"
    world.register("w2", [two])
    assert (world.replica().since, world.view().since) == (None, None), "it was READY all along"

    world.now += 5.0
    world.register("w2", [shard(stage=1, stage_count=2, state=ShardState.FAILED)], revision=2)
    assert (world.replica().since, world.view().since) == (began + 6.0, began + 6.0)
    world.now += 1.0
    other_reason = shard(stage=1, stage_count=2, state=ShardState.FAILED, state_reason="more")
    world.register("w2", [other_reason], revision=3)
    assert world.replica().since == began + 6.0, "the reason is another one, the state is not"


def test_a_worker_that_comes_after_the_recovery_brings_news() -> None:
    world = World(roster=["w1", "w2"])
    world.register("w1")
    world.tick(10.0)

    world.register("w2", [shard()])

    assert world.replica().since == world.now


# The log.


def test_a_whole_cluster_that_comes_back_takes_no_reader_its_routes() -> None:
    settings = RegistrySettings(change_log_limit=60, event_log_limit=50)
    world = World(roster=[f"w{n}" for n in range(200)], settings=settings)
    seen = world.registry.revision

    for n in range(200):
        world.register(f"w{n}", [shard("m", n)] if n < 50 else [])

    assert len(kept(world)) == 50
    assert [it.name for it in world.registry.changes_since(seen)] == ["m"]
    with pytest.raises(Refused) as caught:
        world.registry.events_since(seen)
    assert caught.value.reason is Reason.REVISION_GONE


def test_events_and_changes_share_one_order() -> None:
    world = World()
    world.register(shards=[shard()])
    world.register("w2", [shard("n")])

    everything = world.registry.events_since(ChangeRevision(REIGN, 0))
    everything += world.registry.changes_since(ChangeRevision(REIGN, 0))

    numbers = sorted(it.revision.n for it in everything)
    assert numbers == list(range(1, world.registry.revision.n + 1))


def test_events_of_one_deployment_leave_out_those_of_others_and_of_workers() -> None:
    world = World()
    world.register(shards=[shard("a"), shard("b")])

    for events in (
        world.registry.newest_events(100, "a"),
        world.registry.events_since(ChangeRevision(REIGN, 0), "a"),
    ):
        assert [it.kind for it in events] == [K.REPLICA_CHANGED, K.DEPLOYMENT_CHANGED]
        assert {it.subject.deployment for it in events} == {"a"}
    assert [it.kind for it in world.registry.newest_events(1)] == [K.DEPLOYMENT_CHANGED]


def test_an_event_is_one_line_of_a_bounded_length() -> None:
    world = World()
    world.register(shards=[shard(state=ShardState.FAILED, state_reason="x" * 5_000)])

    assert max(len(it.message) for it in kept(world)) == LONGEST_MESSAGE


def test_every_kind_is_put_down_by_some_test_of_this_module() -> None:
    source = Path(__file__).read_text(encoding="utf-8")

    assert [it for it in EventKind if f"K.{it}" not in source] == []


def test_a_generation_is_not_shown_to_people() -> None:
    """Supervisor ids are long; what they are good for is in the shards."""
    world = World()
    world.register(shards=[shard(generation=gen(1))])
    world.delete()

    assert all("supervisor-" not in it.message for it in kept(world)[1:])
