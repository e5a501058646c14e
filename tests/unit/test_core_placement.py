"""Where replicas go: spreading, matching cards, the ledger, and the arithmetic of a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.model import MemoryNeed
from stagekeeper.core.placement import Account, Card
from stagekeeper.core.planner import Holding
from stagekeeper.core.states import OperationState, ShardState
from tests.plain import DeviceClaim, Offer, Placement, place_replicas
from tests.worlds import (
    GIB,
    World,
    desired,
    device,
    on_cards,
    only,
    shard,
    spec,
    stage_spec,
    started_shards,
)


def holding(gpu: int, memory_bytes: int, state=ShardState.READY, name="other"):
    """A shard of another deployment that holds so much of a card."""
    claims = (DeviceClaim(f"gpu-{gpu}", memory_bytes),)
    return shard(name, devices=claims, state=state, instance_id=f"{name}{gpu}")


def where(plans) -> list[tuple]:
    return [(it.worker_id, *(stage.device_ids for stage in it.stages)) for it in plans]


def refusal_of(world: World, made) -> str:
    with pytest.raises(Refused) as caught:
        world.deploy(made)
    assert caught.value.reason is Reason.ADMISSION_REFUSED
    return caught.value.message


def test_replicas_are_spread_over_workers() -> None:
    world = World()
    for worker in ("w2", "w1", "w3"):
        world.register(worker)

    plans = world.deploy(on_cards(([0], 0.1), replicas=5))

    assert [it.worker_id for it in plans] == ["w1", "w2", "w3", "w1", "w2"]


def test_a_replica_goes_where_the_fewest_of_its_deployment_lie_before_where_most_is_free() -> None:
    world = World(desired=[desired(spec(replicas=2))], is_new=True)
    world.register("roomy", [shard(replica=0)])
    world.register("tight", [holding(0, 9 * GIB)])

    (plan,) = world.deploy(spec(replicas=2))

    assert plan.worker_id == "tight"


def test_among_equals_the_worker_with_most_free_memory_takes_it() -> None:
    world = World()
    world.register("w1", [holding(0, GIB)])
    world.register("w2")

    assert world.deploy(on_cards(([0], 0.1)))[0].worker_id == "w2"


def test_stages_without_cards_need_a_worker_and_no_card() -> None:
    world = World()
    world.register(devices=())

    assert where(world.deploy(spec(stages=2))) == [("w1", (), ())]


def test_equal_numbers_are_the_same_card_and_different_ones_are_not() -> None:
    world = World()
    world.register()

    plans = world.deploy(on_cards(([0], 0.9), ([1], 0.6), ([1], 0.1)))

    assert where(plans) == [("w1", ("gpu-0",), ("gpu-1",), ("gpu-1",))]


def test_two_replicas_of_two_cards_each_take_four_cards() -> None:
    world = World()
    world.register(devices=tuple(device(k) for k in range(1, 5)))

    plans = world.deploy(on_cards(([0], 0.9), ([1], 0.9), replicas=2))

    assert where(plans) == [("w1", ("gpu-1",), ("gpu-2",)), ("w1", ("gpu-3",), ("gpu-4",))]


def test_a_replicas_cards_are_matched_with_those_that_hold_them() -> None:
    world = World()
    world.register(devices=(device(0, 8 * GIB), device(1, 80 * GIB)))
    small = stage_spec("s0", devices=(0,), memory=MemoryNeed(bytes=6 * GIB))
    large = stage_spec("s1", devices=(1,), memory=MemoryNeed(bytes=60 * GIB))

    plans = world.deploy(replace(spec(), stages=(small, large)))

    assert where(plans) == [("w1", ("gpu-0",), ("gpu-1",))]


def test_replicas_are_packed_where_spreading_over_cards_would_not_hold_them_all() -> None:
    world = World()
    world.register(devices=(device(0, 2), device(1, 4)))
    one = stage_spec("s0", devices=(0,), memory=MemoryNeed(bytes=1))
    two = stage_spec("s1", devices=(1,), memory=MemoryNeed(bytes=2))

    plans = world.deploy(replace(spec(replicas=2), stages=(one, two)))

    assert where(plans) == [("w1", ("gpu-0",), ("gpu-1",))] * 2


def test_replicas_without_cards_are_spread_over_workers_too() -> None:
    world = World()
    world.register("w1")
    world.register("w2")

    assert [it.worker_id for it in world.deploy(spec(replicas=4))] == ["w1", "w2"] * 2


@pytest.mark.parametrize(("total_bytes", "fits"), [(101, True), (100, True), (99, False)])
def test_equality_is_admitted_and_a_byte_more_is_not(total_bytes, fits) -> None:
    world = World()
    world.register(devices=(device(0, total_bytes),), shards=[holding(0, 40)])
    made = replace(
        spec(), stages=(stage_spec(devices=(0,), memory=MemoryNeed(bytes=50, reserve_bytes=10)),)
    )

    if fits:
        assert world.deploy(made)
    else:
        assert "device gpu-0: 100 bytes needed, 99 there, 1 too many" in refusal_of(world, made)


def test_each_product_is_truncated_before_it_is_added() -> None:
    world = World()
    world.register(devices=(device(0, 10),))

    assert world.deploy(on_cards(*[([0], 0.05)] * 20)), "int(0.05 × 10) is 0"


@pytest.mark.parametrize(
    ("state", "counts"),
    [
        (ShardState.READY, True),
        (ShardState.PENDING, True),
        (ShardState.STARTING, True),
        (ShardState.STOPPING, True),
        (ShardState.STALLED, True),
        (ShardState.ADOPTING, True),
        (ShardState.FAILED, False),
        (ShardState.STOPPED, False),
    ],
)
def test_what_runs_starts_or_stops_on_a_card_counts(state, counts) -> None:
    world = World()
    world.register(shards=[holding(0, 2 * GIB, state), holding(1, 2 * GIB, state, "more")])
    made = on_cards(([0], 0.9))

    if counts:
        assert "other replica 0 stage 0: 2147483648" in refusal_of(world, made)
    else:
        assert world.deploy(made)


def test_a_start_that_is_not_reported_yet_counts() -> None:
    world = World()
    world.register(devices=(device(0),))
    world.deploy(on_cards(([0], 0.6)))

    said = refusal_of(world, on_cards(([0], 0.6), name="n"))

    assert "m replica 0 stage 0 (starting): 6442450944" in said


def test_a_start_that_is_reported_counts_once() -> None:
    world = World()
    world.register(devices=(device(0),))
    (plan,) = world.deploy(on_cards(([0], 0.5)))
    starting = started_shards(plan, committed=False, state=ShardState.STARTING)
    world.register(devices=(device(0),), shards=starting, revision=2)

    assert world.deploy(on_cards(([0], 0.5), name="n"))


def test_a_start_that_failed_frees_what_it_was_promised() -> None:
    world = World()
    world.register(devices=(device(0),))
    (plan,) = world.deploy(on_cards(([0], 0.6)))
    world.end(plan, OperationState.ROLLED_BACK)

    assert world.deploy(on_cards(([0], 0.6), name="n"))


def test_what_a_replica_holds_is_free_when_it_is_stopped_first() -> None:
    made = on_cards(([0], 0.6), ([0], 0.3))
    world = World(desired=[desired(made)], is_new=True)
    alive = shard(stage_count=2, devices=(DeviceClaim("gpu-0", 6 * GIB),))
    dead = shard(stage=1, stage_count=2, state=ShardState.FAILED)
    world.register(devices=(device(0),), shards=[alive, dead])

    assert where(world.deploy(made)) == [("w1", ("gpu-0",), ("gpu-0",))]


def test_one_card_seen_by_two_agents_is_one_card() -> None:
    world = World()
    shared = device(0, lock_domain_id="GPU-abc")
    world.register("w1", [holding(0, 6 * GIB)], devices=(shared,))
    world.register("w2", devices=(shared,))

    assert "on any of 2 workers" in refusal_of(world, on_cards(([0], 0.6)))


def test_cards_of_the_same_name_on_two_workers_are_two_cards() -> None:
    world = World()
    world.register("w1", [holding(0, 6 * GIB)], devices=(device(0),))
    world.register("w2", devices=(device(0),))

    assert world.deploy(on_cards(([0], 0.6)))[0].worker_id == "w2"


def test_only_the_workers_and_devices_that_the_placement_allows_are_used() -> None:
    world = World()
    world.register("w1")
    world.register("w2")
    placement = Placement(workers=("w2",), device_pool=("gpu-1",))

    plans = world.deploy(on_cards(([0], 0.4), replicas=2, placement=placement))

    assert where(plans) == [("w2", ("gpu-1",))] * 2


def test_too_few_cards_are_said_to_be_too_few() -> None:
    world = World()
    world.register("w1", devices=(device(0),))
    world.register("w2", devices=())

    said = refusal_of(world, on_cards(([0], 0.1), ([1], 0.1), ([2], 0.1)))

    assert "it needs 3 cards, and w1 has 1 for it" in said


def test_a_card_whose_size_is_unknown_takes_nothing() -> None:
    world = World()
    world.register(devices=(device(0, 0), device(1, 0)))

    said = refusal_of(world, on_cards(([0], 0.1)))

    assert "w1 has 0 for it" in said


def test_all_replicas_are_placed_or_none() -> None:
    world = World()
    world.register(devices=(device(0),))

    said = refusal_of(world, on_cards(([0], 0.4), replicas=3))

    assert "no room for m replica 2 (of 3 to start; nothing is started)" in said
    assert "m replica 0 stage 0: 4294967296" in said, "the sum has the two that would fit"
    assert world.view() is None


def test_the_refusal_shows_the_worker_that_came_closest() -> None:
    world = World()
    world.register("small", devices=(device(0, 10),))
    world.register("large", devices=(device(0, 100),))
    world.register("cardless", devices=())
    made = replace(spec(), stages=(stage_spec(devices=(0,), memory=MemoryNeed(bytes=101)),))

    said = refusal_of(world, made)

    assert "closest is large: device gpu-0: 101 bytes needed, 100 there, 1 too many" in said


def test_a_card_number_moves_on_when_another_can_only_lie_where_it_is() -> None:
    """Number 0 fits anywhere, and takes what 1 needs when spreading, what 2 needs when packing."""
    totals_and_held = ((20, 10), (40, 31), (8, 0))
    cards = [
        Card(device(k, total_bytes), Account())
        for k, (total_bytes, _) in enumerate(totals_and_held)
    ]
    for card, (_, held_bytes) in zip(cards, totals_and_held, strict=True):
        card.account.hold(Holding(card.device.device_id, "x", held_bytes))
    needs = (MemoryNeed(bytes=6), MemoryNeed(bytes=10), MemoryNeed(utilization=0.8))
    stages = (stage_spec(f"s{k}", devices=(k,), memory=need) for k, need in enumerate(needs))

    places = place_replicas(
        replace(spec(), stages=tuple(stages)), [0], lambda: [Offer("w1", cards)]
    ).places

    assert places[0][0].devices == {0: "gpu-1", 1: "gpu-0", 2: "gpu-2"}


def test_replicas_are_spread_over_the_cards_of_a_worker() -> None:
    world = World()
    world.register()

    plans = world.deploy(on_cards(([0], 0.3), replicas=4))

    assert [it.stages[0].device_ids for it in plans] == [("gpu-0",), ("gpu-1",)] * 2


def test_many_cards_are_matched_in_good_time() -> None:
    count = 256
    made = replace(
        spec(),
        stages=tuple(
            stage_spec(f"s{k}", devices=tuple(range(k * 4, k * 4 + 4)),
                       memory=MemoryNeed(bytes=k + 1))
            for k in range(64)
        ),
    )  # fmt: skip
    cards = [Card(device(k, k // 4 + 1), Account()) for k in range(count)]

    places = place_replicas(made, [0], lambda: [Offer("w1", cards)]).places

    assert len(set(places[0][0].devices.values())) == count
    assert only(int, places) == [0]
