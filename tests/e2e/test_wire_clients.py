"""Faults on the wire between clients and what they talk to: routes stay, calls go on, and the way
to the supervisor is found again without being asked.

The transport notices a dead connection after 4 s of silence and 4 s for a ping (`wire/transport`);
a test waits for what follows from it with five times as long. `hastened` clients take a quarter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from stagekeeper.client import Client, watching
from tests.e2e.specs import echo
from tests.e2e.traffic import traffic
from tests.fakes.name_server import NameServer
from tests.fakes.tcp_proxy import TcpProxy
from tests.harness.keepalive import hasten
from tests.harness.waiting import wait_for
from tests.harness.wires import WiredCluster

NOTICED_S = 40.0
SOON_S = 5.0


@pytest.fixture
async def wired() -> AsyncIterator[WiredCluster]:
    async with WiredCluster() as wired:
        yield wired


@pytest.fixture
def hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


def lose(proxy: TcpProxy) -> None:
    proxy.lose_established()


def half_open(proxy: TcpProxy) -> None:
    proxy.half_open()


@pytest.mark.soak
async def test_watch_that_is_never_answered_over_a_living_connection_is_opened_again(
    wired: WiredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pings are answered all the while: only the missing bookmarks tell."""
    silence_s = 7.0  # a bookmark comes each 5 s
    assert silence_s < watching.SILENCE_S
    monkeypatch.setattr(watching, "SILENCE_S", silence_s)
    await wired.start_supervisor()
    wired.users.swallow_reply()
    async with wired.client() as client:
        await wait_for(lambda: wired.users.connection_count == 2, "it dials anew", within_s=40.0)
        assert await client.synced(SOON_S)
        began = asyncio.get_running_loop().time()
        await wait_for(
            lambda: asyncio.get_running_loop().time() > began + 1.5 * silence_s, "a while"
        )
        assert wired.users.connection_count == 2  # bookmarks come: it is not silent


@pytest.mark.usefixtures("hastened")
@pytest.mark.parametrize("fault", [lose, half_open])
async def test_recovery_R35_dead_watch_is_found_out_and_no_route_is_lost_meanwhile(
    wired: WiredCluster, fault: Callable[[TcpProxy], None]
) -> None:
    await wired.start_supervisor()
    await wired.start_agent()
    async with wired.client() as client, wired.beside() as beside:
        await client.deploy(echo("old"))
        old = set(client.routes.addresses)
        async with traffic(client, "old") as calls:
            fault(wired.users)
            await beside.deploy(echo("new"))  # the watch does not hear of it
            seen: list[set[str]] = []

            def is_watched_again() -> bool:
                seen.append(set(client.routes.addresses))
                return client.routes.has_route("new", None)

            await wait_for(is_watched_again, "the new route", within_s=NOTICED_S)
            await calls.more(50)
        assert calls.failures == []
        assert all(old <= routes for routes in seen)
        assert await client.call("new", "echo", "there") == "there"


@pytest.mark.usefixtures("hastened")
async def test_recovery_R35_question_over_a_dead_connection_is_answered_over_a_new_one(
    wired: WiredCluster,
) -> None:
    """Within its own time: what the transport needs to notice is not taken from its patience."""
    await wired.start_supervisor()
    async with wired.client() as client:
        assert (await client.list()).complete
        flows = wired.users.connection_count
        wired.users.lose_established()
        assert (await client.list(timeout=NOTICED_S)).complete
        assert wired.users.connection_count > flows


async def test_deadline_over_a_dead_connection_makes_the_next_question_dial_anew(
    wired: WiredCluster,
) -> None:
    from stagekeeper.client import DeadlineExceeded

    await wired.start_supervisor()
    async with Client(wired.users.url, watch_at_once=False) as client:
        await client.list()
        wired.users.lose_established()
        with pytest.raises(DeadlineExceeded):
            await client.list(timeout=0.5)
        async with asyncio.timeout(3.0):  # and still before the transport notices anything, at 4 s
            await client.list(timeout=NOTICED_S)


