"""Start-up cases that users of neighbouring systems reported, by number, with real processes.

What a plan or an admission refuses, what a failed or interrupted start leaves behind (nothing), and
what its error says.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.client import DeployFailed, NoRoom
from stagekeeper.core.limits import MOST_LOG_LINES
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import echo
from tests.e2e.startups import (
    deployment,
    in_load,
    nothing_reserved,
    patience_s,
    processes_of,
    reserved_bytes,
    slow,
    stage,
    used_bytes,
)
from tests.harness.cluster import Cluster
from tests.harness.command_line import command_line
from tests.harness.waiting import wait_for

GIB = 2**30


# --- refused before anything starts


async def test_startup_8_four_cards_and_the_last_of_them_are_one_group(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent(devices=[f"cpu:{n}=1GiB" for n in range(4)])
    spec = deployment(
        "tp",
        stage("wide", "sample_stages:Echo", devices=(0, 1, 2, 3)),
        stage("narrow", "sample_stages:Echo", devices=(3,)),
    )
    async with cluster.client() as client:
        plan = await client.plan(spec)
    assert [list(group.stage_names) for group in plan.groups] == [["wide", "narrow"]]
    assert not plan.refusals


async def test_startup_20_more_cards_in_a_stage_than_the_worker_has_are_refused_in_the_plan(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent(devices=["cpu:0=1GiB"])
    spec = deployment("tp", stage("thinker", "sample_stages:Echo", devices=(0, 1)))
    async with cluster.client() as client:
        refusals = (await client.plan(spec)).refusals
        assert len(refusals) == 1
        assert "2 cards" in refusals[0].message and "1" in refusals[0].message
        with pytest.raises(NoRoom, match="2 cards"):
            await client.deploy(spec)
    assert processes_of(cluster) == {}


async def test_startup_39_without_a_free_card_all_is_refused_and_nothing_is_touched(
    standing: Cluster,
) -> None:
    full = deployment(
        "full",
        stage("a", "sample_stages:Echo", devices=(0,), utilization=1.0),
        stage("b", "sample_stages:Echo", devices=(1,), utilization=1.0),
    )
    wanted = echo("wanted", replicas=8, devices=[0], memory={"utilization": 0.9})
    async with standing.client() as client:
        await client.deploy(full)
        before, reserved = processes_of(standing), await reserved_bytes(client)

        with pytest.raises(NoRoom, match=r"cpu:0.*full replica 0"):
            await client.deploy(wanted)

        assert processes_of(standing) == before
        assert await reserved_bytes(client) == reserved == [GIB, GIB]
        assert [it.name for it in (await client.list()).deployments] == ["full"]


async def test_startup_40_what_starts_counts_as_what_runs(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent(devices=["cpu:0=1GiB"])
    gate = cluster.directory / "gate"
    async with cluster.client() as client:
        first = asyncio.create_task(client.deploy(slow("first", gate, utilization=0.7)))
        await in_load(client, "first")

        with pytest.raises(NoRoom, match=r"cpu:0.*first replica 0"):
            await client.deploy(echo("second", devices=[0], memory={"utilization": 0.5}))

        assert len(cluster.stage_processes()) == 1
        gate.touch()
        await first


# --- given to the child


async def test_startup_38_child_gets_the_budget_that_was_planned(standing: Cluster) -> None:
    spec = deployment(
        "quarter",
        stage("fraction", "startup_stages:Timed", devices=(0,), utilization=0.25),
        {
            "name": "bytes",
            "entrypoint": "startup_stages:Timed",
            "devices": [1],
            "memory": {"bytes": "96MiB", "reserve": "4MiB"},
        },
    )
    async with standing.client() as client:
        plan = await client.plan(spec)
        planned = {
            term.stage_name: (term.memory_bytes, term.need.reserve_bytes)
            for device in plan.devices
            for term in device.stages
        }
        await client.deploy(spec)
        for name, (memory_bytes, reserve_bytes) in planned.items():
            budget = await client.call("quarter", "budget_bytes", stage=name)
            assert budget == memory_bytes - reserve_bytes, name
    assert planned == {"fraction": (GIB // 4, 0), "bytes": (100 * 2**20, 4 * 2**20)}


# --- a start that fails


async def test_startup_11_failed_start_leaves_no_child_and_the_memory_is_back(
    standing: Cluster,
) -> None:
    spec = deployment(
        "engine",
        stage("front", "startup_stages:Engine"),
        stage("engine", "startup_stages:Engine", args={"how": "raise"}),
    )
    async with standing.client() as client:
        baseline = await used_bytes(client)
        with pytest.raises(DeployFailed, match="half downloaded"):
            await client.deploy(spec)
        assert processes_of(standing) == {}
        began = time.monotonic()
        await nothing_reserved(client)

        async def is_back() -> bool:
            return await used_bytes(client) == baseline

        await wait_for(is_back, "the memory is back", within_s=patience_s(5))
        assert time.monotonic() - began < patience_s(5)


@pytest.mark.parametrize("how", ["exit", "stall"])
async def test_startup_15_error_has_the_phase_and_the_last_lines_of_the_log(
    standing: Cluster, how: str
) -> None:
    spec = deployment(
        "engine",
        stage(
            "engine",
            "startup_stages:Engine",
            args={"how": how, "lines": 30, "gate": str(standing.directory / "never")},
            stall_timeout_s=3.0,
        ),
    )
    async with standing.client() as client:
        with pytest.raises(DeployFailed) as caught:
            await client.deploy(spec)
    (failed,) = caught.value.failures
    said = failed.failure
    assert said.origin.phase == types_pb2.PHASE_LOAD
    assert list(said.last_log_lines)[-20:] == [f"line {number}" for number in range(10, 30)]
    assert MOST_LOG_LINES >= 20
    expected = {"exit": "exited with code 7", "stall": "no progress for 3 s in LOAD"}[how]
    assert expected in said.message
    assert processes_of(standing) == {}


async def test_startup_15_command_line_shows_them(standing: Cluster) -> None:
    spec = standing.directory / "spec.yaml"
    spec.write_text(
        'name: engine\nstages:\n  - {name: engine, entrypoint: "startup_stages:Engine", '
        "args: {how: exit, lines: 30}}\n"
    )

    failed = await command_line("deploy", str(spec), endpoint=standing.endpoint)

    assert "in LOAD" in failed.err
    shown = re.findall(r"\| (line \d+)$", failed.err, re.M)
    assert shown == [f"line {number}" for number in range(10, 30)]


@pytest.mark.parametrize("how", ["", "hold_gil"])
async def test_startup_14_23_start_over_its_limit_fails_on_time_and_is_gone_when_that_is_told(
    standing: Cluster, how: str
) -> None:
    never = str(standing.directory / "never")
    name = f"late{len(how)}"  # failures of a name are kept when it is deleted
    spec = deployment(
        name,
        stage(
            "late", "startup_stages:Engine", args={"how": how, "gate": never}, start_timeout_s=2.0
        ),
    )
    async with standing.client() as client:
        began = time.monotonic()
        with pytest.raises(DeployFailed, match="not READY within 2 s"):
            await client.deploy(spec)
        assert processes_of(standing) == {}
        assert 1.5 <= time.monotonic() - began < 2 + patience_s(0.5)
        (failure,) = await client.failures(name)
        assert failure.kind == types_pb2.FAILURE_KIND_INIT_TIMEOUT
        await nothing_reserved(client)


# --- deaths


async def test_startup_12_stage_that_dies_in_service_is_told_and_its_tree_is_killed(
    standing: Cluster,
) -> None:
    async with standing.client() as client:
        await client.deploy(deployment("dies", stage("engine", "startup_stages:Engine")))
        (pid,) = standing.stage_processes()
        assert len(processes_of(standing)) == 3

        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        async def is_told() -> bool:
            return (await client.get("dies")).state == types_pb2.DEPLOYMENT_STATE_FAILED

        await wait_for(is_told, "the death is told", within_s=patience_s(1))
        left_s = patience_s(1) - (time.monotonic() - began)
        await wait_for(lambda: not processes_of(standing), "its tree is gone", within_s=left_s)
        (failure,) = await client.failures("dies")
        assert failure.exit.signal == signal.SIGKILL
        await nothing_reserved(client)


async def test_startup_24_next_agent_has_the_orphans_in_its_books_before_it_plans(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    agent = await cluster.start_agent(devices=["cpu:0=1GiB"])
    async with cluster.client() as client:
        await client.deploy(deployment("kept", stage("kept", "startup_stages:Engine")))
        before = processes_of(cluster)
        agent.kill()
        assert processes_of(cluster) == before

        again = await cluster.start_agent(devices=["cpu:0=1GiB"])
        assert (await again.line(r"adopted=(\d+)"))[1] == "1"
        await cluster.all_ready("kept", 1, client)
        with pytest.raises(NoRoom, match=r"cpu:0.*kept replica 0"):
            await client.deploy(echo("more", devices=[0], memory={"utilization": 0.8}))
        assert processes_of(cluster) == before
        await client.delete("kept")
        assert processes_of(cluster) == {}


async def test_startup_25_agent_that_is_asked_to_end_takes_what_still_loads_with_it(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    agent = await cluster.start_agent()
    never = cluster.directory / "never"
    async with cluster.client() as client:
        await client.deploy(deployment("kept", stage("kept", "startup_stages:Engine")))
        kept = processes_of(cluster)
        loads = stage("loads", "startup_stages:Engine", args={"gate": str(never)}, devices=(1,))
        creation = asyncio.create_task(client.deploy(deployment("loads", loads)))
        await wait_for(lambda: len(processes_of(cluster)) == 6, "it has its two workers")

        agent.send(signal.SIGTERM)

        await wait_for(lambda: processes_of(cluster) == kept, "it is gone", within_s=patience_s(10))
        assert await agent.ended(within_s=patience_s(10)) == 0
        assert processes_of(cluster) == kept
        creation.cancel()
        await asyncio.wait({creation})
        assert await client.call("kept", "pid") in kept


# --- a limit on loads


async def test_startup_35_no_more_than_two_of_seven_are_ever_in_load(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    agent = await cluster.start_agent(
        "node-1", "--max-loads=2", devices=[f"cpu:{n}=1GiB" for n in range(7)]
    )
    trace, folder = cluster.directory / "trace", cluster.directory / "met"
    folder.mkdir()
    # One alone would wait for a second one for ever: that would be too careful.
    args = {"folder": str(folder), "count": 2, **_traced(trace, 0.2)}
    stages = [stage(f"s{n}", "startup_stages:Meeting", devices=(n,), args=args) for n in range(7)]
    async with cluster.client() as client:
        await client.deploy(deployment("seven", *stages))
    loading, most = 0, 0
    for word, _, _ in _lines_of(trace):
        loading += 1 if word == "begin" else -1
        most = max(most, loading)
    assert loading == 0
    assert most == 2
    assert "a start waits: --max-loads" in agent.output


# --- groups


@pytest.mark.parametrize(
    "plan",
    [
        {"a": (0, 1, 2, 3), "b": (3,)},
        {"a": (1, 0), "b": (0, 1)},
        {"a": (0, 1), "b": (1, 2), "c": (2,)},
    ],
    ids=["wide-and-last", "another-order", "chain"],
)
async def test_recovery_R50_stages_that_share_cards_never_start_side_by_side(
    cluster: Cluster, plan: dict[str, tuple[int, ...]]
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent(devices=[f"cpu:{n}=1GiB" for n in range(4)])
    trace = cluster.directory / "trace"
    stages = [
        stage(name, "startup_stages:Timed", devices=devices, args=_traced(trace, 0.2))
        for name, devices in plan.items()
    ]
    async with cluster.client() as client:
        shown = await client.plan(deployment("one-group", *stages))
        assert [list(group.stage_names) for group in shown.groups] == [list(plan)]
        await client.deploy(deployment("one-group", *stages))
    words = [(word, name) for word, name, _ in _lines_of(trace)]
    assert words == [(word, name) for name in plan for word in ("begin", "end")]


async def test_recovery_R51_disjoint_groups_load_side_by_side(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent(devices=[f"cpu:{n}=1GiB" for n in range(4)])
    folder = cluster.directory / "met"
    folder.mkdir()
    # Each loads for a second from when all four have come: alone, none would ever go on.
    args = {"folder": str(folder), "count": 4, "seconds": 1.0}
    stages = [stage(f"s{n}", "startup_stages:Meeting", devices=(n,), args=args) for n in range(4)]
    async with cluster.client() as client:
        shown = await client.plan(deployment("four", *stages))
        assert len(shown.groups) == 4
        creation = asyncio.create_task(client.deploy(deployment("four", *stages)))
        await wait_for(lambda: len(list(folder.iterdir())) == 4, "all of them load")
        met = time.monotonic()
        await creation
        assert time.monotonic() - met < patience_s(1.6)


def _traced(trace: Path, seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "trace": str(trace)}


def _lines_of(trace: Path) -> list[tuple[str, str, float]]:
    """What traced stages wrote: "begin" or "end", the stage, the time; as it was."""
    rows = [line.split() for line in trace.read_text().splitlines()]
    return sorted(((word, name, float(at)) for word, name, at in rows), key=lambda row: row[2])
