"""Start-up cases about cards that users of neighbouring systems reported, by number, as plans.

startup-17, 18 and what a plan says of a sick card. The agent's part (which cards it has at all) is
in `test_agent_visible_devices` and `integration/test_nvml_errors`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.cli.text.plan import plan_text
from stagekeeper.cli.text.tables import plain_lines
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeviceId
from stagekeeper.supervisor.plan_messages import plan_response
from tests.worlds import GIB, World, device, on_cards

SICK = "XID 79 (it has fallen off the bus): nothing new goes there"


def visible(*physical: int):
    """The cards of an agent that was started with them in CUDA_VISIBLE_DEVICES."""
    return tuple(
        replace(device(number), index=place, device_id=DeviceId(f"GPU-{number}"))
        for place, number in enumerate(physical)
    )


def test_startup_17_stage_that_wants_more_cards_than_are_visible_is_refused() -> None:
    world = World()
    world.register(devices=visible(2, 3))
    wide = on_cards(([0, 1, 2, 3], 0.5))

    plan = world.registry.plan(wide, world.now)
    with pytest.raises(Refused) as refused:
        world.deploy(wide)

    assert refused.value.reason is Reason.ADMISSION_REFUSED
    assert "it needs 4 cards, and w1 has 2 for it" in refused.value.message
    assert plan.refusals
    # No card but those can be in any plan.
    (started,) = world.deploy(on_cards(([0], 0.5), ([1], 0.5)))
    assert {it for stage in started.stages for it in stage.device_ids} == {"GPU-2", "GPU-3"}


def test_startup_18_logical_2_is_physical_4_and_the_plan_prints_the_map() -> None:
    world = World()
    world.register(devices=visible(2, 3, 4, 5))
    wide = on_cards(([0, 1, 2, 3], 0.5), ([2], 0.1))

    shown = plan_text("m", plan_response(world.registry.plan(wide, world.now)))
    (plan,) = world.deploy(wide)

    first, second = plan.stages
    assert first.device_ids == ("GPU-2", "GPU-3", "GPU-4", "GPU-5")
    assert second.device_ids == ("GPU-4",)
    lines = [line for table in shown.tables for line in plain_lines(table)]
    assert any("0 is GPU-2, 1 is GPU-3, 2 is GPU-4, 3 is GPU-5" in line for line in lines)


def test_sick_card_is_not_chosen_and_the_plan_says_why() -> None:
    world = World()
    world.register(devices=(device(0, sick_reason=SICK), device(1)))

    plans = world.deploy(on_cards(([0], 0.5), name="a"))
    with pytest.raises(Refused) as refused:
        world.deploy(on_cards(([0], 0.5), ([1], 0.5), name="b"))

    assert [it.device_ids for it in plans[0].stages] == [("gpu-1",)]
    assert f"device gpu-0 is sick: {SICK}" in refused.value.message
    assert "it needs 2 cards, and w1 has 1 for it" in refused.value.message
    refusals = world.registry.plan(on_cards(([0], 0.9), name="b"), world.now).refusals
    assert {it.device_id for it in refusals} == {"gpu-0", "gpu-1"}


def test_claims_on_a_sick_card_go_on_counting_for_who_shares_it() -> None:
    world = World()
    world.register("w1", devices=(device(0, lock_domain_id="host/gpu-0"),))
    world.deploy(on_cards(([0], 0.6), name="a"))
    sick = device(0, lock_domain_id="host/gpu-0", sick_reason=SICK, reserved_bytes=6 * GIB)
    world.register("w1", devices=(sick,))
    world.register("w2", devices=(replace(sick, sick_reason=""),))

    with pytest.raises(Refused):
        world.deploy(on_cards(([0], 0.5), name="b"))
