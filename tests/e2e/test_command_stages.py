"""Programs that are not ours as stages of a whole cluster: planned, started, watched, stopped."""

from __future__ import annotations

import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.client import DeployFailed
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import Spec
from tests.e2e.startups import patience_s, processes_of
from tests.harness.cluster import Cluster
from tests.harness.command_line import command_line
from tests.harness.ports import ports_in_a_row
from tests.harness.waiting import wait_for

PROGRAMS = Path(__file__).parent.parent / "programs"
GIB = 2**30


def program(name: str, *args: str, **stage: Any) -> dict[str, Any]:
    return {"name": name, "command": [sys.executable, "-u", *args], **stage}


def served(**stage: Any) -> Spec:
    """One HTTP server that ignores SIGTERM, has orphans of its own, and tells its arguments."""
    path = str(PROGRAMS / "stubborn.py")
    one = program(
        "llm",
        path,
        "{host}",
        "{port:http}",
        ports=["http"],
        env={"SHARE": "{utilization} {memory_bytes}"},
        ready={"http": "/metrics"},
        canary={"http": "/v1/completions", "body": {"prompt": 1}, "contains": "Paris"},
        devices=[0],
        memory={"utilization": 0.25},
        stop_budget_s=1.0,
        **stage,
    )
    return {"name": "web", "stages": [one]}


def own_ports() -> str:
    """A flag of an agent: agents of other tests have other lock folders, and the same host."""
    ports = ports_in_a_row(8)
    return f"--ports={ports[0]}-{ports[-1]}"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


async def test_a_program_is_planned_started_found_adopted_and_stopped(cluster: Cluster) -> None:
    """startup-38, startup-24, startup-31, recovery-U13"""
    await cluster.start_supervisor()
    await cluster.start_agent("node-1", own_ports(), devices=["cpu:0=1GiB"])
    async with cluster.client() as client:
        (planned,) = (await client.plan(served())).commands
        assert planned.argv[1:] == ["-u", planned.argv[2], "127.0.0.1", "<port:http>"]

        await client.deploy(served(), timeout=60)
        (shard,) = (await client.get("web")).replicas[0].shards
        (http,) = [it for it in shard.record.addresses if it.name == "http"]
        assert http.protocol == types_pb2.ADDRESS_PROTOCOL_HTTP
        assert "running" in get(http.url)
        log = await command_line("logs", "web", f"--endpoint={cluster.endpoint}")
        # What was planned and reserved is what the program was told.
        assert f"env 0.25 {GIB // 4}" in log.out
        assert http.url.endswith(log.out.split("'")[-2])
        described = await command_line("describe", "web", f"--endpoint={cluster.endpoint}")
        assert http.url in described.out and "{port:http}" in described.out

        cluster.agents["node-1"].kill()
        await cluster.start_agent("node-1", own_ports(), devices=["cpu:0=1GiB"])
        assert "running" in get(http.url)  # the program went on, and its port is still leased
        await client.deploy({**served(), "name": "other"}, timeout=60)
        (other,) = (await client.get("other")).replicas[0].shards
        assert {it.url for it in other.record.addresses}.isdisjoint({http.url})

        await client.delete("other")
        await client.delete("web")
        await wait_for(lambda: not processes_of(cluster), "nothing is left", within_s=patience_s(5))


async def test_a_program_that_ends_is_a_failure_with_its_code_and_its_last_lines(
    cluster: Cluster,
) -> None:
    """recovery-U14, startup-12, startup-14, startup-15, startup-23"""
    await cluster.start_supervisor()
    await cluster.start_agent("node-1", own_ports(), "--allow", f"command:{sys.executable}")
    code = "import sys; print('no weights at /models'); sys.exit(3)"
    broken = {"name": "bad", "stages": [program("one", "-c", code, ready={"log": "up"})]}
    async with cluster.client() as client:
        with pytest.raises(DeployFailed, match="exited with code 3, unasked"):
            await client.deploy(broken, timeout=60)
        with pytest.raises(DeployFailed, match="command:/bin/true"):
            await client.deploy(
                {
                    "name": "no",
                    "stages": [{"name": "s", "command": ["/bin/true"], "ready": {"log": "x"}}],
                },
                timeout=60,
            )

        slow = served(start_timeout_s=3.0)
        slow["stages"][0]["ready"] = {"log": "never said"}
        with pytest.raises(DeployFailed, match="start_timeout_s"):
            await client.deploy({**slow, "name": "slow"}, timeout=60)
        assert not orphans(cluster)  # before the error is returned

        await client.deploy(served(), timeout=60)
        (shard,) = (await client.get("web")).replicas[0].shards
        children = Path(f"/proc/{shard.record.pid}/task/{shard.record.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)

        async def has_failed() -> types_pb2.ShardRecord | None:
            (replica,) = (await client.get("web")).replicas
            record = replica.shards[0].record
            return record if record.state == types_pb2.SHARD_STATE_FAILED else None

        record = await wait_for(has_failed, "the end of the program is a failure")
        assert "SIGKILL" in record.state_reason
        found = {it.origin.deployment: it for it in await client.failures()}
        assert found["web"].exit.signal == signal.SIGKILL
        assert "was ended by SIGKILL, unasked" in found["web"].last_log_lines[-1]
        assert found["bad"].exit.code == 3
        assert "no weights at /models" in found["bad"].last_log_lines
        await wait_for(lambda: not orphans(cluster), "its orphans are gone too")


async def test_shards_of_a_program_meet_at_the_leaders_port(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    ports = ports_in_a_row(8)
    for node, first in (("node-1", ports[0]), ("node-2", ports[4])):
        await cluster.start_agent(node, f"--ports={first}-{first + 3}", devices=[])
    meet = program(
        "gang",
        str(PROGRAMS / "rendezvous.py"),
        "{shard_index}",
        "{shard_count}",
        "{leader_host}",
        "{leader_port:rdv}",
        "{port:http}",
        ports=["http", "rdv"],
        ready={"http": "/"},
        shard_count=2,
    )
    spec = {"name": "gang", "stages": [meet]}
    async with cluster.client() as client:
        commands = (await client.plan(spec)).commands
        assert [(it.shard_index, it.argv[3]) for it in commands] == [(0, "0"), (1, "1")]
        await client.deploy(spec, timeout=60)
        (replica,) = (await client.get("gang")).replicas
        shards = {it.record.shard_index: it.record for it in replica.shards}
        (url,) = [it.url for it in shards[0].addresses if it.name == "http"]
        assert get(url) == "1 of 2 met"
        assert [it.name for it in shards[1].addresses] == ["stage"]
        await client.delete("gang")
        await cluster.no_stage_left()


async def test_ports_that_are_too_few_are_refused_before_anything_starts(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    (port,) = ports_in_a_row(1)
    await cluster.start_agent("node-1", f"--ports={port}-{port}")
    spec = served()
    spec["stages"][0]["ports"] = ["http", "more"]
    spec["stages"][0]["env"] = {"A": "{port:more}"}
    async with cluster.client() as client:
        with pytest.raises(DeployFailed, match=f"no port is free for 'more'.*{port}-{port}"):
            await client.deploy(spec, timeout=60)
    assert processes_of(cluster) == {}


def orphans(cluster: Cluster) -> list[str]:
    """The orphans of `stubborn.py` that live; only their command line says whose they are."""
    return [command for command in processes_of(cluster).values() if "/orphan" in command]
