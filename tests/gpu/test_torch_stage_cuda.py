"""TorchStage on a real card: torch's own peak is what its budget is held to."""

from __future__ import annotations

import pytest

from stagekeeper.runtime.launch import LaunchDevice
from stagekeeper.v1 import types_pb2
from tests.harness.stage_process import StageProcess

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

MIB = 2**20
ARGUMENTS = '{"weights_mib": 64, "batch_mib": 128}'


def card(budget_mib: int) -> LaunchDevice:
    return LaunchDevice(
        device_id="GPU-0", kind="cuda", budget_bytes=budget_mib * MIB, total_bytes=8192 * MIB
    )


async def test_stage_on_a_card_gets_its_budget_less_weights_and_batch():
    async with StageProcess(
        "torch_cases:Weighs", args_json=ARGUMENTS, devices=[card(400)]
    ) as stage:
        state = await stage.ready()

        assert 400 * MIB - 196 * MIB <= await stage.call("left") <= 400 * MIB - 192 * MIB
        assert 64 * MIB <= state.device_bytes < 70 * MIB


async def test_stage_over_its_budget_on_a_card_fails_with_both_numbers():
    async with StageProcess(
        "torch_cases:Weighs", args_json=ARGUMENTS, devices=[card(150)]
    ) as stage:
        state = await stage.until(lambda state: state.state == types_pb2.SHARD_STATE_FAILED)

        assert state.phase == types_pb2.PHASE_MEASURE
        assert f"its budget there is {150 * MIB} bytes" in state.error


async def test_card_without_room_is_out_of_memory():
    arguments = '{"weights_mib": 16, "batch_mib": 4000000}'
    async with StageProcess(
        "torch_cases:Weighs", args_json=arguments, devices=[card(400)]
    ) as stage:
        state = await stage.until(lambda state: state.state == types_pb2.SHARD_STATE_FAILED)

        assert state.phase == types_pb2.PHASE_MEASURE
        assert state.out_of_memory
