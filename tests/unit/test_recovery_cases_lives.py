"""Cases about the lives of an agent: which of two owns its worker, and what late words do.

recovery-R26, recovery-R28, as decisions: no process, no socket, no clock.
"""

from __future__ import annotations

from typing import Any

import pytest

from stagekeeper.core.commands import HeartbeatVerdict, StopSlot
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.states import OperationState, ReplicaState, WorkerState
from tests.plain import (
    AgentProbed,
    Failure,
    FailureOrigin,
    FailureReported,
    OperationEnded,
    SlotKey,
    SlotStopped,
)
from tests.worlds import World, desired, gen, only, record_of, shard, spec, started_shards, stops

SLOT = SlotKey("m", 0, 0)
OLD, NEW = "127.0.0.1:7071", "127.0.0.1:7072"


def failure() -> Failure:
    origin = FailureOrigin("w1", "m", 0, 0, "s0", 0, "i")
    return Failure("f", "SIGNALED", origin, "ended by SIGKILL")


def refused(world: World, **changes) -> Refused:
    with pytest.raises(Refused) as caught:
        world.register(**changes)
    return caught.value


# --- R28: two agents of one worker id that know nothing of each other


@pytest.mark.parametrize("newer_first", [False, True])
def test_recovery_R28_higher_incarnation_owns_in_either_order(newer_first: bool) -> None:
    world = World()
    old: dict[str, Any] = {"shards": [shard("of-old")], "incarnation": 1, "agent_address": OLD}
    new: dict[str, Any] = {"shards": [shard("of-new")], "incarnation": 2, "agent_address": NEW}

    if newer_first:
        world.register(**new)
        assert refused(world, **old).reason is Reason.STALE_INCARNATION
    else:
        world.register(**old)
        world.register(**new)

    assert world.beat(incarnation=1).verdict is HeartbeatVerdict.SUPERSEDED
    assert world.beat(incarnation=2).verdict is HeartbeatVerdict.OK
    assert world.worker().incarnation == 2
    assert world.worker().state is WorkerState.ALIVE
    assert [it.name for it in world.registry.deployments()] == ["of-new"]


def test_recovery_R28_of_two_equal_incarnations_the_first_one_keeps_the_worker() -> None:
    world = World()
    world.register(shards=[shard()], incarnation=3, revision=5, agent_address=OLD)

    for revision in (4, 5, 6):
        refusal = refused(world, incarnation=3, revision=revision, agent_address=NEW)
        assert refusal.reason is Reason.STALE_INCARNATION
        assert refusal.retry_after_s == 10.0
        assert NEW in refusal.message
        assert OLD in refusal.message

    assert world.worker().agent_address == OLD
    assert world.replica().state is ReplicaState.READY
    assert world.worker().registration_count == 1


def test_recovery_R28_equal_incarnation_rises_once_the_other_ones_lease_is_over() -> None:
    world = World()
    world.register(incarnation=3, agent_address=OLD)
    world.now += 10.0

    refusal = refused(world, incarnation=3, agent_address=NEW)

    assert refusal.retry_after_s is None
    assert refusal.metadata == {"highest_incarnation": "3"}
    world.register(incarnation=4, agent_address=NEW)
    assert world.worker().agent_address == NEW


def test_life_that_lost_its_state_at_the_same_address_is_heard_after_the_lease() -> None:
    """Its incarnation is the old one's again, and its revisions are below what is known."""
    world = World()
    world.register(shards=[shard()], incarnation=1, revision=50)
    world.now += 9.999
    assert world.beat(revision=1).verdict is HeartbeatVerdict.OK, "it may be a late one"
    world.now += 0.001

    assert world.beat(revision=1).verdict is HeartbeatVerdict.REGISTER
    refusal = refused(world, incarnation=1, revision=1)
    assert (refusal.reason, refusal.retry_after_s) == (Reason.STALE_INCARNATION, None)
    world.register(incarnation=2, revision=1)
    assert world.worker().state is WorkerState.ALIVE


# --- R26: a clean-up for incarnation 1 that comes when incarnation 2 has registered


def test_recovery_R26_late_probe_of_an_earlier_life_says_nothing_of_the_next() -> None:
    world = World()
    world.register(shards=[shard()])
    world.register(shards=[shard()], incarnation=2, agent_address=NEW)
    world.apply(AgentProbed("w1", 2, True))

    world.apply(AgentProbed("w1", 1, False, "connection refused"))

    assert world.worker().is_agent_reachable is True
    assert world.replica().state is ReplicaState.READY


def test_recovery_R26_late_outcome_of_an_earlier_lifes_start_takes_nothing_away() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(spec())
    world.register(shards=started_shards(plan), incarnation=2, agent_address=NEW)
    before = world.view()
    assert before.replicas[0].state is ReplicaState.READY

    lost = OperationEnded(plan.operation_id, None, "its agent was lost", "UNAVAILABLE")
    undone = OperationEnded(plan.operation_id, record_of(plan, OperationState.ROLLED_BACK))
    for late in (lost, undone):
        assert stops(world.apply(late)) == []

    assert world.view() == before


def test_recovery_R26_late_outcome_of_an_earlier_lifes_stop_is_not_the_answer_to_the_next() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard()])
    asked = only(StopSlot, world.delete())
    asked += only(StopSlot, world.register(shards=[shard()], incarnation=2, agent_address=NEW))
    assert [it.target.incarnation for it in asked] == [1, 2]

    world.apply(SlotStopped("w1", 1, SLOT, "that life is over"))
    world.now += 60.0
    world.beat(incarnation=2)
    told = world.tick()

    assert stops(told) == [], "the stop of incarnation 2 is under way still"
    world.apply(SlotStopped("w1", 2, SLOT, "no answer in time"))
    world.now += 1.0
    assert stops(world.tick()) == [("w1", "m", 0, 0, 1)]


def test_recovery_R26_failure_reported_by_an_earlier_life_is_refused_and_changes_nothing() -> None:
    world = World()
    world.register(shards=[shard()], incarnation=2, agent_address=NEW)

    with pytest.raises(Refused) as caught:
        world.apply(FailureReported("w1", 1, failure()))

    assert caught.value.reason is Reason.STALE_INCARNATION
    assert world.registry.failures() == []
    assert world.replica().state is ReplicaState.READY


def test_recovery_R26_worker_that_came_back_is_not_forgotten_by_a_late_tick() -> None:
    world = World()
    world.register()
    world.tick(3_599.0)
    assert world.worker().state is WorkerState.LOST
    world.register(incarnation=2, agent_address=NEW)

    world.tick(1.0)

    assert world.worker().incarnation == 2
    assert world.worker().state is WorkerState.ALIVE


def test_recovery_R26_stop_names_the_generation_up_to_which_it_cleans() -> None:
    """What the next life starts meanwhile is above it, and is spared."""
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard(n=1)])

    (stop,) = only(StopSlot, world.delete())

    assert stop.up_to == gen(1)
    assert stop.target.incarnation == 1
