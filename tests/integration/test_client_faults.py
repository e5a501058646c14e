"""What the client makes of stages that are killed, frozen, moved, or cut off by the network.

The transport's keepalive is run in a quarter of its time: 1 s of silence, 1 s for the ping.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from stagekeeper import client as sdk
from stagekeeper.client import Client
from stagekeeper.client.channels import StageCaller
from stagekeeper.client.errors import CONNECTION_LOST, UNREACHABLE
from tests.fakes.stage_server import StageServer
from tests.fakes.supervisor_server import SupervisorServer
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.views import deployment, replica, shard
from tests.harness.keepalive import hasten
from tests.harness.waiting import wait_for

NOTICED_S = 10.0
"""2 s on a machine that has nothing else to do."""


@pytest.fixture(autouse=True)
def hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


async def _start(instance_id: str = "i", port: int = 0):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.fakes.stage_process",
        str(port),
        instance_id,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    return process, url


@pytest.fixture
async def processes():
    """Start stage processes that end with the test."""
    started = []

    async def start(*args, **kwargs):
        process, url = await _start(*args, **kwargs)
        started.append(process)
        return process, url

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def caller():
    caller = StageCaller()
    yield caller
    await caller.close()


@pytest.fixture
async def supervisor():
    supervisor = await SupervisorServer().start()
    yield supervisor
    await supervisor.stop()


async def _failure_of(awaitable) -> sdk.StagekeeperError:
    with pytest.raises(sdk.StagekeeperError) as caught:
        await awaitable
    return caught.value


async def test_stage_killed_in_a_call_is_told_apart_from_one_that_was_not_there(processes, caller):
    process, url = await processes()
    call = asyncio.create_task(caller.call(url, "i", "sleep", (30,), timeout=40))
    assert await caller.call(url, "i", "pid", timeout=10) == process.pid
    process.kill()
    lost = await _failure_of(call)
    assert (lost.reason, lost.never_ran) == (CONNECTION_LOST, False)
    await process.wait()
    for _ in range(3):
        absent = await _failure_of(caller.call(url, "i", "pid", timeout=10))
        assert (absent.reason, absent.never_ran) == (UNREACHABLE, True)
    assert url not in caller.addresses


async def test_stage_that_comes_back_at_the_same_port_is_reached_at_once(processes, caller):  # R34
    process, url = await processes()
    assert await caller.call(url, "", "pid", timeout=10) == process.pid
    process.kill()
    await process.wait()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        absent = await _failure_of(caller.call(url, "", "pid", timeout=10))
        assert absent.reason == UNREACHABLE
        await asyncio.sleep(0.05)
    process, _ = await processes(port=int(url.rpartition(":")[2]))
    started = time.monotonic()
    assert await caller.call(url, "", "pid", timeout=10) == process.pid
    assert time.monotonic() - started < 1


async def test_name_that_does_not_resolve_was_never_sent(caller):
    absent = await _failure_of(caller.call("no-such-host.invalid:1", "", "pid", timeout=20))
    assert absent.never_ran
    assert absent.reason == UNREACHABLE


async def test_frozen_stage_is_noticed_without_the_deadline(processes, caller):
    process, url = await processes()
    call = asyncio.create_task(caller.call(url, "i", "sleep", (60,), timeout=60))
    await caller.call(url, "i", "pid", timeout=10)
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    lost = await _failure_of(call)
    assert lost.reason == CONNECTION_LOST
    assert time.monotonic() - started < NOTICED_S
    process.send_signal(signal.SIGCONT)


async def test_established_flow_that_swallows_packets_is_replaced(processes, caller):  # R33, R35
    process, url = await processes()
    proxy = await TcpProxy(url).start()
    try:
        assert await caller.call(proxy.url, "i", "pid", timeout=10) == process.pid
        proxy.lose_established()
        started = time.monotonic()
        lost = await _failure_of(caller.call(proxy.url, "i", "pid", timeout=30))
        assert lost.reason == CONNECTION_LOST
        assert time.monotonic() - started < NOTICED_S
        assert await caller.call(proxy.url, "i", "pid", timeout=10) == process.pid
        assert proxy.connection_count == 2
    finally:
        await proxy.stop()


async def test_address_that_swallows_connections_is_given_up_and_never_sent(processes, caller):
    _, url = await processes()
    proxy = await TcpProxy(url).start()
    proxy.loses_new = True
    try:
        started = time.monotonic()
        absent = await _failure_of(caller.call(proxy.url, "i", "pid", timeout=30))
        assert (absent.reason, absent.never_ran) == (UNREACHABLE, True)
        assert time.monotonic() - started < 10
    finally:
        await proxy.stop()


async def test_kill_of_one_of_two_replicas_fails_no_call_of_an_idempotent_endpoint(
    processes, supervisor
):  # U5
    first, url_0 = await processes("i0")
    second, url_1 = await processes("i1")
    both = [
        replica(0, shard("i0", url_0, worker_id="w0", idempotent=["sleep", "pid"])),
        replica(1, shard("i1", url_1, worker_id="w1", idempotent=["sleep", "pid"])),
    ]
    supervisor.put(deployment("m", *both))
    async with Client(supervisor.endpoint) as client:
        calls = [asyncio.create_task(client.call("m", "sleep", 1, timeout=30)) for _ in range(20)]
        await wait_for(
            lambda: client.routes.outstanding("i0") + client.routes.outstanding("i1") == 20,
            "all calls are under way",
        )
        await client.call("m", "pid")
        first.kill()
        assert set(await asyncio.gather(*calls)) == {second.pid}
        after = [await client.call("m", "pid", timeout=30) for _ in range(50)]
        assert set(after) == {second.pid}


async def test_kill_fails_a_call_that_must_not_run_twice(processes, supervisor):
    first, url_0 = await processes("i0")
    _, url_1 = await processes("i1")
    supervisor.put(deployment("m", replica(0, shard("i0", url_0)), replica(1, shard("i1", url_1))))
    async with Client(supervisor.endpoint) as client:
        calls = [asyncio.create_task(client.call("m", "sleep", 1, timeout=30)) for _ in range(2)]
        await wait_for(lambda: client.routes.outstanding("i0") == 1, "a call is under way")
        await client.call("m", "pid")
        await client.call("m", "pid")
        first.kill()
        lost, answered = sorted(
            await asyncio.gather(*calls, return_exceptions=True), key=lambda r: isinstance(r, int)
        )
        assert isinstance(lost, sdk.CallLost)
        assert not lost.never_ran
        assert isinstance(answered, int)


async def test_only_replica_dead_and_no_supervisor_ends_with_the_reason(supervisor):
    stage = await StageServer("i0").start()
    supervisor.put(deployment("m", replica(0, shard("i0", stage.url))))
    async with Client(supervisor.endpoint) as client:
        assert await client.synced(10)
        await stage.stop()
        await supervisor.stop()
        with pytest.raises(sdk.StagekeeperError, match="cannot be reached") as caught:
            await client.call("m", "pid", timeout=1)
        assert caught.value.never_ran


async def test_neither_an_idle_nor_a_busy_peer_loses_its_connection(processes):  # R37, in short
    """Pings come each second: a server that minds sends GOAWAY at the third, and one that holds the
    GIL must still answer them."""
    stage = await StageServer("i0", {"pid": _pid}).start()
    process, url = await processes()
    caller = StageCaller()
    try:
        await caller.call(stage.url, "i0", "pid", timeout=10)
        assert await caller.call(url, "i", "hold", (3.5,), timeout=30) == process.pid
        await caller.call(stage.url, "i0", "pid", timeout=10)
        assert len(stage.peers) == 1
    finally:
        await caller.close()
        await stage.stop()


@pytest.mark.soak
@pytest.mark.timeout(700)
async def test_ten_idle_minutes_without_goaway(monkeypatch):  # R37
    monkeypatch.undo()  # with the numbers as they are
    stage = await StageServer("i0", {"pid": _pid}).start()
    caller = StageCaller()
    try:
        await caller.call(stage.url, "i0", "pid", timeout=10)
        await asyncio.sleep(600)
        await caller.call(stage.url, "i0", "pid", timeout=10)
        assert len(stage.peers) == 1
    finally:
        await caller.close()
        await stage.stop()


async def _pid():
    return os.getpid()
