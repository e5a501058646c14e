"""Stages that share a card measure it right, whoever starts beside them.

Cases recovery-R52; startup-1, 2, 4, 32: shown with real pages of real processes on host memory.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.runtime.launch import LaunchDevice
from stagekeeper.v1 import types_pb2
from tests.harness.lock_user import lock_user
from tests.harness.shared_card import overlaps, windows
from tests.harness.stage_process import StageProcess

MIB = 2**20
DOMAIN = "host-1/cpu:0"
FAILED = types_pb2.SHARD_STATE_FAILED


def on_card(tmp_path: Path, name: str, *, card: str = "card", **arguments: Any) -> StageProcess:
    limit_s = arguments.pop("lock_limit_s", 60.0)
    skips_measure = arguments.pop("skips_measure", False)
    (tmp_path / card).mkdir(exist_ok=True)
    (tmp_path / "locks").mkdir(exist_ok=True)
    return StageProcess(
        "shared_card_stages:OnCard",
        stage_name=name,
        args_json=json.dumps({"card": str(tmp_path / card), **arguments}),
        devices=[
            LaunchDevice("cpu:0", "cpu", 800 * MIB, 2048 * MIB, lock_domain_id=DOMAIN),
        ],
        lock_dir=str(tmp_path / "locks"),
        lock_limit_s=limit_s,
        skips_measure=skips_measure,
        cache_dir=str(tmp_path / "cache"),
    )


async def up(stage: StageProcess) -> int:
    """Bring a stage up and return what it was given to allocate."""
    await stage.ready()
    left = await stage.call("left")
    assert isinstance(left, int)
    return left


async def test_startup_1_32_recovery_R52_stages_started_together_get_what_a_serial_start_gives_them(
    tmp_path,
):
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(on_card(tmp_path, "one", card="serial"))
        serial = [await up(first)]
        second = await stack.enter_async_context(on_card(tmp_path, "two", card="serial"))
        serial.append(await up(second))

        both = [
            await stack.enter_async_context(on_card(tmp_path, name, neighbours=1))
            for name in ("one", "two")
        ]
        together = await asyncio.gather(*map(up, both))

    assert serial == pytest.approx([640 * MIB] * 2, rel=0.01)
    assert together == pytest.approx(serial, rel=0.01)
    card = tmp_path / "card"
    measured = windows(card, "MEASURE")
    assert len(measured) == 2
    assert overlaps(measured) == 0
    assert overlaps(measured, windows(card, "LOAD")) == 0
    assert overlaps(measured, windows(card, "ALLOCATE")) == 0


async def test_startup_10_stage_whose_lock_is_held_elsewhere_fails_and_names_the_holder(
    tmp_path,
):
    """recovery-R50, startup-10: it never goes on without the lock."""
    (tmp_path / "locks").mkdir()
    async with lock_user(tmp_path / "locks", "stage other of demo/0", DOMAIN) as holder:
        await holder.holds("alone", "MEASURE")
        async with on_card(tmp_path, "late", lock_limit_s=0.5) as stage:
            waiting = await stage.until(lambda state: "waits for" in state.progress.note)
            failed = await stage.until(lambda state: state.state == FAILED)

    assert f"held by process {holder.pid} (stage other of demo/0, MEASURE" in waiting.progress.note
    assert failed.error.startswith("LockTimeout: the phase lock of host-1/cpu:0 was not had")
    assert f"process {holder.pid} (stage other of demo/0, MEASURE, since 2" in failed.error
    assert windows(tmp_path / "card", "LOAD") == []


async def test_start_with_a_profile_takes_no_exclusive_window(tmp_path):
    """It comes up while others load, whoever they are; a start without a profile waits for them."""
    async with on_card(tmp_path, "first", skips_measure=True) as first:
        left = await up(first)
    async with lock_user(tmp_path / "locks", "stage other of demo/0", DOMAIN) as holder:
        await holder.holds("shared", "LOAD")
        async with on_card(tmp_path, "second", skips_measure=True) as second:
            assert await up(second) == pytest.approx(left, rel=0.01)
        async with on_card(tmp_path, "third", weights_mib=104, skips_measure=True) as third:
            waiting = await third.until(lambda state: "waits for" in state.progress.note)
            assert f"held by process {holder.pid} (stage other" in waiting.progress.note
            await holder.frees()
            await up(third)
    assert len(windows(tmp_path / "card", "MEASURE")) == 2
