"""What every incarnation of every rank of a mesh is made from."""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload


@dataclass(frozen=True, slots=True)
class SpawnPlan:
    """A mesh of actors as it was asked for."""

    name: str
    entrypoint: str
    main_path: str
    arguments: Payload
    is_group: bool = False
    stall_after_s: float = 0.0
    max_in_flight: int = 0


def spawn_request(
    plan: SpawnPlan, identity: ActorIdentity, *, token: str, session_id: str, instance_id: str
) -> pb.SpawnActorRequest:
    """Make the request for one actor.

    Args:
        identity: which rank, in which life.
        session_id: of the owner's process.
        instance_id: of the process that it is to be in.
    """
    return pb.SpawnActorRequest(
        token=token,
        instance_id=instance_id,
        session_id=session_id,
        actor_id=identity.actor_id,
        entrypoint=plan.entrypoint,
        main_path=plan.main_path,
        arguments=plan.arguments,
        mesh_id=identity.mesh_id,
        mesh_name=plan.name,
        rank=identity.rank,
        size=identity.size,
        owner_path=identity.owner_path,
        incarnation=identity.incarnation,
        stall_after_s=plan.stall_after_s,
        max_in_flight=plan.max_in_flight,
    )
