"""What the code of an actor can ask `context()` about where it runs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from stagekeeper.actor.identity import ActorIdentity

Result = TypeVar("Result")


class ActorPlace:
    """One actor's place in its mesh."""

    def __init__(self, identity: ActorIdentity) -> None:
        self._identity = identity

    @property
    def rank(self) -> int:
        return self._identity.rank

    @property
    def size(self) -> int:
        return self._identity.size

    @property
    def mesh_name(self) -> str:
        return self._identity.mesh_name

    @property
    def incarnation(self) -> int:
        return self._identity.incarnation

    @property
    def owner_path(self) -> tuple[str, ...]:
        return self._identity.owner_path

    def wait(self, awaitable: Awaitable[Result], timeout_s: float | None) -> Result:
        from stagekeeper.actor.program import current_program  # it imports what hosts actors

        result: Result = current_program().wait(awaitable, timeout_s)
        return result
