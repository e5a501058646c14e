"""What a mesh of actors asks of the processes that it lies in, and what it takes to start one.

Decided here: the words between the two, and nothing of how they are kept. Invariant: whoever
starts a process gives back one that is up, or says why it is not and leaves nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from stagekeeper.actor.failure import ExitInfo, MeshFailure
from stagekeeper.actor.place import Place

UNCONFIRMED: Final = "owner"
"""Who says that a process has ended when only its owner says so, since nobody else answers."""


@dataclass(frozen=True, slots=True)
class ProcEnd:
    """How a process ended, as far as is known.

    Attributes:
        detected_by: who says so: `pidfd`, `agent`, `lease` (nobody could be asked for so long), or
            UNCONFIRMED.
        is_late: it was not up within the limit of a start, and was killed for that.
    """

    exit: ExitInfo | None
    detected_by: str
    message: str = ""
    last_log_lines: tuple[str, ...] = ()
    is_late: bool = False


def is_unconfirmed(failure: MeshFailure) -> bool:
    """Return whether it is an end of a process that may still run, on a host that is silent."""
    return failure.exit is None and failure.detected_by in (UNCONFIRMED, "lease")


class StartedProc(Protocol):
    """A process that is up."""

    place: Place

    async def ended(self) -> ProcEnd:
        """Return when it has ended, at once when it is gone from the kernel's view."""
        ...

    async def end(self, budget_s: float) -> bool:
        """Ask it to end, kill it with all that it started after the budget; False: no answer."""
        ...

    async def kill(self) -> None:
        """Kill it with all that it started; return when it is gone."""
        ...


class ProcSource(Protocol):
    """Starts processes somewhere."""

    async def start(self, index: int, instance_id: str, name: str) -> StartedProc:
        """Start one.

        Raises:
            ProcFailed: it did not come up; nothing is left of it.
        """
        ...

    async def close(self) -> None:
        """Let go of what belongs to the whole set. Its processes have ended."""
        ...


class ProcPlaces(Protocol):
    """Processes that actors can be spawned in."""

    @property
    def size(self) -> int: ...

    @property
    def mesh_name(self) -> str: ...

    @property
    def is_stopping(self) -> bool:
        """They were asked to end, as far as is known here: nothing is spawned in them."""
        ...

    def instance_id_of(self, rank: int) -> str:
        """Return which process is in a place, or is about to be; "" where only others know."""
        ...

    async def place(self, rank: int) -> Place:
        """Return where a process is, once it is up.

        Raises:
            ProcFailed: it is not there, though nobody asked it to end.
            MeshStopped: it was stopped, as its owner asked.
        """
        ...

    async def replace_ended(self, instance_ids: list[str]) -> None:
        """Put new processes in the places of those of these that have ended."""
        ...

    async def kill(self, instance_id: str) -> None:
        """Kill a process that is stalled, or in which code is stuck; where that can be done."""
        ...

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        """Say how a process ended; None when nobody knows that it did."""
        ...


class ProcFailed(Exception):
    """The process that a rank was to be in is not there; `failure` says why."""

    def __init__(self, failure: MeshFailure) -> None:
        super().__init__(failure.summary)
        self.failure = failure
