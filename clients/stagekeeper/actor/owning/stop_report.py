"""How the stop of a mesh went, for its owner.

Invariant: each rank that was to end is in one of the lists of ranks, and in no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stagekeeper.actor.failure import MeshFailure


@dataclass(slots=True)
class StopReport:
    """How a stop went, rank by rank.

    Attributes:
        clean: ranks that ended as asked.
        dead: ranks that had failed already, with how.
        unreachable: ranks that did not answer within the budget.
        stuck: ranks that were let go of, and whose code still runs: until their process ends.
        unrun: messages that did not run or were given up, with who sent them.
        cleanup: failures of `__cleanup__`, and of what the ranks owned.
        unconfirmed: of processes, the ends that nobody has confirmed: their host does not answer,
            and they may still run.
        actors: of processes, how the stops of the meshes in them went, in that order; what they
            left unrun and what went wrong in their cleanup is in `unrun` and `cleanup` as well.
        name: of the mesh that was stopped.
    """

    clean: list[int] = field(default_factory=list)
    dead: dict[int, MeshFailure] = field(default_factory=dict)
    unreachable: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    unrun: list[Unrun] = field(default_factory=list)
    cleanup: list[MeshFailure] = field(default_factory=list)
    unconfirmed: list[MeshFailure] = field(default_factory=list)
    actors: list[StopReport] = field(default_factory=list)
    name: str = ""

    @property
    def is_clean(self) -> bool:
        """Every rank ended as asked or had ended before, and every message ran."""
        wrong = (self.unreachable, self.stuck, self.unrun, self.cleanup, self.unconfirmed)
        return not any(wrong) and all(of_mesh.is_clean for of_mesh in self.actors)

    def __str__(self) -> str:
        parts = [f"{len(self.clean)} clean", *self._not_clean()]
        for of_mesh in self.actors:
            parts += [f"{of_mesh.name} {what}" for what in of_mesh._not_clean()]
        if self.unrun:
            parts.append(f"{len(self.unrun)} messages not run")
        parts += [failure.summary for failure in (*self.cleanup, *self.unconfirmed)]
        return "; ".join(parts)

    def _not_clean(self) -> list[str]:
        parts = []
        if self.dead:
            parts.append(f"{len(self.dead)} dead")
        if self.unreachable:
            parts.append(f"unreachable: {', '.join(map(str, self.unreachable))}")
        if self.stuck:
            parts.append(f"stuck: {', '.join(map(str, self.stuck))}")
        return parts


@dataclass(frozen=True, slots=True)
class Unrun:
    """A message that a stop left undone."""

    rank: int
    endpoint: str
    sender: str
    had_begun: bool
