"""Every reason of the table that a server gives, provoked over real gRPC, with the table's code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import pytest

from stagekeeper.core.errors import Reason
from stagekeeper.core.ids import Epoch
from stagekeeper.v1 import actor_service_pb2 as actor_pb2
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2
from stagekeeper.v1 import deployment_service_pb2_grpc, types_pb2
from stagekeeper.v1 import stage_service_pb2 as stage_pb2
from tests.fakes.agents import agent_in, home_at
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.overseer import COMMIT, RESERVE, Overseer, plan, stage
from tests.fakes.supervisors import reigns, spec
from tests.harness.stage_process import StageProcess
from tests.harness.tree_process import TOKEN, TreeProcess, tree_process
from tests.harness.verdicts import verdict_of
from tests.harness.waiting import wait_for

NOT_GIVEN = {
    Reason.SHARD_OUT_OF_RANGE: "of single entries, in RegisterWorkerResponse.refused",
    Reason.AGENT_UNREACHABLE: "in a plan's refusals, and shown with the worker",
    Reason.NO_REPLICA: "of the SDK and between siblings, before anything is sent",
    Reason.SLOW_DOWN: "not built: a supervisor sets the pace of heartbeats and refuses none",
    Reason.ACTOR_UNKNOWN: "of calls over Connect; see tests/integration/test_actor_frames.py",
    Reason.ACTOR_FAILED: "likewise",
    Reason.ACTOR_STOPPED: "likewise",
    Reason.INTERNAL_BUG: "nobody knows how; see tests/unit/test_server_errors.py",
}
"""Reasons that no status carries yet, or ever, each with where it is found instead."""


class Supervised:
    """A supervisor with an agent (w0), a worker by hand (w1), and what users may ask of it."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self._stub: Any = deployment_service_pb2_grpc.DeploymentServiceStub(channel)

    def worker(self, worker_id: str = "w1", **fields: Any) -> HandWorker:
        return HandWorker(self.endpoint, worker_id, **fields)

    async def create(
        self, wanted: types_pb2.DeploymentSpec, *, timeout: float = 20.0, **fields: Any
    ) -> None:
        request = deployment_pb2.CreateDeploymentRequest(spec=wanted, **fields)
        async for _ in self._stub.CreateDeployment(request, timeout=timeout):
            pass

    async def get(self, name: str) -> None:
        await self._stub.GetDeployment(deployment_pb2.GetDeploymentRequest(name=name), timeout=20)

    async def update(self) -> None:
        await self._stub.UpdateDeployment(deployment_pb2.UpdateDeploymentRequest(), timeout=20)

    async def watch(self, after: types_pb2.ChangeRevision) -> None:
        request = deployment_pb2.WatchDeploymentsRequest(after=after)
        async for _ in self._stub.WatchDeployments(request, timeout=20):
            pass


def too_large() -> types_pb2.DeploymentSpec:
    made = spec("large")
    made.stages[0].args_json = '{"text": "' + "x" * 1_100_000 + '"}'
    return made


def without_room() -> types_pb2.DeploymentSpec:
    made = spec("no-room")
    made.stages[0].memory.bytes = 1 << 50
    return made


OF_ANOTHER_REIGN = types_pb2.ChangeRevision(
    epoch=types_pb2.Epoch(number=1, supervisor_id="another"), n=5
)
A_FAILURE = types_pb2.Failure(failure_id="f")

OF_A_SUPERVISOR: Mapping[Reason, Callable[[Supervised], Awaitable[Any]]] = {
    Reason.BAD_FIELD: lambda it: it.get("a/b"),
    Reason.TOO_LARGE: lambda it: it.create(too_large()),
    Reason.WORKER_UNKNOWN: lambda it: it.worker("nobody").report(A_FAILURE),
    Reason.DEPLOYMENT_UNKNOWN: lambda it: it.get("nobody"),
    Reason.DEPLOYMENT_EXISTS: lambda it: it.create(spec("there", stages=1)),
    Reason.WORKER_ID_IN_USE: lambda it: it.worker(host_id="elsewhere").register(),
    Reason.STALE_INCARNATION: lambda it: it.worker(incarnation=6).register(),
    Reason.WRONG_CLUSTER: lambda it: it.worker(cluster="other").register(),
    Reason.PLAN_STALE: lambda it: it.create(spec("planned"), plan_id="of yesterday"),
    Reason.ADMISSION_REFUSED: lambda it: it.create(without_room()),
    Reason.REVISION_GONE: lambda it: it.watch(OF_ANOTHER_REIGN),
    Reason.NOT_YET: lambda it: it.update(),
}

