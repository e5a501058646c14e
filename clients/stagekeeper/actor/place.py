"""Where a rank is: a process, and in it perhaps an actor. A value that travels.

Invariant: a place names one start of a process and of an actor; what comes after it is another
place.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.v1.actor_service_pb2 import RankPlace


@dataclass(frozen=True, slots=True)
class Place:
    """One process, as a start, and where it listens.

    Attributes:
        address: `host:port`.
        instance_id: the process's own, new with every start.
        pid: its number on its host; 0 where that is not known.
        boot_id: of its host; two processes with the same one are on one host.
        is_stage: it is a deployed stage, which is no part of the tree and is told no secret of it.
    """

    address: str
    instance_id: str
    pid: int = 0
    boot_id: str = ""
    is_stage: bool = False


def place_to_proto(
    place: Place, *, rank: int, actor_id: str = "", incarnation: int = 1
) -> RankPlace:
    return RankPlace(
        rank=rank,
        address=place.address,
        instance_id=place.instance_id,
        actor_id=actor_id,
        incarnation=incarnation,
        pid=place.pid,
        boot_id=place.boot_id,
    )


def place_from_proto(message: RankPlace) -> Place:
    return Place(message.address, message.instance_id, message.pid, message.boot_id)
