"""`AgentService`: what the supervisor, and people who look, ask of this agent.

Servicers convert, check, call and convert; what is decided is decided elsewhere. Commands carry a
header that is checked first, then all their fields at once; reads have none. Invariant: a command
that is refused has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final

from stagekeeper.agent.authority import Authority
from stagekeeper.agent.cards.host_ledger import until_turn
from stagekeeper.agent.cards.inventory import InventoryReport
from stagekeeper.agent.log_tail import follow, tail
from stagekeeper.agent.operation import Operation
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.procs.proc_events import proc_event
from stagekeeper.agent.procs.proc_sets import ProcSets
from stagekeeper.agent.records import RecordStore
from stagekeeper.agent.stages import Stages
from stagekeeper.agent.stopping import Stopping
from stagekeeper.core.command_check import (
    asked_problems,
    cancel_problems,
    peer_problems,
    plan_problems,
    slot_problems,
    stop_problems,
)
from stagekeeper.core.command_stage_check import ports_problem
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.field_check import named
from stagekeeper.core.ids import (
    DeploymentName,
    DeviceId,
    Epoch,
    InstanceId,
    OperationId,
    ReplicaIndex,
    SlotKey,
    StageId,
    WorkerId,
)
from stagekeeper.core.limits import MOST_LINES_READ, MOST_STAGES
from stagekeeper.core.model import OperationPlan, OperationRecord, ShardRecord
from stagekeeper.core.names import cut
from stagekeeper.core.procs import wanted_problems
from stagekeeper.runtime.convert import (
    device_to_proto,
    epoch_from_proto,
    generation_from_proto,
    operation_to_proto,
    peer_from_proto,
    phase_to_proto,
    plan_from_proto,
    procs_wanted_from_proto,
    progress_to_proto,
    shard_state_to_proto,
    shard_to_proto,
    stage_ports_from_proto,
)
from stagekeeper.runtime.errors import Context, answers_refusals
from stagekeeper.v1 import agent_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.agent_service_pb2_grpc import AgentServiceServicer

SERVICE: Final = pb.DESCRIPTOR.services_by_name["AgentService"].full_name

_DEFAULT_LINES: Final = 100
_STEPS: Final = frozenset(
    {pb.OPERATION_STEP_RESERVE, pb.OPERATION_STEP_START, pb.OPERATION_STEP_COMMIT}
)


class AgentService(AgentServiceServicer):
    """Serves one agent.

    Args:
        inventory: tells the cards as they are now.
        read_cards: has these cards read anew; returns when they are, or cannot be.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        authority: Authority,
        stages: Stages,
        operations: Operations,
        stopping: Stopping,
        records: RecordStore,
        procs: ProcSets,
        inventory: Callable[[], InventoryReport],
        read_cards: Callable[[Collection[DeviceId]], Awaitable[None]],
    ) -> None:
        self._worker_id = worker_id
        self._authority = authority
        self._stages = stages
        self._operations = operations
        self._stopping = stopping
        self._records = records
        self._procs = procs
        self._inventory = inventory
        self._read_cards = read_cards
        self._ending = asyncio.Event()

    def end_streams(self) -> None:
        """End what is followed: the agent ends. Operations end by themselves."""
        self._ending.set()

    @answers_refusals
    async def InitStage(
        self, request: pb.InitStageRequest, context: Context
    ) -> AsyncIterator[pb.InitStageResponse]:
        reign = self._check_start(request.header)
        plan = plan_from_proto(request, self._worker_id)
        problems = [*_step_problems(request), *plan_problems(plan, reign)]
        if request.step == pb.OPERATION_STEP_RESERVE:
            problems += self._operations.problems(plan)
        asked = [StageId(it) for it in request.start_stage_ids]
        problems += asked_problems(plan, asked)
        peers = tuple([peer_from_proto(it) for it in request.peers])
        problems += peer_problems(plan, peers)
        leaders = tuple([stage_ports_from_proto(it) for it in request.leaders])
        problems += named([("leaders", ports_problem(leaders, MOST_STAGES))])
        _refuse(problems, "the operation")
        committed = self._operations.committed_record(plan.operation_id)
        if committed is not None:
            if request.step == pb.OPERATION_STEP_COMMIT:
                await self._operations.commit_again(plan.operation_id, peers)
            yield _outcome(committed)
            return
        if request.step == pb.OPERATION_STEP_RESERVE:
            operation = await self._reserve(request.header, plan)
        elif request.step == pb.OPERATION_STEP_COMMIT:
            operation = await self._operations.commit(plan, peers)
        else:
            asked = asked or [start.stage_id for start in plan.stages]
            operation = self._operations.start(plan, asked, leaders)
        with self._operations.joined(operation):
            if request.step == pb.OPERATION_STEP_START:
                async for shard in operation.progress(asked):
                    yield pb.InitStageResponse(progress=_progress(shard, self._worker_id))
            yield _outcome(operation.record)

    @answers_refusals
    async def CancelOperation(
        self, request: pb.CancelOperationRequest, context: Context
    ) -> pb.CancelOperationResponse:
        self._check(request.header)
        operation_id = OperationId(request.operation_id)
        _refuse(cancel_problems(operation_id), "the cancellation")
        record = await self._operations.cancel(
            operation_id, cut(request.reason), lets_finish=request.lets_finish
        )
        return pb.CancelOperationResponse(
            operation=None if record is None else operation_to_proto(record)
        )

    @answers_refusals
    async def StopStage(
        self, request: pb.StopStageRequest, context: Context
    ) -> pb.StopStageResponse:
        reign, has = self._check(request.header), request.HasField
        slot = _slot(request)
        budget_s = request.budget_s if has("budget_s") else None
        has_ceiling = has("up_to_generation")
        up_to = generation_from_proto(request.up_to_generation)
        _refuse(stop_problems(slot, up_to if has_ceiling else None, budget_s, reign), "the stop")
        outcome = await self._stopping.stop_slot(slot, up_to, budget_s, cut(request.reason))
        return pb.StopStageResponse(stopped_count=outcome.stopped_count, killed=outcome.killed)

    @answers_refusals
    async def ListStages(
        self, request: pb.ListStagesRequest, context: Context
    ) -> pb.ListStagesResponse:
        return pb.ListStagesResponse(
            shards=[shard_to_proto(shard) for shard in self._stages.shards()],
            operations=[operation_to_proto(it) for it in self._operations.records()],
        )

    @answers_refusals
    async def GetInventory(
        self, request: pb.GetInventoryRequest, context: Context
    ) -> pb.GetInventoryResponse:
        inventory = self._inventory()
        return pb.GetInventoryResponse(
            devices=[device_to_proto(device) for device in inventory.devices],
            inventory_unknown=bool(inventory.unknown_reason),
            inventory_reason=inventory.unknown_reason,
        )

    @answers_refusals
    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Context
    ) -> pb.DrainWorkerResponse:
        raise Refused(
            Reason.NOT_YET,
            "draining a worker is not built yet: delete the deployments that lie on it",
        )

    @answers_refusals
    async def ReadStageLog(
        self, request: pb.ReadStageLogRequest, context: Context
    ) -> AsyncIterator[pb.ReadStageLogResponse]:
        _refuse(slot_problems(_slot(request)))
        instance_id = self._instance_with_log(request)
        path = self._records.log_path(instance_id)
        count = min(request.last_lines or _DEFAULT_LINES, MOST_LINES_READ)

        def is_over() -> bool:
            live = {stage.instance_id for stage in self._stages if stage.holds_processes}
            return instance_id not in live or self._ending.is_set()

        pieces = follow(path, count, is_over=is_over) if request.follow else tail(path, count)
        async for lines in pieces:
            yield pb.ReadStageLogResponse(lines=lines, instance_id=instance_id)

    @answers_refusals
    async def SpawnProcs(
        self, request: pb.SpawnProcsRequest, context: Context
    ) -> AsyncIterator[pb.SpawnProcsResponse]:
        self._authority.check_cluster(request.cluster)
        wanted = procs_wanted_from_proto(request)
        _refuse(wanted_problems(wanted), "the request for processes")
        if wanted.ends:
            await self._procs.end(wanted)
            return
        self._check_not_ending()
        found, named = self._procs.join(wanted)
        with found.held():
            async for instance_id, news in found.news(named):
                yield proc_event(instance_id, news, self._procs)
        self._check_not_ending()

    async def _reserve(self, header: pb.CommandHeader, plan: OperationPlan) -> Operation:
        """Reserve against the cards as they are now, in this agent's turn among those of the host.

        Both may take a while, so whether this agent may still be told is asked at the very last.
        """

        def reserve() -> Operation:
            self._check_start(header)
            return self._operations.reserve(plan)

        await self._read_cards({it for start in plan.stages for it in start.device_ids})
        return await until_turn(reserve)

    def _check_start(self, header: pb.CommandHeader) -> Epoch:
        """Refuse what may not be started here now; return the reign that commands."""
        reign = self._check(header)
        self._check_not_ending()
        return reign

    def _check_not_ending(self) -> None:
        if self._authority.is_draining:
            raise Refused(Reason.DRAINING, "this agent ends and starts nothing new")

    def _check(self, header: pb.CommandHeader) -> Epoch:
        """Refuse what is not for this agent now; return the reign that commands."""
        epoch = epoch_from_proto(header.epoch)
        self._authority.check(header.cluster, epoch, header.incarnation)
        return epoch

    def _instance_with_log(self, request: pb.ReadStageLogRequest) -> InstanceId:
        instances = self._records.instances_of(_slot(request))
        place = 1 if request.previous else 0
        if len(instances) > place:
            return instances[place]
        what = "no earlier instance of it" if instances else "no log of it"
        raise Refused(
            Reason.STAGE_UNKNOWN,
            f"{request.deployment} replica {request.replica_index} stage {request.stage_id}: "
            f"worker {self._worker_id} has {what}",
        )


