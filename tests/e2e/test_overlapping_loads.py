"""`overlap_loads`: stages that share a card load side by side and measure one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagekeeper.client import Client
from tests.e2e.specs import Spec
from tests.e2e.startups import stage
from tests.harness.cluster import Cluster
from tests.harness.shared_card import overlaps, windows


def on_one_card(name: str, card: Path, *, overlap_loads: bool) -> Spec:
    card.mkdir()
    stages = [
        stage(
            name,
            "shared_card_stages:OnCard",
            args={"card": str(card), "neighbours": int(overlap_loads), "meets": overlap_loads},
            utilization=0.4,
        )
        for name in ("one", "two")
    ]
    return {"name": name, "stages": stages, "overlap_loads": overlap_loads}


async def left_bytes(client: Client, name: str) -> list[int]:
    return [await client.call(name, "left", stage=stage) for stage in ("one", "two")]


async def test_startup_1_recovery_R52_loads_overlap_and_each_stage_measures_what_it_would_alone(
    cluster: Cluster,
) -> None:
    """startup-1 and recovery-R52, with `overlap_loads`."""
    await cluster.start_supervisor()
    await cluster.start_agent(devices=["cpu:0=2GiB"])
    serial, together = cluster.directory / "serial", cluster.directory / "together"
    async with cluster.client() as client:
        await client.deploy(on_one_card("serial", serial, overlap_loads=False))
        serial_left = await left_bytes(client, "serial")
        await client.delete("serial")
        await client.deploy(on_one_card("together", together, overlap_loads=True))
        together_left = await left_bytes(client, "together")
        (replica,) = (await client.get("together")).replicas
        shards = [it.record for it in replica.shards]

    assert together_left == pytest.approx(serial_left, rel=0.01)
    assert overlaps(windows(serial, "LOAD")) == 0
    measured = windows(together, "MEASURE")
    assert len(measured) == 2
    assert overlaps(measured) == 0
    assert overlaps(measured, windows(together, "LOAD")) == 0

    budget_bytes = int(0.4 * 2 * 2**30)
    assert [budget_bytes - it.measured_memory.peak_bytes for it in shards] == together_left
    assert all(it.measured_memory.HasField("graph_bytes") for it in shards)


async def test_start_with_a_profile_measures_nothing_and_waits_for_no_measurement(
    cluster: Cluster,
) -> None:
    """Starts of one kind take what the first of them measured, and show it."""
    await cluster.start_supervisor()
    await cluster.start_agent(devices=["cpu:0=2GiB"])
    card = cluster.directory / "card"
    spec = on_one_card("again", card, overlap_loads=False)
    for each in spec["stages"]:
        each["memory"]["reuse_profile"] = True
    async with cluster.client() as client:
        await client.deploy(spec)
        first_left = await left_bytes(client, "again")
        await client.delete("again")
        await client.deploy(spec)
        second_left = await left_bytes(client, "again")
        (replica,) = (await client.get("again")).replicas
        shards = [it.record for it in replica.shards]

    assert len(windows(card, "LOAD")) == 4
    assert len(windows(card, "MEASURE")) == 1
    assert [first_left[1], *second_left] == pytest.approx([first_left[0]] * 3, rel=0.01)
    budget_bytes = int(0.4 * 2 * 2**30)
    assert {budget_bytes - it.predicted_memory.peak_bytes for it in shards} == {first_left[0]}
    assert not any(it.HasField("measured_memory") for it in shards)
