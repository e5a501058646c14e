"""A supervisor by hand, for one agent: real gRPC, every decision the test's own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from stagekeeper.core.ids import (
    DeploymentName,
    DeviceId,
    Epoch,
    Generation,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import MemoryNeed, OperationPlan, StageSpec, StageStart
from stagekeeper.runtime.convert import (
    epoch_to_proto,
    generation_to_proto,
    header_to_proto,
    plan_to_proto,
)
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import supervisor_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.agent_service_pb2_grpc import AgentServiceStub
from stagekeeper.v1.discovery_service_pb2_grpc import (
    DiscoveryServiceServicer,
    add_DiscoveryServiceServicer_to_server,
)
from stagekeeper.v1.supervisor_service_pb2_grpc import (
    SupervisorServiceServicer,
    add_SupervisorServiceServicer_to_server,
)
from stagekeeper.wire.transport import CLIENT_OPTIONS, SERVER_OPTIONS
from tests.fakes.agents import AgentHome, AgentProcess
from tests.harness.waiting import wait_for

RESERVE = agent_pb2.OPERATION_STEP_RESERVE
START = agent_pb2.OPERATION_STEP_START
COMMIT = agent_pb2.OPERATION_STEP_COMMIT
CALL_TIMEOUT_S = 60.0

REIGN = Epoch(1, "overseer")


class Overseer(DiscoveryServiceServicer, SupervisorServiceServicer):
    """Takes registrations, beats and failures; says commands.

    Attributes:
        settles: whether failures and ended operations are settled when they are reported.
        settled_too: operations that every answer to a registration calls settled, ended or not.
    """

    def __init__(self, *, settles: bool = True, pace_s: float = 0.2) -> None:
        self.epoch = REIGN
        self.settles = settles
        self.settled_too: list[str] = []
        self.pace_s = pace_s
        self.registrations: list[pb.RegisterWorkerRequest] = []
        self.heartbeat_count = 0
        self.failures: dict[str, types_pb2.Failure] = {}
        self.endpoint = ""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._channel: grpc.aio.Channel | None = None
        self._address = ""
        self._newest: Counter[str] = Counter()

    async def __aenter__(self) -> Overseer:
        add_DiscoveryServiceServicer_to_server(self, self._server)
        add_SupervisorServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self.leave()

    async def leave(self) -> None:
        """Answer nobody any more. A second call changes nothing."""
        await self._server.stop(0)

    # --- what agents call

    async def GetSupervisor(self, request: Any, context: Any) -> Any:
        return discovery_pb2.GetSupervisorResponse(
            cluster="default", epoch=epoch_to_proto(self.epoch), worker_address=self.endpoint
        )

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> Any:
        self.registrations.append(request)
        for failure in request.failures:
            self.failures[failure.failure_id] = failure
        ended = (types_pb2.OPERATION_STATE_COMMITTED, types_pb2.OPERATION_STATE_ROLLED_BACK)
        return pb.RegisterWorkerResponse(
            epoch=epoch_to_proto(self.epoch),
            next_heartbeat_s=self.pace_s,
            settled_failure_ids=[it.failure_id for it in request.failures if self.settles],
            settled_operation_ids=self.settled_too
            + [it.operation_id for it in request.operations if self.settles and it.state in ended],
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> Any:
        self.heartbeat_count += 1
        return pb.HeartbeatResponse(
            verdict=pb.HEARTBEAT_VERDICT_OK,
            epoch=epoch_to_proto(self.epoch),
            next_heartbeat_s=self.pace_s,
        )

    async def ReportFailure(self, request: pb.ReportFailureRequest, context: Any) -> Any:
        self.failures[request.failure.failure_id] = request.failure
        return pb.ReportFailureResponse(settled=self.settles)

    # --- what it knows

    @property
    def last(self) -> pb.RegisterWorkerRequest:
        return self.registrations[-1]

    @property
    def shards(self) -> dict[str, types_pb2.ShardRecord]:
        """The shards of the last registration, by the names of their stages."""
        return {shard.stage_name: shard for shard in self.last.replica_states}

    async def hears(
        self, condition: Callable[[pb.RegisterWorkerRequest], Any], what: str
    ) -> pb.RegisterWorkerRequest:
        """Wait for a registration of which the condition holds."""

        def look() -> pb.RegisterWorkerRequest | None:
            return self.last if self.registrations and condition(self.last) else None

        return await wait_for(look, what)

    async def has_heard(
        self, condition: Callable[[pb.RegisterWorkerRequest], Any], what: str
    ) -> pb.RegisterWorkerRequest:
        """Wait for a registration that may be followed by others soon: what is settled goes."""

        def look() -> pb.RegisterWorkerRequest | None:
            return next((it for it in reversed(self.registrations) if condition(it)), None)

        return await wait_for(look, what)

    # --- what it commands

    @property
    def agent(self) -> Any:
        """A stub of the agent that registered last."""
        if self._channel is None or self.last.agent_address != self._address:
            self._address = self.last.agent_address
            self._channel = grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS)
        return AgentServiceStub(self._channel)

    def header(self, **changes: Any) -> agent_pb2.CommandHeader:
        facts: dict[str, Any] = {
            "cluster": "default",
            "epoch": self.epoch,
            "incarnation": self.last.incarnation,
            **changes,
        }
        return header_to_proto(**facts)

    async def take(
        self, step: agent_pb2.OperationStep.ValueType, plan: OperationPlan, **more: Any
    ) -> types_pb2.OperationRecord:
        """Take a step and return its outcome; `more` is what `plan_to_proto` takes."""
        *_, last = await self.events(step, plan, **more)
        assert last.HasField("outcome")
        return last.outcome

    async def events(
        self, step: agent_pb2.OperationStep.ValueType, plan: OperationPlan, **more: Any
    ) -> list[agent_pb2.InitStageResponse]:
        """Take a step and return all that the agent said."""
        return [event async for event in self.stream(step, plan, **more)]

    def stream(
        self, step: agent_pb2.OperationStep.ValueType, plan: OperationPlan, **more: Any
    ) -> Any:
        """Take a step; what the agent says is read as it comes."""
        self._newest[plan.deployment] = max(self._newest[plan.deployment], plan.generation.n)
        request = plan_to_proto(plan, self.header(), step, **more)
        return self.agent.InitStage(request, timeout=CALL_TIMEOUT_S)

    async def bring_up(self, plan: OperationPlan) -> types_pb2.OperationRecord:
        """Reserve, start and commit; return the last outcome."""
        await self.take(RESERVE, plan)
        started = await self.take(START, plan)
        if started.state != types_pb2.OPERATION_STATE_STARTED:
            return started
        return await self.take(COMMIT, plan)

    async def cancel(
        self, operation_id: str, *, lets_finish: bool = False
    ) -> types_pb2.OperationRecord | None:
        response = await self.agent.CancelOperation(
            agent_pb2.CancelOperationRequest(
                header=self.header(),
                operation_id=operation_id,
                reason="test",
                lets_finish=lets_finish,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        return response.operation if response.HasField("operation") else None

    async def stop(
        self,
        stage_id: int = 0,
        *,
        deployment: str = "m",
        up_to: int | None = None,
        budget_s: float | None = None,
    ) -> agent_pb2.StopStageResponse:
        """Stop a slot, by default up to the newest generation that was given."""
        n = self._newest[deployment] if up_to is None else up_to
        return await self.agent.StopStage(
            agent_pb2.StopStageRequest(
                header=self.header(),
                deployment=deployment,
                stage_id=stage_id,
                up_to_generation=generation_to_proto(Generation(self.epoch, n)),
                budget_s=budget_s,
                reason="test",
            ),
            timeout=CALL_TIMEOUT_S,
        )


def stage(
    name: str,
    entrypoint: str = "sample_stages:Echo",
    *,
    args: str = "{}",
    device: str | None = None,
    utilization: float = 0.3,
    **limits: Any,
) -> StageSpec | tuple[StageSpec, str]:
    """A stage, and the device that it lies on if it lies on one."""
    spec = StageSpec(
        name,
        entrypoint,
        args_json=args,
        devices=() if device is None else (0,),
        memory=None if device is None else MemoryNeed(utilization=utilization),
        **limits,
    )
    return spec if device is None else (spec, device)


def gate(home: AgentHome, name: str) -> Path:
    """The file that a `slow` stage of this name waits for."""
    return home.path / f"{name}.open"


def slow(name: str, home: AgentHome, **options: Any) -> StageSpec | tuple[StageSpec, str]:
    """A stage that loads until its gate is opened."""
    return stage(name, "sample_stages:Slow", args=f'{{"gate": "{gate(home, name)}"}}', **options)


def only(*stage_ids: int) -> dict[str, tuple[StageId, ...]]:
    """What starts these stages alone, for `Overseer.take`."""
    return {"start_stage_ids": tuple(StageId(it) for it in stage_ids)}


def plan(
    *stages: StageSpec | tuple[StageSpec, str],
    n: int = 1,
    deployment: str = "m",
    operation: str = "",
    epoch: Epoch = REIGN,
    shard: tuple[int, int] = (0, 1),
) -> OperationPlan:
    """A plan that starts these stages as generation `n`; of each the same shard (index, count)."""
    starts: Sequence[tuple[StageSpec, tuple[str, ...]]] = [
        (it[0], (it[1],)) if isinstance(it, tuple) else (it, ()) for it in stages
    ]
    return OperationPlan(
        operation_id=OperationId(operation or f"op-{n}"),
        deployment=DeploymentName(deployment),
        replica_index=ReplicaIndex(0),
        generation=Generation(epoch, n),
        worker_id=WorkerId("w"),
        stages=tuple(
            StageStart(
                StageId(index),
                replace(spec, shard_count=shard[1]),
                tuple(DeviceId(it) for it in devices),
                *shard,
            )
            for index, (spec, devices) in enumerate(starts)
        ),
        stage_count=len(starts),
        entry_stage_id=StageId(0),
        spec_revision=1,
    )


async def first_life(home: AgentHome, overseer: Overseer, **changes: Any) -> AgentProcess:
    """An agent that can be killed, registered."""
    agent = await AgentProcess.start(home, **changes)
    await overseer.hears(lambda it: it.agent_address, "it registers")
    return agent


async def gone(pids: Sequence[int]) -> None:
    """Wait until none of these processes lives."""
    from stagekeeper.host.process import identity_of

    await wait_for(lambda: not [pid for pid in pids if identity_of(pid)], f"{pids} are gone")
    await asyncio.sleep(0)
