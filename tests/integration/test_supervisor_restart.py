"""Supervisors that end, or are killed, and what the next one makes of what is left."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagekeeper.host.server import AddressTaken
from stagekeeper.supervisor.app import Supervisor
from stagekeeper.supervisor.lifetime import run
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.state_lock import StateDirTaken
from stagekeeper.supervisor.store import FILE_NAME, StoreFailed
from stagekeeper.v1 import (
    deployment_service_pb2,
    deployment_service_pb2_grpc,
    discovery_service_pb2,
    discovery_service_pb2_grpc,
    supervisor_service_pb2,
    supervisor_service_pb2_grpc,
    types_pb2,
)
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import (
    Reigns,
    SupervisorProcess,
    get_deployment,
    list_deployments,
    list_workers,
    reigns,
    spec,
    timeless,
)
from tests.harness.waiting import wait_for


def three_workers(endpoint: str) -> list[HandWorker]:
    """Six replicas of two stages on three workers; replica 0 lies on two of them."""
    return [
        HandWorker(endpoint, "w1").hold(
            shard(replica=0, stage=0, of=2),
            shard(replica=1, stage=1, of=2),
            shard(replica=1, stage=0, of=2),
        ),
        HandWorker(endpoint, "w2").hold(
            shard(replica=0, stage=1, of=2),
            *[shard(replica=index, stage=stage, of=2) for index in (2, 3) for stage in (1, 0)],
        ),
        HandWorker(endpoint, "w3").hold(
            *[shard(replica=index, stage=stage, of=2) for index in (4, 5) for stage in (0, 1)]
        ),
    ]


async def create(
    endpoint: str, wanted: types_pb2.DeploymentSpec
) -> types_pb2.DeploymentState.ValueType:
    async with channel_to(endpoint) as channel:
        call = deployment_service_pb2_grpc.DeploymentServiceStub(channel).CreateDeployment(
            deployment_service_pb2.CreateDeploymentRequest(spec=wanted)
        )
        messages = [message async for message in call]
    return messages[-1].outcome.deployment.state


async def delete(endpoint: str, name: str) -> None:
    async with channel_to(endpoint) as channel:
        await deployment_service_pb2_grpc.DeploymentServiceStub(channel).DeleteDeployment(
            deployment_service_pb2.DeleteDeploymentRequest(name=name), timeout=10
        )


async def is_gone(endpoint: str, name: str) -> bool:
    listed = await list_deployments(endpoint)
    return name not in [deployment.name for deployment in listed.deployments]


async def test_killed_supervisor_is_rebuilt_from_what_the_workers_hold(tmp_path):
    supervisor = SupervisorProcess(tmp_path)
    try:
        await supervisor.start()
        workers = three_workers(supervisor.endpoint)
        for worker in workers:
            await worker.register()
        before = (await list_deployments(supervisor.endpoint)).deployments
        assert len(before[0].replicas) == 6
        assert all(it.state == types_pb2.REPLICA_STATE_READY for it in before[0].replicas)
        first = await list_workers(supervisor.endpoint)

        async def is_on_disk():
            with sqlite3.connect(tmp_path / FILE_NAME) as store:
                return store.execute("SELECT count(*) FROM roster").fetchone() == (3,)

        await wait_for(is_on_disk, "the roster is on disk")
        await supervisor.kill()
        await supervisor.start()
        assert (await list_workers(supervisor.endpoint)).hold_reason == (
            types_pb2.HOLD_REASON_RECOVERING
        )
        # In another order, and one of them twice: saying it again changes nothing.
        for worker in (*reversed(workers), workers[0]):
            await worker.register()
        after = await list_deployments(supervisor.endpoint)
        assert [timeless(it) for it in after.deployments] == [timeless(it) for it in before]
        assert after.complete
        listed = await list_workers(supervisor.endpoint)
        assert listed.registration_count == 4
        assert listed.epoch.number == first.epoch.number + 1
        assert listed.epoch.supervisor_id != first.epoch.supervisor_id
    finally:
        await supervisor.kill()


async def test_worker_facing_address_moves_and_the_endpoint_names_the_new_one(tmp_path):
    async with reigns(tmp_path) as them:
        worker = HandWorker(them.endpoint).hold(shard())
        await worker.register()
        old = await worker.supervisor_address()
        await them.restart()
        new = await worker.supervisor_address()
        assert new != old
        async with channel_to(old) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await supervisor_service_pb2_grpc.SupervisorServiceStub(channel).Heartbeat(
                    supervisor_service_pb2.HeartbeatRequest(), timeout=5
                )
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        answer = await worker.heartbeat()
        assert answer.verdict == supervisor_service_pb2.HEARTBEAT_VERDICT_REGISTER
        await worker.register()
        assert (await worker.heartbeat()).verdict == supervisor_service_pb2.HEARTBEAT_VERDICT_OK


async def test_advertised_address_is_what_agents_are_told(tmp_path):
    async with reigns(tmp_path, advertise="node-1.example:0") as them:
        assert them.supervisor is not None
        _, port = them.supervisor.worker_address.split(":")
        assert them.supervisor.worker_address == f"node-1.example:{port}"
        assert int(port) > 0


async def test_deletion_goes_on_after_a_restart(tmp_path):
    async with reigns(tmp_path) as them, FakeAgent(them.endpoint).serving() as agent:
        await create(them.endpoint, spec())
        await agent.stop()  # so that nothing can be stopped yet
        await delete(them.endpoint, "m")
        await them.restart()
        deleting = await get_deployment(them.endpoint, "m")
        assert deleting.state == types_pb2.DEPLOYMENT_STATE_DELETING
        await agent.start()
        await wait_for(lambda: is_gone(them.endpoint, "m"), "m is gone")
        assert not agent.shards


async def test_shards_of_what_was_deleted_are_stopped_when_their_worker_returns(tmp_path):
    async with reigns(tmp_path) as them, FakeAgent(them.endpoint).serving() as agent:
        await create(them.endpoint, spec())
        kept = dict(agent.shards)
        await delete(them.endpoint, "m")
        await wait_for(lambda: is_gone(them.endpoint, "m"), "m is gone")
        await them.restart()
        agent.shards.update(kept)  # as if its host had slept through all of it
        await agent.register()
        await wait_for(lambda: not agent.shards, "they are stopped")
        await wait_for(lambda: is_gone(them.endpoint, "m"), "m is gone")


@asynccontextmanager
async def interrupted_creation(them: Reigns, agent: FakeAgent) -> AsyncIterator[None]:
    """A creation whose supervisor ends while its only stage loads."""
    agent.may_start.clear()
    async with channel_to(them.endpoint) as channel:
        call = deployment_service_pb2_grpc.DeploymentServiceStub(channel).CreateDeployment(
            deployment_service_pb2.CreateDeploymentRequest(spec=spec())
        )
        await call.read()
        await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
        await them.stop()
    yield


async def test_recovery_R12_creation_that_a_restart_interrupts_is_joined(tmp_path):
    async with (
        reigns(tmp_path) as them,
        FakeAgent(them.endpoint).serving() as agent,
        interrupted_creation(them, agent),
    ):
        await them.start()
        await agent.register()
        await wait_for(lambda: agent.calls.count("START m/0") == 2, "it is joined")
        agent.may_start.set()

        async def is_ready():
            deployment = await get_deployment(them.endpoint, "m")
            return deployment.state == types_pb2.DEPLOYMENT_STATE_READY

        await wait_for(is_ready, "the deployment is READY")
        assert not any(call.startswith(("CANCEL", "STOP")) for call in agent.calls)
        with sqlite3.connect(tmp_path / FILE_NAME) as store:
            assert store.execute("SELECT count(*) FROM operations").fetchone() == (0,)


async def test_creation_that_a_restart_interrupts_is_cancelled_where_nothing_is_stored():
    numbers = {"recovery_window_s": 0.5, "longest_backoff_s": 0.2}
    async with (
        reigns(None, registry=numbers) as them,
        FakeAgent(them.endpoint).serving() as agent,
        interrupted_creation(them, agent),
    ):
        await them.start()
        await agent.register()
        await wait_for(lambda: not agent.shards, "what had started is stopped")
        assert agent.calls.count("START m/0") == 1


async def test_desired_state_is_there_before_any_worker_is_back(tmp_path):
    async with reigns(tmp_path) as them, FakeAgent(them.endpoint).serving() as agent:
        await create(them.endpoint, spec())
        before = await get_deployment(them.endpoint, "m")
        await them.restart()
        listed = await list_deployments(them.endpoint)
        assert not listed.complete
        assert listed.deployments[0].spec == before.spec
        assert listed.deployments[0].create_time == before.create_time
        await agent.register()
        assert timeless(await get_deployment(them.endpoint, "m")) == timeless(before)


async def test_damaged_row_is_quarantined_and_its_shards_are_left_alone(tmp_path):
    async with reigns(tmp_path) as them, FakeAgent(them.endpoint).serving() as agent:
        await create(them.endpoint, spec("bad", stages=1))
        await create(them.endpoint, spec("good", stages=1))
        await them.stop()
        with sqlite3.connect(tmp_path / FILE_NAME) as store:
            store.execute("UPDATE deployments SET checksum = 0 WHERE name = 'bad'")
        await them.start()
        await agent.register()
        listed = {it.name: it for it in (await list_deployments(them.endpoint)).deployments}
        assert listed["good"].HasField("spec")
        assert not listed["bad"].HasField("spec")
        assert listed["bad"].replicas[0].state == types_pb2.REPLICA_STATE_READY
        assert not any(call.startswith("STOP") for call in agent.calls)


async def test_new_state_directory_waits_for_nobody(tmp_path):
    async with reigns(tmp_path / "deep" / "er") as them:
        listed = await list_workers(them.endpoint)
        assert listed.complete
        assert listed.mode == types_pb2.MODE_NORMAL


async def test_recovery_ends_when_its_window_closes(tmp_path):
    numbers = {"recovery_window_s": 0.3}
    async with reigns(tmp_path, registry=numbers) as them:
        await HandWorker(them.endpoint).register()
        await them.restart()
        listed = await list_workers(them.endpoint)
        assert not listed.complete
        assert [worker.worker_id for worker in listed.workers] == ["w1"]

        async def is_complete():
            return (await list_workers(them.endpoint)).complete

        await wait_for(is_complete, "the window is closed")


async def test_second_supervisor_of_a_state_directory_is_refused(tmp_path):
    async with reigns(tmp_path) as them:
        second = Supervisor(SupervisorSettings(endpoint="127.0.0.1:0", state_dir=tmp_path))
        with pytest.raises(StateDirTaken, match="--state-dir"):
            await second.start()
        assert (await list_workers(them.endpoint)).epoch.number == 1


async def test_endpoint_of_a_living_supervisor_is_refused_and_nothing_is_written(tmp_path):
    async with reigns(tmp_path / "one") as them:
        second = Supervisor(SupervisorSettings(endpoint=them.endpoint, state_dir=tmp_path / "two"))
        with pytest.raises(AddressTaken, match="lives at"):
            await second.start()
        assert not (tmp_path / "two").exists()


async def test_endpoint_that_something_else_listens_at_is_refused(tmp_path):
    async with asyncio.timeout(20):
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            supervisor = Supervisor(
                SupervisorSettings(endpoint=f"127.0.0.1:{port}", state_dir=tmp_path)
            )
            with pytest.raises(AddressTaken):
                await supervisor.start()
    # What had been opened before is closed: the directory is free again.
    async with reigns(tmp_path) as them:
        assert (await list_workers(them.endpoint)).complete


async def test_store_that_another_reign_took_ends_the_supervisor(tmp_path):
    ready = asyncio.Queue[str]()
    settings = SupervisorSettings(endpoint="127.0.0.1:0", state_dir=tmp_path)
    running = asyncio.create_task(
        run(
            settings,
            stop=asyncio.Event(),
            ready=lambda supervisor: ready.put_nowait(supervisor.endpoint),
        )
    )
    endpoint = await asyncio.wait_for(ready.get(), 20)
    async with FakeAgent(endpoint).serving():
        with sqlite3.connect(tmp_path / FILE_NAME) as store:
            store.execute("UPDATE epoch SET number = 99, supervisor_id = 'usurper'")
        async with refused(grpc.StatusCode.UNAVAILABLE, "DRAINING") as details:
            await create(endpoint, spec())
        assert "another one took over" in details[0].message
        with pytest.raises(StoreFailed, match="another one took over"):
            await asyncio.wait_for(running, 20)


async def test_run_ends_when_it_is_told_to(tmp_path):
    stop, ready = asyncio.Event(), asyncio.Queue[Supervisor]()
    settings = SupervisorSettings(endpoint="127.0.0.1:0", state_dir=tmp_path)
    running = asyncio.create_task(run(settings, stop=stop, ready=ready.put_nowait))
    supervisor = await asyncio.wait_for(ready.get(), 20)
    async with channel_to(supervisor.endpoint) as channel:
        answer = await discovery_service_pb2_grpc.DiscoveryServiceStub(channel).GetSupervisor(
            discovery_service_pb2.GetSupervisorRequest()
        )
    assert answer.cluster == "default"
    assert answer.worker_address == supervisor.worker_address
    assert answer.epoch.number == supervisor.epoch.number
    assert answer.mode == types_pb2.MODE_NORMAL
    began = time.monotonic()
    stop.set()
    await asyncio.wait_for(running, 20)
    assert time.monotonic() - began < 2.0


async def test_every_port_answers_health_checks(tmp_path):
    async with reigns(tmp_path) as them:
        assert them.supervisor is not None
        for address, service in (
            (them.endpoint, "stagekeeper.v1.DeploymentService"),
            (them.endpoint, "stagekeeper.v1.DiscoveryService"),
            (them.supervisor.worker_address, "stagekeeper.v1.SupervisorService"),
            (them.supervisor.worker_address, "stagekeeper.v1.DiscoveryService"),
        ):
            async with channel_to(address) as channel:
                for name in (service, ""):
                    check: Any = health_pb2_grpc.HealthStub(channel)
                    answer = await check.Check(health_pb2.HealthCheckRequest(service=name))
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
