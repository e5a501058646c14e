"""What one owner owns: its meshes in the order in which they were made, and their failures.

Every actor has one, and the program at the root. Decided here: that failures are handled one at a
time, what becomes of one that nobody handles, and the order of an end. Not decided here: how an
owner is asked (its host says), and what a mesh does to stop. Invariant: a failure that was
delivered is handled, or goes on to the owner's owner, exactly once, also when the owner ends
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from stagekeeper.actor.error_text import beginning, message_of
from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failing import cut_off, from_below
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.wire.actor_limits import LONGEST_PEER_WAIT_S
from stagekeeper.wire.error_details import is_own_cancellation

if TYPE_CHECKING:
    from stagekeeper.actor.owning.stop_report import StopReport

_log = logging.getLogger("stagekeeper.actor")

DEFAULT_STOP_BUDGET_S: Final = 10.0

_GRACE_S: Final = 1.5
"""For the answers of what was still ending when the budget was over."""

_TELL_AFTER_S: Final = 2.0
"""An end that takes longer says what it waits for."""


class NoSupervisor(Exception):
    """The owner has no `__supervise__`."""


class OwnedMesh(Protocol):
    """A mesh, seen by its owner."""

    @property
    def mesh_name(self) -> str:
        """As its owner named it."""
        ...

    def expect_end(self) -> None:
        """From now on the end of a rank is asked for, and no failure."""
        ...

    async def stop_for_owner(
        self, budget_s: float, failure: MeshFailure | None
    ) -> list[MeshFailure]:
        """Stop; return what went wrong on the way. Never raises."""
        ...


@runtime_checkable
class OwnedActors(OwnedMesh, Protocol):
    """A mesh of actors, seen by the owner of the processes that they are in."""

    def holds(self, instance_id: str) -> bool:
        """Return whether a rank that has not ended is, or is about to be, in a process."""
        ...

    async def stop(self, budget_s: float, failure: MeshFailure | None = None) -> StopReport:
        """Stop, and say how that went; a second call joins."""
        ...


class Scope:
    """One owner's meshes. For the loop's thread only, except `add`.

    Args:
        identity: who the owner is.
        stop_budget_s: for the messages of all meshes together when the owner ends.
    """

    def __init__(
        self, identity: ActorIdentity, *, stop_budget_s: float = DEFAULT_STOP_BUDGET_S
    ) -> None:
        self.identity = identity
        self.stop_budget_s = stop_budget_s
        self.supervise: Callable[[MeshFailure], Awaitable[object]] = _nobody
        """Asks the owner. Truthy: handled. Raises NoSupervisor where it has no say."""
        self.on_unhandled: Callable[[MeshFailure, BaseException | None], None] = _drop
        """Told the failure of the owner that comes of what it did not handle."""
        self.is_stopping = False
        self._meshes: list[OwnedMesh] = []
        self._failures: deque[MeshFailure] = deque()
        self._in_hand: MeshFailure | None = None
        self._is_answered = False
        self._is_open = False
        self._is_over = False
        """Nothing is owned any more."""
        self._adding = threading.Lock()
        self._runner: asyncio.Task[None] | None = None

    def add(self, mesh: OwnedMesh) -> None:
        """Take a mesh into ownership, behind those that there are.

        Raises:
            MeshStopped: all that the owner owned has ended, and nobody would end this one.
        """
        with self._adding:
            if self._is_over:
                name = self.identity.name
                raise MeshStopped(
                    f"{name} has ended, and so has all that it owned: {mesh.mesh_name} is not "
                    "spawned",
                    mesh_name=mesh.mesh_name,
                )
            self._meshes.append(mesh)

    def remove(self, mesh: OwnedMesh) -> None:
        """Forget a mesh that was stopped."""
        if mesh in self._meshes:
            self._meshes.remove(mesh)

    def meshes_in(self, instance_ids: list[str]) -> list[OwnedActors]:
        """Return the meshes of actors that have a rank in one of these processes, last made first.

        They are wholly in one set of processes, since a mesh is spawned in one.
        """
        return [
            mesh
            for mesh in reversed(self._as_they_are())
            if isinstance(mesh, OwnedActors) and any(map(mesh.holds, instance_ids))
        ]

    def open(self) -> None:
        """Begin to ask the owner about failures: from now on it can answer."""
        self._is_open = True
        self._run_if_needed()

    def deliver(self, failure: MeshFailure) -> None:
        """Have the owner asked about a failure of one of its meshes, after those before it.

        One that comes while the owner is stopping is part of what `stop` returns.
        """
        if self._is_over:
            self.on_unhandled(cut_off(self.identity, [failure]), None)
            return
        self._failures.append(failure)
        self._run_if_needed()

    def answered(self) -> None:
        """Hear that the owner has just handled the failure in hand: nobody else is to."""
        self._is_answered = True

    def take_open(self) -> list[MeshFailure]:
        """Return what is not handled, oldest first; whoever takes it answers for it from now on.

        That is the failure in hand, unless the owner has handled it by now, and those that wait.
        """
        left = list(self._failures)
        if self._in_hand is not None and not self._is_answered:
            left.insert(0, self._in_hand)
        self._in_hand = None
        self._failures.clear()
        return left

    async def drained(self) -> None:
        """Return when no failure waits to be handled."""
        while self._runner is not None and not self._runner.done():
            await asyncio.wait({self._runner})

    async def stop(self, budget_s: float, failure: MeshFailure | None) -> list[MeshFailure]:
        """Stop every mesh, the last made first. Repeats find nothing left.

        The budget is for all of them: each is given what those before it left, and once it is over
        those that are left end all at once.

        Returns:
            What went wrong: a failure in hand and those that waited, which go on to the owner's
            owner; those that came meanwhile; and what the meshes' own ends brought.
        """
        self.is_stopping = True
        for mesh in self._as_they_are():
            mesh.expect_end()
        end_at = time.monotonic() + budget_s
        if self._runner is not None and self._runner is not asyncio.current_task():
            self._runner.cancel()
            await asyncio.wait({self._runner})
        problems = await self._stop_meshes(end_at, failure)
        return self.take_open() + problems

    async def _stop_meshes(self, end_at: float, failure: MeshFailure | None) -> list[MeshFailure]:
        stops: dict[asyncio.Task[list[MeshFailure]], str] = {}

        def tell() -> None:
            left_s = max(0.0, end_at + _GRACE_S - time.monotonic())
            names = [name for stop, name in stops.items() if not stop.done()]
            names += [mesh.mesh_name for mesh in reversed(self._as_they_are())]
            _log.warning(
                "%s waits for the end of %s, for at most %.0f s more; processes that have not "
                "ended then are killed%s",
                self.identity.name,
                ", ".join(names),
                left_s,
                "" if self.identity.mesh_id else " (a second Ctrl-C does so at once)",
            )

        telling = asyncio.get_running_loop().call_later(_TELL_AFTER_S, tell)
        try:
            while True:
                while self._meshes:
                    mesh = self._meshes.pop()
                    left_s = end_at - time.monotonic()
                    stop = asyncio.create_task(
                        mesh.stop_for_owner(max(0.0, left_s), failure),
                        name=f"end of {mesh.mesh_name}",
                    )
                    stops[stop] = mesh.mesh_name
                    await asyncio.wait({stop}, timeout=max(0.0, left_s + _GRACE_S))
                if stops:
                    await asyncio.wait(stops)
                with self._adding:  # an actor's thread may have spawned meanwhile
                    self._is_over = not self._meshes
                if self._is_over:
                    break
            return [problem for stop in stops for problem in stop.result()]
        finally:
            telling.cancel()
            for stop in stops:
                stop.cancel()

    def _as_they_are(self) -> list[OwnedMesh]:
        """Return the meshes as they are now: an actor's thread may add one at any time."""
        return list(self._meshes)

    def _run_if_needed(self) -> None:
        if self.is_stopping or not (self._is_open and self._failures):
            return
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name=f"supervise {self.identity.name}")

    async def _run(self) -> None:
        # Whoever waits for a call to what failed goes first: their errors are on their way already.
        await asyncio.sleep(0)
        while self._failures and not self.is_stopping:
            self._in_hand, self._is_answered = self._failures.popleft(), False
            await self._ask(self._in_hand)
            self._in_hand = None

    async def _ask(self, failure: MeshFailure) -> None:
        try:
            is_handled = bool(await self.supervise(failure))
        except (SystemExit, KeyboardInterrupt):
            raise
        except NoSupervisor:
            self._go_on(FailureKind.UNHANDLED, failure, "has no __supervise__")
        except asyncio.CancelledError as error:
            if is_own_cancellation():
                raise
            self._go_on(FailureKind.SUPERVISE_RAISED, failure, "raised CancelledError", error)
        except BaseException as error:
            said = f"raised {type(error).__name__}: {beginning(message_of(error), 1_000)}"
            self._go_on(FailureKind.SUPERVISE_RAISED, failure, said, error)
        else:
            if not is_handled:
                self._go_on(FailureKind.UNHANDLED, failure, "refused")

    def _go_on(
        self,
        kind: FailureKind,
        failure: MeshFailure,
        decision: str,
        error: BaseException | None = None,
    ) -> None:
        """Make the owner's own failure of this one, and of those that would have come next."""
        if self._in_hand is None:
            return  # somebody else answers for it
        self._in_hand = None
        if self.is_stopping:
            self._failures.appendleft(failure)
            return
        for mesh in self._as_they_are():
            mesh.expect_end()  # all of them end with their owner
        waiting = list(self._failures)
        self._failures.clear()
        self.on_unhandled(
            from_below(self.identity, kind, [failure, *waiting], decision, error), error
        )


current_scope: ContextVar[Scope | None] = ContextVar("stagekeeper_scope", default=None)
"""Whose code runs here: what it spawns belongs to this scope."""


def checked_budget_s(budget_s: float | None) -> float:
    """Return what a stop may take, the default for None; infinity is as long as anybody waits.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 0.
    """
    if budget_s is None:
        return DEFAULT_STOP_BUDGET_S
    if not isinstance(budget_s, (int, float)):
        raise TypeError(f"a stop has a number of seconds, not {budget_s!r:.80}")
    if not budget_s >= 0.0:
        raise ValueError(f"a stop has 0 seconds or more, not {budget_s}")
    return min(float(budget_s), LONGEST_PEER_WAIT_S)


def sender_name() -> str:
    """Return who sends a message from here, for people."""
    scope = current_scope.get()
    return "root" if scope is None else scope.identity.name


async def _nobody(failure: MeshFailure) -> object:
    return False


def _drop(failure: MeshFailure, error: BaseException | None) -> None:
    return None
