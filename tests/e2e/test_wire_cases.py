"""Faults on the wire between agents and their supervisor, by number: the network's own failures.

T is the heartbeat interval, 0.5 s. What a case wants within some T is waited for with max(5 s, five
times as long).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stagekeeper.client import Client
from stagekeeper.v1 import deployment_service_pb2 as deployments
from stagekeeper.v1 import types_pb2
from tests.e2e.beats import beats, worker
from tests.e2e.specs import echo
from tests.e2e.traffic import traffic
from tests.fakes.rpc_relay import RpcRelay
from tests.fakes.tcp_proxy import DOWN, NOBODY, UP, Direction, TcpProxy
from tests.harness.processes import Program
from tests.harness.waiting import wait_for
from tests.harness.wires import WiredCluster

T = 0.5
SOON_S = 5.0
"""What is to come within a few T, on a machine that does other things too."""

LEASES = ("--lease-s=1.5", "--lost-s=600")

ALIVE = types_pb2.WORKER_STATE_ALIVE
SUSPECT = types_pb2.WORKER_STATE_SUSPECT
UNREACHABLE = types_pb2.WORKER_STATE_UNREACHABLE
LOST = types_pb2.WORKER_STATE_LOST


@pytest.fixture
async def wired() -> AsyncIterator[WiredCluster]:
    async with WiredCluster(heartbeat_s=T) as wired:
        yield wired


@pytest.fixture
async def calm() -> AsyncIterator[WiredCluster]:
    """For tests that count connections exactly: a heartbeat is given twice the time."""
    async with WiredCluster(heartbeat_s=2 * T) as wired:
        yield wired


@asynccontextmanager
async def agent_of(wired: WiredCluster, *flags: str) -> AsyncIterator[tuple[Program, Client]]:
    """A supervisor with these flags and an agent; the client goes through no proxy."""
    await wired.start_supervisor(*flags)
    agent = await wired.start_agent()
    async with wired.beside() as client:
        yield agent, client


async def is_in(state: types_pb2.WorkerState.ValueType, client: Client, worker_id: str) -> None:
    async def look() -> bool:
        return (await worker(client, worker_id)).state == state

    name = types_pb2.WorkerState.Name(state)
    await wait_for(look, f"{worker_id} is {name}", within_s=20.0)


def connections_of(agent: Program) -> list[int]:
    """Return the connection generations that an agent registered over, in order."""
    return [int(found) for found in re.findall(r"registered .*connection=(\d+)", agent.output)]


async def one_connection_more(agent: Program, before: int) -> None:
    """Wait until an agent is registered over a later connection than its first `before`."""
    await wait_for(
        lambda: len(connections_of(agent)) > before, "the next connection", within_s=SOON_S
    )


async def steady(agent: Program, client: Client) -> None:
    """Wait until a connection lasts. A busy machine may cost one now and then, a loop costs all."""

    async def is_steady() -> bool:
        before = connections_of(agent)
        await beats(client, 4)
        return connections_of(agent) == before

    await wait_for(is_steady, "a connection that lasts")


async def is_replaced(agent: Program, client: Client) -> None:
    """Wait until an agent has left its first connection for one that lasts."""
    await one_connection_more(agent, 1)
    await steady(agent, client)


async def registrations_when_quiet(client: Client) -> int:
    """Wait until two beats go by without a registration; return how many there were."""

    async def is_quiet() -> int | None:
        before = (await worker(client)).registration_count
        await beats(client, 2)
        return before if (await worker(client)).registration_count == before else None

    count: int = await wait_for(is_quiet, "nothing is registered anew")
    return count


async def one_reply_swallowed(proxy: TcpProxy) -> None:
    goal = proxy.swallowed_replies + 1
    proxy.swallow_reply()
    await wait_for(lambda: proxy.swallowed_replies == goal, "a reply is swallowed")


# --- one connection is lost, in each way in which it can be


async def test_recovery_R4_swallowed_heartbeat_reply_costs_one_connection_each_time(
    wired: WiredCluster,
) -> None:
    async with agent_of(wired) as (agent, client):
        for _ in range(3):
            await beats(client, 1)
            before = len(connections_of(agent))
            await one_reply_swallowed(wired.beats)
            await one_connection_more(agent, before)
        await steady(agent, client)
        assert (await worker(client)).registration_count == len(connections_of(agent))
        assert len(wired.beats.established) == 1
        assert agent.is_running


async def test_recovery_R35_black_holed_agent_connection_is_replaced_by_the_heartbeats_deadline(
    wired: WiredCluster,
) -> None:
    async with agent_of(wired) as (agent, client):
        await beats(client, 1)
        wired.beats.lose_established()
        await is_replaced(agent, client)
        assert (await worker(client)).state == ALIVE
        assert wired.beats.connection_count >= 2


@pytest.mark.parametrize("way", [UP, DOWN])
async def test_one_way_failure_of_an_agents_connection_is_noticed(
    wired: WiredCluster, way: Direction
) -> None:
    async with agent_of(wired) as (agent, client):
        await beats(client, 1)
        wired.beats.lose_established(way)
        await is_replaced(agent, client)


async def test_half_open_agent_connection_is_noticed(wired: WiredCluster) -> None:
    """The supervisor's end is gone, and its host has not told the agent."""
    async with agent_of(wired) as (agent, client):
        await beats(client, 1)
        wired.beats.half_open()
        await is_replaced(agent, client)
        assert (await worker(client)).registration_count == len(connections_of(agent))


