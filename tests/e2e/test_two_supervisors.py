"""Two supervisors of one cluster, as processes: one reigns, the others wait, and models notice
nothing of it.

The stable endpoint is the reigning one's own address, or a TCP proxy in front of all of them.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from stagekeeper.cli.exits import ExitCode
from stagekeeper.core.ids import Epoch
from stagekeeper.runtime.convert import epoch_from_proto, epoch_to_proto
from stagekeeper.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    deployment_service_pb2,
    deployment_service_pb2_grpc,
)
from tests.e2e.specs import chain, echo
from tests.e2e.traffic import traffic
from tests.fakes.hand_worker import channel_to
from tests.fakes.refusals import refused
from tests.fakes.tcp_proxy import NOBODY, TcpProxy
from tests.harness.cluster import HEARTBEAT_S, Cluster
from tests.harness.command_line import own_environment
from tests.harness.processes import Program
from tests.harness.roster import roster_written
from tests.harness.waiting import wait_for

TAKEOVER_S = 30.0
"""A takeover takes two or three seconds; these tests judge whether it comes, on a busy machine."""

NEVER = "--look-s=600"


class Supervisors:
    """Any number of supervisors of one cluster; their logs and states lie in its directory."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: list[Program] = []

    def start(self, name: str, *flags: str, state: str = "") -> Program:
        """Start one; `state` is its own folder unless another one's is named."""
        program = Program(
            name,
            [
                "supervisor",
                f"--state-dir={self.state_dir(state or name)}",
                f"--heartbeat-s={HEARTBEAT_S}",
                "--recovery-window-s=5",
                *(flags if NEVER in flags else (*flags, "--look-s=0.5")),
            ],
            self.cluster.directory / f"{name}.log",
            own_environment(),
        )
        self.started.append(program)
        return program

    def state_dir(self, name: str) -> Path:
        return self.cluster.directory / f"s-{name}"

    def kill(self) -> None:
        for program in self.started:
            program.kill()


@pytest.fixture
async def supervisors(cluster: Cluster) -> AsyncIterator[Supervisors]:
    them = Supervisors(cluster)
    yield them
    them.kill()


@pytest.fixture
async def proxy() -> AsyncIterator[TcpProxy]:
    """The stable endpoint, with nobody behind it yet."""
    async with TcpProxy() as proxy:
        yield proxy


async def reigning(program: Program, *, nth: int = 1) -> tuple[str, int]:
    """Wait until a supervisor has begun its nth reign; return where it serves, and its number."""
    ready = r"^supervisor ready: endpoint=(\S+) .*epoch=(\d+)/"
    found = await program.line(rf"(?s)({ready}.*?){{{nth}}}", within_s=TAKEOVER_S)
    endpoint, number = re.findall(ready, found[0], re.M)[-1]
    return endpoint, int(number)


async def standing_by(program: Program) -> str:
    """Wait until a supervisor waits; return for which epoch."""
    return (await program.line(r"^supervisor standby: endpoint=\S+ epoch=(\S+)$"))[1]


async def test_standby_takes_over_when_its_predecessor_is_killed_and_no_call_fails(
    cluster: Cluster, supervisors: Supervisors
) -> None:
    first = supervisors.start("first", "--endpoint=127.0.0.1:0", state="shared")
    cluster.endpoint, reign = await reigning(first)
    standby = supervisors.start("second", f"--endpoint={cluster.endpoint}", state="shared")
    assert (await standing_by(standby)).startswith(f"{reign}/")
    for worker_id in ("node-1", "node-2"):
        await cluster.start_agent(worker_id)
    async with cluster.client() as client:
        await client.deploy(chain(replicas=2))
        await roster_written(supervisors.state_dir("shared"), 2)
        before = cluster.stage_processes()
        async with traffic(client, "chain", "ask") as calls:
            first.kill()
            await calls.more()

            endpoint, next_reign = await reigning(standby)

            assert endpoint == cluster.endpoint
            assert next_reign > reign
            await cluster.workers_alive(2, client)
            await cluster.all_ready("chain", 2, client)
            await calls.more()
        assert calls.failures == []
        assert cluster.stage_processes() == before
        await client.delete("chain")  # it is obeyed, and knows what was wanted
        await cluster.no_stage_left()


