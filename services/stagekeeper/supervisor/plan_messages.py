"""A plan as a message.

Invariant: nothing is decided here; what the core planned is what is sent.
"""

from __future__ import annotations

from stagekeeper.core.ids import ReplicaIndex
from stagekeeper.core.placement import CardSum, Place
from stagekeeper.core.plan import Plan, PlannedGroup
from stagekeeper.core.plan_id import plan_id_of
from stagekeeper.runtime.convert import memory_need_to_proto
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2


def plan_response(plan: Plan) -> deployment_pb2.PlanDeploymentResponse:
    return deployment_pb2.PlanDeploymentResponse(
        plan_id=plan_id_of(plan),
        groups=[_group(group, plan) for group in plan.groups],
        replicas=[_replica(index, plan) for index in plan.starting],
        kept_replicas=plan.kept,
        devices=[_device(card, plan) for card in plan.placing.sums],
        refusals=[
            deployment_pb2.PlanRefusal(
                reason=refusal.reason,
                worker_id=refusal.worker_id,
                device_id=refusal.device_id,
                message=refusal.message,
            )
            for refusal in plan.refusals
        ],
        estimated_s=plan.estimated_s,
        exists=plan.exists,
        commands=[
            deployment_pb2.PlannedCommand(
                replica_index=command.replica_index,
                stage_id=command.stage_id,
                stage_name=plan.spec.stages[command.stage_id].name,
                shard_index=command.shard_index,
                worker_id=command.worker_id,
                argv=command.argv,
            )
            for command in plan.commands
        ],
    )


def _group(group: PlannedGroup, plan: Plan) -> deployment_pb2.StageGroup:
    return deployment_pb2.StageGroup(
        stage_ids=group.stage_ids,
        stage_names=[plan.spec.stages[stage_id].name for stage_id in group.stage_ids],
        devices=group.devices,
        estimated_s=group.estimated_s,
    )


def _replica(index: ReplicaIndex, plan: Plan) -> deployment_pb2.PlannedReplica:
    places = plan.placing.places.get(index)
    if places is None:
        return deployment_pb2.PlannedReplica(replica_index=index)
    parts = [_part(number, place, plan) for number, place in enumerate(places)]
    first = parts[0]
    return deployment_pb2.PlannedReplica(
        replica_index=index, worker_id=first.worker_id, cards=first.cards, parts=parts
    )


def _part(shard_index: int, place: Place, plan: Plan) -> deployment_pb2.PlannedPart:
    stages = enumerate(plan.spec.stages)
    return deployment_pb2.PlannedPart(
        worker_id=place.worker_id,
        shard_index=shard_index,
        stage_ids=[stage_id for stage_id, it in stages if it.shard_count > shard_index],
        cards=[
            deployment_pb2.PlannedCard(device=number, device_id=device_id)
            for number, device_id in sorted(place.devices.items())
        ],
    )


def _device(card: CardSum, plan: Plan) -> deployment_pb2.PlannedDevice:
    return deployment_pb2.PlannedDevice(
        worker_id=card.worker_id,
        device_id=card.device.device_id,
        model=card.device.model,
        total_bytes=card.device.total_bytes,
        need_bytes=card.need_bytes,
        is_over=card.is_over,
        stages=[
            deployment_pb2.PlannedTerm(
                replica_index=term.replica_index,
                stage_id=term.stage_id,
                stage_name=plan.spec.stages[term.stage_id].name,
                memory_bytes=term.memory_bytes,
                need=memory_need_to_proto(term.need),
                shard_index=term.shard_index,
            )
            for term in card.terms
        ],
        holdings=[
            deployment_pb2.PlannedHolding(holder=holding.holder, memory_bytes=holding.memory_bytes)
            for holding in card.holdings
        ],
    )