def _step_problems(request: pb.InitStageRequest) -> Iterable[FieldProblem]:
    if request.step not in _STEPS:
        yield FieldProblem("step", f"{request.step} is no step of an operation")
        return
    if request.start_stage_ids and request.step != pb.OPERATION_STEP_START:
        yield FieldProblem("start_stage_ids", "are for START alone")
    if request.leaders and request.step != pb.OPERATION_STEP_START:
        yield FieldProblem("leaders", "are for START alone")
    if request.peers and request.step != pb.OPERATION_STEP_COMMIT:
        yield FieldProblem("peers", "are for COMMIT alone")


def _refuse(problems: Sequence[FieldProblem], what: str = "the request") -> None:
    if problems:
        raise bad_fields(problems, what)


def _slot(request: pb.StopStageRequest | pb.ReadStageLogRequest) -> SlotKey:
    return SlotKey(
        DeploymentName(request.deployment),
        ReplicaIndex(request.replica_index),
        StageId(request.stage_id),
    )


def _outcome(record: OperationRecord) -> pb.InitStageResponse:
    return pb.InitStageResponse(outcome=operation_to_proto(record))


def _progress(shard: ShardRecord, worker_id: WorkerId) -> types_pb2.StageProgress:
    return types_pb2.StageProgress(
        replica_index=shard.replica_index,
        stage_id=shard.stage_id,
        stage_name=shard.stage_name,
        worker_id=worker_id,
        state=shard_state_to_proto(shard.state),
        phase=phase_to_proto(shard.phase),
        progress=progress_to_proto(shard.progress),
    )