OF_A_SUPERVISOR_THAT_RECOVERS: Mapping[Reason, Callable[[Supervised], Awaitable[Any]]] = {
    Reason.SUPERVISOR_RECOVERING: lambda it: it.create(spec("another"), timeout=0.5),
}


async def read_log(it: Overseer) -> None:
    async for _ in it.agent.ReadStageLog(agent_pb2.ReadStageLogRequest(deployment="m", stage_id=9)):
        pass


async def cancel_as_another_reign(it: Overseer) -> None:
    header = it.header(epoch=Epoch(9, "another"))
    request = agent_pb2.CancelOperationRequest(header=header, operation_id="op")
    await it.agent.CancelOperation(request, timeout=20)


def procs(**fields: Any) -> agent_pb2.SpawnProcsRequest:
    sound = {"cluster": "default", "procs_id": "p", "token": "t", "lease_s": 0.1}
    return agent_pb2.SpawnProcsRequest(**{**sound, "instance_ids": ["0" * 32], **fields})


async def spawn(it: Overseer, request: agent_pb2.SpawnProcsRequest) -> None:
    async for _ in it.agent.SpawnProcs(request, timeout=20):
        pass


async def spawn_into_the_set_of_another(it: Overseer) -> None:
    theirs = it.agent.SpawnProcs(procs(), timeout=60)
    try:
        await theirs.read()
        await spawn(it, procs(token="mine"))
    finally:
        theirs.cancel()


OF_AN_AGENT: Mapping[Reason, Callable[[Overseer], Awaitable[Any]]] = {
    Reason.BAD_FIELD: lambda it: it.take(COMMIT, plan(stage("s"), n=9)),
    Reason.UNKNOWN_DEVICE: lambda it: it.take(
        RESERVE, plan(stage("s", device="x"), deployment="d")
    ),
    Reason.PROCS_UNKNOWN: lambda it: spawn(it, procs(incarnation=it.last.incarnation)),
    Reason.NOT_ALLOWED: spawn_into_the_set_of_another,
    Reason.STAGE_UNKNOWN: read_log,
    Reason.STALE_EPOCH: cancel_as_another_reign,
    Reason.STALE_GENERATION: lambda it: it.take(RESERVE, plan(stage("s"), operation="late")),
    Reason.REPLICA_DRAINING: lambda it: it.take(RESERVE, plan(stage("s"), n=9)),
}


async def call(it: StageProcess, endpoint: str, *args: Any, **fields: Any) -> None:
    await it.call(endpoint, *args, **fields)


async def call_while_it_is_full(it: StageProcess) -> None:
    first = asyncio.ensure_future(it.call("wait", 30))
    try:
        await it.until(lambda told: told.in_flight == 1)
        await it.call("wait", 30)
    finally:
        first.cancel()
        await it.until(lambda told: told.in_flight == 0)


async def call_while_it_ends(it: StageProcess) -> None:
    under_way = asyncio.ensure_future(it.call("wait", 30))
    await it.until(lambda told: told.in_flight == 1)
    await it.end(budget_s=30.0)
    try:
        await it.call("where")
    finally:
        under_way.cancel()