async def test_recovery_R34_watch_is_back_at_once_after_an_outage(wired: WiredCluster) -> None:
    await wired.start_supervisor()
    await wired.start_agent()
    async with wired.client() as client, wired.beside() as beside:
        await client.synced(10)
        wired.users.refuse()
        wired.users.reset()
        await beside.deploy(echo())
        loop = asyncio.get_running_loop()
        until = loop.time() + 6.0
        await wait_for(lambda: loop.time() > until, "an outage of some seconds")
        assert not client.routes.has_route("echo", None)
        await wired.users.accept_again()
        await wait_for(lambda: client.routes.has_route("echo", None), "the route", within_s=SOON_S)


@pytest.mark.usefixtures("hastened")
async def test_recovery_R33_name_that_moves_while_its_old_address_swallows_packets(
    wired: WiredCluster,
) -> None:
    """Both for the client, which asks and watches by that name, and for the agent."""
    await wired.start_supervisor()
    names = await NameServer("127.0.0.1").start()
    old = await TcpProxy(wired.endpoint).start()
    port = int(old.url.rpartition(":")[2])
    new = await TcpProxy(wired.endpoint, host="127.0.0.2", port=port).start()
    address = names.address_of("supervisor.test", port)
    try:
        await wired.start_agent("node-1", f"--endpoint={address}")
        async with Client(address) as client, wired.beside() as beside:
            await client.deploy(echo("before"))
            assert new.connection_count == 0

            names.ip = "127.0.0.2"
            old.loses_new = True
            old.lose_established()
            wired.beats.lose_established()
            assert (await client.list(timeout=NOTICED_S)).complete
            assert new.connection_count >= 1
            await wired.workers_alive(1, beside)
            await beside.deploy(echo("after"))
            await wait_for(
                lambda: client.routes.has_route("after", None), "the watch", within_s=NOTICED_S
            )
            async with traffic(client, "before") as calls:
                await calls.more(20)
            assert calls.failures == []
            workers = (await beside.workers()).workers
            assert [it.registration_count > 1 for it in workers] == [True]
    finally:
        await old.stop()
        await new.stop()
        names.stop()


async def test_reset_storm_on_the_way_to_the_supervisor_fails_no_call(wired: WiredCluster) -> None:
    await wired.start_supervisor()
    await wired.start_agent()
    async with wired.client() as client, wired.beside() as beside:
        await client.deploy(echo())
        async with traffic(client, "echo") as calls:
            for _ in range(10):
                await reset_and_dialled_again(wired.users)
            await beside.deploy(echo("more"))
            await wait_for(lambda: client.routes.has_route("more", None), "the watch goes on")
            await calls.more(50)
        assert calls.failures == []


async def reset_and_dialled_again(proxy: TcpProxy) -> None:
    flows = proxy.connection_count
    proxy.reset()
    await wait_for(lambda: proxy.connection_count > flows, "it dials again")


async def test_creation_whose_commands_are_cut_off_on_the_way_to_the_agent_goes_on(
    wired: WiredCluster,
) -> None:
    """The supervisor's connection to the agent swallows everything in the middle of a start."""
    commands = await TcpProxy().start()
    try:
        agent = await wired.start_agent("node-1", f"--advertise={commands.url}", ready=False)
        commands.move(await listening_address(agent.pid))
        await wired.start_supervisor()
        async with wired.client() as client:
            await wired.workers_alive(1, client)
            flag = wired.directory / "go"
            spec = {
                "name": "slow",
                "stages": [
                    {
                        "name": "slow",
                        "entrypoint": "sample_stages:Slow",
                        "args": {"gate": str(flag)},
                    }
                ],
            }
            deploying = asyncio.create_task(client.deploy(spec))
            await wait_for(wired.stage_processes, "the stage loads")
            pids = wired.stage_processes()
            commands.lose_established()
            flag.touch()
            deployment = await asyncio.wait_for(deploying, NOTICED_S)
            assert deployment.name == "slow"
            assert wired.stage_processes() == pids
            assert commands.connection_count >= 2
    finally:
        await commands.stop()


async def listening_address(pid: int) -> str:
    import psutil

    def look() -> list[int]:
        connections = psutil.Process(pid).net_connections("tcp")
        return [it.laddr.port for it in connections if it.status == psutil.CONN_LISTEN]

    (port,) = await wait_for(look, "a listening port")
    return f"127.0.0.1:{port}"
