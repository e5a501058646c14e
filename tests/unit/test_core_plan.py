"""Plans: what a creation would do, every reason why not, and the id that holds it to that."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.events import DeploymentRequested
from stagekeeper.core.model import MemoryNeed
from stagekeeper.core.placement import NOTHING_PLACED
from stagekeeper.core.plan import Plan
from stagekeeper.core.plan_id import plan_id_of
from stagekeeper.core.states import ShardState
from tests.plain import AgentProbed, DeviceClaim, Placement
from tests.worlds import (
    GIB,
    REIGN,
    World,
    desired,
    device,
    on_cards,
    replica_shards,
    shard,
    spec,
    stage_spec,
    started_shards,
)

LAID_OUT = on_cards(([0], 0.9), ([1], 0.6), ([1], 0.1), name="omni")
OMNI = replace(
    LAID_OUT,
    stages=tuple(
        replace(stage, entrypoint=f"models:{name}")
        for stage, name in zip(LAID_OUT.stages, ("Thinker", "Talker", "Code2Wav"), strict=True)
    ),
)
"""As Qwen3-Omni lies: the thinker on a card of its own, talker and code2wav on another."""


def plan_of(world: World, made) -> Plan:
    plan: Plan = world.registry.plan(made, world.now)
    return plan


def other(gpu: int, memory_bytes: int, **changes):
    """A shard of another deployment that holds so much of a card."""
    claims = (DeviceClaim(f"gpu-{gpu}", memory_bytes),)
    return shard("other", devices=claims, **changes)


def request(world: World, made, plan_id: str):
    return world.apply(DeploymentRequested(made, 2_000.0, plan_id))


def stale(world: World, made, plan_id: str) -> str:
    with pytest.raises(Refused) as caught:
        request(world, made, plan_id)
    assert caught.value.reason is Reason.PLAN_STALE
    return caught.value.message


def test_a_plan_has_groups_places_and_the_sum_of_each_card() -> None:
    world = World()
    world.register(shards=[other(1, 3 * GIB)])

    plan = plan_of(world, OMNI)

    assert [(it.stage_ids, it.devices) for it in plan.groups] == [((0,), (0,)), ((1, 2), (1,))]
    assert (plan.starting, plan.kept, plan.exists) == ((0,), (), False)
    place = plan.placing.places[plan.starting[0]][0]
    assert (place.worker_id, dict(place.devices)) == ("w1", {0: "gpu-0", 1: "gpu-1"})
    first, second = plan.placing.sums
    assert [(it.stage_id, it.memory_bytes) for it in first.terms] == [(0, int(0.9 * 10 * GIB))]
    assert first.need_bytes == int(0.9 * 10 * GIB)
    assert [it.stage_id for it in second.terms] == [1, 2]
    assert [(it.holder, it.memory_bytes) for it in second.holdings] == [
        ("other replica 0 stage 0", 3 * GIB)
    ]
    assert second.need_bytes == int(0.6 * 10 * GIB) + int(0.1 * 10 * GIB) + 3 * GIB
    assert not second.is_over, "equality is admitted"
    assert plan.refusals == []


def test_planning_changes_nothing() -> None:
    world = World(desired=[desired(spec(replicas=2))], is_new=True)
    world.register(shards=[shard(), other(0, GIB)])
    before = copy.deepcopy(world.registry._cluster.operations), world.registry.revision

    plans = [plan_of(world, it) for it in (OMNI, spec(replicas=2), spec(stages=2), OMNI)]

    assert plans[0] == plans[3]
    assert (world.registry._cluster.operations, world.registry.revision) == before
    world.check()
    assert world.registry.deployment("omni") is None


def test_a_byte_too_many_is_refused_with_the_sum_of_the_card() -> None:
    world = World()
    world.register(shards=[other(0, GIB + 1), other(1, GIB + 1, replica=1)])

    plan = plan_of(world, OMNI)

    (refusal,) = plan.refusals
    assert (refusal.reason, refusal.worker_id) == (Reason.ADMISSION_REFUSED, "w1")
    assert refusal.device_id in ("gpu-0", "gpu-1")
    assert "1 too many" in refusal.message
    assert "0.9 × 10737418240 = 9663676416" in refusal.message
    over = [it for it in plan.placing.sums if it.is_over]
    assert [it.device.device_id for it in over] == [refusal.device_id]
    assert over[0].need_bytes == 10 * GIB + 1
    assert plan.placing.places == {}


def test_each_card_without_room_is_refused_by_itself() -> None:
    world = World()
    world.register(shards=[other(0, 2 * GIB), other(1, 9 * GIB, replica=1)])

    plan = plan_of(world, OMNI)

    assert [it.device_id for it in plan.refusals] == ["gpu-0", "gpu-1"]


def test_replicas_that_found_a_place_are_shown_beside_the_one_that_did_not() -> None:
    world = World()
    world.register("w1", devices=(device(0),))

    plan = plan_of(world, on_cards(([0], 0.4), replicas=3))

    assert plan.starting == (0, 1, 2)
    assert sorted(plan.placing.places) == [0, 1]
    (card,) = plan.placing.sums
    assert [it.replica_index for it in card.terms] == [0, 1, 2]
    assert card.is_over
    (refusal,) = plan.refusals
    assert "no room for m replica 2" in refusal.message


def test_cards_that_are_too_few_are_about_the_worker_alone() -> None:
    world = World()
    world.register(devices=(device(0),))

    plan = plan_of(world, OMNI)

    (refusal,) = plan.refusals
    assert (refusal.worker_id, refusal.device_id) == ("w1", "")
    assert "it needs 2 cards, and w1 has 1 for it" in refusal.message
    assert [it.device.device_id for it in plan.placing.sums] == ["gpu-0"]


def test_all_refusals_come_at_once() -> None:
    """Another spec of that name, a full card, and each worker that may take nothing."""
    world = World(desired=[desired(spec("omni"))], is_new=True)
    world.register("silent")
    world.tick(4.0)
    world.register("full", [shard("omni"), other(0, 2 * GIB)], devices=(device(0), device(1)))
    world.register("deaf")
    world.apply(AgentProbed("deaf", 1, False))
    world.register("blind", inventory_unknown=True, devices=())

    made = on_cards(([0], 0.9), ([1], 0.9), name="omni")

    plan = plan_of(world, made)

    assert [(it.reason, it.worker_id, it.device_id) for it in plan.refusals] == [
        (Reason.DEPLOYMENT_EXISTS, "", ""),
        (Reason.ADMISSION_REFUSED, "full", "gpu-0"),
        (Reason.ADMISSION_REFUSED, "silent", ""),
        (Reason.AGENT_UNREACHABLE, "deaf", ""),
        (Reason.ADMISSION_REFUSED, "blind", ""),
    ]
    with pytest.raises(Refused) as caught:
        world.deploy(made)
    assert caught.value.message == plan.refusals[0].message, "a creation is told the first"


def test_workers_that_may_take_nothing_are_no_refusal_while_another_may() -> None:
    world = World()
    world.register("blind", inventory_unknown=True, devices=())
    world.register("w1")

    assert plan_of(world, OMNI).refusals == []


def test_without_a_worker_there_is_one_refusal_and_with_none_fit_one_for_each() -> None:
    world = World()
    assert "start an agent" in plan_of(world, OMNI).refusals[0].message

    world.register("w1", inventory_unknown=True, devices=())
    world.register("w2")
    made = replace(OMNI, placement=Placement(workers=("w1",)))

    assert [(it.worker_id, it.message) for it in plan_of(world, made).refusals] == [
        ("w1", "worker w1 could not read its devices"),
        ("w2", "worker w2 is not among placement.workers"),
    ]


def test_replicas_that_run_or_start_are_kept_and_the_others_start() -> None:
    world = World(desired=[desired(spec(replicas=4))], is_new=True)
    ready, half = shard(replica=0), shard(replica=1, shard_count=2)
    failed = shard(replica=3, state=ShardState.FAILED)
    world.register(shards=[ready, half, failed])

    plan = plan_of(world, spec(replicas=4))

    assert (plan.kept, plan.starting, plan.exists) == ((0, 1), (2, 3), True)
    assert world.deploy(spec(replicas=4))
    under_way = plan_of(world, spec(replicas=4))
    assert (under_way.kept, under_way.starting) == ((0, 1, 2, 3), ())
    assert under_way.placing is NOTHING_PLACED


def test_what_a_failed_replica_holds_is_free_when_it_starts_anew() -> None:
    made = on_cards(([0], 0.6), ([0], 0.3))
    world = World(desired=[desired(made)], is_new=True)
    alive = shard(stage_count=2, devices=(DeviceClaim("gpu-0", 6 * GIB),))
    dead = shard(stage=1, stage_count=2, state=ShardState.FAILED)
    world.register(devices=(device(0),), shards=[alive, dead])

    (card,) = plan_of(world, made).placing.sums

    assert card.holdings == ()


def test_another_spec_of_the_name_is_planned_as_if_that_were_deleted() -> None:
    world = World()
    world.register(devices=(device(0),))
    old = on_cards(([0], 0.6))
    (running,) = world.deploy(old)

    for _ in ("promised", "reported"):
        plan = plan_of(world, on_cards(([0], 0.7)))
        assert [it.reason for it in plan.refusals] == [Reason.DEPLOYMENT_EXISTS]
        assert (plan.starting, plan.kept, plan.exists) == ((0,), (), False)
        assert plan.placing.places
        world.register(shards=started_shards(running), devices=(device(0),), revision=2)


def test_replicas_that_the_new_spec_has_no_more_are_gone_by_then_too() -> None:
    world = World()
    world.register(devices=(device(0),))
    old = on_cards(([0], 0.4), replicas=2)
    shards = [it for running in world.deploy(old) for it in started_shards(running)]
    world.register(shards=shards, devices=(device(0),), revision=2)

    plan = plan_of(world, on_cards(([0], 0.9)))

    assert [it.reason for it in plan.refusals] == [Reason.DEPLOYMENT_EXISTS]


def test_a_name_that_is_being_deleted_is_refused_and_does_not_exist_any_more() -> None:
    world = World(desired=[desired()], is_new=True)
    world.register(shards=[shard()])
    world.delete()

    plan = plan_of(world, spec())

    assert [it.reason for it in plan.refusals] == [Reason.REPLICA_DRAINING]
    assert not plan.exists


def test_while_recovering_it_is_refused_and_nothing_is_placed() -> None:
    world = World(desired=[desired(spec(replicas=2))], roster=["w1", "w2"])
    world.register("w1", [shard()])

    plan = plan_of(world, spec(replicas=2))

    assert [it.reason for it in plan.refusals] == [Reason.SUPERVISOR_RECOVERING]
    assert (plan.kept, plan.starting, plan.exists) == ((0,), (), True)
    assert plan.placing is NOTHING_PLACED
    assert plan.groups
    fresh = plan_of(world, spec("m", stages=2))
    assert [it.reason for it in fresh.refusals] == [
        Reason.DEPLOYMENT_EXISTS,
        Reason.SUPERVISOR_RECOVERING,
    ]


def test_workers_that_have_yet_to_register_with_the_reign_are_waited_for() -> None:
    world = World()
    world.register("w1")
    world.register("w2", highest_epoch=replace(REIGN, number=8))

    plan = plan_of(world, replace(OMNI, placement=Placement(workers=("w1",))))

    assert [(it.reason, it.worker_id) for it in plan.refusals] == [
        (Reason.SUPERVISOR_RECOVERING, "w1"),
        (Reason.ADMISSION_REFUSED, "w2"),
    ]


def timed(took_s: float, **changes):
    return {"create_time": 1_000.0, "ready_time": 1_000.0 + took_s, **changes}


def test_time_is_the_longest_group_by_the_longest_start_of_each_stage() -> None:
    world = World(desired=[desired(OMNI)], is_new=True)
    world.register(
        shards=[
            shard("omni", 0, 0, stage_count=3, **timed(30.0)),
            shard("omni", 0, 1, stage_count=3, **timed(20.0)),
            shard("omni", 0, 2, stage_count=3, **timed(5.0)),
            shard("omni", 1, 1, stage_count=3, **timed(27.0)),
        ]
    )

    plan = plan_of(world, OMNI)

    assert [it.estimated_s for it in plan.groups] == [30.0, 32.0]
    assert plan.estimated_s == 32.0


def test_time_of_another_deployments_stage_counts_where_it_runs_the_same_code() -> None:
    slow = spec("slow", stages=2)
    slow = replace(slow, stages=(slow.stages[0], stage_spec("s1", entrypoint="models:Other")))
    world = World(desired=[desired(slow)], is_new=True)
    world.register(
        shards=[
            shard("slow", 0, 0, stage_count=2, **timed(8.0)),
            shard("slow", 0, 1, stage_count=2, **timed(80.0)),
        ]
    )

    assert plan_of(world, spec("m")).estimated_s == 8.0


@pytest.mark.parametrize(
    "times",
    [
        {},
        {"create_time": 1_000.0},
        {"create_time": 1_000.0, "ready_time": 999.0},
    ],
)
def test_time_is_unknown_where_one_stage_has_none(times) -> None:
    world = World(desired=[desired(OMNI)], is_new=True)
    shards = replica_shards("omni", **timed(3.0))
    world.register(shards=[*shards[:2], shard("omni", 0, 2, stage_count=3, **times)])

    plan = plan_of(world, OMNI)

    assert [it.estimated_s for it in plan.groups] == [3.0, None]
    assert plan.estimated_s is None


# The id.


def test_a_plans_id_starts_what_it_showed() -> None:
    world = World()
    world.register()
    plan = plan_of(world, OMNI)

    commands = request(world, OMNI, plan_id_of(plan))

    assert commands[0].starting == plan.starting


def test_the_same_wish_written_otherwise_has_the_same_id() -> None:
    world = World()
    world.register()
    stage = stage_spec(args_json='{"a": 1, "b": 2}', env=(("A", "1"), ("B", "2")))
    one = replace(spec(), stages=(stage,))
    turned = replace(stage, args_json='{"b":2,"a":1}', env=(("B", "2"), ("A", "1")))
    same = replace(one, stages=(turned,), entry="s0")

    assert plan_id_of(plan_of(world, one)) == plan_id_of(plan_of(world, same))


def test_the_next_supervisor_makes_the_same_id() -> None:
    """Whatever the order in which workers come back, and whatever their agents' lives."""
    first, second = World(), World(epoch=replace(REIGN, number=9, supervisor_id="next"))
    first.register("w1", [other(0, GIB, n=1), other(0, 2 * GIB, n=2, replica=1)])
    first.register("w2")
    second.register("w2", incarnation=7)
    second.register("w1", [other(0, 2 * GIB, n=2, replica=1), other(0, GIB, n=1)])

    made = replace(OMNI, replicas=2)

    assert plan_of(first, made).refusals == []
    assert plan_id_of(plan_of(first, made)) == plan_id_of(plan_of(second, made))


