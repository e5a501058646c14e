"""What a running endpoint may ask about its own call: its deadline, and whether somebody waits.

Decided here: how the two are read, from async endpoints and from worker threads alike. Not decided
here: who sets them. Invariant: `context()` never fails; outside of a call it answers with a context
that has no deadline and is never cancelled, so that an endpoint can be tested as a plain method.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from typing import Protocol, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger("stagekeeper.actor")

_cancelling = threading.Lock()
"""Held for an instant by `cancel` and `on_cancel`; one for all calls, so that a call costs none."""


class CallPlace(Protocol):
    """The actor that a call runs in."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def mesh_name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def owner_path(self) -> tuple[str, ...]: ...

    def wait(self, awaitable: Awaitable[Result], timeout_s: float | None) -> Result: ...


class CallContext:
    """One call under way. Async endpoints are cancelled like any task; sync ones look here.

    Args:
        deadline: on the clock of `time.monotonic`; None when the caller set none.
    """

    __slots__ = ("_is_cancelled", "_is_over", "_on_cancel", "deadline", "place")

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.place: CallPlace | None = None
        """Who runs the call: a rank of a mesh; None for a stage, and outside of a call."""
        self._is_cancelled = False
        self._is_over = False
        self._on_cancel: list[Callable[[], object]] | None = None

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the answer: the caller gave up, or its deadline passed."""
        return self._is_cancelled or (
            self.deadline is not None and time.monotonic() >= self.deadline
        )

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never below 0; None when there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def rank(self) -> int:
        """The rank of the actor that this code belongs to; 0 for what is no rank."""
        return 0 if self.place is None else self.place.rank

    @property
    def size(self) -> int:
        """How many ranks its mesh has; 1 for what is no rank."""
        return 1 if self.place is None else self.place.size

    @property
    def mesh_name(self) -> str:
        """The name of its mesh; "" for what is no rank."""
        return "" if self.place is None else self.place.mesh_name

    @property
    def incarnation(self) -> int:
        """The life of this place in the mesh, from 1."""
        return 1 if self.place is None else self.place.incarnation

    @property
    def owner(self) -> str:
        """Who owns the mesh, for people: `manager[0]`, `root`; "" for what nobody owns."""
        path = () if self.place is None else self.place.owner_path
        return path[-1] if path else ""

    @property
    def owner_path(self) -> tuple[str, ...]:
        """The owners, outermost first."""
        return () if self.place is None else self.place.owner_path

    def progress(self) -> None:
        """Say that the work goes on: a call that says so is never taken for stalled."""

    def wait(self, awaitable: Awaitable[Result], timeout_s: float | None = None) -> Result:
        """Await something from plain code: `context().wait(self.workers.step.call(x))`.

        Raises:
            RuntimeError: this code runs on the event loop (use `await`), or in no actor.
            TimeoutError: it took longer; it is cancelled.
        """
        if self.place is None:
            raise RuntimeError("only the code of an actor can wait like this: use await")
        return self.place.wait(awaitable, timeout_s)

    def cancel(self) -> None:
        """Say that nobody waits any more, and call what `on_cancel` left, once."""
        with _cancelling:
            self._is_cancelled = True
            callbacks, self._on_cancel = self._on_cancel, None
        for callback in callbacks or ():
            try:
                callback()
            except BaseException:  # of the call's own code; whoever cancels has others to see to
                _log.exception("what a call left to be called when it is cancelled raised")

    def end(self) -> None:
        """Say that the call is over: what it left running in the background is on its own."""
        self._is_over = True

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Have `callback` called by `cancel`, in the thread that cancels; at once if that was.

        What it raises there is logged.

        Returns a function that takes the wish back; calling it late or twice does no harm.
        """

        def forget() -> None:
            with _cancelling:
                if self._on_cancel is not None and callback in self._on_cancel:
                    self._on_cancel.remove(callback)

        with _cancelling:
            is_late = self._is_cancelled
            if not is_late:
                self._on_cancel = [*(self._on_cancel or ()), callback]
        if is_late:
            callback()
        return forget


class _NoCall(CallContext):
    """Where no call is under way: nothing can be cancelled, and nothing is kept."""

    __slots__ = ()

    def cancel(self) -> None: ...

    def end(self) -> None: ...

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], None]:
        return lambda: None


_NO_CALL = _NoCall()
_current: ContextVar[CallContext] = ContextVar("stagekeeper_call", default=_NO_CALL)


def context() -> CallContext:
    """Return the context of the call that this code runs in, or of the actor that it belongs to.

    Tasks that an endpoint starts share its context until the call ends; threads and processes that
    it starts do not: hand it to them.
    """
    call = _current.get()
    # A background task keeps the variable of the call that started it; the deadline of a call that
    # is over must not cut short what that task does later.
    if not call._is_over:
        return call
    return _NO_CALL if call.place is None else _of_place(call.place)


def _of_place(place: CallPlace) -> CallContext:
    outside = _NoCall()
    outside.place = place
    return outside


def enter_call(call: CallContext) -> Token[CallContext]:
    """Make `call` what `context()` answers here, until `leave_call`; for who runs endpoints."""
    return _current.set(call)


def leave_call(token: Token[CallContext]) -> None:
    """Undo `enter_call`, in the same thread or task."""
    _current.reset(token)
