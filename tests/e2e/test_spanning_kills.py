"""kill -9 at every step of a start over two workers: the replica serves, or nothing of it is left.

Each agent and the supervisor are killed at each of their hand-off points, and started again. Where
the start goes on, what had been started by then is kept. Each test ends with the same spec deployed
once more, served, and deleted without a rest.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.client import Client
from stagekeeper.runtime.crash_points import VARIABLE as KILL_AT
from stagekeeper.v1 import types_pb2
from tests.e2e.spanning import (
    NODES,
    decided,
    deployed,
    is_gone,
    nothing_left,
    pair,
    settled,
    shards,
    whole,
    wide,
)
from tests.e2e.specs import Spec
from tests.harness.standing import StandingCluster
from tests.harness.waiting import wait_for

WORKERS = NODES

READY = types_pb2.DEPLOYMENT_STATE_READY
FAILED = types_pb2.DEPLOYMENT_STATE_FAILED

START_POINTS = (
    "reserve-written",
    "starting-written",
    "intent-written",
    "spawned",
    "pid-written",
    "released",
    "ready-written",
    "started-written",
    "peers-written",
    "peers-pushed",
    "commit-written",
    "commit-half-written",
    "committed",
    # The next stage of a group: a shard of the first one lives here by then.
    "starting-written#2",
    "spawned#2",
    "ready-written#2",
)
UNBORN = ("spawned", "pid-written", "spawned#2")
"""At these a process waits to be let go, and ends with its agent."""

ROLLBACK_POINTS = (
    "rollback-written",
    "stopping-written",
    "stop-gone",
    "clean-written",
    "rolled-back",
)
STOP_POINTS = ("stopping-written", "stop-gone", "stopped")

SUPERVISOR_POINTS = (
    "desired-written",
    "operation-reserved",
    "operation-reserved#2",
    "operation-started",
    "commit-decided",
    "operation-committed",
    "operation-committed#2",
)
SUPERVISOR_ROLLBACK_POINTS = ("step-failed", "part-undone")


SHORT_NODES = (NODES[0], *(pytest.param(node, marks=pytest.mark.soak) for node in NODES[1:]))


@pytest.fixture
def cluster(standing: StandingCluster) -> StandingCluster:
    """Each test leaves a supervisor and two agents that nothing happens to."""
    return standing


def _every_second(points: Sequence[str]) -> list[Any]:
    """Leave the others to the long run: `test_agent_crash_points` takes an agent through all."""
    return [
        pytest.param(point, marks=pytest.mark.soak if number % 2 else ())
        for number, point in enumerate(points)
    ]


@pytest.mark.parametrize("point", _every_second(START_POINTS))
async def test_each_agent_killed_during_a_start_goes_on_with_it(
    cluster: StandingCluster, point: str
) -> None:
    await cluster.restart_agent("node-1", env={KILL_AT: point})
    spec = pair(cluster)
    async with cluster.client() as client:
        await _killed_and_whole(cluster, client, spec, "node-1", point)
        await client.delete("wide")
        await nothing_left(cluster, client)
        await cluster.restart_agent("node-2", env={KILL_AT: point})
        await _killed_and_whole(cluster, client, spec, "node-2", point)


async def _killed_and_whole(
    cluster: StandingCluster, client: Client, spec: Spec, node: str, point: str
) -> None:
    """See a start go on in the next life of an agent, with what its earlier life had started."""
    creation = asyncio.create_task(deployed(client, spec))
    assert await cluster.agents[node].ended() == -signal.SIGKILL
    before = cluster.stage_processes()
    await cluster.start_agent(node)
    assert await creation
    await whole(cluster, client, spec)
    lost = before.items() - cluster.stage_processes().items()
    assert len(lost) <= (point in UNBORN), "a stage was started anew that lived"


@pytest.mark.parametrize("point", _every_second(ROLLBACK_POINTS))
async def test_each_agent_killed_during_a_rollback_ends_it(
    cluster: StandingCluster, point: str
) -> None:
    """The second shard of the second stage fails: its worker rolls back, the other one is told."""
    await cluster.restart_agent("node-1", env={KILL_AT: point})
    torn = cluster.directory / "torn"
    torn.touch()
    spec = pair(cluster, back={"fails": 1, "torn": str(torn)})
    async with cluster.client() as client:
        await _killed_and_undone(cluster, client, spec, "node-1")
        await cluster.restart_agent("node-2", env={KILL_AT: point})
        await _killed_and_undone(cluster, client, spec, "node-2")
        torn.unlink()
        assert await settled(cluster, client, spec) == FAILED


async def _killed_and_undone(
    cluster: StandingCluster, client: Client, spec: Spec, node: str
) -> None:
    creation = asyncio.create_task(deployed(client, spec))
    assert await cluster.agents[node].ended() == -signal.SIGKILL
    await cluster.start_agent(node)
    assert not await creation
    assert await decided(client) == FAILED
    assert "back" in (await client.get("wide")).reason
    await nothing_left(cluster, client)


@pytest.mark.parametrize("node", SHORT_NODES)
@pytest.mark.parametrize("point", ["rollback-written", "clean-written", "rolled-back"])
async def test_agent_killed_while_a_start_is_cancelled_ends_that(
    cluster: StandingCluster, node: str, point: str
) -> None:
    await cluster.restart_agent(node, env={KILL_AT: point})
    gate = cluster.directory / "gate"
    spec = wide(cluster, front={"gate": str(gate)})
    async with cluster.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        await _loading(cluster)
        await client.delete("wide", wait=False)
        assert await cluster.agents[node].ended() == -signal.SIGKILL
        await cluster.start_agent(node)
        await wait_for(lambda: is_gone(client), "the deployment is gone")
        assert not await creation
        await nothing_left(cluster, client)
        gate.touch()
        await client.deploy(spec)
        await whole(cluster, client, spec)


@pytest.mark.parametrize("node", SHORT_NODES)
@pytest.mark.parametrize("point", STOP_POINTS)
async def test_agent_killed_while_a_replica_is_stopped_ends_that(
    cluster: StandingCluster, node: str, point: str
) -> None:
    await cluster.restart_agent(node, env={KILL_AT: point})
    spec = wide(cluster)
    async with cluster.client() as client:
        await client.deploy(spec)
        await client.delete("wide", wait=False)
        assert await cluster.agents[node].ended() == -signal.SIGKILL
        await cluster.start_agent(node)
        await wait_for(lambda: is_gone(client), "the deployment is gone")
        await nothing_left(cluster, client)


@pytest.mark.parametrize("point", SUPERVISOR_POINTS)
async def test_supervisor_killed_during_a_start_is_followed_by_one_that_goes_on(
    cluster: StandingCluster, point: str
) -> None:
    await _supervisor_dies_at(cluster, point)
    spec = wide(cluster)
    async with cluster.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        before = await _next_supervisor(cluster)
        is_told = await creation
        # Whoever was not answered asks again only for so long; the start goes on either way.
        assert is_told or point == "desired-written"
        await whole(cluster, client, spec)
        assert before.items() <= cluster.stage_processes().items(), "a stage was started anew"
        assert await settled(cluster, client, spec) == READY


@pytest.mark.parametrize("point", SUPERVISOR_ROLLBACK_POINTS)
async def test_supervisor_killed_while_a_start_fails_is_followed_by_one_that_undoes_it(
    cluster: StandingCluster, point: str
) -> None:
    await _supervisor_dies_at(cluster, point)
    torn = cluster.directory / "torn"
    torn.touch()
    spec = pair(cluster, back={"fails": 1, "torn": str(torn)})
    async with cluster.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        await _next_supervisor(cluster)
        assert not await creation
        assert await decided(client) == FAILED
        await nothing_left(cluster, client)
        torn.unlink()
        assert await settled(cluster, client, spec) == FAILED


async def test_supervisor_killed_when_the_deletion_of_a_start_was_written(
    cluster: StandingCluster,
) -> None:
    await _supervisor_dies_at(cluster, "desired-written#2")
    gate = cluster.directory / "gate"
    spec = wide(cluster, front={"gate": str(gate)})
    async with cluster.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        await _loading(cluster)
        deletion = asyncio.create_task(client.delete("wide"))
        await _next_supervisor(cluster)
        await asyncio.wait([creation, deletion])
        await wait_for(lambda: is_gone(client), "the deployment is gone")
        await nothing_left(cluster, client)
        gate.touch()
        await client.deploy(spec)
        await whole(cluster, client, spec)


@pytest.mark.parametrize("killed", ["supervisor", "node-1", "node-2", "all"])
async def test_recovery_R11_stage_that_loads_is_adopted_as_the_same_shard(
    cluster: StandingCluster, killed: str
) -> None:
    """One shard of the first stage is up, the other one loads; the next stage has yet to start."""
    gate = cluster.directory / "gate"
    spec = wide(cluster, front={"gate": str(gate), "gated_shard": 1})
    async with cluster.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        await _first_shard_up(client)
        known = await shards(client)
        before = cluster.stage_processes()
        names = ["supervisor", *NODES] if killed == "all" else [killed]
        for name in names:
            program = cluster.supervisor if name == "supervisor" else cluster.agents[name]
            assert program is not None
            program.kill()
        if "supervisor" in names:
            await cluster.start_supervisor()
        await asyncio.gather(*(cluster.start_agent(it) for it in names if it != "supervisor"))
        await wait_for(lambda: _same(client, known), "the same shards are reported again")
        gate.touch()
        assert await creation
        await whole(cluster, client, spec)
        assert before.items() <= cluster.stage_processes().items()
        after = await shards(client)
        for place, record in known.items():
            assert (after[place].pid, after[place].instance_id, after[place].operation_id) == (
                record.pid,
                record.instance_id,
                record.operation_id,
            )


async def _same(client: Client, known: dict[tuple[str, int], types_pb2.ShardRecord]) -> bool:
    now = await shards(client)
    return {it: now[it].instance_id for it in now} == {it: known[it].instance_id for it in known}


async def _first_shard_up(client: Client) -> None:
    async def look() -> bool:
        known = await shards(client)
        is_up = {it for it in known if known[it].state == types_pb2.SHARD_STATE_READY}
        return is_up == {("front", 0), ("side", 0)} and known["front", 1].pid > 0

    await wait_for(look, "one shard of the first stage is up, the other one loads")


async def _loading(cluster: StandingCluster) -> None:
    """Wait until both shards of the first stage load: before that nothing of them is in flight."""
    marks = [_mark(cluster, shard) for shard in (0, 1)]
    await wait_for(lambda: all(it.exists() for it in marks), "both shards load")


def _mark(cluster: StandingCluster, shard: int) -> Path:
    return cluster.directory / "meet" / f"wide.front.{shard}.here"


async def _supervisor_dies_at(cluster: StandingCluster, point: str) -> None:
    await cluster.restart_supervisor(env={KILL_AT: point})
    async with cluster.client() as client:
        await cluster.workers_alive(len(WORKERS), client)


async def _next_supervisor(cluster: StandingCluster) -> dict[int, int]:
    """Wait for the death of the supervisor, and start another; return the stages of in between."""
    assert cluster.supervisor is not None
    assert await cluster.supervisor.ended() == -signal.SIGKILL
    before = cluster.stage_processes()
    await cluster.start_supervisor()
    return before