def test_what_lies_on_other_cards_does_not_make_a_plan_stale() -> None:
    world = World()
    world.register(devices=(device(0), device(1), device(2)))
    made = on_cards(([0], 0.9))
    before = plan_id_of(plan_of(world, made))
    world.register(shards=[other(2, GIB)], devices=(device(0), device(1), device(2)), revision=2)

    assert request(world, made, before)


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda world: None, "another spec"),
        (lambda world: world.register(shards=[other(0, GIB)], revision=2), "held of the cards"),
        (lambda world: world.register("w0"), "they go elsewhere"),
    ],
)
def test_a_plan_that_no_longer_fits_is_stale_and_says_what_is_different(happens, why) -> None:
    world = World()
    world.register()
    made = on_cards(([0], 0.4), ([1], 0.3))
    looked_at = plan_id_of(plan_of(world, made))
    happens(world)
    if why == "another spec":
        made = on_cards(([0], 0.4), ([1], 0.4))

    assert why in stale(world, made, looked_at)
    assert world.view() is None
    assert request(world, made, plan_id_of(plan_of(world, made)))


@pytest.mark.parametrize("nonsense", ["x", "0" * 8, "00000000-00000000-0000000g", "é" * 26])
def test_what_is_no_plan_id_is_stale(nonsense) -> None:
    world = World()
    world.register()

    assert "the id of no plan" in stale(world, spec(), nonsense)