async def test_recovery_R3_late_failure_of_a_report_leaves_the_next_connection_alone(
    calm: WiredCluster,
) -> None:
    """α is the report of a dead stage: it is allowed more time than a heartbeat."""
    async with agent_of(calm) as (agent, client):
        await client.deploy(echo())
        await beats(client, 1)
        old = calm.beats.established
        for flow in old:
            flow.lose(DOWN)  # the supervisor hears everything, the agent nothing
        pid = (await client.get("echo")).replicas[0].shards[0].record.pid
        os.kill(pid, signal.SIGKILL)

        await wait_for(lambda: connections_of(agent) == [1, 2], "connection 2", within_s=SOON_S * 3)
        # The death, and the word that it is settled, are registrations of their own.
        registered = await registrations_when_quiet(client)
        for flow in old:
            flow.reset()  # α fails now, at the latest
        await beats(client, 2)

        assert connections_of(agent) == [1, 2]
        assert (await worker(client)).registration_count == registered
        assert len(await client.failures("echo")) == 1  # said twice, recorded once


async def test_recovery_U4_old_heartbeat_that_fails_after_the_move_to_the_next_epoch(
    calm: WiredCluster,
) -> None:
    async with agent_of(calm) as (agent, client):
        await beats(client, 1)
        old = calm.beats.established
        for flow in old:
            flow.lose()  # the heartbeat of epoch 1 is under way, and the death of its end unheard
        assert calm.supervisor is not None
        calm.supervisor.kill()
        await calm.start_supervisor()
        await wait_for(lambda: connections_of(agent) == [1, 2], "epoch 2", within_s=SOON_S * 2)
        for flow in old:
            flow.reset()
        await beats(client, 2)

        listed = await worker(client)
        assert listed.state == ALIVE
        assert listed.registration_count == 1  # one in this epoch
        assert connections_of(agent) == [1, 2]


@pytest.mark.soak
async def test_heartbeat_replies_later_than_their_deadline_are_ignored_and_then_forgotten(
    wired: WiredCluster,
) -> None:
    async with agent_of(wired) as (agent, client):
        await client.deploy(echo())
        await beats(client, 1)
        wired.beats.delay(3 * T, DOWN)
        await wait_for(lambda: len(connections_of(agent)) >= 3, "replies come too late")
        wired.beats.delay(0.0)
        await steady(agent, client)
        assert (await worker(client)).state == ALIVE
        await wired.all_ready("echo", 1, client)


async def test_lost_registration_reply_is_registered_again_and_is_one_worker(
    wired: WiredCluster,
) -> None:
    await wired.start_supervisor()
    wired.beats.swallow_reply()
    agent = await wired.start_agent(ready=False)
    async with wired.beside() as client:
        await wait_for(lambda: wired.beats.swallowed_replies == 1, "the reply is gone")
        first = await worker(client)
        assert (first.state, first.registration_count) == (ALIVE, 1)
        await agent.line(r"registered .*connection=2")
        await beats(client, 2)
        (again,) = (await client.workers()).workers
        assert again.registration_count == connections_of(agent)[-1]
        assert again.incarnation == first.incarnation
        assert again.revision == first.revision


