"""An agent's processes for actors: started, joined, held, ended; and nothing is left of them."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from stagekeeper.core.errors import Reason
from stagekeeper.host.process import boot_id
from stagekeeper.v1 import agent_service_pb2 as pb
from tests.fakes.agents import AgentHome, AgentProcess, agent_in
from tests.fakes.overseer import Overseer
from tests.harness.verdicts import Verdict, verdict_of
from tests.harness.waiting import wait_for

STAND_IN = "actor_stand_in"
TIMEOUT_S = 60.0
LONG_LEASE_S = 600.0


def mint() -> str:
    return uuid.uuid4().hex


def request(*instance_ids: str, procs_id: str = "set", **fields: Any) -> pb.SpawnProcsRequest:
    sound = {"cluster": "default", "token": "secret", "lease_s": LONG_LEASE_S, "name": "workers"}
    return pb.SpawnProcsRequest(procs_id=procs_id, instance_ids=instance_ids, **{**sound, **fields})


class Stream:
    """One open stream, read as the test asks."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.verdict: Verdict | None = None

    async def next(self) -> Any:
        """Return the next `started` or `ended`; None at the end, or when it was refused."""
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self.verdict = verdict_of(error, "a stream")
            return None
        return None if event is grpc.aio.EOF else getattr(event, event.WhichOneof("event"))

    async def some(self, count: int) -> dict[str, Any]:
        """Return the next events by their instance; the last of each counts."""
        return {event.instance_id: event for event in [await self.next() for _ in range(count)]}

    def leave(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def stream(overseer: Overseer, wanted: pb.SpawnProcsRequest) -> AsyncIterator[Stream]:
    call = overseer.agent.SpawnProcs(wanted, timeout=TIMEOUT_S)
    try:
        yield Stream(call)
    finally:
        call.cancel()


async def refusal(overseer: Overseer, wanted: pb.SpawnProcsRequest) -> str:
    async with stream(overseer, wanted) as refused:
        assert await refused.next() is None
        return refused.verdict.reason if refused.verdict else ""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def log_of(home: AgentHome, instance_id: str) -> str:
    return (home.path / "s/agents/w/procs" / instance_id / "proc.log").read_text()


async def grandchild_of(home: AgentHome, instance_id: str) -> int:
    (line,) = [it for it in log_of(home, instance_id).splitlines() if "grandchild" in it]
    return int(line.split()[1])


async def test_processes_are_started_once_told_again_replaced_and_ended(overseer, home):
    a, b, c, d = mint(), mint(), mint(), mint()
    environment = {"STAND_IN": "grandchild", "MINE": "1"}
    async with agent_in(home, proc_module=STAND_IN, allow=("shop.*",)) as agent:
        async with (
            stream(overseer, request(a, b, environment=environment)) as first,
            stream(overseer, request(b, a, environment=environment)) as repeat,
        ):
            up = await first.some(2)
            assert await repeat.some(2) == up, "a repeat starts nothing and is told of all"
            assert {it.boot_id for it in up.values()} == {boot_id()}
            assert {it.incarnation for it in up.values()} == {agent.identity.incarnation}
            host = agent.address.rpartition(":")[0]
            assert all(it.address.rpartition(":")[0] == host for it in up.values())
            environ = Path(f"/proc/{up[a].pid}/environ").read_bytes().split(b"\0")
            assert {b"MINE=1", b"CUDA_VISIBLE_DEVICES="} <= set(environ)
            assert b"secret" not in b"".join(environ)
            assert '["shop.*"]' in log_of(home, a)

            grandchild = await grandchild_of(home, a)
            os.kill(up[a].pid, signal.SIGKILL)
            for told in (first, repeat):
                end = await told.next()
                assert (end.instance_id, end.exit.signal, end.exit.asked) == (a, 9, False)
                assert "grandchild" in end.last_log_lines[0]
            await wait_for(lambda: not lives(grandchild), "what it started is gone")

            leaving = {"STAND_IN": "exits"}
            async with stream(overseer, request(b, c, environment=leaving)) as second:
                seen = await second.some(2)
                assert seen[b] == up[b]
                end = await second.next()
                assert (end.instance_id, end.exit.code, end.exit.asked) == (c, 3, False)
                assert end.last_log_lines[-1] == "I leave"
            refusing = {"STAND_IN": "refuses"}
            async with stream(overseer, request(a, d, environment=refusing)) as third:
                seen = await third.some(1)
                while d not in seen:  # what is known of the old one may be forgotten by now
                    seen |= await third.some(1)
                assert type(seen[a]) is pb.ProcEnded, "an id is used once"
                assert "it does not want to" in seen[d].reason
                assert seen[d].last_log_lines[-1] == "no, never"
            assert lives(up[b].pid)

            grandchild = await grandchild_of(home, b)
            async with stream(overseer, request(ends=True)) as ending:
                assert await ending.next() is None and ending.verdict is None
            assert not lives(up[b].pid) and not lives(grandchild)
            end = await first.next()
            assert (end.instance_id, end.exit.signal, end.exit.asked) == (b, 9, True)
            assert await first.next() is None and first.verdict is None
        assert await refusal(overseer, request(b)) == Reason.PROCS_UNKNOWN
        assert await refusal(overseer, request(ends=True)) == "", "an end may be repeated"
        assert not list((home.path / "s/agents/w/procs").iterdir())


async def test_processes_go_when_nobody_holds_them_for_their_lease(overseer, home):
    a = mint()
    async with agent_in(home, proc_module=STAND_IN):
        short = request(a, lease_s=0.2, environment={"STAND_IN": "grandchild"})
        async with stream(overseer, short) as first:
            up = await first.next()
            grandchild = await grandchild_of(home, a)
            assert await refusal(overseer, request(a, token="other")) == Reason.NOT_ALLOWED
            assert await refusal(overseer, request(a, procs_id="another")) == Reason.BAD_FIELD
            assert lives(up.pid)
        await wait_for(lambda: not lives(up.pid), "the lease is over")
        await wait_for(lambda: not lives(grandchild), "what it started is gone")

        async def is_forgotten() -> bool:
            return await refusal(overseer, request(mint())) == Reason.PROCS_UNKNOWN

        await wait_for(is_forgotten, "the set is over")
        assert await refusal(overseer, request(a, cluster="x")) == Reason.WRONG_CLUSTER
        unsound = request("../x", lease_s=-1.0, environment={"PYTHONPATH": "x"})
        async with stream(overseer, unsound) as wrong:
            assert await wrong.next() is None and wrong.verdict is not None
            assert set(wrong.verdict.paths) == {
                "instance_ids[0]",
                "lease_s",
                "environment[PYTHONPATH]",
            }


async def test_agent_that_allows_nothing_starts_no_actors(overseer, home):
    async with agent_in(home, allow=()):
        assert await refusal(overseer, request(mint())) == Reason.NOT_ALLOWED


async def test_processes_end_with_their_agent_in_order_or_by_the_kernel(overseer, home):
    a, b = mint(), mint()
    agent = await AgentProcess.start(home, proc_module=STAND_IN)
    await overseer.hears(lambda it: it.agent_address, "it registers")
    asked = request(a, environment={"STAND_IN": "grandchild"})
    async with stream(overseer, asked) as first:
        up = await first.next()
        grandchild = await grandchild_of(home, a)
        agent.process.terminate()
        end = await first.next()
        assert (end.exit.code, end.exit.asked) == (0, True), "it was let to end by itself"
        assert await first.next() is None
        assert first.verdict is not None and first.verdict.reason == Reason.DRAINING
    assert await agent.ended() == 0
    assert not lives(up.pid) and not lives(grandchild)

    agent = await AgentProcess.start(home, proc_module=STAND_IN)
    await overseer.hears(lambda it: it.incarnation == 2, "its next life registers")
    async with stream(overseer, request(b, environment={"STAND_IN": "grandchild"})) as second:
        up = await second.next()
        grandchild = await grandchild_of(home, b)
        await agent.kill()
        await wait_for(lambda: not lives(up.pid), "the process dies with its agent", within_s=5)
        await wait_for(lambda: not lives(grandchild), "so does what it had started", within_s=5)
    agent = await AgentProcess.start(home, proc_module=STAND_IN)
    await overseer.hears(lambda it: it.incarnation == 3, "its next life registers")
    assert not list((home.path / "s/agents/w/procs").iterdir())
    stale = request(b, incarnation=2)
    assert await refusal(overseer, stale) == Reason.STALE_INCARNATION
    await agent.end()
