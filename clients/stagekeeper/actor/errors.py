"""What the user of a mesh can be told instead of an answer, cut by what to do next.

One tree with the client's: catch `StagekeeperError` for everything. Decided here: the types. Not
decided here: how what another process raised becomes a `RemoteError` (remote_exception), and who is
told of which failure. Invariant: every error can be pickled and says its caller's next move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from stagekeeper.actor.failure_text import place_name
from stagekeeper.client.errors import BadRequest, EndpointRaised, StagekeeperError

if TYPE_CHECKING:
    from stagekeeper.actor.failure import MeshFailure

Value = TypeVar("Value")


class RemoteError(EndpointRaised):
    """An endpoint raised, in another process: look at its code. The actor lives on.

    What is raised is also of the nearest builtin type that the exception had there, so that `except
    ValueError` works. The exceptions that it came from are its `__cause__` and `__context__`.

    Args:
        message: one sentence: who raised what.
        remote_type: the exception's type as Python prints it; its module need not exist here.
        builtin_types: the builtin types that it was, nearest first.
        remote_message: its own text.
        remote_traceback: its traceback, that of its causes included; of a long one the end.
        mesh_name: the mesh of the rank that raised.
        rank: the rank that raised; None for what is no rank.
    """

    def __init__(
        self,
        message: str,
        *,
        remote_type: str = "",
        builtin_types: Sequence[str] = (),
        remote_message: str = "",
        remote_traceback: str = "",
        mesh_name: str = "",
        rank: int | None = None,
    ) -> None:
        metadata = {"type": remote_type, "traceback": remote_traceback}
        if rank is not None:
            metadata["rank"] = str(rank)
        super().__init__(message, reason="ENDPOINT_RAISED", metadata=metadata)
        self.builtin_types = tuple(builtin_types)
        self.remote_message = remote_message
        self.mesh_name = mesh_name

    def __str__(self) -> str:
        # Not that of the builtin type: KeyError quotes its text, OSError looks at errno.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        from stagekeeper.actor.remote_exception import rebuilt

        return rebuilt, (
            self.message,
            self.remote_type,
            self.builtin_types,
            self.remote_message,
            self.remote_traceback,
            self.mesh_name,
            self.rank,
            self.__cause__,
            self.__context__,
            self.__suppress_context__,
            tuple(getattr(self, "__notes__", ())),
        )


class Died(StagekeeperError):
    """The rank that was called has failed: its owner decides. Wait for its respawn, or do without.

    A slice of the mesh without this rank goes on working. The call may have run, in part, unless
    `never_ran`.

    Attributes:
        failure: what happened; the owner is told the same, with the same id.
        rank: which rank of the mesh.
    """

    def __init__(
        self, failure: MeshFailure, *, rank: int | None = None, never_ran: bool = False
    ) -> None:
        super().__init__(
            failure.summary,
            reason="ACTOR_FAILED",
            metadata={"failure_id": failure.id},
            next_move="wait until its owner has respawned it, or call a slice without it",
            never_ran=never_ran,
        )
        self.failure = failure
        self.rank = failure.ranks[0] if rank is None and len(failure.ranks) == 1 else rank

    @property
    def failure_id(self) -> str:
        """The failure's id, by which reports of one end are told to be of one."""
        return self.failure.id

    @property
    def signal(self) -> int | None:
        """The signal that ended its process; None when none did, or that is not known."""
        return None if self.failure.exit is None else self.failure.exit.signal

    @property
    def exit_code(self) -> int | None:
        """The code that its process exited with; None when it did not, or that is not known."""
        return None if self.failure.exit is None else self.failure.exit.code

    def __repr__(self) -> str:
        facts = [("signal", self.signal), ("exit_code", self.exit_code), ("rank", self.rank)]
        said = "".join(f"{name}={value}, " for name, value in facts if value is not None)
        return f"Died({said}failure_id={self.failure_id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _died, (self.failure, self.rank, self.never_ran)


class MeshStopped(StagekeeperError):
    """The mesh was stopped, as asked: spawn another one, or stop calling it earlier.

    Attributes:
        mesh_name: which one.
        rank: which rank of it; None for all.
        had_begun: the call was running when it was given up; otherwise it never ran.
    """

    def __init__(
        self, message: str, *, mesh_name: str = "", rank: int | None = None, had_begun: bool = False
    ) -> None:
        super().__init__(
            message,
            reason="ACTOR_STOPPED",
            next_move="spawn a new mesh; a stopped one takes no more messages",
            never_ran=not had_begun,
        )
        self.mesh_name = mesh_name
        self.rank = rank
        self.had_begun = had_begun

    def __reduce__(self) -> tuple[Any, ...]:
        return _stopped, (self.message, self.mesh_name, self.rank, self.had_begun)