OF_A_STAGE: Mapping[Reason, Callable[[StageProcess], Awaitable[Any]]] = {
    Reason.BAD_FIELD: lambda it: it.call("echo", 1, 2, 3),
    Reason.ENDPOINT_UNKNOWN: lambda it: it.call("nothing"),
    Reason.STALE_ROUTE: lambda it: it.call("where", instance_id="another"),
    Reason.ENDPOINT_RAISED: lambda it: it.call("fail", "on purpose"),
    Reason.TOO_MANY_CALLS: call_while_it_is_full,
    Reason.DRAINING: call_while_it_ends,  # the last: it ends the stage
}


async def get_mesh(it: TreeProcess, **fields: Any) -> None:
    sound = {"token": TOKEN, "mesh_id": "no mesh"}
    await it.actors.GetMesh(actor_pb2.GetMeshRequest(**{**sound, **fields}), timeout=20)


async def connect(it: TreeProcess, **fields: Any) -> None:
    async with it.connected(**fields):
        pass


OF_A_TREE_PROCESS: Mapping[Reason, Callable[[TreeProcess], Awaitable[Any]]] = {
    Reason.BAD_FIELD: lambda it: connect(it, lease_s=float("nan")),
    Reason.BAD_TOKEN: lambda it: get_mesh(it, token="of another tree"),
    Reason.STALE_ROUTE: lambda it: connect(it, peer_instance_id="another"),
    Reason.MESH_UNKNOWN: get_mesh,
    Reason.SESSION_UNKNOWN: lambda it: it.spawn("nobody", "m:Class"),
    Reason.NOT_ALLOWED: lambda it: it.spawn("nobody", "not_mine:Class"),
    Reason.NOT_YET: lambda it: it.stages.Call(stage_pb2.CallRequest(), timeout=20),
}


async def provoke(reasons: Mapping[Reason, Callable[[Any], Awaitable[Any]]], it: Any) -> None:
    for reason, refused in reasons.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused(it)
        assert verdict_of(caught.value, reason).reason == reason  # and the code is the table's


def test_every_reason_is_provoked_or_said_not_to_be_given() -> None:
    provoked = {
        *OF_A_SUPERVISOR,
        *OF_A_SUPERVISOR_THAT_RECOVERS,
        *OF_AN_AGENT,
        *OF_A_STAGE,
        *OF_A_TREE_PROCESS,
    }

    assert provoked | set(NOT_GIVEN) == set(Reason)
    assert not provoked & set(NOT_GIVEN)


async def test_reasons_of_a_supervisor_have_the_codes_of_the_table(tmp_path):
    async with (
        reigns(tmp_path) as them,
        FakeAgent(them.endpoint, "w0").serving() as agent,
        channel_to(them.endpoint) as channel,
    ):
        it = Supervised(them.endpoint, channel)
        await it.worker(incarnation=7).hold(shard("held")).register()
        await it.create(spec("there"))
        await provoke(OF_A_SUPERVISOR, it)
        await agent.stop()
        await them.restart()
        await provoke(OF_A_SUPERVISOR_THAT_RECOVERS, it)


async def test_reasons_of_an_agent_have_the_codes_of_the_table():
    async with Overseer() as overseer, home_at(overseer.endpoint) as home, agent_in(home):
        await overseer.bring_up(plan(stage("s"), n=5))
        await wait_for(lambda: overseer.last.replica_states, "the stage is reported")
        await provoke(OF_AN_AGENT, overseer)


async def test_reasons_of_a_stage_have_the_codes_of_the_table():
    async with StageProcess("sample_stages:Echo", max_in_flight=1) as process:
        await process.ready()
        await provoke(OF_A_STAGE, process)


async def test_reasons_of_a_process_of_a_tree_have_the_codes_of_the_table():
    async with tree_process(extra={"allow": '["m.*"]'}) as process:
        await provoke(OF_A_TREE_PROCESS, process)


async def test_shard_out_of_range_is_the_reason_of_its_entry_alone(tmp_path):
    async with reigns(tmp_path) as them:
        worker = HandWorker(them.endpoint).hold(shard("m", of=0), shard("fine"))
        answer = await worker.register()

    assert [(it.index, it.reason) for it in answer.refused] == [(0, "SHARD_OUT_OF_RANGE")]
