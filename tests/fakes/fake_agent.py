"""An agent without processes: it serves AgentService, keeps its shards in memory, and registers.

It stands for the edge of the supervisor: what a real agent does with processes is tested elsewhere.
A test holds a start back, makes it fail or breaks its stream through the attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.runtime.errors import answers_refusals
from stagekeeper.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    types_pb2,
)
from stagekeeper.wire.transport import SERVER_OPTIONS
from tests.fakes.hand_worker import HandWorker, shard

STEP = agent_service_pb2.OperationStep.Name
GIB = 1 << 30

_UNSTARTED = (types_pb2.OPERATION_STATE_RESERVED, types_pb2.OPERATION_STATE_STARTING)
_ENDED = (types_pb2.OPERATION_STATE_COMMITTED, types_pb2.OPERATION_STATE_ROLLED_BACK)


class FakeAgent(agent_service_pb2_grpc.AgentServiceServicer):
    """One agent with two cards of 8 GiB.

    Attributes:
        may_start: cleared, a START waits for it.
        start_fails: a START is rolled back with this message, when it is not empty.
        holds_back: stages that do not come up until `may_start` is set; None: all.
        commit_fails: a COMMIT rolls back with this message, when it is not empty.
        reserve_refused: a RESERVE finds no room, with this message, when it is not empty.
        refuses_commits: a COMMIT is answered as if nobody were there.
        peers: what the last COMMIT told of other workers.
        breaks: so many InitStage streams are broken off before their outcome.
        calls: what was asked, in order.
    """

    def __init__(self, endpoint: str, worker_id: str = "w1", **slice_fields: object) -> None:
        self.worker = HandWorker(
            endpoint,
            worker_id,
            **{
                "devices": [
                    types_pb2.Device(
                        device_id=f"cpu:{index}",
                        kind="cpu",
                        model="host memory",
                        index=index,
                        total_bytes=8 * GIB,
                    )
                    for index in range(2)
                ],
                **slice_fields,
            },
        )
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_fails = ""
        self.holds_back: set[int] | None = None
        self.commit_fails = ""
        self.reserve_refused = ""
        self.refuses_commits = False
        self.peers: list[types_pb2.Peer] = []
        self.breaks = 0
        self.calls: list[str] = []
        self.epoch = types_pb2.Epoch()
        self.shards: dict[tuple[str, int, int], types_pb2.ShardRecord] = {}
        self.operations: dict[str, types_pb2.OperationRecord] = {}
        self.ended: set[str] = set()
        self._server: grpc.aio.Server | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeAgent]:
        """Serve at a port from the system, and register."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        agent_service_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.worker.slice.agent_address = f"127.0.0.1:{port}"
        await self.register()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def register(self) -> None:
        """Put the whole slice, as a real agent does at each change."""
        del self.worker.slice.operations[:]
        self.worker.slice.operations.extend(self.operations.values())
        self.worker.hold(*self.shards.values())
        reply = await self.worker.register()
        self.epoch = reply.epoch
        self.worker.slice.highest_epoch.CopyFrom(reply.epoch)
        for operation_id in reply.settled_operation_ids:
            self.operations.pop(operation_id, None)

    async def _report(self) -> None:
        """Put the slice in the midst of a command: that goes on whether or not anybody hears."""
        with suppress(grpc.RpcError):
            await self.register()

    def _check(self, header: agent_service_pb2.CommandHeader) -> None:
        if header.epoch != self.epoch:
            raise Refused(Reason.STALE_EPOCH, "not registered with this reign")
        if header.incarnation != self.worker.slice.incarnation:
            raise Refused(Reason.STALE_INCARNATION, "another life")

    @answers_refusals
    async def InitStage(
        self, request: agent_service_pb2.InitStageRequest, context: Any
    ) -> AsyncIterator[agent_service_pb2.InitStageResponse]:
        step = STEP(request.step).removeprefix("OPERATION_STEP_")
        self.calls.append(f"{step} {request.deployment}/{request.replica_index}")
        self._check(request.header)
        if request.operation_id not in self.operations:
            if request.step != agent_service_pb2.OPERATION_STEP_RESERVE:
                problem = FieldProblem("step", "begin with RESERVE")
                raise bad_fields([problem], "the operation")
            if self.reserve_refused:
                raise Refused(Reason.ADMISSION_REFUSED, self.reserve_refused)
            self.operations[request.operation_id] = types_pb2.OperationRecord(
                operation_id=request.operation_id,
                deployment=request.deployment,
                replica_index=request.replica_index,
                generation=request.generation,
                state=types_pb2.OPERATION_STATE_RESERVED,
            )
        operation = self.operations[request.operation_id]
        asked = set(request.start_stage_ids) or {stage.stage_id for stage in request.stages}
        if (
            request.step == agent_service_pb2.OPERATION_STEP_START
            and operation.state in _UNSTARTED
            and not asked <= set(operation.up_stage_ids)
        ):
            operation.state = types_pb2.OPERATION_STATE_STARTING
            for phase in (types_pb2.PHASE_LOAD, types_pb2.PHASE_LOAD, types_pb2.PHASE_MEASURE):
                yield _progress(request, phase)
            if operation.state == types_pb2.OPERATION_STATE_STARTING:  # nobody cancelled it since
                self._put_shards(request, types_pb2.SHARD_STATE_STARTING, asked)
                await self._report()
            if self.breaks:
                self.breaks -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")
            if self.holds_back is None or asked & self.holds_back:
                await self.may_start.wait()
            if operation.state == types_pb2.OPERATION_STATE_STARTING:
                await self._finish_start(request, operation, asked)
        elif (
            request.step == agent_service_pb2.OPERATION_STEP_COMMIT
            and operation.state == types_pb2.OPERATION_STATE_STARTED
        ):
            if self.refuses_commits:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is there")
            self.peers = list(request.peers)
            if self.commit_fails:
                self._roll_back(operation, self.commit_fails)
            else:
                operation.state = types_pb2.OPERATION_STATE_COMMITTED
                self._put_shards(request, types_pb2.SHARD_STATE_READY, committed=True)
            await self._report()
        yield agent_service_pb2.InitStageResponse(outcome=operation)

    async def _finish_start(
        self,
        request: agent_service_pb2.InitStageRequest,
        operation: types_pb2.OperationRecord,
        asked: set[int],
    ) -> None:
        if self.start_fails:
            self._roll_back(operation, self.start_fails)
        else:
            up = asked.union(operation.up_stage_ids)
            operation.up_stage_ids[:] = sorted(up)
            if up == {stage.stage_id for stage in request.stages}:
                operation.state = types_pb2.OPERATION_STATE_STARTED
            self._put_shards(request, types_pb2.SHARD_STATE_READY, asked)
        await self._report()

    def _put_shards(
        self,
        request: agent_service_pb2.InitStageRequest,
        state: types_pb2.ShardState.ValueType,
        asked: Container[int] | None = None,
        *,
        committed: bool = False,
    ) -> None:
        for stage in request.stages:
            if asked is not None and stage.stage_id not in asked:
                continue
            record = shard(
                request.deployment,
                replica=request.replica_index,
                stage=stage.stage_id,
                of=request.stage_count,
                instance=f"{request.operation_id}-{stage.stage_id}-{stage.shard_index}",
                url=f"{self.worker.slice.worker_id}:{5000 + stage.stage_id}",
                shard_index=stage.shard_index,
                shard_count=stage.shard_count,
                state=state,
                stage_name=stage.spec.name,
                operation_id=request.operation_id,
                committed=committed,
                entry=stage.stage_id == request.entry_stage_id,
            )
            record.generation.CopyFrom(request.generation)
            self.shards[request.deployment, request.replica_index, stage.stage_id] = record

    def _roll_back(self, operation: types_pb2.OperationRecord, why: str) -> None:
        operation.state = types_pb2.OPERATION_STATE_ROLLED_BACK
        operation.reason = why
        for key, record in list(self.shards.items()):
            if record.operation_id == operation.operation_id:
                del self.shards[key]
                operation.rollback.add(
                    stage_id=key[2],
                    stage_name=record.stage_name,
                    worker_id=self.worker.slice.worker_id,
                    cleaned=True,
                    duration_s=0.01,
                )

    @answers_refusals
    async def CancelOperation(
        self, request: agent_service_pb2.CancelOperationRequest, context: Any
    ) -> agent_service_pb2.CancelOperationResponse:
        self.calls.append(f"CANCEL {request.operation_id}")
        self._check(request.header)
        operation = self.operations.get(request.operation_id)
        if operation is not None and operation.state not in _ENDED:
            self._roll_back(operation, request.reason)
            self.may_start.set()
            await self._report()
        return agent_service_pb2.CancelOperationResponse(operation=operation)

    @answers_refusals
    async def StopStage(
        self, request: agent_service_pb2.StopStageRequest, context: Any
    ) -> agent_service_pb2.StopStageResponse:
        key = (request.deployment, request.replica_index, request.stage_id)
        self.calls.append(f"STOP {key[0]}/{key[1]}/{key[2]}")
        self._check(request.header)
        stopped = self.shards.pop(key, None)
        await self._report()
        return agent_service_pb2.StopStageResponse(stopped_count=1 if stopped else 0)

    async def GetInventory(
        self, request: agent_service_pb2.GetInventoryRequest, context: Any
    ) -> agent_service_pb2.GetInventoryResponse:
        return agent_service_pb2.GetInventoryResponse(devices=self.worker.slice.devices)

    async def ListStages(
        self, request: agent_service_pb2.ListStagesRequest, context: Any
    ) -> agent_service_pb2.ListStagesResponse:
        return agent_service_pb2.ListStagesResponse(
            shards=self.shards.values(), operations=self.operations.values()
        )

    @answers_refusals
    async def DrainWorker(
        self, request: agent_service_pb2.DrainWorkerRequest, context: Any
    ) -> agent_service_pb2.DrainWorkerResponse:
        raise Refused(Reason.NOT_YET, "no agent drains yet")

    @answers_refusals
    async def ReadStageLog(
        self, request: agent_service_pb2.ReadStageLogRequest, context: Any
    ) -> AsyncIterator[agent_service_pb2.ReadStageLogResponse]:
        yield agent_service_pb2.ReadStageLogResponse()

    @answers_refusals
    async def SpawnProcs(
        self, request: agent_service_pb2.SpawnProcsRequest, context: Any
    ) -> AsyncIterator[agent_service_pb2.SpawnProcsResponse]:
        for it in request.instance_ids:
            ended = agent_service_pb2.ProcEnded(instance_id=it, reason="this agent starts none")
            yield agent_service_pb2.SpawnProcsResponse(ended=ended)


def _progress(
    request: agent_service_pb2.InitStageRequest, phase: types_pb2.Phase.ValueType
) -> agent_service_pb2.InitStageResponse:
    stage = request.stages[0]
    return agent_service_pb2.InitStageResponse(
        progress=types_pb2.StageProgress(
            replica_index=request.replica_index,
            stage_id=stage.stage_id,
            stage_name=stage.spec.name,
            state=types_pb2.SHARD_STATE_STARTING,
            phase=phase,
            progress=types_pb2.Progress(counter=phase, done=1, total=2),
        )
    )
