"""TorchStage in a real process: what it measures, what it may allocate, when it has too much."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from importlib.util import find_spec

import pytest

from stagekeeper.runtime.launch import LaunchDevice
from stagekeeper.v1 import types_pb2
from tests.harness.stage_process import StageProcess

# Stages load it in their own processes: only a test that uses it itself does so here.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

MIB = 2**20
FAILED = types_pb2.SHARD_STATE_FAILED


def card(budget_mib: int) -> LaunchDevice:
    return LaunchDevice(
        device_id="cpu:0", kind="cpu", budget_bytes=budget_mib * MIB, total_bytes=4096 * MIB
    )


async def test_stage_within_its_budget_gets_the_rest_to_allocate():
    arguments = '{"weights_mib": 64, "batch_mib": 128}'
    async with StageProcess(
        "torch_cases:Weighs", args_json=arguments, devices=[card(600)]
    ) as stage:
        state = await stage.ready()
        left = await stage.call("left")

        # The peak holds weights and batch; the batch is gone afterwards.
        assert 600 * MIB - 400 * MIB < left < 600 * MIB - 190 * MIB
        assert 64 * MIB <= state.device_bytes < 600 * MIB - left


async def test_stage_over_its_budget_fails_in_measure_with_both_numbers():
    arguments = '{"weights_mib": 64, "batch_mib": 256}'
    async with StageProcess(
        "torch_cases:Weighs", args_json=arguments, devices=[card(200)]
    ) as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.phase == types_pb2.PHASE_MEASURE
        assert state.error.startswith("BudgetExceeded: ")
        assert f"its budget there is {200 * MIB} bytes (200 MiB)" in state.error
        used = int(state.error.split(" used ")[1].split()[0])
        assert used > 320 * MIB
        assert not state.out_of_memory


async def test_stage_without_cards_has_no_budget_to_exceed_and_is_sent_tensors():
    import torch

    async with StageProcess("torch_cases:Weighs") as stage:
        await stage.ready()

        assert await stage.call("left") == 0
        answer = await stage.call("double", torch.arange(4, dtype=torch.float32))
        assert answer.tolist() == [0.0, 2.0, 4.0, 6.0]


async def test_allocator_that_finds_no_memory_is_out_of_memory():
    async with StageProcess("torch_cases:RunsOut") as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.phase == types_pb2.PHASE_LOAD
        assert state.out_of_memory


async def test_ranks_take_as_many_blocks_as_the_least_of_them_has_room_for(tmp_path):
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                StageProcess(
                    "torch_cases:Ranked",
                    args_json=json.dumps({"rank": rank, "meeting_point": str(tmp_path / "meet")}),
                )
            )
            for rank in range(2)
        ]
        await asyncio.gather(*(rank.ready() for rank in ranks))

        assert [await rank.call("block_count") for rank in ranks] == [100, 100]
