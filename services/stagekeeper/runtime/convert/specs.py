"""Specs, and the plan of an operation as its agent is told it.

Decided here: the defaults of fields that were left out (0 replicas are 1). What a field may hold is
the core's to judge.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.ids import (
    DeploymentName,
    DeviceId,
    Epoch,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import (
    DEFAULT_MAX_IN_FLIGHT,
    DeploymentSpec,
    MemoryNeed,
    OperationPlan,
    Peer,
    Placement,
    StageSpec,
    StageStart,
)
from stagekeeper.runtime.convert.command_stages import (
    command_from_proto,
    command_to_proto,
    stage_ports_to_proto,
)
from stagekeeper.runtime.convert.identities import (
    epoch_to_proto,
    generation_from_proto,
    generation_to_proto,
)
from stagekeeper.runtime.convert.shards import model_info_from_proto, model_info_to_proto
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2 as pb2


def memory_need_to_proto(need: MemoryNeed) -> pb2.MemoryNeed:
    message = pb2.MemoryNeed(reserve_bytes=need.reserve_bytes, reuse_profile=need.reuse_profile)
    if need.bytes is not None:
        message.bytes = need.bytes
    elif need.utilization is not None:
        message.utilization = need.utilization
    return message


def memory_need_from_proto(message: pb2.MemoryNeed) -> MemoryNeed:
    amount = message.WhichOneof("amount")
    return MemoryNeed(
        utilization=message.utilization if amount == "utilization" else None,
        bytes=message.bytes if amount == "bytes" else None,
        reserve_bytes=message.reserve_bytes,
        reuse_profile=message.reuse_profile,
    )


def stage_spec_to_proto(stage: StageSpec) -> pb2.StageSpec:
    return pb2.StageSpec(
        name=stage.name,
        entrypoint=stage.entrypoint,
        args_json="" if stage.command is not None else stage.args_json,
        devices=stage.devices,
        memory=None if stage.memory is None else memory_need_to_proto(stage.memory),
        shard_count=stage.shard_count,
        env=dict(stage.env),
        start_timeout_s=stage.start_timeout_s,
        stall_timeout_s=stage.stall_timeout_s,
        stop_budget_s=stage.stop_budget_s,
        max_in_flight=stage.max_in_flight,
        command=None if stage.command is None else command_to_proto(stage.command),
    )


def stage_spec_from_proto(message: pb2.StageSpec) -> StageSpec:
    has = message.HasField
    return StageSpec(
        name=message.name,
        entrypoint=message.entrypoint,
        args_json=message.args_json or "{}",
        devices=tuple(message.devices),
        memory=memory_need_from_proto(message.memory) if has("memory") else None,
        shard_count=message.shard_count or 1,
        env=tuple(sorted(message.env.items())),
        start_timeout_s=message.start_timeout_s if has("start_timeout_s") else None,
        stall_timeout_s=message.stall_timeout_s if has("stall_timeout_s") else None,
        stop_budget_s=message.stop_budget_s if has("stop_budget_s") else None,
        max_in_flight=message.max_in_flight or DEFAULT_MAX_IN_FLIGHT,
        command=command_from_proto(message.command) if has("command") else None,
    )


def spec_to_proto(spec: DeploymentSpec) -> pb2.DeploymentSpec:
    placement = spec.placement
    return pb2.DeploymentSpec(
        name=spec.name,
        model=model_info_to_proto(spec.model),
        replicas=spec.replicas,
        entry=spec.entry,
        stages=[stage_spec_to_proto(stage) for stage in spec.stages],
        placement=(
            None
            if placement == Placement()
            else pb2.Placement(workers=placement.workers, device_pool=placement.device_pool)
        ),
        overlap_loads=spec.overlap_loads,
    )


def spec_from_proto(message: pb2.DeploymentSpec) -> DeploymentSpec:
    return DeploymentSpec(
        name=DeploymentName(message.name),
        stages=tuple(stage_spec_from_proto(stage) for stage in message.stages),
        replicas=message.replicas or 1,
        entry=message.entry,
        model=model_info_from_proto(message.model),
        placement=Placement(
            tuple(WorkerId(worker) for worker in message.placement.workers),
            tuple(DeviceId(device) for device in message.placement.device_pool),
        ),
        overlap_loads=message.overlap_loads,
    )


def header_to_proto(cluster: str, epoch: Epoch, incarnation: int) -> agent_pb2.CommandHeader:
    """Say which reign of which cluster commands which life of an agent."""
    return agent_pb2.CommandHeader(
        cluster=cluster, epoch=epoch_to_proto(epoch), incarnation=incarnation
    )


def stage_start_to_proto(start: StageStart) -> agent_pb2.StageStart:
    return agent_pb2.StageStart(
        stage_id=start.stage_id,
        spec=stage_spec_to_proto(start.spec),
        device_ids=start.device_ids,
        shard_index=start.shard_index,
        shard_count=start.shard_count,
        restart_ages_s=start.restart_ages_s,
    )


def stage_start_from_proto(message: agent_pb2.StageStart) -> StageStart:
    return StageStart(
        stage_id=StageId(message.stage_id),
        spec=stage_spec_from_proto(message.spec),
        device_ids=tuple(DeviceId(device) for device in message.device_ids),
        shard_index=message.shard_index,
        shard_count=message.shard_count or 1,
        restart_ages_s=tuple(message.restart_ages_s),
    )


def plan_to_proto(
    plan: OperationPlan,
    header: agent_pb2.CommandHeader,
    step: agent_pb2.OperationStep.ValueType,
    *,
    start_stage_ids: Iterable[StageId] = (),
    peers: Iterable[Peer] = (),
    leaders: Iterable[StagePorts] = (),
) -> agent_pb2.InitStageRequest:
    """Build the request for one step of `plan`; the plan is the same in all of its requests.

    Args:
        plan: a worker's part of a start.
        header: whom it is from and for.
        step: which one.
        start_stage_ids: START only: the stages to start now; none at all means all.
        peers: COMMIT only: the shards that lie on other workers.
        leaders: START only: the ports of each command stage's shard 0, where that is elsewhere.
    """
    return agent_pb2.InitStageRequest(
        header=header,
        step=step,
        operation_id=plan.operation_id,
        deployment=plan.deployment,
        spec_revision=plan.spec_revision,
        model=model_info_to_proto(plan.model),
        replica_index=plan.replica_index,
        generation=generation_to_proto(plan.generation),
        stages=[stage_start_to_proto(stage) for stage in plan.stages],
        entry_stage_id=plan.entry_stage_id,
        stage_count=plan.stage_count,
        start_stage_ids=start_stage_ids,
        peers=[peer_to_proto(peer) for peer in peers],
        overlap_loads=plan.overlap_loads,
        leaders=[stage_ports_to_proto(it) for it in leaders],
    )


def peer_to_proto(peer: Peer) -> pb2.Peer:
    return pb2.Peer(
        stage_id=peer.stage_id,
        stage_name=peer.stage_name,
        shard_index=peer.shard_index,
        instance_id=peer.instance_id,
        url=peer.url,
    )


def peer_from_proto(message: pb2.Peer) -> Peer:
    return Peer(
        stage_id=StageId(message.stage_id),
        stage_name=message.stage_name,
        shard_index=message.shard_index,
        instance_id=InstanceId(message.instance_id),
        url=message.url,
    )


def plan_from_proto(message: agent_pb2.InitStageRequest, worker_id: WorkerId) -> OperationPlan:
    """Convert what an agent is told; `worker_id` is its own, since the request need not name it.

    Nothing is checked: an absent generation comes out as the lowest there is.
    """
    return OperationPlan(
        operation_id=OperationId(message.operation_id),
        deployment=DeploymentName(message.deployment),
        replica_index=ReplicaIndex(message.replica_index),
        generation=generation_from_proto(message.generation),
        worker_id=worker_id,
        stages=tuple(stage_start_from_proto(stage) for stage in message.stages),
        stage_count=message.stage_count,
        entry_stage_id=StageId(message.entry_stage_id),
        spec_revision=message.spec_revision,
        model=model_info_from_proto(message.model),
        overlap_loads=message.overlap_loads,
    )
