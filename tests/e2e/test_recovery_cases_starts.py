"""Recovery cases, by number, about starts and deletions that something or somebody cuts short."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from typing import Any

import psutil
import pytest

from stagekeeper.client import Client, DeployFailed, NotFound
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import echo
from tests.e2e.startups import (
    deployment,
    in_load,
    nothing_reserved,
    patience_s,
    processes_of,
    slow,
    stage,
)
from tests.fakes.tcp_proxy import DOWN, TcpProxy
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.harness.wires import WiredCluster


async def is_gone(client: Client, name: str) -> bool:
    try:
        await client.get(name)
    except NotFound:
        return True
    return False


def engine(name: str, *, how: str = "", gate: str = "", **more: Any) -> dict[str, Any]:
    """One stage with two workers of its own."""
    return deployment(
        name, stage(name, "startup_stages:Engine", args={"how": how, "gate": gate}, **more)
    )


# --- deletions


@pytest.mark.timeout(600)
@pytest.mark.parametrize("points", [4, pytest.param(20, marks=pytest.mark.soak)])
async def test_recovery_R12_deletion_ends_wherever_its_supervisor_is_killed(
    cluster: Cluster, points: int
) -> None:
    """The points lie side by side over the time that an undisturbed deletion takes."""
    await cluster.start_supervisor()
    await cluster.start_agent()
    names = [f"m{number}" for number in range(points)]
    async with cluster.client() as client:
        await asyncio.gather(*(client.deploy(echo(name)) for name in ("whole", *names)))
        began = time.monotonic()
        await client.delete("whole")
        whole_s = time.monotonic() - began
        cut_short = 0
        for number, name in enumerate(names):
            (replica,) = (await cluster.all_ready(name, 1, client)).replicas
            (pid,) = [shard.record.pid for shard in replica.shards]
            await client.delete(name, wait=False)
            await asyncio.sleep(whole_s * number / points)  # the point
            assert cluster.supervisor is not None
            cluster.supervisor.kill()
            cut_short += pid in cluster.stage_processes()
            await cluster.start_supervisor()
            await wait_for(partial(is_gone, client, name), f"{name} is gone (point {number})")
            assert pid not in cluster.stage_processes()
            assert len(cluster.stage_processes()) == points - 1 - number, (
                "it took another one along"
            )
        assert cut_short, "no kill was in the middle of a deletion"
        assert processes_of(cluster) == {}
        await nothing_reserved(client)
        await client.deploy(echo("m0"))


@pytest.mark.parametrize("how", ["", "hold_gil"])
async def test_recovery_U23_start_that_still_loads_is_cancelled_by_a_delete(
    standing: Cluster, how: str
) -> None:
    never = str(standing.directory / "never")
    async with standing.client() as client:
        creation = asyncio.create_task(client.deploy(engine("big", how=how, gate=never)))
        await _has_its_workers(standing)

        began = time.monotonic()
        await client.delete("big")
        assert time.monotonic() - began < patience_s(5)

        with pytest.raises(NotFound, match="cancelled"):
            await asyncio.wait_for(creation, 20)
        assert processes_of(standing) == {}
        await nothing_reserved(client)
        await client.deploy(engine("big"))  # its name is free


async def _has_its_workers(cluster: Cluster) -> None:
    """Wait until an engine loads: one that holds its interpreter may never have said so itself."""
    await wait_for(lambda: len(processes_of(cluster)) == 3, "it has its two workers")


STATES = ("loads", "loads-deaf", "failed", "ready", "ready-deaf", "paused", "agent-dead")


@pytest.mark.parametrize("state", STATES)
async def test_recovery_U24_delete_returns_in_any_state(standing: Cluster, state: str) -> None:
    agent = standing.agents["node-1"]
    never = str(standing.directory / "never")
    how = {"loads-deaf": "hold_gil", "failed": "raise"}.get(state, "")
    gate = never if state.startswith("loads") else ""
    spec = engine("stuck", how=how, gate=gate, stop_budget_s=2.0)
    async with standing.client() as client, standing.client() as caller:
        others: list[asyncio.Task[Any]] = [asyncio.create_task(client.deploy(spec))]
        if state.startswith("loads"):
            await _has_its_workers(standing)
        elif state == "failed":
            await asyncio.wait(others)
        else:
            await others[0]
        if state == "ready-deaf":
            others.append(await _deafened(caller, "stuck", standing))
        elif state == "paused":
            (pid,) = standing.stage_processes()
            os.kill(pid, signal.SIGSTOP)
        elif state == "agent-dead":
            agent.kill()

        began = time.monotonic()
        await client.delete("stuck", wait=False)
        assert time.monotonic() - began < 10

        if state == "agent-dead":
            assert len(processes_of(standing)) == 3
            await standing.start_agent()
        await wait_for(lambda: is_gone(client, "stuck"), "it is gone")
        assert processes_of(standing) == {}
        await nothing_reserved(client)
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        for task in others:
            _ = task.cancelled() or task.exception()


async def test_recovery_U25_list_answers_while_a_stage_that_ignores_sigterm_is_stopped(
    standing: Cluster,
) -> None:
    budget_s = 3.0
    async with standing.client() as client, standing.client() as caller:
        await client.deploy(engine("deaf", stop_budget_s=budget_s))
        (pid,) = standing.stage_processes()
        call = await _deafened(caller, "deaf", standing)
        os.kill(pid, signal.SIGTERM)  # asked by somebody else too: it hears neither

        began = time.monotonic()
        deletion = asyncio.create_task(client.delete("deaf"))
        slowest_s, listed_count = 0.0, 0
        while not deletion.done():
            asked = time.monotonic()
            listed = (await caller.list()).deployments
            slowest_s = max(slowest_s, time.monotonic() - asked)
            listed_count += [it.state for it in listed] == [types_pb2.DEPLOYMENT_STATE_DELETING]
            await asyncio.wait([deletion], timeout=0.05)
        await deletion

        assert slowest_s < patience_s(1)
        assert listed_count > 1, "it was listed while it was being stopped"
        assert budget_s - 0.5 < time.monotonic() - began, "it did not end by itself"
        assert processes_of(standing) == {}
        call.cancel()
        await asyncio.wait([call])


async def _deafened(caller: Client, name: str, cluster: Cluster) -> asyncio.Task[Any]:
    """Make a stage hold its interpreter for long; returns the call that does it, once it does."""
    began = cluster.directory / "began"
    call: asyncio.Task[Any] = asyncio.create_task(caller.call(name, "hold_gil", str(began), 600.0))
    await wait_for(began.exists, "the stage listens to nobody")
    return call


# --- failed starts


async def test_recovery_U11_failed_name_can_be_started_again_and_deleted(standing: Cluster) -> None:
    broken = engine("model", how="raise")
    async with standing.client() as client:
        for _ in range(2):
            with pytest.raises(DeployFailed, match="half downloaded"):
                await client.deploy(broken)
            assert processes_of(standing) == {}
            await nothing_reserved(client)
        await client.delete("model")
        assert await is_gone(client, "model")

        await client.deploy(engine("model"))
        assert await client.call("model", "pid") in standing.stage_processes()


async def test_recovery_U12_failed_starts_leak_no_reservation(standing: Cluster) -> None:
    """Each takes 0.3 of a card: a leak of one of them would show at the fourth."""
    async with standing.client() as client:

        async def is_all_free() -> bool:
            (worker,) = (await client.workers()).workers
            return [device.reserved_bytes for device in worker.devices] == [0, 0]

        for number in range(5):
            how = ("raise", "exit")[number % 2]
            name = f"broken-{number}"
            spec = engine(name, how=how)
            spec["stages"].append(stage("never", "sample_stages:Echo", utilization=0.3))
            with pytest.raises(DeployFailed):
                await client.deploy(spec)
            # What the agent reports of its cards may come after what became of the start.
            await wait_for(is_all_free, "nothing is reserved any more")
        whole = echo("whole", devices=[0], memory={"utilization": 1.0})
        await client.deploy(whole)


# --- answers that are lost


async def test_recovery_R39_lost_answer_to_a_start_is_asked_for_again_and_starts_nothing(
    cluster: Cluster,
) -> None:
    async with WiredCluster() as wired, TcpProxy() as commands:
        agent = await wired.start_agent("node-1", f"--advertise={commands.url}", ready=False)
        commands.move(await _listening_address(agent.pid))
        await wired.start_supervisor()
        gate = wired.directory / "gate"
        async with wired.client() as client:
            await wired.workers_alive(1, client)
            creation = asyncio.create_task(client.deploy(slow("slow", gate)))
            await in_load(client, "slow")
            before = await _only_shard(client)
            connections = commands.connection_count

            commands.lose_established(DOWN)  # what the agent answers from now on is lost
            gate.touch()

            await asyncio.wait_for(creation, 120)
            assert commands.connection_count > connections, "it was asked again"
            after = await _only_shard(client)
            assert (after.operation_id, after.instance_id, after.pid) == (
                before.operation_id,
                before.instance_id,
                before.pid,
            )
            assert list(wired.stage_processes()) == [before.pid]


async def _only_shard(client: Client) -> types_pb2.ShardRecord:
    ((shard,),) = [replica.shards for replica in (await client.get("slow")).replicas]
    return shard.record


async def _listening_address(pid: int) -> str:
    def look() -> list[int]:
        connections = psutil.Process(pid).net_connections("tcp")
        return [it.laddr.port for it in connections if it.status == psutil.CONN_LISTEN]

    (port,) = await wait_for(look, "a listening port")
    return f"127.0.0.1:{port}"


# --- named cards


async def test_recovery_U17_two_replicas_of_two_named_cards_each_lie_beside_each_other(
    cluster: Cluster,
) -> None:
    """The pool holds more than the named cards; neither replica is refused for its sibling."""
    await cluster.start_supervisor()
    await cluster.start_agent(devices=[f"cpu:{number}=1GiB" for number in range(6)])
    named = [f"cpu:{number}" for number in range(1, 5)]
    spec = {
        **echo("m", replicas=2, devices=[0, 1], memory={"utilization": 0.9}),
        "placement": {"device_pool": named},
    }
    async with cluster.client() as client:
        await client.deploy(spec)

        found = await cluster.all_ready("m", 2, client)

        cards = [
            [claim.device_id for shard in replica.shards for claim in shard.record.devices]
            for replica in found.replicas
        ]
        assert cards == [named[:2], named[2:]]
        await client.delete("m")
    await cluster.no_stage_left()