async def test_standby_elsewhere_with_a_store_of_its_own_takes_over_and_no_call_fails(
    cluster: Cluster, supervisors: Supervisors, proxy: TcpProxy
) -> None:
    cluster.endpoint = proxy.url
    first = supervisors.start("first", "--endpoint=127.0.0.1:0", f"--stable-endpoint={proxy.url}")
    endpoint, reign = await reigning(first)
    proxy.move(endpoint)
    standby = supervisors.start(
        "second", "--endpoint=127.0.0.1:0", f"--stable-endpoint={proxy.url}"
    )
    await standing_by(standby)
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(chain())
        before = cluster.stage_processes()
        async with traffic(client, "chain", "ask") as calls:
            first.kill()
            endpoint, next_reign = await reigning(standby)
            proxy.move(endpoint)
            assert next_reign > reign

            # It has nothing of its own, and says so: routes stay until the workers are back.
            await cluster.all_ready("chain", 1, client)
            await wait_for(lambda: _is_complete(client), "the recovery is over")
            await calls.more()
        assert calls.failures == []
        assert cluster.stage_processes() == before


async def _is_complete(client) -> bool:
    return (await client.workers()).complete


async def test_standby_does_not_take_over_from_a_stopped_supervisor(
    supervisors: Supervisors, proxy: TcpProxy
) -> None:
    stable = f"--stable-endpoint={proxy.url}"
    first = supervisors.start("first", "--endpoint=127.0.0.1:0", stable)
    endpoint, _ = await reigning(first)
    proxy.move(endpoint)
    standby = supervisors.start("second", "--endpoint=127.0.0.1:0", stable)
    await standing_by(standby)

    first.send(signal.SIGSTOP)
    await standby.line(r"standing by.*does not answer")
    looks = proxy.connection_count
    await wait_for(lambda: proxy.connection_count >= looks + 3, "it has looked three times more")
    first.send(signal.SIGCONT)
    lives = r"standing by.*lives at"
    await wait_for(lambda: len(re.findall(lives, standby.output)) == 2, "it lives again")

    assert "supervisor ready" not in standby.output
    assert first.is_running
    assert not list(supervisors.state_dir("second").iterdir())


async def _woken_late(
    cluster: Cluster, supervisors: Supervisors, proxy: TcpProxy, *flags: str
) -> tuple[Program, str, Program, Epoch]:
    """Have a supervisor with an agent sleep while another one takes over, and wake it.

    Returns:
        The woken one, its own address, the one that reigns, and the reign of before.
    """
    cluster.endpoint = proxy.url
    stable = f"--stable-endpoint={proxy.url}"
    first = supervisors.start("first", "--endpoint=127.0.0.1:0", stable, *flags)
    endpoint, _ = await reigning(first)
    proxy.move(endpoint)
    second = supervisors.start("second", "--endpoint=127.0.0.1:0", stable)
    await standing_by(second)
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
        reign = epoch_from_proto((await client.workers()).epoch)
    first.send(signal.SIGSTOP)
    await second.line(r"standing by.*does not answer")
    proxy.move(NOBODY, reset_old=True)
    other, _ = await reigning(second)
    proxy.move(other)
    async with cluster.client() as client:
        await cluster.workers_alive(1, client)
        await cluster.all_ready("echo", 1, client)
    first.send(signal.SIGCONT)
    return first, endpoint, second, reign


