"""Replicas over several workers through a real supervisor, with agents that have no processes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stagekeeper.supervisor.store import FILE_NAME
from stagekeeper.v1 import deployment_service_pb2, deployment_service_pb2_grpc, types_pb2
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import channel_to
from tests.fakes.supervisors import Reigns, get_deployment, list_deployments, reigns, spec
from tests.harness.waiting import wait_for

READY = types_pb2.DEPLOYMENT_STATE_READY
FAILED = types_pb2.DEPLOYMENT_STATE_FAILED


def sharded(*counts: int, same_card: bool = False) -> types_pb2.DeploymentSpec:
    """A spec whose stages have so many shards; with `same_card` they are one group."""
    wanted = spec(stages=len(counts))
    for number, (stage, count) in enumerate(zip(wanted.stages, counts, strict=True)):
        stage.shard_count = count
        stage.devices[:] = [0 if same_card else number]
        stage.memory.utilization = 0.2
    return wanted


@pytest.fixture
async def agents(them) -> AsyncIterator[tuple[FakeAgent, FakeAgent]]:
    async with (
        FakeAgent(them.endpoint, "w1").serving() as first,
        FakeAgent(them.endpoint, "w2").serving() as second,
    ):
        yield first, second


async def create(
    endpoint: str, wanted: types_pb2.DeploymentSpec
) -> list[deployment_service_pb2.CreateDeploymentResponse]:
    async with channel_to(endpoint) as channel:
        call = deployment_service_pb2_grpc.DeploymentServiceStub(channel).CreateDeployment(
            deployment_service_pb2.CreateDeploymentRequest(spec=wanted), timeout=30
        )
        return [message async for message in call]


@asynccontextmanager
async def creating(
    them: Reigns, agents: tuple[FakeAgent, FakeAgent], wanted: types_pb2.DeploymentSpec
) -> AsyncIterator[asyncio.Task]:
    """A creation under way: every agent has its START and none comes to its end."""
    for agent in agents:
        agent.may_start.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(create(them.endpoint, wanted))
        await wait_for(lambda: all("START m/0" in it.calls for it in agents), "all are starting")
        yield task


def outcome(messages) -> deployment_service_pb2.CreationOutcome:
    assert messages[-1].WhichOneof("event") == "outcome"
    return messages[-1].outcome


def starts(agent: FakeAgent) -> int:
    return agent.calls.count("START m/0")


async def is_ready(endpoint: str) -> bool:
    return (await get_deployment(endpoint, "m")).state == READY


def stored_operations(tmp_path) -> int:
    with sqlite3.connect(tmp_path / FILE_NAME) as store:
        (count,) = store.execute("SELECT count(*) FROM operations").fetchone()
    return count


async def test_shards_lie_on_their_workers_and_each_is_told_of_the_others(them, agents, tmp_path):
    messages = await create(them.endpoint, sharded(2, 1))

    deployment = outcome(messages).deployment
    assert deployment.state == READY
    places = {
        (it.record.stage_id, it.record.shard_index): it.worker_id
        for it in deployment.replicas[0].shards
    }
    assert places == {(0, 0): "w1", (0, 1): "w2", (1, 0): "w1"}
    first, second = agents
    assert [(it.stage_id, it.shard_index, it.url) for it in first.peers] == [(0, 1, "w2:5000")]
    assert [(it.stage_id, it.shard_index) for it in second.peers] == [(0, 0), (1, 0)]
    assert {it.progress.worker_id for it in messages[1:-1]} == {"w1", "w2"}
    assert [it.calls[0] for it in agents] == ["RESERVE m/0"] * 2
    assert stored_operations(tmp_path) == 0


async def test_stages_of_a_group_are_stepped_over_the_workers(them, agents):
    first, second = agents
    second.holds_back = {0}
    second.may_start.clear()
    task = asyncio.create_task(create(them.endpoint, sharded(2, 2, same_card=True)))
    await wait_for(lambda: starts(second) == 1, "the first stage starts")
    await wait_for(lambda: first.operations and _up(first) == [0], "its other shard is up")

    assert starts(first) == 1, "the second stage waits for both shards of the first"
    second.may_start.set()

    assert outcome(await task).deployment.state == READY
    assert starts(first) == starts(second) == 2


def _up(agent: FakeAgent) -> list[int]:
    (operation,) = agent.operations.values()
    return list(operation.up_stage_ids)


async def test_failure_on_one_worker_undoes_all_and_names_the_shard(them, agents, tmp_path):
    first, second = agents
    second.start_fails = "stage-0 raised ValueError"

    ended = outcome(await create(them.endpoint, sharded(2, 1)))

    assert ended.deployment.state == FAILED
    (failed,) = ended.failures
    assert failed.worker_id == "w2"
    assert "worker w2 (shard 1): stage-0 raised ValueError" in failed.message
    assert {(it.worker_id, it.stage_id) for it in failed.rollback} == {
        ("w2", 0),
        ("w1", 0),
        ("w1", 1),
    }
    assert not first.shards
    assert not second.shards
    assert not any("COMMIT" in call for it in agents for call in it.calls)
    assert stored_operations(tmp_path) == 0


async def test_reservation_that_is_refused_starts_nothing_anywhere(them, agents):
    first, second = agents
    second.reserve_refused = "cpu:0: 9 bytes needed, 8 there"

    (failed,) = outcome(await create(them.endpoint, sharded(2, 1))).failures

    assert "worker w2 (shard 1)" in failed.message
    assert "9 bytes needed" in failed.message
    assert not any("START" in call for it in agents for call in it.calls)
    assert [call.split()[0] for call in first.calls] == ["RESERVE", "CANCEL"]
    assert [call.split()[0] for call in second.calls] == ["RESERVE"]


async def test_recovery_R11_one_of_two_agents_restarts_and_is_joined(them, agents):
    _, second = agents
    async with creating(them, agents, sharded(2, 1)) as task:
        await second.stop()
        second.worker.slice.incarnation += 1
        await second.start()
        await wait_for(lambda: starts(second) == 2, "it is joined")
        for agent in agents:
            agent.may_start.set()
    assert outcome(task.result()).deployment.state == READY
    assert not any("CANCEL" in call for it in agents for call in it.calls)


async def test_agent_that_lost_its_part_fails_the_start_everywhere(them, agents):
    first, second = agents
    async with creating(them, agents, sharded(2, 1)) as task:
        await second.stop()
        second.worker.slice.incarnation += 1
        second.operations.clear()
        second.shards.clear()
        await second.start()
    ended = outcome(task.result())
    assert ended.deployment.state == FAILED
    assert "worker w2 (shard 1) was interrupted" in ended.failures[0].message
    await wait_for(lambda: not first.shards, "the other part is undone")


async def test_part_that_is_undone_while_another_starts_is_noticed_at_once(them, agents):
    first, second = agents
    first.holds_back = set()
    async with creating(them, agents, sharded(2, 1)) as task:
        await wait_for(lambda: _up(first) == [0, 1], "all of w1 is up")
        (operation,) = first.operations.values()
        first._roll_back(operation, "stage-1 was killed")
        await first.register()
        await wait_for(lambda: not second.shards, "the other part is undone")
    (failed,) = outcome(task.result()).failures
    assert "worker w1 (shard 0): stage-1 was killed" in failed.message


async def test_recovery_R12_supervisor_that_ends_in_mid_start_is_followed_by_one_that_goes_on(
    them, agents, tmp_path
):
    for agent in agents:
        agent.may_start.clear()
    async with channel_to(them.endpoint) as channel:
        call = deployment_service_pb2_grpc.DeploymentServiceStub(channel).CreateDeployment(
            deployment_service_pb2.CreateDeploymentRequest(spec=sharded(2, 1))
        )
        await call.read()
        await wait_for(lambda: all(starts(it) for it in agents), "all are starting")
        assert stored_operations(tmp_path) == 1
        await them.stop()
    await them.start()
    for agent in agents:
        await agent.register()
    await wait_for(lambda: all(starts(it) >= 2 for it in agents), "both are joined")
    for agent in agents:
        agent.may_start.set()

    await wait_for(lambda: is_ready(them.endpoint), "the deployment is READY")
    assert not any("CANCEL" in call for it in agents for call in it.calls)
    assert stored_operations(tmp_path) == 0


async def test_committed_half_is_stopped_when_the_other_is_rolled_back(them, agents, tmp_path):
    first, second = agents
    second.commit_fails = "stage-0 could not be told where its siblings are"

    ended = outcome(await create(them.endpoint, sharded(2, 1)))

    assert ended.deployment.state == FAILED
    assert "could not be told" in ended.failures[0].message
    await wait_for(lambda: not first.shards, "the committed half is stopped")
    await second.register()
    await first.register()
    assert stored_operations(tmp_path) == 0
    second.commit_fails = ""
    assert outcome(await create(them.endpoint, sharded(2, 1))).deployment.state == READY


async def test_decided_start_is_committed_by_the_next_reign(them, agents, tmp_path):
    """One worker is away when it is decided, so that only the other one commits."""
    first, second = agents
    async with creating(them, agents, sharded(2, 1)) as task:
        second.refuses_commits = True
        for agent in agents:
            agent.may_start.set()
        await wait_for(lambda: "COMMIT m/0" in second.calls, "both were told")
        await wait_for(
            lambda: all(it.committed for it in first.shards.values()), "w1 has committed"
        )
        task.cancel()
    assert stored_operations(tmp_path) == 1
    await them.restart()
    second.refuses_commits = False
    for agent in agents:
        await agent.register()

    await wait_for(lambda: is_ready(them.endpoint), "the deployment is READY")
    assert [(it.stage_id, it.shard_index) for it in second.peers] == [(0, 0), (1, 0)]
    assert stored_operations(tmp_path) == 0


async def test_deletion_in_mid_start_leaves_nothing_anywhere(them, agents, tmp_path):
    async with creating(them, agents, sharded(2, 1)):
        async with channel_to(them.endpoint) as channel:
            await deployment_service_pb2_grpc.DeploymentServiceStub(channel).DeleteDeployment(
                deployment_service_pb2.DeleteDeploymentRequest(name="m"), timeout=10
            )

        async def is_gone():
            return not (await list_deployments(them.endpoint)).deployments

        await wait_for(is_gone, "m is gone")
    assert not any(agent.shards for agent in agents)
    assert stored_operations(tmp_path) == 0


async def test_part_that_waits_for_others_is_joined_now_and_then(tmp_path):
    async with reigns(tmp_path, rejoin_s=1.0) as them:
        first = FakeAgent(them.endpoint, "w1")
        second = FakeAgent(them.endpoint, "w2")
        async with first.serving(), second.serving():
            first.holds_back = set()
            async with creating(them, (first, second), sharded(2)) as task:
                await wait_for(lambda: first.calls.count("RESERVE m/0") >= 3, "it is joined twice")
                second.may_start.set()
            assert outcome(task.result()).deployment.state == READY