class NotSendable(BadRequest):
    """An argument cannot travel: send something that can. Nothing was sent.

    Args:
        argument: which one: its name, or `argument 0`.
        problem: what is wrong with it.
        target: what was called: `workers.step`.
    """

    def __init__(self, argument: str, problem: str, *, target: str = "") -> None:
        of = f" of {target}" if target else ""
        super().__init__(
            f"{argument}{of} cannot be sent: {problem}",
            code=None,
            next_move="send plain values, tensors, dataclasses or mesh references",
            violations=[(argument, problem)],
        )
        self.argument = argument
        self.problem = problem
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_sendable, (self.argument, self.problem, self.target)


class NotOwner(StagekeeperError):
    """Only the owner of a mesh may do this: do it there, or ask the owner with a message."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="NOT_OWNER", next_move="have the owner do it")


class MeshError(ExceptionGroup[Exception], StagekeeperError, Generic[Value]):  # type: ignore[override]
    """Some ranks of a `call` gave no answer: look at each, or go on with those that did.

    Attributes:
        failed: what each rank raised instead, by rank.
        ok: what the others answered, by rank.
    """

    failed: dict[int, Exception]
    ok: dict[int, Value]

    def __new__(
        cls, message: str, failed: Mapping[int, Exception], ok: Mapping[int, Value]
    ) -> Self:
        self = super().__new__(cls, message, list(failed.values()))
        self.failed, self.ok = dict(failed), dict(ok)
        return self

    def __init__(
        self, message: str, failed: Mapping[int, Exception], ok: Mapping[int, Value]
    ) -> None:
        # Not StagekeeperError's: the message of a group is read-only and set already.
        Exception.__init__(self, message, list(failed.values()))
        self.reason = "RANKS_FAILED"
        self.code = None
        self.metadata = {}
        self.next_move = "look at `failed`, rank by rank; the other answers are in `ok`"
        self.never_ran = all(getattr(it, "never_ran", False) for it in failed.values())
        self.retry_after_s = None

    def derive(self, excs: Sequence[Exception], /) -> MeshError[Value]:  # type: ignore[override]
        """Make the part of this group that has these exceptions; for `except*` and `split`."""
        wanted = {id(it) for it in excs}
        part = {rank: it for rank, it in self.failed.items() if id(it) in wanted}
        return MeshError(self.message, part, self.ok)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mesh_error, (self.message, self.failed, self.ok)


class NotStopped(StagekeeperError):
    """The tree has ended, but of some processes nobody confirms it: their host does not answer.

    They were told to end where they could be, and end there when nobody holds them for the lease.

    Attributes:
        failures: one per process, with the host's agent in its message.
    """

    def __init__(self, failures: Sequence[MeshFailure]) -> None:
        listed = "".join(
            f"\n  {place_name(it.mesh_name, it.ranks)} (process {it.pid}): {it.message}"
            for it in failures
        )
        super().__init__(
            f"of these processes of the tree nobody says that they have ended:{listed}",
            reason="NOT_STOPPED",
            next_move="look at the hosts that do not answer",
        )
        self.failures = tuple(failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return NotStopped, (self.failures,)


class UnhandledFault(KeyboardInterrupt):
    """A failure reached the root of the tree unhandled: the program ends, as by Ctrl-C.

    Handle failures below, in `__supervise__`, or replace `unhandled_fault_hook`.

    Attributes:
        failure: what nobody handled.
        is_told: its tree has been printed already.
    """

    def __init__(self, failure: MeshFailure) -> None:
        super().__init__(failure)
        self.failure = failure
        self.is_told = False


def _died(failure: MeshFailure, rank: int | None, never_ran: bool) -> Died:
    return Died(failure, rank=rank, never_ran=never_ran)


def _stopped(message: str, mesh_name: str, rank: int | None, had_begun: bool) -> MeshStopped:
    return MeshStopped(message, mesh_name=mesh_name, rank=rank, had_begun=had_begun)


def _not_sendable(argument: str, problem: str, target: str) -> NotSendable:
    return NotSendable(argument, problem, target=target)


def _mesh_error(
    message: str, failed: Mapping[int, Exception], ok: Mapping[int, Any]
) -> MeshError[Any]:
    return MeshError(message, failed, ok)
