"""`MeshFailure`: an end that nobody asked for, as the owner of a mesh is told of it. A value.

Decided here: what a failure says, how it grows on its way up, and what it is equal by: all that it
says but the time, which is for display. What caused it is kept flat, root first, so that a failure
of a deep tree is no larger than its depth. Not decided here: who is told, and what is done then.
Invariant: the owner's mesh and its `respawn` belong to one owner in one process: they are no part
of the value, and neither what goes on to others nor what travels has them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from stagekeeper.actor.errors import NotOwner
from stagekeeper.actor.failure_text import end_of, place_name, signal_name, summary_of, tree_of

if TYPE_CHECKING:
    from stagekeeper.host.process import ExitStatus


class FailureKind(StrEnum):
    """What kind of end it is: the names of the protocol's FailureKind, without its prefix."""

    UNSPECIFIED = "UNSPECIFIED"
    """Of a later release; the rest is worth reading."""
    EXITED = "EXITED"
    SIGNALED = "SIGNALED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    INIT_RAISED = "INIT_RAISED"
    INIT_TIMEOUT = "INIT_TIMEOUT"
    GONE = "GONE"
    STALLED = "STALLED"
    BROADCAST_RAISED = "BROADCAST_RAISED"
    UNDELIVERABLE = "UNDELIVERABLE"
    CLEANUP_RAISED = "CLEANUP_RAISED"
    UNHANDLED = "UNHANDLED"
    SUPERVISE_RAISED = "SUPERVISE_RAISED"
    OWNER_GONE = "OWNER_GONE"
    DEVICE_FAILED = "DEVICE_FAILED"


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """How a process ended.

    Attributes:
        code: when it exited by itself and that is known.
        signal: when one ended it and that is known.
        out_of_memory: the kernel ended it for memory.
        asked: somebody had asked it to end.
    """

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    asked: bool = False

    @classmethod
    def of(
        cls, status: ExitStatus | None, *, out_of_memory: bool = False, asked: bool = False
    ) -> Self:
        """Make it from what the parent of a process was told; None where nobody was."""
        if status is None:
            return cls(out_of_memory=out_of_memory, asked=asked)
        return cls(status.code, status.signal, out_of_memory, asked)

    @property
    def is_unknown(self) -> bool:
        """True when neither a code nor a signal is known, as of a process of another parent."""
        return self.code is None and self.signal is None

    def __str__(self) -> str:
        memory = "out of memory, " if self.out_of_memory else ""
        if self.signal is not None:
            return f"{memory}{signal_name(self.signal)}"
        return f"{memory}exit code {'unknown' if self.code is None else self.code}"


class Hop(NamedTuple):
    """One owner's word on a failure."""

    owner: str
    """`manager[0]`, `root`."""
    decision: str
    """`handled`, `refused`, `has no __supervise__`, `raised ValueError: …`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One rank of a mesh, in one of its lives: what fails, or who decides.

    Attributes:
        mesh_name: as its owner named it.
        mesh_id: of the mesh; empty for the root of a tree.
        rank: None for the root of a tree, which is none.
        incarnation: its life, from 1.
        instance_id: the actor or the process, as a start.
        pid: its process's; 0 where that is not known.
    """

    mesh_name: str
    mesh_id: str = ""
    rank: int | None = None
    incarnation: int = 1
    instance_id: str = ""
    pid: int = 0

    @property
    def name(self) -> str:
        """`workers[2]`; `root`."""
        return place_name(self.mesh_name, () if self.rank is None else (self.rank,))


class _Attached(NamedTuple):
    """What only the owner has."""

    mesh: object
    respawn: Callable[[MeshFailure], Awaitable[None]] | None


class _Owned:
    """Apart from the value: what goes by its fields (`replace`, `asdict`, codecs) meets no mesh."""

    _attached: _Attached | None = None


