"""The agent's session over real gRPC and a bad network, in this process: what it costs, and what
it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from stagekeeper.agent.authority import Authority
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.session import Session
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.transport import CallFailed, GrpcTransport
from stagekeeper.agent.worker_slice import WorkerSlice
from stagekeeper.client import Client
from stagekeeper.core.ids import (
    ClusterName,
    DeploymentName,
    FailureId,
    InstanceId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import Failure, FailureOrigin, ShardRecord, WorkerReport
from stagekeeper.runtime.clock import SystemClock
from stagekeeper.runtime.convert import shard_from_proto
from tests.fakes.hand_worker import shard
from tests.fakes.http2_reply import HEADERS
from tests.fakes.supervisors import Reigns, reigns
from tests.fakes.tcp_proxy import DOWN, UP, TcpProxy
from tests.harness.waiting import wait_for


class Agent:
    """A session that holds `shards`, and nothing else of an agent."""

    def __init__(self, folder: Path, endpoint: str, register_timeout_s: float = 5.0) -> None:
        self.shards: tuple[ShardRecord, ...] = ()
        self.failures: tuple[Failure, ...] = ()
        settings = AgentSettings(
            worker_id=WorkerId("w"),
            endpoint=endpoint,
            state_dir=folder,
            register_timeout_s=register_timeout_s,
        )
        self.identity = AgentIdentity.next_life(
            folder / "identity.json", WorkerId("w"), recorded_incarnation=0
        )
        self.slice = WorkerSlice("default", self.report)
        self.session = Session(
            settings,
            self.identity,
            Authority(ClusterName("default"), self.identity),
            self.slice,
            self,
            transport=GrpcTransport(endpoint),
            clock=SystemClock(),
            random=random.random,
        )

    def report(self) -> WorkerReport:
        return WorkerReport(
            worker_id=WorkerId("w"),
            host_id=self.identity.host_id,
            incarnation=self.identity.incarnation,
            revision=0,
            agent_address="127.0.0.1:1",
            highest_epoch=self.identity.highest_epoch,
            shards=self.shards,
            failures=self.failures,
        )

    def settle(self, failure_ids: object, operation_ids: object) -> None:
        self.failures = ()

    def unsettled_failures(self) -> tuple[Failure, ...]:
        return self.failures

    @property
    def generation(self) -> int:
        """The connection that is registered now; 0 when none is."""
        connection = self.session.connection
        return connection.generation if connection and connection.is_registered else 0

    async def registered_again(self, after: int, *, within_s: float = 30.0) -> int:
        await wait_for(lambda: self.generation > after, "the next connection", within_s=within_s)
        return self.generation


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    task = asyncio.create_task(agent.session.run())
    try:
        await agent.registered_again(0)
        yield agent
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def wired(tmp_path: Path, **numbers: float) -> AsyncIterator[tuple[Reigns, TcpProxy]]:
    """A supervisor whose workers come through a proxy."""
    async with TcpProxy() as proxy:
        registry = {"lease_s": 5.0, **numbers}
        async with reigns(tmp_path / "s", registry=registry, tick_s=0.02) as them:
            assert them.supervisor is not None
            proxy.move(them.supervisor.worker_address)
            them.supervisor.worker_address = proxy.url  # what agents are told
            yield them, proxy


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settled_figures() -> tuple[int, int]:
    """Return open files and tasks once those that end by themselves have ended."""
    gc.collect()
    await asyncio.sleep(0.2)  # closing channels end in gRPC's own threads
    return open_files(), len(asyncio.all_tasks())


async def beats_sent(proxy: TcpProxy, count: int) -> None:
    goal = proxy.frames[UP, HEADERS] + count
    await wait_for(lambda: proxy.frames[UP, HEADERS] >= goal, f"{count} calls are sent")


async def reset_storm(agent: Agent, proxy: TcpProxy, rounds: int) -> None:
    """Reset the connection with a heartbeat under way, again and again.

    A reset between two heartbeats costs no session: the channel dials again for the next one.
    """
    generation = agent.generation
    for _ in range(rounds):
        proxy.stall(DOWN)
        await beats_sent(proxy, 1)
        proxy.reset()
        proxy.release(DOWN)
        generation = await agent.registered_again(generation)


@pytest.mark.soak
async def test_recovery_U33_storm_of_resets_leaves_files_and_tasks_flat(tmp_path: Path) -> None:
    async with (
        wired(tmp_path, heartbeat_s=0.02) as (reigns, proxy),
        running(Agent(tmp_path, reigns.endpoint)) as agent,
    ):
        await reset_storm(agent, proxy, 10)
        files, tasks = await settled_figures()
        await reset_storm(agent, proxy, 200)
        files_after, tasks_after = await settled_figures()
        assert files_after <= files + 10
        assert tasks_after <= tasks + 4
        assert len(proxy.established) == 1


async def test_who_answers_and_is_no_supervisor_is_said_to_be_none() -> None:
    stranger = grpc.aio.server()
    port = stranger.add_insecure_port("127.0.0.1:0")
    await stranger.start()
    try:
        with pytest.raises(CallFailed, match=r"is no supervisor, .* check --endpoint"):
            await GrpcTransport(f"127.0.0.1:{port}").find_supervisor(10.0)
    finally:
        await stranger.stop(None)


async def test_waits_between_reconnects_are_jittered(tmp_path: Path) -> None:
    async with (
        wired(tmp_path, heartbeat_s=0.05) as (reigns, proxy),
        running(Agent(tmp_path, reigns.endpoint)) as agent,
    ):
        first = len(proxy.accepted_at)
        await reset_storm(agent, proxy, 20)
        times = proxy.accepted_at[first:]
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        assert gaps[-1] - gaps[0] > 0.04  # waits of 0 to 0.1 s, evenly


@pytest.mark.soak
async def test_large_registration_passes_a_slow_link_and_beats_go_on(tmp_path: Path) -> None:
    record = shard_from_proto(shard("m"))
    agent_shards = tuple(
        replace(
            record, deployment=DeploymentName(f"m{number}"), instance_id=InstanceId(f"i{number}")
        )
        for number in range(6000)
    )
    async with wired(tmp_path, heartbeat_s=1.0) as (reigns, proxy):
        agent = Agent(tmp_path, reigns.endpoint)
        agent.shards = agent_shards
        size = agent.slice.copy().request.ByteSize()
        assert size > 600_000
        proxy.limit(size / 12.0, UP)  # twelve seconds: more than a registration is given alone
        async with running(agent):
            proxy.limit(None)
            await beats_sent(proxy, 3)
            assert agent.generation == 1  # the first attempt got through
            async with Client(reigns.endpoint, watch_at_once=False) as client:
                (worker,) = (await client.workers()).workers
            assert worker.shard_count == len(agent_shards)
            assert worker.registration_count == 1


async def test_report_that_fails_ends_the_registration_under_way_on_its_connection(
    tmp_path: Path,
) -> None:
    """What is dropped is dropped at once: the longer deadline is not waited for."""
    async with wired(tmp_path) as (reigns, proxy):
        agent = Agent(tmp_path, reigns.endpoint, register_timeout_s=600.0)
        async with running(agent):
            proxy.lose_established(DOWN)
            origin = FailureOrigin(
                WorkerId("w"),
                DeploymentName("m"),
                ReplicaIndex(0),
                StageId(0),
                "s",
                0,
                InstanceId("i"),
            )
            agent.failures = (Failure(FailureId("f"), "EXITED", origin, "it ended"),)
            agent.slice.changed()
            await agent.registered_again(1)
            assert not agent.failures


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_recovery_R4_thousand_swallowed_replies_over_real_connections(
    tmp_path: Path,
) -> None:
    async with (
        wired(tmp_path, heartbeat_s=0.05) as (reigns, proxy),
        running(Agent(tmp_path, reigns.endpoint)) as agent,
    ):
        generation = agent.generation
        for _ in range(1000):
            proxy.swallow_reply()
            generation = await agent.registered_again(generation)
        assert len(proxy.established) == 1