def test_a_wish_said_twice_with_its_plans_id_joins_what_it_started() -> None:
    """The first answer may have been lost; by then the plan fits no longer, since it was done."""
    world = World()
    world.register()
    looked_at = plan_id_of(plan_of(world, OMNI))
    request(world, OMNI, looked_at)

    commands = request(world, OMNI, looked_at)

    assert commands[0].starting == ()


def test_a_fact_is_told_rather_than_that_the_plan_is_stale() -> None:
    world = World()
    world.register()
    looked_at = plan_id_of(plan_of(world, OMNI))
    world.register(shards=[other(0, 5 * GIB), other(1, 5 * GIB, replica=1)], revision=2)

    with pytest.raises(Refused) as caught:
        request(world, OMNI, looked_at)

    assert caught.value.reason is Reason.ADMISSION_REFUSED


def test_reserve_and_bytes_are_in_the_sum() -> None:
    world = World()
    world.register(devices=(device(0, 100),))
    needs = (MemoryNeed(bytes=40, reserve_bytes=5), MemoryNeed(utilization=0.333, reserve_bytes=2))
    stages = tuple(
        stage_spec(f"s{number}", devices=(0,), memory=need) for number, need in enumerate(needs)
    )

    (card,) = plan_of(world, replace(spec(), stages=stages)).placing.sums

    assert [it.memory_bytes for it in card.terms] == [45, 35]
    assert card.need_bytes == 80
