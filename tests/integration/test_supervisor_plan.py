"""Plans asked of a real supervisor, and creations held to them, with agents without processes."""

from __future__ import annotations

import grpc
import pytest

from stagekeeper import client as sdk
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2
from stagekeeper.v1 import deployment_service_pb2_grpc, types_pb2
from tests.fakes.fake_agent import GIB, FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import list_deployments, spec


@pytest.fixture
async def agent(endpoint):
    async with FakeAgent(endpoint).serving() as serving:
        yield serving


def omni(**needs: float) -> types_pb2.DeploymentSpec:
    """The thinker on card 0, talker and code2wav on card 1."""
    shares = {"thinker": 0.9, "talker": 0.6, "code2wav": 0.1, **needs}
    made = types_pb2.DeploymentSpec(name="qwen3-omni", replicas=1)
    for number, (name, share) in enumerate(shares.items()):
        made.stages.add(
            name=name,
            entrypoint=f"my_models.omni:{name}",
            devices=[min(number, 1)],
            memory=types_pb2.MemoryNeed(utilization=share),
        )
    return made


async def plan(endpoint: str, wanted: types_pb2.DeploymentSpec):
    async with channel_to(endpoint) as channel:
        return await deployment_service_pb2_grpc.DeploymentServiceStub(channel).PlanDeployment(
            deployment_pb2.PlanDeploymentRequest(spec=wanted), timeout=10
        )


async def create(endpoint: str, wanted: types_pb2.DeploymentSpec, plan_id: str, timeout_s=20.0):
    """Create, and return the acceptance and the outcome."""
    async with channel_to(endpoint) as channel:
        request = deployment_pb2.CreateDeploymentRequest(spec=wanted, plan_id=plan_id)
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        messages = [it async for it in stub.CreateDeployment(request, timeout=timeout_s)]
    return messages[0].accepted, messages[-1].outcome


async def test_plan_shows_groups_places_and_sums_and_starts_nothing(endpoint, agent):
    shown = await plan(endpoint, omni())

    assert [list(group.stage_names) for group in shown.groups] == [
        ["thinker"],
        ["talker", "code2wav"],
    ]
    assert [list(group.devices) for group in shown.groups] == [[0], [1]]
    (replica,) = shown.replicas
    assert replica.worker_id == "w1"
    assert {card.device: card.device_id for card in replica.cards} == {0: "cpu:0", 1: "cpu:1"}
    first, second = shown.devices
    assert (first.device_id, first.model, first.total_bytes) == ("cpu:0", "host memory", 8 * GIB)
    assert [(term.stage_name, term.memory_bytes) for term in second.stages] == [
        ("talker", int(0.6 * 8 * GIB)),
        ("code2wav", int(0.1 * 8 * GIB)),
    ]
    assert second.need_bytes == int(0.6 * 8 * GIB) + int(0.1 * 8 * GIB)
    assert not shown.refusals
    assert not shown.exists
    assert not shown.HasField("estimated_s")
    assert not agent.calls
    assert not (await list_deployments(endpoint)).deployments


async def test_creation_with_the_plans_id_starts_what_it_showed(endpoint, agent):
    async with FakeAgent(endpoint, "w2").serving():
        wanted = omni()
        wanted.replicas = 2
        shown = await plan(endpoint, wanted)
        accepted, outcome = await create(endpoint, wanted, shown.plan_id)

    assert list(accepted.starting_replicas) == [it.replica_index for it in shown.replicas]
    for replica, planned in zip(outcome.deployment.replicas, shown.replicas, strict=True):
        assert {routed.worker_id for routed in replica.shards} == {planned.worker_id}
    again = await plan(endpoint, wanted)
    assert (list(again.kept_replicas), again.exists) == ([0, 1], True)
    assert not again.replicas


async def test_plan_that_fits_no_longer_is_stale_and_nothing_is_wanted(endpoint, agent):
    wanted = spec()
    shown = await plan(endpoint, wanted)
    agent.shards["other", 0, 0] = shard(
        "other", devices=[types_pb2.DeviceClaim(device_id="cpu:0", reserved_bytes=GIB)]
    )
    await agent.register()

    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "PLAN_STALE") as details:
        await create(endpoint, wanted, shown.plan_id)

    assert "plan again" in details[0].message
    assert [it.name for it in (await list_deployments(endpoint)).deployments] == ["other"]
    await create(endpoint, wanted, (await plan(endpoint, wanted)).plan_id)


async def test_id_is_the_same_under_the_next_supervisor(them, agent):
    before = await plan(them.endpoint, omni())
    await them.restart()
    await agent.register()

    assert (await plan(them.endpoint, omni())) == before


async def test_every_refusal_is_listed_and_is_no_error(endpoint, agent):
    await HandWorker(endpoint, "w2").register()
    wanted = omni(thinker=1.0, talker=0.95, code2wav=0.1)
    wanted.placement.workers.append("w1")

    shown = await plan(endpoint, wanted)

    assert [(it.reason, it.worker_id, it.device_id) for it in shown.refusals] == [
        ("ADMISSION_REFUSED", "w1", "cpu:0"),
        ("ADMISSION_REFUSED", "w2", ""),
    ]
    assert "stage 1: 0.95 × 8589934592 = 8160437862" in shown.refusals[0].message
    assert [device.is_over for device in shown.devices] == [True, False]
    assert [replica.worker_id for replica in shown.replicas] == [""]


async def test_supervisor_that_recovers_answers_with_that(them, agent):
    await create(them.endpoint, spec(), "")
    await agent.stop()
    await them.restart()

    shown = await plan(them.endpoint, spec())

    assert [it.reason for it in shown.refusals] == ["SUPERVISOR_RECOVERING"]
    assert (shown.exists, list(shown.replicas), list(shown.devices)) == (True, [], [])
    assert len(shown.groups) == 2


async def test_wrong_specs_are_refused_as_by_a_creation(endpoint):
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD") as details:
        await plan(endpoint, types_pb2.DeploymentSpec(name="a/b"))
    assert {path for path, _ in details[0].violations} == {"name", "stages"}
    async with channel_to(endpoint) as channel:
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
            await stub.PlanDeployment(deployment_pb2.PlanDeploymentRequest())


async def test_client_plans_deploys_by_the_id_and_says_when_it_is_stale(endpoint, agent):
    async with sdk.Client(endpoint) as client:
        shown = await client.plan(omni())
        with pytest.raises(sdk.PlanStale) as caught:
            await client.deploy(omni(talker=0.5), plan_id=shown.plan_id)
        assert isinstance(caught.value, sdk.WrongState)
        assert "another spec" in caught.value.message
        assert caught.value.next_move
        deployment = await client.deploy(omni(), plan_id=shown.plan_id)
        assert deployment.state == types_pb2.DEPLOYMENT_STATE_READY
        # Said twice, as after a lost answer: it is done, and nothing starts.
        await client.deploy(omni(), plan_id=shown.plan_id)
        assert agent.calls.count("START qwen3-omni/0") == 1


async def test_client_says_where_in_a_dict_a_plan_goes_wrong(endpoint):
    async with sdk.Client(endpoint) as client:
        with pytest.raises(sdk.SpecError):
            await client.plan({"name": "m", "stages": [], "colour": "red"})
        with pytest.raises((sdk.SpecError, sdk.BadRequest)):
            await client.plan({"name": "a/b", "stages": [{"name": "s", "entrypoint": "m:S"}]})