# --- the supervisor is not what it was


async def test_recovery_R8_connection_that_outlives_its_supervisor_asks_for_a_registration(
    wired: WiredCluster,
) -> None:
    relay = await RpcRelay().start()
    try:
        first = await wired.start_supervisor(
            "--no-store", "--recovery-window-s=1", advertise=relay.url
        )
        await relay.lead_to(wired.workers_target)
        agent = await wired.start_agent()
        async with wired.client() as client:
            await client.deploy(echo())
            pids = wired.stage_processes()
            wired.users.move(await second_supervisor(wired, relay), reset_old=True)
            mark = len(relay.calls)
            await agent.line(r"the supervisor asks for a registration")
            first.kill()
            wired.looks.move(wired.endpoint)

            await wired.all_ready("echo", 1, client)
            async with wired.client() as stranger:
                assert await stranger.call("echo", "echo", "routable") == "routable"
            assert wired.stage_processes() == pids
            # Over the connection that was there before, and healthy: a heartbeat.
            peers_before = {peer for peer, _ in relay.calls[:mark]}
            peer, method = relay.calls[mark]
            assert peer in peers_before
            assert method.endswith("/Heartbeat")
    finally:
        await relay.stop()


async def second_supervisor(wired: WiredCluster, relay: RpcRelay) -> str:
    """Put a supervisor that knows nothing behind the relay; agents look at the first one still."""
    endpoint_of_first, wired.endpoint = wired.endpoint, "127.0.0.1:0"
    await wired.start_supervisor("--no-store", "--recovery-window-s=1", advertise=relay.url)
    wired.looks.move(endpoint_of_first)
    await relay.lead_to(wired.workers_target)
    return wired.endpoint


async def test_recovery_R34_agent_is_back_at_once_after_a_long_outage(wired: WiredCluster) -> None:
    """The transport's own back-off would grow: 1, 1.6, 2.6, 4.1 s and so on."""
    async with agent_of(wired) as (agent, client):
        await beats(client, 1)
        wired.looks.move(NOBODY)  # every flow is reset as soon as it is accepted
        wired.beats.move(NOBODY, reset_old=True)
        began = time.monotonic()
        await wait_for(lambda: time.monotonic() - began > 10.0, "an outage of 10 s")
        attempts = [at for at in wired.looks.accepted_at if at > began + 2.0]
        gaps = [after - before for before, after in itertools.pairwise(attempts)]
        assert max(gaps) < 3.0  # a wait is at most 1 s

        wired.looks.move(wired.endpoint)
        wired.beats.move(wired.workers_target)
        await wait_for(lambda: connections_of(agent)[-1] > 1, "registered", within_s=SOON_S)
        await beats(client, 1)


async def test_endpoint_that_answers_before_a_port_that_swallows_is_retried_for_ever(
    wired: WiredCluster,
) -> None:
    async with agent_of(wired, *LEASES) as (agent, client):
        await client.deploy(echo())
        pids = wired.stage_processes()
        wired.beats.loses_new = True
        wired.beats.lose_established()
        await is_in(UNREACHABLE, client, "node-1")
        first = await agent.line(r"no session with a supervisor.*attempt=2\b.*")
        assert "error=" in first[0]
        async with traffic(client, "echo") as calls:
            await calls.more(100)
        assert calls.failures == []

        wired.beats.loses_new = False
        await is_in(ALIVE, client, "node-1")
        await wired.all_ready("echo", 1, client)
        assert wired.stage_processes() == pids
        assert agent.is_running


async def test_refused_and_moved_worker_port_is_followed(wired: WiredCluster) -> None:
    async with agent_of(wired) as (agent, client):
        await beats(client, 1)
        wired.beats.refuse()
        wired.beats.reset()
        await agent.line(r"no session with a supervisor.*attempt=2\b")
        assert wired.supervisor is not None
        wired.supervisor.kill()
        await wired.start_supervisor()
        await wired.beats.accept_again()
        await beats(client, 2)
        assert (await worker(client)).state == ALIVE