async def test_woken_supervisor_steps_down_before_the_reign_that_began_meanwhile(
    cluster: Cluster, supervisors: Supervisors, proxy: TcpProxy
) -> None:
    first, _, second, reign = await _woken_late(cluster, supervisors, proxy)
    stages = cluster.stage_processes()

    over = await first.line(r"^supervisor stepped-down: endpoint=(\S+) epoch=(\d+)/")

    assert over[1] == proxy.url
    assert int(over[2]) == reign.number
    assert int((await standing_by(first)).partition("/")[0]) > reign.number
    assert first.is_running
    async with cluster.client() as client:
        assert await client.call("echo", "echo", "x") == "x"
        assert (await client.workers()).epoch.number > reign.number
    assert cluster.stage_processes() == stages

    # And the other way round: they take turns.
    second.kill()
    proxy.move(NOBODY, reset_old=True)
    endpoint, number = await reigning(first, nth=2)
    proxy.move(endpoint)
    assert number > reign.number + 1
    async with cluster.client() as client:
        await cluster.workers_alive(1, client)
        await cluster.all_ready("echo", 1, client)
    assert cluster.stage_processes() == stages


async def test_commands_of_a_woken_supervisor_are_refused_by_agents(
    cluster: Cluster, supervisors: Supervisors, proxy: TcpProxy
) -> None:
    # It looks at the endpoint so seldom that it takes itself for the one that reigns.
    first, own, _, reign = await _woken_late(cluster, supervisors, proxy, NEVER)
    stages = cluster.stage_processes()
    async with cluster.client() as client:
        (worker,) = (await client.workers()).workers
    async with channel_to(worker.agent_address) as channel:
        command = agent_service_pb2.StopStageRequest(
            header=agent_service_pb2.CommandHeader(
                cluster="default", epoch=epoch_to_proto(reign), incarnation=worker.incarnation
            ),
            deployment="echo",
            reason="deleted",
        )
        command.up_to_generation.epoch.CopyFrom(epoch_to_proto(reign))
        command.up_to_generation.n = 1_000
        async with refused(grpc.StatusCode.ABORTED, "STALE_EPOCH"):
            await agent_service_pb2_grpc.AgentServiceStub(channel).StopStage(command, timeout=10)

    cluster.endpoint = own
    async with cluster.client() as client:
        await client.delete("echo", wait=False)

    await first.line(r"a stop did not succeed.*obeys reign")
    assert cluster.stage_processes() == stages


async def test_agent_moves_to_the_higher_reign_that_the_endpoint_names(
    cluster: Cluster, supervisors: Supervisors, proxy: TcpProxy
) -> None:
    """Its own supervisor lives and answers, and would go on doing so."""
    cluster.endpoint = proxy.url
    first = supervisors.start(
        "first", "--endpoint=127.0.0.1:0", f"--stable-endpoint={proxy.url}", NEVER
    )
    endpoint, _ = await reigning(first)
    proxy.move(endpoint)
    second = supervisors.start("second", "--endpoint=127.0.0.1:0", f"--stable-endpoint={proxy.url}")
    await standing_by(second)
    agent = await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
    proxy.move(NOBODY)  # flows of now stay: nobody is cut off
    endpoint, number = await reigning(second)
    proxy.move(endpoint)

    await agent.line(r"the endpoint names a higher reign")
    await agent.line(rf"registered .*epoch={number}/")

    assert first.is_running
    assert "stepped-down" not in first.output
    async with cluster.client() as client:
        await cluster.all_ready("echo", 1, client)


async def test_of_two_standbys_one_takes_over_and_the_other_waits_on(
    cluster: Cluster, supervisors: Supervisors
) -> None:
    running = supervisors.start("first", "--endpoint=127.0.0.1:0", state="shared")
    cluster.endpoint, number = await reigning(running)
    endpoint = f"--endpoint={cluster.endpoint}"
    waiting = [supervisors.start(name, endpoint, state="shared") for name in ("second", "third")]
    for standby in waiting:
        await standing_by(standby)

    while waiting:
        running.kill()
        await wait_for(
            lambda: any("supervisor ready" in it.output for it in waiting),
            "one of them reigns",
            within_s=TAKEOVER_S,
        )
        (running,) = [it for it in waiting if "supervisor ready" in it.output]
        waiting.remove(running)
        _, next_number = await reigning(running)
        assert next_number > number
        number = next_number
        # It still waits, for the new reign now.
        for standby in waiting:
            await standby.line(rf"standing by.*epoch {number}/")
            assert standby.is_running


