"""What others hold of a card, as plans and creations count it."""

from __future__ import annotations

import pytest

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import WorkerId
from stagekeeper.core.model import ForeignHolder
from tests.plain import Placement
from tests.worlds import GIB, World, device, on_cards
from tests.worlds import started_shards as ready

OTHERS = "others (pids unknown)"


def held(*holders: ForeignHolder, index: int = 0, **changes):
    """A card of 10 GiB of which these hold something."""
    return device(index, foreign=holders, **changes)


def stranger(memory_bytes: int, pid: int = 4711, name: str = "python") -> ForeignHolder:
    return ForeignHolder(pid, name, memory_bytes)


def of_worker(worker: str, memory_bytes: int) -> ForeignHolder:
    return ForeignHolder(
        7, f"m replica 0 stage a (worker {worker})", memory_bytes, WorkerId(worker)
    )


def refusals(world: World, made) -> list[str]:
    return [it.message for it in world.registry.plan(made, world.now).refusals]


def test_startup_7_plan_names_what_is_wanted_what_is_free_and_who_holds_the_rest() -> None:
    world = World()
    world.register(devices=(held(stranger(6 * GIB // 10), ForeignHolder(0, OTHERS, GIB // 10)),))

    (message,) = refusals(world, on_cards(([0], 0.95)))

    assert "device gpu-0: " in message
    assert f"stage 0: 0.95 × {10 * GIB} = {int(0.95 * 10 * GIB)}" in message
    assert f"pid 4711 (python): {6 * GIB // 10}" in message
    assert f"{OTHERS}: {GIB // 10}" in message
    assert f"free: {10 * GIB - 6 * GIB // 10 - GIB // 10}" in message
    assert "it fits with stage 0 at utilization 0.93" in message
    with pytest.raises(Refused) as refused:
        world.deploy(on_cards(([0], 0.95)))
    assert refused.value.reason is Reason.ADMISSION_REFUSED
    assert not refusals(world, on_cards(([0], 0.93)))


def test_strangers_of_a_card_that_two_workers_see_count_once() -> None:
    world = World()
    for worker, memory_bytes in (("w1", 4 * GIB), ("w2", 3 * GIB)):
        seen = held(stranger(memory_bytes), lock_domain_id="host/gpu-0")
        world.register(worker, devices=(seen,))

    assert not refusals(world, on_cards(([0], 0.6)))
    assert refusals(world, on_cards(([0], 0.61)))


def test_stage_of_another_worker_counts_by_that_workers_own_word() -> None:
    """And by its neighbour's, as long as it has said nothing: its agent may be dead."""
    world = World()
    neighbour = held(of_worker("w2", 5 * GIB), lock_domain_id="host/gpu-0")
    world.register("w1", devices=(neighbour,))
    assert refusals(world, on_cards(([0], 0.6)))

    world.register("w2", devices=(device(0, lock_domain_id="host/gpu-0"),))

    assert not refusals(world, on_cards(([0], 1.0)))


def test_what_a_stage_uses_beyond_its_claim_counts_whoever_sees_more_strangers() -> None:
    world = World()
    beyond = held(of_worker("w1", 2 * GIB), lock_domain_id="host/gpu-0")
    world.register("w1", devices=(beyond,))
    world.register("w2", devices=(held(stranger(4 * GIB), lock_domain_id="host/gpu-0"),))

    assert not refusals(world, on_cards(([0], 0.4)))
    assert refusals(world, on_cards(([0], 0.41)))


def test_what_a_silent_worker_said_of_strangers_is_old() -> None:
    world = World()
    for worker, memory_bytes in (("w1", 9 * GIB), ("w2", GIB)):
        seen = held(stranger(memory_bytes), lock_domain_id="host/gpu-0")
        world.register(worker, devices=(seen,))
    for _ in range(6):
        world.beat("w2")
        world.tick(1)

    assert not refusals(world, on_cards(([0], 0.9)))


def test_startup_39_no_free_card_is_a_refusal_and_other_cards_are_left_alone() -> None:
    world = World()
    full = held(stranger(10 * GIB), index=0)
    world.register(devices=(full, held(index=1)))

    assert refusals(world, on_cards(([0], 0.5), ([1], 0.5)))
    (plan,) = world.deploy(on_cards(([0], 0.5)))

    assert [it.device_ids for it in plan.stages] == [("gpu-1",)]


def test_startup_40_what_is_still_starting_counts() -> None:
    world = World()
    world.register(devices=(device(0),))
    world.deploy(on_cards(([0], 0.7), name="a"))

    (message,) = refusals(world, on_cards(([0], 0.5), name="b"))

    assert f"a replica 0 stage 0 (starting): {int(0.7 * 10 * GIB)}" in message


def test_recovery_U17_two_replicas_on_named_cards_are_not_in_each_others_way() -> None:
    world = World()
    world.register(devices=tuple(device(index) for index in range(6)))
    pool = tuple(f"gpu-{index}" for index in range(1, 5))
    made = on_cards(([0], 0.9), ([1], 0.9), replicas=2, placement=Placement(device_pool=pool))

    plans = world.deploy(made)

    cards = [{it for stage in plan.stages for it in stage.device_ids} for plan in plans]
    assert [len(it) for it in cards] == [2, 2]
    assert cards[0] | cards[1] == set(pool)
    world.register(
        devices=tuple(device(index) for index in range(6)),
        shards=[it for plan in plans for it in ready(plan)],
        revision=2,
    )
    for plan in plans:
        world.end(plan)
    assert not world.deploy(made), "said again it starts nothing, and is refused nothing"


def test_a_device_whose_foreign_holders_make_no_sense_is_left_out() -> None:
    world = World()
    bad = [stranger(-1), stranger(1, name="a\x1b[2J"), stranger(1, name="a" * 300)]
    many = tuple(stranger(1, pid=pid) for pid in range(1, 66))
    devices = [held(it, index=index) for index, it in enumerate(bad)]
    world.register(devices=(*devices, held(*many, index=3), held(stranger(1), index=4)))

    assert [it.device_id for it in world.worker().devices] == ["gpu-4"]