# --- a worker is late, or gone


async def test_recovery_R21_agent_whose_control_path_is_late_stays_routed_and_alive(
    wired: WiredCluster,
) -> None:
    async with agent_of(wired, *LEASES) as (agent, client):
        await client.deploy(echo())
        pids, incarnation = wired.stage_processes(), (await worker(client)).incarnation
        async with traffic(client, "echo") as calls:
            wired.looks.stall()
            wired.beats.stall()
            stalled = time.monotonic()
            await is_in(UNREACHABLE, client, "node-1")
            await wait_for(lambda: time.monotonic() - stalled > 3 * 1.5, "three leases")
            await calls.more(100)
            assert set(client.routes.addresses)  # still routed
            (replica,) = (await client.get("echo")).replicas
            assert replica.state == types_pb2.REPLICA_STATE_READY
            assert agent.is_running

            wired.looks.release()
            wired.beats.release()  # all that was held back arrives late
            await is_in(ALIVE, client, "node-1")
            await beats(client, 3)
            await calls.more(50)
        assert calls.failures == []
        assert agent.is_running
        assert wired.stage_processes() == pids
        assert (await worker(client)).incarnation == incarnation
        await wired.all_ready("echo", 1, client)


async def test_recovery_R19_U5_U6_dead_worker_is_listed_as_such_and_disturbs_nobody(
    wired: WiredCluster,
) -> None:
    await wired.start_supervisor("--lease-s=2.5", "--lost-s=4")
    await wired.start_agent("node-1")
    second = await wired.start_agent("node-2")
    async with wired.client() as client:
        await client.deploy({**echo("mine"), "placement": {"workers": ["node-1"]}})
        await client.deploy(echo("shared", replicas=2))
        where = {s.worker_id for r in (await client.get("shared")).replicas for s in r.shards}
        assert where == {"node-1", "node-2"}
        incarnation = (await worker(client, "node-2")).incarnation
        address = (await worker(client, "node-2")).agent_address

        async with traffic(client, "mine") as mine, traffic(client, "shared") as shared:
            kill_worker(wired, second, await client.get("shared"))
            states = await states_until(LOST, client, "node-2")
            await mine.more(100)
            await shared.more(100)
            assert states == [ALIVE, SUSPECT, UNREACHABLE, LOST]

            listing = asyncio.create_task(lists_answer(client))
            again = await wired.start_agent("node-2", f"--listen={address}")
            await is_in(ALIVE, client, "node-2")
            await listing
            await mine.more(50)
            await shared.more(50)
        assert mine.failures == []
        assert shared.failures == []
        back = await worker(client, "node-2")
        assert back.incarnation == incarnation + 1
        assert back.agent_address == address
        assert len(connections_of(again)) == 1  # it joined at once


def kill_worker(wired: WiredCluster, agent: Program, shared: deployments.Deployment) -> None:
    """SIGKILL an agent with the stages that it holds: its host is gone."""
    agent.kill()
    for replica in shared.replicas:
        for shard in replica.shards:
            if shard.worker_id == agent.name:
                os.kill(shard.record.pid, signal.SIGKILL)


async def states_until(
    last: types_pb2.WorkerState.ValueType, client: Client, worker_id: str
) -> list[types_pb2.WorkerState.ValueType]:
    """Return the states that a worker goes through, while every list answers."""
    seen = [(await worker(client, worker_id)).state]

    async def look() -> bool:
        await lists_answer(client)
        state = (await worker(client, worker_id)).state
        if state != seen[-1]:
            seen.append(state)
        return state == last

    await wait_for(look, f"{worker_id} is {types_pb2.WorkerState.Name(last)}", within_s=30.0)
    return seen


async def lists_answer(client: Client) -> None:
    """Ask everything that lists; each answers within a second, five on a busy machine."""
    questions = (client.list(), client.workers(), client.failures(), client.get("shared"))
    for question in questions:
        async with asyncio.timeout(SOON_S):
            await question