async def test_reign_that_loses_its_store_steps_down_without_another_word(
    cluster: Cluster, supervisors: Supervisors, proxy: TcpProxy
) -> None:
    """Two hosts that share a disk: the lock of a host that sleeps is gone, its store is not."""
    cluster.endpoint = proxy.url
    stable = f"--stable-endpoint={proxy.url}"
    first = supervisors.start("first", "--endpoint=127.0.0.1:0", stable, NEVER, state="shared")
    endpoint, reign = await reigning(first)
    proxy.move(endpoint)
    second = supervisors.start("second", "--endpoint=127.0.0.1:0", stable, state="shared")
    await standing_by(second)
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
    stages = cluster.stage_processes()
    first.send(signal.SIGSTOP)
    os.unlink(supervisors.state_dir("shared") / "supervisor.lock")
    proxy.move(NOBODY, reset_old=True)
    new_endpoint, new_reign = await reigning(second)
    proxy.move(new_endpoint)
    assert new_reign > reign
    async with cluster.client() as client:
        await cluster.all_ready("echo", 1, client)

    first.send(signal.SIGCONT)
    async with (
        channel_to(endpoint) as channel,
        refused(grpc.StatusCode.UNAVAILABLE, "DRAINING") as details,
    ):
        await deployment_service_pb2_grpc.DeploymentServiceStub(channel).DeleteDeployment(
            deployment_service_pb2.DeleteDeploymentRequest(name="echo"), timeout=20
        )
    assert "another one took over" in details[0].message

    await first.line(r"^supervisor stepped-down: ")
    assert (await standing_by(first)).startswith(f"{new_reign}/")
    async with cluster.client() as client:
        await cluster.all_ready("echo", 1, client)
    assert cluster.stage_processes() == stages


async def test_recovery_R13_supervisor_of_another_cluster_is_refused_at_the_endpoint(
    cluster: Cluster, supervisors: Supervisors
) -> None:
    first = supervisors.start("first", "--endpoint=127.0.0.1:0")
    cluster.endpoint, reign = await reigning(first)
    agent = await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
        stages = cluster.stage_processes()

        other = supervisors.start("other", "--cluster=other", f"--endpoint={cluster.endpoint}")

        assert await other.ended() == ExitCode.FAILED
        assert "cluster, 'default'" in other.output
        assert "--cluster" in other.output
        assert agent.is_running
        assert (await client.workers()).epoch.number == reign
        assert "no session" not in agent.output
    assert cluster.stage_processes() == stages


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_standby_ends_when_it_is_told_to_and_leaves_nothing(
    supervisors: Supervisors, number: signal.Signals
) -> None:
    first = supervisors.start("first", "--endpoint=127.0.0.1:0")
    endpoint, _ = await reigning(first)
    standby = supervisors.start("second", f"--endpoint={endpoint}")
    await standing_by(standby)

    standby.send(number)

    assert await standby.ended() == ExitCode.DONE
    assert not list(supervisors.state_dir("second").iterdir())
    assert first.is_running


async def test_supervisor_that_may_not_wait_ends_with_the_reason(supervisors: Supervisors) -> None:
    first = supervisors.start("first", "--endpoint=127.0.0.1:0")
    endpoint, _ = await reigning(first)

    second = supervisors.start("second", f"--endpoint={endpoint}", "--no-standby")

    assert await second.ended() == ExitCode.FAILED
    assert f"lives at {endpoint}: end that one first" in second.output