@dataclass(frozen=True, kw_only=True)
class MeshFailure(_Owned):
    """An end that nobody asked for: which ranks, how, seen by whom, and what was decided since.

    Attributes:
        id: the same for one end, whoever reports it (`failure_id`).
        kind: what kind of end.
        mesh_name: the mesh, as its owner named it.
        mesh_id: the mesh; empty for the root of a tree.
        ranks: the ranks that failed, ascending.
        incarnations: the lives that ended, from 1, in the order of `ranks`.
        instance_id: the actor or the process, as a start.
        message: one sentence for a person; made from the rest when left empty.
        exit: how the process ended; None when it has not.
        detected_by: how it was seen: `pidfd`, `connection`, `beat`.
        detect_time: when, in seconds since the epoch, for display; not compared.
        endpoint: that was called, where one was.
        sender: who called it.
        pid: the process; 0 where that is not known.
        path: the owners that it passed and what each decided, innermost first.
        causes: what caused it, root first, each without causes of its own.
        remote_traceback: of what raised, where something did.
        last_log_lines: of its process, oldest first.
        restarts_tried: for its place in the mesh, before.
    """

    id: str
    kind: FailureKind
    mesh_name: str
    mesh_id: str = ""
    ranks: tuple[int, ...] = ()
    incarnations: tuple[int, ...] = ()
    instance_id: str = ""
    message: str = ""
    exit: ExitInfo | None = None
    detected_by: str = ""
    detect_time: float | None = field(default=None, compare=False)
    endpoint: str = ""
    sender: str = ""
    pid: int = 0
    path: tuple[Hop, ...] = ()
    causes: tuple[MeshFailure, ...] = ()
    remote_traceback: str = ""
    last_log_lines: tuple[str, ...] = ()
    restarts_tried: int = 0

    def __post_init__(self) -> None:
        if self.causes != ():
            object.__setattr__(self, "causes", _flat(self.causes))
        if not self.message:
            object.__setattr__(self, "message", end_of(self))

    @classmethod
    def at(
        cls,
        origin: Origin,
        kind: FailureKind,
        *,
        id: str = "",
        message: str = "",
        exit: ExitInfo | None = None,
        detected_by: str = "",
        detect_time: float | None = None,
        endpoint: str = "",
        sender: str = "",
        remote_traceback: str = "",
        last_log_lines: Iterable[str] = (),
        restarts_tried: int = 0,
    ) -> Self:
        """Make the failure of one rank; the id is that of its only failure of this kind."""
        is_rank = origin.rank is not None
        return cls(
            id=id or failure_id(origin.instance_id, kind),
            kind=kind,
            mesh_name=origin.mesh_name,
            mesh_id=origin.mesh_id,
            ranks=() if origin.rank is None else (origin.rank,),
            incarnations=(origin.incarnation,) if is_rank else (),
            instance_id=origin.instance_id,
            message=message,
            exit=exit,
            detected_by=detected_by,
            detect_time=detect_time,
            endpoint=endpoint,
            sender=sender,
            pid=origin.pid,
            remote_traceback=remote_traceback,
            last_log_lines=tuple(last_log_lines),
            restarts_tried=restarts_tried,
        )

    # --- reading it

    @property
    def root(self) -> MeshFailure:
        """Where it all began: the first cause, or this failure itself."""
        return self.causes[0] if self.causes else self

    @property
    def rank(self) -> int:
        """The rank that failed.

        Raises:
            ValueError: there are several, or none: look at `ranks`.
        """
        if len(self.ranks) != 1:
            count = f"{len(self.ranks)} ranks" if self.ranks else "no rank"
            raise ValueError(f"the failure {self.id} is of {count}: look at `ranks`")
        return self.ranks[0]

    @property
    def where(self) -> str:
        """`workers[2]`, `workers[0-3,7]`; `root`."""
        return place_name(self.mesh_name, self.ranks)

    @property
    def summary(self) -> str:
        """One line: what happened, and where it began."""
        return summary_of(self)

    def __str__(self) -> str:
        return tree_of(self)

    # --- what its owner does with it

    @property
    def mesh(self) -> Any:
        """The owner's own mesh that has failed ranks; None for everybody but the owner."""
        return None if self._attached is None else self._attached.mesh

    async def respawn(self) -> None:
        """Put new actors in the places of those that failed: same shape, same arguments.

        Only the ranks that failed, unless the mesh is a group; in a new process where the old one
        is gone. Those that were respawned since are left as they are.

        Raises:
            NotOwner: this is not the failure that an owner was given, but a copy of it.
        """
        if self._attached is None or self._attached.respawn is None:
            raise NotOwner(
                f"{self.where} can be respawned by its owner only, with the failure that its "
                "__supervise__ is given: this one came from elsewhere"
            )
        await self._attached.respawn(self)

    def attached(
        self, mesh: object, respawn: Callable[[MeshFailure], Awaitable[None]] | None
    ) -> MeshFailure:
        """Return it as the owner of `mesh` is given it; for who runs `__supervise__`."""
        given = replace(self)
        object.__setattr__(given, "_attached", _Attached(mesh, respawn))
        return given

    def with_hop(self, owner: str, decision: str) -> MeshFailure:
        """Return it as it goes on from an owner: with the decision, without the owner's mesh."""
        return replace(self, path=(*self.path, Hop(owner, decision)))

    # --- a value

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_attached"}


def failure_id(instance_id: str, end: FailureKind | Literal["end"], n: int = 1) -> str:
    """Make the id of a failure: the n-th of this kind that the instance has.

    Of a process's death use `end`: those who see it may disagree about the kind.
    """
    return f"{instance_id}-{end.lower()}-{n}"


def _flat(causes: Iterable[MeshFailure]) -> tuple[MeshFailure, ...]:
    """Return the causes with those of their own before them, each once and without any."""
    flat: dict[MeshFailure, None] = {}
    for cause in causes:
        flat |= dict.fromkeys(cause.causes)  # flat already, as those of every failure
        # Always a new one, so that no cause has an owner's mesh: it was that of another owner.
        flat[replace(cause, causes=())] = None
    return tuple(flat)
