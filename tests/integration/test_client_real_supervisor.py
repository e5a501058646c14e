"""The client with the real supervisor: creations, deletions, and routes over its restarts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from stagekeeper import client as sdk
from stagekeeper.client import Client, parse_spec
from stagekeeper.v1 import types_pb2 as types
from stagekeeper.v1.deployment_service_pb2 import (
    CreationAccepted,
    GetDeploymentRequest,
    GetDeploymentResponse,
)
from stagekeeper.v1.deployment_service_pb2_grpc import DeploymentServiceStub
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.stage_server import StageServer
from tests.fakes.supervisors import SupervisorProcess, reigns, spec
from tests.harness.roster import roster_written
from tests.harness.waiting import wait_for


async def _who(server: StageServer) -> str:
    return server.instance_id


@contextlib.asynccontextmanager
async def _stages(*instance_ids: str):
    """Serve one stage for each instance id; its endpoint `run` answers with it."""
    servers = []
    try:
        for instance_id in instance_ids:
            server = StageServer(instance_id)
            server.endpoints["run"] = lambda server=server: _who(server)
            servers.append(await server.start())
        yield servers
    finally:
        for server in servers:
            await server.stop()


def _worker(endpoint: str, replica: int, stage: StageServer) -> HandWorker:
    return HandWorker(endpoint, f"w{replica}").hold(
        shard(replica=replica, instance=stage.instance_id, url=stage.url)
    )


async def test_deploy_is_seen_by_every_client_at_once_and_delete_ends_it(tmp_path):  # U26
    async with (
        reigns(tmp_path) as supervisor,
        Client(supervisor.endpoint) as client,
        Client(supervisor.endpoint) as other,
        FakeAgent(supervisor.endpoint).serving(),
    ):
        await other.synced(10)
        told: list[object] = []
        view = await client.deploy(spec(replicas=2), on_progress=told.append, timeout=30)
        assert view.state == types.DEPLOYMENT_STATE_READY
        assert isinstance(told[0], CreationAccepted)
        assert {type(event).__name__ for event in told[1:]} == {"StageProgress"}
        assert (await other.get("m")).state == types.DEPLOYMENT_STATE_READY
        # Nobody serves at the address, but the route is known: the call is not refused as unknown.
        with pytest.raises((sdk.Unavailable, sdk.DeadlineExceeded)):
            await other.call("m", "run", timeout=1)
        assert await client.deploy(spec(replicas=2), timeout=30) is not None
        with pytest.raises(sdk.NameTaken, match="delete"):
            await client.deploy(spec(replicas=1), timeout=30)
        assert await client.delete("m", timeout=30) is True
        assert list((await client.list()).deployments) == []
        with pytest.raises(sdk.NotFound):
            await client.call("m", "run", timeout=5)


async def test_problems_found_by_the_supervisor_are_told_with_their_lines(tmp_path):
    text = "name: m\nstages:\n  - name: s\n    entrypoint: a:B\n    devices: [0]\n"
    async with reigns(tmp_path) as supervisor, Client(supervisor.endpoint) as client:
        with pytest.raises(sdk.SpecError) as caught:
            await client.deploy(parse_spec(text, "m.yaml"))
        assert [problem.path for problem in caught.value.problems] == ["stages[0].memory"]
        assert caught.value.problems[0].line > 0


async def test_start_that_fails_says_why(tmp_path):
    async with (
        reigns(tmp_path) as supervisor,
        Client(supervisor.endpoint) as client,
        FakeAgent(supervisor.endpoint).serving() as agent,
    ):
        agent.start_fails = "stage-0 raised in LOAD: no such file"
        with pytest.raises(sdk.DeployFailed, match="no such file") as caught:
            await client.deploy(spec(), timeout=30)
        assert caught.value.failures[0].worker_id == "w1"


async def test_creation_is_followed_over_an_orderly_restart(tmp_path):
    async with (
        reigns(tmp_path) as supervisor,
        Client(supervisor.endpoint) as client,
        FakeAgent(supervisor.endpoint).serving() as agent,
    ):
        agent.may_start.clear()
        accepted = asyncio.Event()
        creation = asyncio.create_task(
            client.deploy(spec(), on_progress=lambda event: accepted.set(), timeout=60)
        )
        await asyncio.wait_for(accepted.wait(), 20)
        await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
        await supervisor.restart()
        await agent.register()
        agent.may_start.set()
        view = await asyncio.wait_for(creation, 30)
        assert view.state == types.DEPLOYMENT_STATE_READY


async def test_creation_is_followed_over_a_kill(tmp_path):
    supervisor = SupervisorProcess(tmp_path)
    await supervisor.start()
    try:
        async with (
            Client(supervisor.endpoint) as client,
            FakeAgent(supervisor.endpoint).serving() as agent,
        ):
            agent.may_start.clear()
            accepted = asyncio.Event()
            creation = asyncio.create_task(
                client.deploy(spec(), on_progress=lambda event: accepted.set(), timeout=60)
            )
            await asyncio.wait_for(accepted.wait(), 20)
            await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
            await roster_written(tmp_path, 1)
            await supervisor.kill()
            await supervisor.start()
            await agent.register()
            agent.may_start.set()
            view = await asyncio.wait_for(creation, 30)
            assert view.state == types.DEPLOYMENT_STATE_READY
    finally:
        await supervisor.kill()


async def test_no_route_is_withdrawn_while_workers_come_back(tmp_path):  # R10, U35
    async with (
        reigns(tmp_path) as supervisor,
        _stages(*(f"i{n}" for n in range(4))) as stages,
        Client(supervisor.endpoint) as client,
    ):
        workers = [_worker(supervisor.endpoint, n, stage) for n, stage in enumerate(stages)]
        for worker in workers:
            await worker.register()
        everybody = {"i0", "i1", "i2", "i3"}

        def routed() -> set[str]:
            return {route.instance_id for route in client.routes.routes("m", 0)}

        await wait_for(lambda: routed() == everybody, "all four are routed")
        await supervisor.restart()
        for worker in (*workers, workers[0]):
            answers = [await client.call("m", "run", timeout=20) for _ in range(8)]
            assert set(answers) == everybody
            assert routed() == everybody
            await worker.register()
        await wait_for(lambda: client.routes.is_complete, "the recovery is over")
        assert routed() == everybody


async def test_read_of_one_deployment_says_whether_workers_are_missing(tmp_path):
    """Clients read one when a call fails, and would else take "not reported yet" for "gone"."""

    async def read(endpoint: str) -> GetDeploymentResponse:
        async with channel_to(endpoint) as channel:
            return await DeploymentServiceStub(channel).GetDeployment(
                GetDeploymentRequest(name="m"), timeout=10
            )

    async with reigns(tmp_path) as supervisor:
        workers = [
            HandWorker(supervisor.endpoint, f"w{n}").hold(shard(replica=n)) for n in range(2)
        ]
        for worker in workers:
            await worker.register()
        assert (await read(supervisor.endpoint)).complete
        await supervisor.restart()
        await workers[0].register()
        assert not (await read(supervisor.endpoint)).complete
        await workers[1].register()
        assert (await read(supervisor.endpoint)).complete


async def test_calls_never_fail_while_the_supervisor_is_killed_again_and_again(tmp_path):
    supervisor = SupervisorProcess(tmp_path)
    await supervisor.start()
    try:
        async with _stages("i0", "i1") as stages, Client(supervisor.endpoint) as client:
            workers = [_worker(supervisor.endpoint, n, stage) for n, stage in enumerate(stages)]
            for worker in workers:
                await worker.register()
            await client.call("m", "run", timeout=20)
            is_over = asyncio.Event()

            async def load() -> int:
                count = 0
                while not is_over.is_set():
                    assert await client.call("m", "run", timeout=20) in ("i0", "i1")
                    count += 1
                return count

            loads = [asyncio.create_task(load()) for _ in range(8)]
            for _ in range(2):
                await roster_written(tmp_path, 2)
                await supervisor.kill()
                await supervisor.start()
                for worker in workers:
                    await worker.register()
                await wait_for(lambda: client.routes.is_complete, "the routes are complete")
            is_over.set()
            assert min(await asyncio.gather(*loads)) > 0
    finally:
        await supervisor.kill()


async def test_port_that_changed_in_place_is_followed(tmp_path):  # R23
    async with (
        reigns(tmp_path) as supervisor,
        _stages("old", "new") as (old, new),
        Client(supervisor.endpoint) as client,
    ):
        worker = _worker(supervisor.endpoint, 0, old)
        await worker.register()
        assert await client.call("m", "run", timeout=20) == "old"
        await old.stop()
        worker.hold(shard(instance="new", url=new.url))
        await worker.register()
        assert await client.call("m", "run", timeout=20) == "new"


async def test_recovery_U14_failed_shard_is_told_to_callers_with_its_reason(tmp_path):  # U14
    async with (
        reigns(tmp_path) as supervisor,
        _stages("i0") as (stage,),
        Client(supervisor.endpoint) as client,
    ):
        worker = _worker(supervisor.endpoint, 0, stage)
        await worker.register()
        assert await client.call("m", "run", timeout=20) == "i0"
        await stage.stop()
        reason = "ended for memory (exit code unknown)"
        worker.hold(
            shard(instance="i0", url="", state=types.SHARD_STATE_FAILED, state_reason=reason)
        )
        await worker.register()
        with pytest.raises(sdk.NoReplica, match="ended for memory"):
            await client.call("m", "run", timeout=20)


async def test_names_round_trip_exactly(tmp_path):  # U27
    names = ["llama-2", "a-rep1", "x-rank0", "模型 é"]
    async with (
        reigns(tmp_path) as supervisor,
        _stages(*names) as stages,
        Client(supervisor.endpoint) as client,
    ):
        shards = [
            shard(name, instance=stage.instance_id, url=stage.url)
            for name, stage in zip(names, stages, strict=True)
        ]
        await HandWorker(supervisor.endpoint).hold(*shards).register()
        assert [view.name for view in (await client.list()).deployments] == sorted(names)
        for name in names:
            assert await client.call(name, "run", timeout=20) == name
