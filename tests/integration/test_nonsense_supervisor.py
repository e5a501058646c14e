"""Whatever is sent to a supervisor is answered, or refused with a reason, and nothing breaks."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagekeeper.core.errors import Reason
from stagekeeper.v1 import (
    deployment_service_pb2 as deployment_pb2,
)
from stagekeeper.v1 import (
    deployment_service_pb2_grpc,
    types_pb2,
)
from stagekeeper.v1 import (
    supervisor_service_pb2 as supervisor_pb2,
)
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.supervisors import Reigns, list_deployments, reigns, spec
from tests.harness.fuzzing import LONG, QUICK, Effort, Target
from tests.harness.nonsense import label, methods
from tests.harness.verdicts import Verdict
from tests.harness.waiting import wait_for

METHODS = methods("supervisor")
CALM = {"heartbeat_s": 100.0, "lease_s": 1_000.0, "lost_s": 2_000.0}
"""Nobody falls silent: nothing changes unless it is made to."""

KEPT = "kept"
"""Wanted, and held by an agent that takes commands."""

HELD = "held"
"""Held by a worker by hand."""


def full_spec() -> types_pb2.DeploymentSpec:
    """A spec that says all that a spec can say, and that no worker has room for."""
    made = spec("n")
    made.entry = "stage-0"
    made.model.name, made.model.version = "Qwen3", "30B"
    made.model.abilities.extend(["chat", "audio"])
    made.placement.workers.append("w0")
    made.placement.device_pool.extend(["cpu:0", "cpu:1"])
    for stage in made.stages:
        stage.args_json = '{"weights": "/models", "deep": [[[1]]]}'
        stage.memory.utilization = 0.9
        stage.env["LEVEL"] = "3"
        stage.start_timeout_s = stage.stall_timeout_s = stage.stop_budget_s = 60.0
        stage.max_in_flight = 8
        stage.shard_count = 1
    return made


def full_failure(failure_id: str = "f") -> types_pb2.Failure:
    failure = types_pb2.Failure(
        failure_id=failure_id,
        kind=types_pb2.FAILURE_KIND_EXITED,
        message="it ended",
        detected_by="pidfd",
        last_log_lines=["one", "two"],
        remote_traceback="Traceback",
        path=[types_pb2.FailureHop(owner="stage one", decision="passed on")],
    )
    failure.exit.code = 1
    failure.detect_time.seconds = 1_700_000_000
    failure.origin.worker_id = "w1"
    failure.origin.generation.n = 1
    failure.causes.add(failure_id="cause").causes.add(failure_id="root")
    return failure


def full_registration(number: int) -> Message:
    """A slice that says all that a slice can say, of a worker and a deployment of its own."""
    shards = [
        shard(
            f"other-{number}",
            replica=replica,
            memory_bytes=1,
            busy_for_s=0.5,
            restart_ages_s=[1.0],
            progress=types_pb2.Progress(counter=1, done=1, total=2, note="loading"),
            devices=[types_pb2.DeviceClaim(device_id="cpu:0", reserved_bytes=1, used_bytes=1)],
            failure_id="f",
        )
        for replica in range(2)
    ]
    for record in shards:
        record.ready_time.seconds = 1_700_000_000
    request = HandWorker("", f"x{number}").hold(*shards).slice
    request.highest_epoch.number, request.highest_epoch.supervisor_id = 1, "earlier"
    request.notes.append("a note")
    request.devices.add(device_id="cpu:0", kind="cpu", total_bytes=1 << 30, used_bytes=1)
    operation = request.operations.add(operation_id="op", deployment=f"other-{number}", state=1)
    operation.generation.n = 1
    operation.rollback.add(stage_id=0, cleaned=True, duration_s=0.1)
    operation.failure.CopyFrom(full_failure("of the operation"))
    request.failures.append(full_failure())
    return request


def sound(method: MethodDescriptor, it: Watched) -> Message:
    """Make a request that would be taken."""
    request: Any = GetMessageClass(method.input_type)()
    if isinstance(request, supervisor_pb2.RegisterWorkerRequest):
        # A worker of which a request was taken may have become another life by it.
        return full_registration(next(it.numbers) // 25)
    if isinstance(request, supervisor_pb2.HeartbeatRequest | supervisor_pb2.ReportFailureRequest):
        request.cluster, request.worker_id, request.incarnation = "default", "w1", 1
    if isinstance(request, supervisor_pb2.ReportFailureRequest):
        request.failure.CopyFrom(full_failure())
    if "spec" in request.DESCRIPTOR.fields_by_name:
        request.spec.CopyFrom(full_spec())
    if isinstance(request, deployment_pb2.WatchDeploymentsRequest):
        request.after.epoch.CopyFrom(it.agent.epoch)
    if isinstance(
        request, deployment_pb2.GetDeploymentRequest | deployment_pb2.DeleteDeploymentRequest
    ):
        request.name = "nobody"
    return request


class Watched:
    """A supervisor with something to lose."""

    def __init__(self, them: Reigns, agent: FakeAgent) -> None:
        self.them = them
        self.agent = agent
        self.stub: Any = None
        self.numbers = itertools.count()

    async def state(self) -> dict[str, bytes]:
        """Everything that anybody can read, but what time alone changes."""
        deployments = await self.stub.ListDeployments(deployment_pb2.ListDeploymentsRequest())
        workers = await self.stub.ListWorkers(deployment_pb2.ListWorkersRequest())
        failures = await self.stub.ListFailures(deployment_pb2.ListFailuresRequest(limit=1_000))
        # It counts events too, and what follows from an earlier request is put down when it comes.
        deployments.ClearField("revision")
        for worker in workers.workers:
            for field in ("silent_for_s", "agent_reachable", "reason"):
                worker.ClearField(field)
        parts = {"deployments": deployments, "workers": workers, "failures": failures}
        return {name: part.SerializeToString(deterministic=True) for name, part in parts.items()}

    async def kept(self) -> list[str]:
        """What no request of somebody else may change, whatever it is answered."""
        found = []
        for name in (KEPT, HELD):
            request = deployment_pb2.GetDeploymentRequest(name=name)
            found.append(str((await self.stub.GetDeployment(request)).deployment))
        return found

    async def clear(self, names: set[str]) -> None:
        """Delete what a request that was taken has made, and wait until it is gone."""
        for name in names:
            with contextlib.suppress(grpc.aio.AioRpcError):  # gone already: nothing of it came up
                await self.stub.DeleteDeployment(deployment_pb2.DeleteDeploymentRequest(name=name))

        async def is_gone() -> bool:
            listed = await list_deployments(self.them.endpoint)
            return not names & {it.name for it in listed.deployments}

        await wait_for(is_gone, f"{names} are gone")


@asynccontextmanager
async def watched(state_dir):
    async with (
        reigns(state_dir, registry=CALM) as them,
        FakeAgent(them.endpoint, "w0").serving() as agent,
        channel_to(them.endpoint) as channel,
    ):
        it = Watched(them, agent)
        it.stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        await HandWorker(them.endpoint, "w1").hold(shard(HELD), shard(HELD, replica=1)).register()
        creation = it.stub.CreateDeployment(
            deployment_pb2.CreateDeploymentRequest(spec=spec(KEPT)), timeout=30
        )
        *_, last = [message async for message in creation]
        assert last.outcome.deployment.state == types_pb2.DEPLOYMENT_STATE_READY
        yield it


async def endure(method: MethodDescriptor, tmp_path, caplog, effort: Effort) -> dict[str, int]:
    """Send nonsense to one rpc of a supervisor that holds something."""
    is_creation = method.name == "CreateDeployment"
    with structlog.testing.capture_logs() as logged:
        async with watched(tmp_path) as it:
            kept = await it.kept()
            assert it.them.supervisor is not None
            is_for_workers = method.containing_service.name == "SupervisorService"
            address = it.them.supervisor.worker_address if is_for_workers else it.them.endpoint

            async def answered(verdict: Verdict) -> None:
                if is_creation:
                    await it.clear({verdict.answer.accepted.deployment})
                    await it.agent.register()  # what was stopped is not held any more
                for entry in getattr(verdict.answer, "refused", ()):
                    assert entry.reason in set(Reason) and entry.message
                assert await it.kept() == kept

            async with channel_to(address) as channel:
                make: Callable[[], Message] = lambda: sound(method, it)  # noqa: E731
                target = Target(channel, method, make, it.state, answered, is_undone=is_creation)
                reasons = await target.endure(effort)
            await it.them.restart()  # and whatever was written can be read again
            names = {it.name for it in (await list_deployments(it.them.endpoint)).deployments}
            assert KEPT in names
    bugs = [entry for entry in logged if "bug" in entry["event"] or "damaged" in entry["event"]]
    assert not bugs
    assert not _python_errors(caplog)
    return reasons


_NOT_OURS = ("DecodeError", "PollerCompletionQueue")
"""gRPC writes of frames that it could not read, and of reading a socket that has nothing yet."""


def _python_errors(caplog) -> list[str]:
    """What asyncio and gRPC complain of."""
    told = [it.getMessage() for it in caplog.records if it.levelno >= logging.ERROR]
    return [message for message in told if not any(word in message for word in _NOT_OURS)]


@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_nonsense_is_answered_or_refused_with_a_reason_and_changes_nothing(
    tmp_path, caplog, method
):
    reasons = await endure(method, tmp_path, caplog, QUICK)
    print(label(method), reasons)
    if method.name != "Heartbeat":  # which is answered, whatever it says
        assert reasons["TOO_LARGE"] > 0
    if method.input_type.fields and method.name not in ("Heartbeat", "UpdateDeployment"):
        assert reasons["BAD_FIELD"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_much_nonsense_is_answered_or_refused_with_a_reason(tmp_path, caplog, method):
    await endure(method, tmp_path, caplog, LONG)
