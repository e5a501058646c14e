"""`describe` and `events -f` against real processes, over a restart of the supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stagekeeper.cli.exits import ExitCode
from tests.e2e.specs import chain
from tests.harness.cluster import Cluster
from tests.harness.command_line import command_line, own_environment
from tests.harness.waiting import wait_for


class Follower:
    """A `stagekeeper events -f` that runs; `out` and `err` are its lines so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = asyncio.gather(
            self._read(process.stdout, self.out), self._read(process.stderr, self.err)
        )

    async def _read(self, stream: asyncio.StreamReader, lines: list[str]) -> None:
        async for line in stream:  # each is looked at as it comes
            lines.append(line.decode().rstrip("\n"))  # noqa: PERF401

    async def has(self, kind: str, count: int = 1) -> None:
        def look() -> bool:
            return sum(f"  {kind} " in line or f'"{kind}"' in line for line in self.out) >= count

        await wait_for(look, f"{count} × {kind} was told")

    async def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        code = await asyncio.wait_for(self.process.wait(), 30)
        await self._reading
        return code


@asynccontextmanager
async def following(cluster: Cluster, *argv: str) -> AsyncIterator[Follower]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stagekeeper.cli",
        "events",
        "-f",
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**own_environment(), "STAGEKEEPER_ENDPOINT": cluster.endpoint},
    )
    try:
        yield Follower(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def serving(cluster: Cluster) -> AsyncIterator[Cluster]:
    """One supervisor, one agent, and a chain that is READY."""
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(chain())
    yield cluster


async def test_events_are_followed_over_a_restart_of_the_supervisor(serving: Cluster) -> None:
    async with following(serving) as everything, following(serving, "chain", "-o", "json") as one:
        await everything.has("DEPLOYMENT_CHANGED", 2)
        await one.has("DEPLOYMENT_CHANGED", 2)

        assert serving.supervisor is not None
        serving.supervisor.kill()
        await wait_for(lambda: "-- supervisor away --" in everything.err, "its absence is said")
        await serving.start_supervisor()
        await everything.has("HOLD_ENDED")
        async with serving.client() as client:
            deployment = await client.get("chain")
        os.kill(deployment.replicas[0].shards[1].record.pid, signal.SIGKILL)
        await everything.has("FAILURE_RECORDED")
        await one.has("FAILURE_RECORDED")

        assert await everything.interrupt() == ExitCode.INTERRUPTED
        assert await one.interrupt() == ExitCode.INTERRUPTED

    for follower in (everything, one):
        assert follower.err.count("-- supervisor away --") == 1
        assert follower.err.count("-- another reign: earlier events are gone --") == 1
        assert not [line for line in follower.err if "Traceback" in line]
    kinds = [re.split(r"\s+", line)[2] for line in everything.out]
    assert kinds.count("REIGN_BEGAN") == 2
    assert kinds.count("FAILURE_RECORDED") == 1
    told = [json.loads(line) for line in one.out]
    assert {event["deployment"] for event in told} == {"chain"}
    assert len({(event["time"], event["message"]) for event in told}) == len(told), "each once"
    (failure,) = [event for event in told if event["kind"] == "FAILURE_RECORDED"]
    assert failure["warning"]
    assert failure["subject"] == "chain/0/1"


async def test_describe_says_why_since_when_and_what_next(standing: Cluster) -> None:
    async with standing.client() as client:
        await client.deploy(chain())
    well = await command_line("describe", "chain", endpoint=standing.endpoint)
    assert well.code == ExitCode.DONE, well.err
    assert re.search(r"^chain  READY  since \d\d:\d\d:\d\d", well.out)
    assert "why:" not in well.out
    assert "START_BEGAN" in well.out

    async with standing.client() as client:
        deployment = await client.get("chain")
    os.kill(deployment.replicas[0].shards[1].record.pid, signal.SIGKILL)

    async def is_dead() -> str | None:
        told = await command_line("describe", "chain", endpoint=standing.endpoint)
        return told.out if "FAILED" in told.out else None

    dead = await wait_for(is_dead, "the failure is described")
    assert re.search(r"^chain  FAILED  since", dead)
    assert "next: deploy again" in dead
    assert "last failure: back on worker node-1 at" in dead
    assert re.search(r"\| .*READY at", dead), "the end of its log"

    as_json = await command_line("describe", "chain", "-o", "json", endpoint=standing.endpoint)
    document = json.loads(as_json.out)
    assert document["deployment"]["state"] == "FAILED"
    assert document["deployment"]["state_time"]
    assert document["failures"][0]["exit_signal"] == signal.SIGKILL


async def test_describe_of_a_silent_worker_and_of_a_new_reign(cluster: Cluster) -> None:
    await cluster.start_supervisor("--recovery-window-s=60", "--lease-s=20")
    agent = await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(chain())
    agent.kill()

    async def says(*words: str) -> str | None:
        told = (await command_line("describe", "chain", endpoint=cluster.endpoint)).out
        flat = " ".join(told.split())
        return told if all(word in flat for word in words) else None

    await wait_for(
        lambda: says("READY since", "worker node-1 is late", "(in ", "node-1 SUSPECT"),
        "the silence is described",
    )
    assert cluster.supervisor is not None
    cluster.supervisor.kill()
    await cluster.start_supervisor("--recovery-window-s=60", "--lease-s=20")
    told = await says("PENDING", "waiting for workers", "then it is judged without them (in ")
    assert told, "what is awaited, and for how long"
    assert "still awaited (node-1)" in " ".join(told.split())
    await cluster.start_agent()
    back = await wait_for(lambda: says("chain READY since before this supervisor began"), "back")
    assert "why:" not in back


async def test_what_does_not_exist_and_who_is_not_there(standing: Cluster) -> None:
    end = standing.endpoint
    unknown = await command_line("describe", "nothing", endpoint=end)
    assert unknown.code == ExitCode.FAILED
    assert "`stagekeeper status` lists what there is" in unknown.err

    none = await command_line("events", "nothing", endpoint=end)
    assert (none.code, none.out) == (ExitCode.FAILED, "")
    assert "nothing is known of 'nothing'" in none.err
    wrong = await command_line("events", "no such/name", endpoint=end)
    assert wrong.code == ExitCode.FAILED
    last = await command_line("events", "--last", "1", endpoint=end)
    assert len(last.out.splitlines()) == 1

    verbs = (("describe", "chain"), ("events",), ("events", "-f"))
    for away in await asyncio.gather(*(command_line(*it, endpoint="127.0.0.1:1") for it in verbs)):
        assert away.code == ExitCode.UNREACHABLE, away.err
