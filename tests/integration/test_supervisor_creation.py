"""Deployments created and deleted through a real supervisor, with agents that have no processes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from stagekeeper.v1 import deployment_service_pb2, deployment_service_pb2_grpc, types_pb2
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import (
    get_deployment,
    list_deployments,
    list_workers,
    reigns,
    spec,
)
from tests.harness.waiting import wait_for

READY = types_pb2.DEPLOYMENT_STATE_READY
FAILED = types_pb2.DEPLOYMENT_STATE_FAILED


@pytest.fixture
async def agent(endpoint):
    async with FakeAgent(endpoint).serving() as serving:
        yield serving


class Creation:
    """One open CreateDeployment, read a message at a time."""

    def __init__(self, call) -> None:
        self.call = call

    async def next(self) -> deployment_service_pb2.CreateDeploymentResponse:
        message = await asyncio.wait_for(self.call.read(), 20)
        assert message is not grpc.aio.EOF
        return message

    async def rest(self) -> list[deployment_service_pb2.CreateDeploymentResponse]:
        messages: list[deployment_service_pb2.CreateDeploymentResponse] = []
        while True:
            message = await asyncio.wait_for(self.call.read(), 20)
            if message is grpc.aio.EOF:
                return messages
            messages.append(message)

    async def outcome(self) -> deployment_service_pb2.CreationOutcome:
        last = (await self.rest())[-1]
        assert last.WhichOneof("event") == "outcome"
        return last.outcome


@asynccontextmanager
async def creating(endpoint: str, wanted: types_pb2.DeploymentSpec, timeout: float | None = None):
    async with channel_to(endpoint) as channel:
        request = deployment_service_pb2.CreateDeploymentRequest(spec=wanted)
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        yield Creation(stub.CreateDeployment(request, timeout=timeout))


async def create(endpoint: str, wanted: types_pb2.DeploymentSpec):
    async with creating(endpoint, wanted) as creation:
        return await creation.outcome()


async def delete(endpoint: str, name: str) -> deployment_service_pb2.DeleteDeploymentResponse:
    async with channel_to(endpoint) as channel:
        return await deployment_service_pb2_grpc.DeploymentServiceStub(channel).DeleteDeployment(
            deployment_service_pb2.DeleteDeploymentRequest(name=name), timeout=10
        )


async def wait_until_gone(endpoint: str, name: str) -> None:
    async def is_gone():
        listed = await list_deployments(endpoint)
        return name not in [deployment.name for deployment in listed.deployments]

    await wait_for(is_gone, f"{name} is gone")


async def test_creation_is_accepted_then_progresses_then_is_ready(endpoint, agent):
    async with creating(endpoint, spec()) as creation:
        messages = await creation.rest()
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "outcome"
    assert set(kinds[1:-1]) == {"progress"}
    accepted = messages[0].accepted
    assert (accepted.deployment, accepted.durable) == ("m", True)
    assert list(accepted.starting_replicas) == [0]
    phases = [message.progress.phase for message in messages[1:-1]]
    assert phases == [types_pb2.PHASE_LOAD, types_pb2.PHASE_MEASURE]  # the repeat is left out
    assert {message.progress.worker_id for message in messages[1:-1]} == {"w1"}
    outcome = messages[-1].outcome
    assert outcome.deployment.state == READY
    assert not outcome.failures
    assert agent.calls == ["RESERVE m/0", "START m/0", "COMMIT m/0"]


async def test_ready_outcome_is_seen_by_every_list_at_once(endpoint, agent):
    for name in ("a", "b", "c"):
        outcome = await create(endpoint, spec(name, stages=1))
        assert outcome.deployment.state == READY
        listed = {it.name: it.state for it in (await list_deployments(endpoint)).deployments}
        assert listed[name] == READY


async def test_replicas_lie_on_different_workers(endpoint, agent):
    async with FakeAgent(endpoint, "w2").serving() as other:
        outcome = await create(endpoint, spec(replicas=2))
        assert outcome.deployment.state == READY
        assert len(agent.calls) == len(other.calls) == 3
        workers = {
            routed.worker_id for replica in outcome.deployment.replicas for routed in replica.shards
        }
        assert workers == {"w1", "w2"}


async def test_same_spec_again_has_nothing_to_do(endpoint, agent):
    await create(endpoint, spec())
    calls = list(agent.calls)
    async with creating(endpoint, spec()) as creation:
        accepted, outcome = await creation.rest()
    assert not accepted.accepted.starting_replicas
    assert outcome.outcome.deployment.state == READY
    assert agent.calls == calls


async def test_same_spec_meanwhile_joins_what_is_under_way(endpoint, agent):
    agent.may_start.clear()
    async with creating(endpoint, spec()) as first, creating(endpoint, spec()) as second:
        await first.next()
        await second.next()
        agent.may_start.set()
        assert (await first.outcome()).deployment.state == READY
        assert (await second.outcome()).deployment.state == READY
    assert agent.calls.count("START m/0") == 1


async def test_other_spec_under_the_same_name_is_refused(endpoint, agent):
    await create(endpoint, spec())
    async with refused(grpc.StatusCode.ALREADY_EXISTS, "DEPLOYMENT_EXISTS") as details:
        await create(endpoint, spec(stages=1))
    assert "delete" in details[0].message


async def test_failed_start_is_rolled_back_and_told(endpoint, agent):
    agent.start_fails = "stage-1 raised ValueError"
    outcome = await create(endpoint, spec())
    assert outcome.deployment.state == FAILED
    (failed,) = outcome.failures
    assert failed.replica_index == 0
    assert failed.worker_id == "w1"
    assert "stage-1 raised ValueError" in failed.message
    assert [entry.stage_id for entry in failed.rollback] == [0, 1]
    assert all(entry.cleaned for entry in failed.rollback)
    assert "COMMIT m/0" not in agent.calls
    assert "stage-1 raised ValueError" in (await get_deployment(endpoint, "m")).reason


async def test_same_spec_after_a_failure_starts_what_failed(endpoint, agent):
    agent.start_fails = "no luck"
    await create(endpoint, spec())
    agent.start_fails = ""
    assert (await create(endpoint, spec())).deployment.state == READY


async def test_call_that_is_cancelled_leaves_the_creation_running(endpoint, agent):
    agent.may_start.clear()
    async with creating(endpoint, spec()) as creation:
        await creation.next()
        creation.call.cancel()
    agent.may_start.set()

    async def is_ready():
        return (await get_deployment(endpoint, "m")).state == READY

    await wait_for(is_ready, "the deployment is READY")


async def test_broken_stream_is_joined_again(endpoint, agent):
    agent.breaks = 2
    assert (await create(endpoint, spec())).deployment.state == READY
    assert agent.calls == ["RESERVE m/0", *["START m/0"] * 3, "COMMIT m/0"]


async def restart(agent: FakeAgent, state: types_pb2.OperationState.ValueType | None) -> None:
    """Have the agent end and come back in another life, with its operations in this state."""
    await agent.stop()
    agent.worker.slice.incarnation += 1
    for operation in agent.operations.values():
        if state is not None:
            operation.state = state
            operation.reason = "its agent died in mid-start"
    await agent.start()


async def test_recovery_R11_agent_that_restarts_in_mid_start_is_joined(endpoint, agent):
    agent.may_start.clear()
    async with creating(endpoint, spec()) as creation:
        await creation.next()
        await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
        await restart(agent, None)
        await wait_for(lambda: agent.calls.count("START m/0") == 2, "it is joined")
        agent.may_start.set()
        outcome = await creation.outcome()
    assert outcome.deployment.state == READY
    assert not any(call.startswith("CANCEL") for call in agent.calls)


async def test_agent_that_cannot_go_on_with_a_start_fails_the_creation(endpoint, agent):
    agent.may_start.clear()
    async with creating(endpoint, spec()) as creation:
        await creation.next()
        await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
        await restart(agent, types_pb2.OPERATION_STATE_INTERRUPTED)
        outcome = await creation.outcome()
    assert outcome.deployment.state == FAILED
    assert "its agent died in mid-start" in outcome.failures[0].message
    await agent.register()
    assert not agent.operations, "the interrupted operation is settled"
    assert any(call.startswith("CANCEL") for call in agent.calls)


async def test_deployment_without_a_worker_is_refused_and_not_wanted(endpoint):
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADMISSION_REFUSED") as details:
        await create(endpoint, spec())
    assert "agent" in details[0].message
    assert not (await list_deployments(endpoint)).deployments


async def test_too_much_memory_is_refused_with_the_arithmetic(endpoint, agent):
    greedy = spec()
    for stage in greedy.stages:
        stage.devices[:] = [0]
        stage.memory.utilization = 0.6
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADMISSION_REFUSED") as details:
        await create(endpoint, greedy)
    assert "cpu:0" in details[0].message
    assert not agent.calls
    assert not (await list_deployments(endpoint)).deployments


async def test_every_wrong_field_of_a_spec_is_named_at_once(endpoint, agent):
    wrong = types_pb2.DeploymentSpec(
        name="a/b",
        entry="nobody",
        stages=[
            types_pb2.StageSpec(name="s", entrypoint="no colon", devices=[0]),
            types_pb2.StageSpec(name="s", entrypoint="m:S", args_json="[1]"),
        ],
        overlap_loads=True,
    )
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD") as details:
        await create(endpoint, wrong)
    paths = {path for path, _ in details[0].violations}
    assert {"name", "entry", "stages[0].memory", "stages[1].name"} <= paths
    assert any(path.startswith("stages[0].entrypoint") for path in paths)
    assert any(path.startswith("stages[1].args") for path in paths)


async def test_what_a_later_release_builds_is_refused_as_not_yet(endpoint, agent):
    async with channel_to(endpoint) as channel:
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        async with refused(grpc.StatusCode.UNIMPLEMENTED, "NOT_YET") as details:
            await stub.UpdateDeployment(deployment_service_pb2.UpdateDeploymentRequest())
        assert "delete" in details[0].message


async def test_requests_with_nothing_in_them_are_refused_and_are_no_bugs(endpoint):
    async with channel_to(endpoint) as channel:
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
            await stub.CreateDeployment(deployment_service_pb2.CreateDeploymentRequest()).read()
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
            await stub.GetDeployment(deployment_service_pb2.GetDeploymentRequest())
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
            await stub.DeleteDeployment(deployment_service_pb2.DeleteDeploymentRequest())
        async with refused(grpc.StatusCode.NOT_FOUND, "DEPLOYMENT_UNKNOWN"):
            await stub.GetDeployment(deployment_service_pb2.GetDeploymentRequest(name="x"))
        async with refused(grpc.StatusCode.NOT_FOUND, "DEPLOYMENT_UNKNOWN"):
            await stub.DeleteDeployment(deployment_service_pb2.DeleteDeploymentRequest(name="x"))


async def test_deleted_deployment_is_stopped_and_gone(endpoint, agent):
    await create(endpoint, spec())
    assert (await delete(endpoint, "m")).durable
    await wait_until_gone(endpoint, "m")
    assert sorted(agent.calls[3:]) == ["STOP m/0/0", "STOP m/0/1"]
    assert not agent.shards
    assert (await create(endpoint, spec(stages=1))).deployment.state == READY


async def test_deleting_twice_changes_nothing(endpoint, agent):
    agent.may_start.clear()
    async with creating(endpoint, spec()) as creation:
        await creation.next()
        await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
        await asyncio.gather(delete(endpoint, "m"), delete(endpoint, "m"))
    await wait_until_gone(endpoint, "m")


async def test_deletion_cancels_a_creation(endpoint, agent):
    agent.may_start.clear()
    async with creating(endpoint, spec()) as creation:
        await creation.next()
        await wait_for(lambda: "START m/0" in agent.calls, "the start is under way")
        await delete(endpoint, "m")
        outcome = await creation.outcome()
        assert outcome.deployment.state == types_pb2.DEPLOYMENT_STATE_DELETING
    await wait_until_gone(endpoint, "m")
    assert any(call.startswith("CANCEL") for call in agent.calls)
    assert not agent.shards


async def test_reported_deployment_that_nobody_wants_can_be_deleted(endpoint, agent):
    agent.shards["stray", 0, 0] = shard("stray")
    await agent.register()
    stray = await get_deployment(endpoint, "stray")
    assert not stray.HasField("spec")
    assert not agent.calls
    await delete(endpoint, "stray")
    await wait_until_gone(endpoint, "stray")
    assert agent.calls == ["STOP stray/0/0"]


async def test_agent_that_does_not_answer_gets_nothing_new(endpoint):
    unreachable = HandWorker(endpoint, "w0")
    unreachable.slice.devices.extend(FakeAgent(endpoint).worker.slice.devices)
    await unreachable.register()

    async def is_known_unreachable():
        (worker,) = (await list_workers(endpoint)).workers
        return worker.HasField("agent_reachable") and not worker.agent_reachable

    await wait_for(is_known_unreachable, "the agent was dialled back")
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADMISSION_REFUSED") as details:
        await create(endpoint, spec())
    assert "w0" in details[0].message


@pytest.mark.parametrize("timeout", [None, 20])
async def test_creation_while_the_supervisor_recovers_waits_for_the_workers(them, agent, timeout):
    await create(them.endpoint, spec())
    await them.restart()
    async with creating(them.endpoint, spec("n", stages=1), timeout) as creation:
        listed = await list_deployments(them.endpoint)
        assert listed.hold_reason == types_pb2.HOLD_REASON_RECOVERING
        await agent.register()
        assert (await creation.outcome()).deployment.state == READY


async def test_creation_is_told_in_time_that_the_workers_are_not_back(them, agent):
    await create(them.endpoint, spec())
    await them.restart()
    async with (
        creating(them.endpoint, spec("n"), timeout=1.0) as creation,
        refused(grpc.StatusCode.UNAVAILABLE, "SUPERVISOR_RECOVERING"),
    ):
        await creation.next()


async def test_wrong_spec_is_refused_at_once_even_while_recovering(them, agent):
    await create(them.endpoint, spec())
    await them.restart()
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
        await create(them.endpoint, types_pb2.DeploymentSpec(name="n"))


async def test_creation_stream_is_ended_when_the_supervisor_ends(them, agent):
    agent.may_start.clear()
    async with creating(them.endpoint, spec()) as creation:
        await creation.next()
        await them.stop()
        async with refused(grpc.StatusCode.UNAVAILABLE, "DRAINING"):
            await creation.rest()


async def test_without_a_store_everything_works_and_says_that_it_is_not_durable():
    async with (
        reigns(None, registry={"recovery_window_s": 0.2, "longest_backoff_s": 0.1}) as them,
        FakeAgent(them.endpoint).serving(),
    ):
        async with creating(them.endpoint, spec()) as creation:
            messages = await creation.rest()
        assert not messages[0].accepted.durable
        assert messages[-1].outcome.deployment.state == READY
        assert not (await delete(them.endpoint, "m")).durable
        await wait_until_gone(them.endpoint, "m")
