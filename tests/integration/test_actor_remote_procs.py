"""Processes on hosts of a cluster, from their owner's side: found, started, held, told, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from stagekeeper.actor.cluster_hosts import AgentHost, hosts_of
from stagekeeper.actor.failure import ExitInfo
from stagekeeper.actor.owning import remote_procs
from stagekeeper.actor.owning.proc_places import ProcFailed
from stagekeeper.actor.owning.remote_procs import RemoteProc, RemoteProcSource
from stagekeeper.client import NotFound, Unavailable
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.host.process import boot_id
from stagekeeper.runtime.errors import abort_refused
from stagekeeper.v1 import agent_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.agent_service_pb2_grpc import (
    AgentServiceServicer,
    add_AgentServiceServicer_to_server,
)
from tests.fakes.agents import agent_in
from tests.fakes.hand_worker import HandWorker
from tests.fakes.tcp_proxy import NOBODY, TcpProxy
from tests.harness.waiting import wait_for

LONG_LEASE_S = 600.0


def source(
    host: AgentHost, *, count: int = 4, lease_s: float = LONG_LEASE_S, what: str = ""
) -> RemoteProcSource:
    program = cast(Any, SimpleNamespace(token="secret", lease_s=lease_s))
    return RemoteProcSource(program, [host], count, {"STAND_IN": what})


async def started(of: RemoteProcSource, index: int = 0) -> RemoteProc:
    return await of.start(index, str(uuid.uuid4()), f"workers[{index}]")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_owner_holds_processes_over_broken_connections_and_hears_of_each_end(overseer, home):
    async with agent_in(home, proc_module="actor_stand_in") as agent, TcpProxy() as proxy:
        proxy.move(agent.address)
        host = AgentHost("w", proxy.url, "default")
        procs = source(host)
        killed, asked, dropped = [await started(procs, index) for index in range(3)]
        assert killed.place.boot_id == boot_id() and lives(killed.place.pid)
        assert len({it.place.address for it in (killed, asked, dropped)}) == 3

        before = proxy.connection_count
        proxy.move(NOBODY, reset_old=True)
        os.kill(killed.place.pid, signal.SIGKILL)
        await wait_for(lambda: proxy.connection_count > before, "the agent is dialled in vain")
        before = proxy.connection_count
        proxy.move(agent.address)
        end = await killed.ended()
        assert end.exit == ExitInfo(signal=9) and end.detected_by == "agent"
        assert proxy.connection_count > before and "allow" in end.last_log_lines[0]

        assert await asked.end(30.0), "it is let to end by itself"
        # Without its code, when its holder was just dialling anew.
        ends = (ExitInfo(code=0, asked=True), ExitInfo(asked=True))
        assert (await asked.ended()).exit in ends
        assert await asked.end(30.0), "and may be asked again"
        assert lives(dropped.place.pid), "nobody else was meant"
        assert not await dropped.end(0.0) and not lives(dropped.place.pid)

        refusing = source(host, what="refuses")
        with pytest.raises(ProcFailed) as caught:
            await started(refusing)
        assert "it does not want to" in caught.value.failure.message
        assert caught.value.failure.last_log_lines[-1] == "no, never"
        of_another = source(AgentHost("w", proxy.url, "another"))
        with pytest.raises(ProcFailed, match="another"):
            await started(of_another)
        for it in (procs, refusing, of_another):
            await it.close()


async def test_process_whose_agent_is_out_of_reach_for_the_lease_is_given_up_at_both_ends(
    overseer, home
):
    async with agent_in(home, proc_module="actor_stand_in") as agent, TcpProxy() as proxy:
        proxy.move(agent.address)
        procs = source(AgentHost("w", proxy.url, "default"), lease_s=0.3)
        proc = await started(procs)
        proxy.move(NOBODY, reset_old=True)
        end = await proc.ended()
        assert end.exit is None and end.detected_by == "lease"
        assert not await proc.end(1.0), "that it ended in order, nobody knows"
        await wait_for(lambda: not lives(proc.place.pid), "its agent ends it")
        await procs.close()


class ScriptedAgent(AgentServiceServicer):
    """Says a process is up, on each stream, and then what the script has for that stream."""

    def __init__(self, *script: Callable[[Any], Awaitable[Any]]) -> None:
        self.asked: list[pb.SpawnProcsRequest] = []
        self._script = list(script)

    async def SpawnProcs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        if request.ends:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the kernel holds it")
        step = self._script.pop(0)
        if step is not is_gone:
            (instance_id,) = request.instance_ids
            started = pb.ProcStarted(instance_id=instance_id, address="h:1", incarnation=5)
            yield pb.SpawnProcsResponse(started=started)
        if (ended := await step(context)) is not None:
            yield ended


@asynccontextmanager
async def scripted(
    *script: Callable[[Any], Awaitable[Any]], lease_s: float = LONG_LEASE_S
) -> AsyncIterator[tuple[ScriptedAgent, RemoteProc]]:
    agent = ScriptedAgent(*script)  # type: ignore[abstract]
    server = grpc.aio.server()
    add_AgentServiceServicer_to_server(agent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    procs = source(AgentHost("w", f"127.0.0.1:{port}", "default"), lease_s=lease_s)
    try:
        yield agent, await started(procs)
    finally:
        await procs.close()
        await server.stop(0)


async def breaks(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def breaks_after_the_lease(context: Any) -> None:
    await asyncio.sleep(0.3)
    await breaks(context)


async def stays(context: Any) -> None:
    await asyncio.sleep(600)


async def is_gone(context: Any) -> None:
    refused = Refused(Reason.STALE_INCARNATION, "it is gone, and they are with it")
    await abort_refused(context, refused)


async def tells_the_end(context: Any) -> pb.SpawnProcsResponse:
    return pb.SpawnProcsResponse(ended=pb.ProcEnded(exit=types_pb2.ExitInfo(code=4)))


async def test_agents_next_life_is_not_asked_for_what_an_earlier_one_had_started():
    async with scripted(breaks, is_gone) as (agent, proc):
        end = await proc.ended()

    assert [it.incarnation for it in agent.asked] == [0, 5]
    assert (end.exit, end.detected_by) == (None, "agent") and "it is gone" in end.message


async def test_each_time_that_a_good_stream_breaks_the_lease_begins_anew(monkeypatch):
    monkeypatch.setattr(remote_procs, "_DIAL_PATIENCE_S", 0.2)
    async with scripted(
        breaks, breaks_after_the_lease, breaks_after_the_lease, tells_the_end, lease_s=0.2
    ) as (agent, proc):
        assert (await proc.ended()).exit == ExitInfo(code=4)
        assert len(agent.asked) == 4


async def test_process_that_its_agent_cannot_end_is_held_no_more():
    async with scripted(stays) as (agent, proc):
        assert not await proc.end(1.0)
        assert [it.ends for it in agent.asked] == [False, True]
        assert (await proc.ended()).detected_by == "owner"


async def test_hosts_of_a_cluster_are_the_workers_that_are_heard_of(them, endpoint):
    for name in ("b", "a"):
        await HandWorker(endpoint, name, agent_address=f"127.0.0.1:{ord(name)}").register()

    assert await hosts_of(endpoint) == [
        AgentHost("a", "127.0.0.1:97", "default", "a"),
        AgentHost("b", "127.0.0.1:98", "default", "b"),
    ]
    assert [it.name for it in await hosts_of(endpoint, workers=["b"])] == ["b"]
    assert [it.name for it in await hosts_of(endpoint, count=1)] == ["a"]
    with pytest.raises(NotFound, match=r"no worker c at .*there are a, b"):
        await hosts_of(endpoint, workers=["a", "c"])
    with pytest.raises(Unavailable, match=r"3 hosts are wanted, and .* has 2"):
        await hosts_of(endpoint, count=3)
