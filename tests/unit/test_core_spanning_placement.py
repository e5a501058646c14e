"""Replicas over several workers: where their shards lie, and why they found no place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.model import MemoryNeed
from stagekeeper.core.plan_id import plan_id_of
from stagekeeper.core.states import OperationState
from tests.plain import DeviceClaim, Placement
from tests.worlds import GIB, World, device, shard, spec, stage_spec, started_shards


def sharded(*stages: tuple[int, tuple[int, ...], float], replicas: int = 1, **changes):
    """A spec whose stages want (shards, cards, utilization)."""
    return replace(
        spec(replicas=replicas),
        stages=tuple(
            stage_spec(
                f"s{number}",
                shard_count=count,
                devices=cards,
                memory=MemoryNeed(utilization=share) if cards else None,
            )
            for number, (count, cards, share) in enumerate(stages)
        ),
        **changes,
    )


OMNI = sharded((2, (0,), 0.9), (1, (1,), 0.5), (2, (1,), 0.1))


def world_of(*workers: str, cards: int = 2) -> World:
    world = World()
    for worker in workers:
        world.register(worker, devices=tuple(device(number) for number in range(cards)))
    return world


def refusal_of(world: World, made) -> str:
    with pytest.raises(Refused) as caught:
        world.deploy(made)
    assert caught.value.reason is Reason.ADMISSION_REFUSED
    return caught.value.message


def test_the_k_th_shards_lie_on_the_k_th_worker() -> None:
    world = world_of("w1", "w2")

    (start,) = world.deploy_starts(OMNI)

    first, second = start.parts
    assert start.worker_ids == ("w1", "w2")
    assert [(it.stage_id, it.shard_index, it.shard_count) for it in first.stages] == [
        (0, 0, 2), (1, 0, 1), (2, 0, 2),
    ]  # fmt: skip
    assert [(it.stage_id, it.shard_index, it.shard_count) for it in second.stages] == [
        (0, 1, 2), (2, 1, 2),
    ]  # fmt: skip
    assert [it.device_ids for it in first.stages] == [("gpu-0",), ("gpu-1",), ("gpu-1",)]
    assert [it.device_ids for it in second.stages] == [("gpu-0",), ("gpu-1",)]
    assert {it.operation_id for it in start.parts} == {start.operation_id}
    assert {it.generation for it in start.parts} == {start.generation}
    assert {(it.stage_count, it.entry_stage_id) for it in start.parts} == {(3, 0)}


def test_each_worker_maps_the_numbers_to_cards_of_its_own() -> None:
    world = World()
    world.register("w1", devices=(device(0), device(1)))
    full = shard("other", devices=(DeviceClaim("gpu-0", 9 * GIB),), instance_id="x")
    world.register("w2", [full], devices=(device(0), device(1)))

    (start,) = world.deploy_starts(sharded((2, (0,), 0.9)))

    assert {it.worker_id: it.stages[0].device_ids for it in start.parts} == {
        "w1": ("gpu-0",),
        "w2": ("gpu-1",),
    }


def test_the_neediest_part_takes_the_worker_that_holds_it() -> None:
    world = World()
    world.register("large", devices=(device(0), device(1)))
    world.register("small", devices=(device(0, 40 * GIB),))

    (start,) = world.deploy_starts(sharded((2, (0,), 0.2), (1, (1,), 0.2)))

    assert start.worker_ids == ("large", "small"), "though more is free on the small one"


def test_replicas_that_span_are_spread_over_other_workers() -> None:
    world = world_of("w1", "w2", "w3", "w4")

    one, two = world.deploy_starts(sharded((2, (0,), 0.3), replicas=2))

    assert (one.worker_ids, two.worker_ids) == (("w1", "w2"), ("w3", "w4"))


def test_sums_hold_nothing_of_the_parts_that_found_a_place_before_the_one_that_found_none() -> None:
    world = world_of("w1", cards=1)
    held = shard("other", devices=(DeviceClaim("gpu-0", 4 * GIB),), instance_id="x")
    world.register("w2", [held], devices=(device(0, 10 * GIB),))

    placing = world.registry.plan(sharded((2, (0,), 0.4), replicas=2), world.now).placing

    assert placing.shortage is not None
    assert (placing.shortage.replica_index, placing.shortage.shard_index) == (1, 1)
    terms = {
        it.worker_id: [(term.replica_index, term.shard_index) for term in it.terms]
        for it in placing.sums
    }
    assert terms == {"w1": [(0, 0)], "w2": [(0, 1), (1, 1)]}


def test_stages_without_cards_want_workers_of_their_own_too() -> None:
    world = world_of("w1", "w2", "w3", cards=0)

    (start,) = world.deploy_starts(sharded((3, (), 0.0)))

    assert start.worker_ids == ("w1", "w2", "w3")


def test_too_few_workers_are_told_with_those_that_cannot_take_it() -> None:
    world = world_of("w1")
    world.register("blind", inventory_unknown=True, devices=())

    said = refusal_of(world, OMNI)

    assert "its shards want 2 workers, and only 1 can take it: blind could not read" in said
    assert "start more agents" in refusal_of(world_of("w1"), OMNI)
    assert "start an agent" in refusal_of(World(), OMNI)


def test_workers_that_are_yet_to_come_are_waited_for() -> None:
    world = world_of("w1", "w2")
    world.register("w2", highest_epoch=replace(world.epoch, number=8))

    with pytest.raises(Refused) as caught:
        world.deploy(OMNI)

    assert caught.value.reason is Reason.SUPERVISOR_RECOVERING


def test_the_refusal_names_the_shard_and_the_worker_that_came_closest() -> None:
    world = World()
    world.register("w1")
    world.register("w2", devices=(device(0, 4 * GIB), device(1, 4 * GIB)))
    needy = replace(sharded((2, (0,), 0.5)).stages[0], memory=MemoryNeed(bytes=8 * GIB))

    said = refusal_of(world, replace(spec(), stages=(needy,)))

    assert "no room for shard 1 of m replica 0 on any of 1 other worker; closest is w2" in said
    assert "device gpu-0" in said
    assert world.view() is None


def test_what_a_half_placed_replica_would_take_is_no_ones() -> None:
    world = World()
    world.register("w1")
    world.register("w2", devices=())
    plan = world.registry.plan(sharded((2, (0,), 0.5)), world.now)

    assert plan.placing.places == {}
    assert plan.placing.shortage.shard_index == 1
    assert all(not it.terms for it in plan.placing.sums)


def test_two_agents_of_one_host_share_the_sum_of_their_card() -> None:
    card = device(0, lock_domain_id="host-a/0")
    world = World()
    world.register("w1", devices=(card,))
    world.register("w2", devices=(card,))

    (start,) = world.deploy_starts(sharded((2, (0,), 0.5)))
    assert len(start.parts) == 2
    other = World()
    other.register("w1", devices=(card,))
    other.register("w2", devices=(card,))
    said = refusal_of(other, sharded((2, (0,), 0.6)))
    assert "shard 1 of m replica 0" in said
    assert "m replica 0 stage 0" in said, "the first shard is in the sum"


def test_promised_memory_counts_on_each_worker_until_it_is_reported() -> None:
    world = world_of("w1", "w2", cards=1)
    world.deploy_starts(sharded((2, (0,), 0.6)))
    other = replace(sharded((1, (0,), 0.6)), name="n")

    said = refusal_of(world, other)

    assert "m replica 0 stage 0 (starting)" in said


def test_a_plan_shows_every_worker_and_its_id_depends_on_each() -> None:
    world = world_of("w1", "w2", "w3")
    plan = world.registry.plan(OMNI, world.now)

    assert [it.worker_id for it in plan.placing.places[0]] == ["w1", "w2"]
    sums = {(it.worker_id, it.device.device_id): it for it in plan.placing.sums}
    assert [(it.stage_id, it.shard_index) for it in sums["w2", "gpu-1"].terms] == [(2, 1)]
    assert [(it.stage_id, it.shard_index) for it in sums["w1", "gpu-1"].terms] == [(1, 0), (2, 0)]
    pinned = replace(OMNI, placement=Placement(workers=("w1", "w3")))
    other = world.registry.plan(pinned, world.now)
    assert [it.worker_id for it in other.placing.places[0]] == ["w1", "w3"]
    before, after = plan_id_of(plan).split("-")[1], plan_id_of(other).split("-")[1]
    assert before != after


def test_a_plan_keeps_a_replica_that_runs_on_several_workers() -> None:
    world = world_of("w1", "w2")
    (start,) = world.deploy_starts(OMNI)
    for part in start.parts:
        world.register(part.worker_id, started_shards(part), revision=2)

    plan = world.registry.plan(OMNI, world.now)

    assert (plan.kept, plan.starting) == ((0,), ())


def test_shards_of_another_count_are_another_deployment() -> None:
    world = World()
    world.register("w1", [shard(shard_count=2)])

    with pytest.raises(Refused) as caught:
        world.deploy(spec())

    assert caught.value.reason is Reason.DEPLOYMENT_EXISTS
    assert "in 2 shards" in caught.value.message


def test_one_worker_is_enough_for_a_replica_whose_stages_have_one_shard() -> None:
    world = world_of("w1", "w2")

    (start,) = world.deploy_starts(sharded((1, (0,), 0.5), (1, (1,), 0.5)))

    assert start.worker_ids == ("w1",)
    assert not start.is_spanning
    assert world.end(start.parts[0], OperationState.ROLLED_BACK) is not None
