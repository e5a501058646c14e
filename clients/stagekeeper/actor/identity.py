"""Who one is in a tree: a rank of a mesh in one of its lives, or the program at the root."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stagekeeper.actor.failure import Origin


@dataclass(frozen=True, slots=True)
class ActorIdentity:
    """Says it for people and in failures.

    Attributes:
        actor_id: of this start, new with every incarnation.
        owner_path: outermost first: "root", "manager[0]".
        incarnation: from 1.
    """

    actor_id: str
    mesh_id: str
    mesh_name: str
    rank: int
    size: int
    incarnation: int
    owner_path: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people: `manager[0]`; a root has no mesh, and so no rank."""
        return f"{self.mesh_name}[{self.rank}]" if self.mesh_id else self.mesh_name

    @property
    def path(self) -> tuple[str, ...]:
        """The owners and oneself, outermost first."""
        return (*self.owner_path, self.name)

    @property
    def origin(self) -> Origin:
        """As failures name it."""
        return Origin(
            mesh_name=self.mesh_name,
            mesh_id=self.mesh_id,
            rank=self.rank if self.mesh_id else None,
            incarnation=self.incarnation,
            instance_id=self.actor_id,
            pid=os.getpid(),
        )
