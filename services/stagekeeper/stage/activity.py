"""What a stage is doing right now: its calls, its phase, and when each last showed a sign of life.

Decided here: what counts as progress, and how long the stage has been busy without any. Not
decided here: when that is too long (the agent), and who is told (control_service). Invariant:
`counter` only grows, whichever thread reports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stagekeeper.actor import CallContext
from stagekeeper.core.limits import LARGEST_NUMBER
from stagekeeper.core.names import cut
from stagekeeper.stage.vitals import sendable


class Work(CallContext):
    """A call or a phase under way.

    Args:
        name: the endpoint or the phase, for people.
        deadline: as in CallContext.
    """

    __slots__ = ("began", "is_call", "last_progress", "name")

    def __init__(self, name: str, deadline: float | None = None, *, is_call: bool = True) -> None:
        super().__init__(deadline)
        self.name = name
        self.is_call = is_call
        self.began = self.last_progress = time.monotonic()


@dataclass(frozen=True, slots=True)
class ProgressView:
    """How far the current phase is, in the stage's own units; total 0 means that it cannot say."""

    counter: int
    done: int
    total: int
    note: str


class Activity:
    """The one record of what is under way in this process. Safe to use from any thread.

    `on_begin`, `on_end` and `on_progress` are called after the fact, in the thread that reports,
    and must be quick: they are in the path of every call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[Work] = set()
        self._call_count = 0
        self._counter = 0
        self._done = 0
        self._total = 0
        self._note = ""
        self.on_begin: Callable[[], None] = _ignore
        self.on_end: Callable[[], None] = _ignore
        self.on_progress: Callable[[], None] = _ignore

    @property
    def call_count(self) -> int:
        """Calls under way; one that was cancelled counts until its code has really ended."""
        return self._call_count

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    @property
    def counter(self) -> int:
        return self._counter

    def progress_view(self) -> ProgressView:
        with self._lock:
            return ProgressView(self._counter, self._done, self._total, self._note)

    def busy_for_s(self) -> float | None:
        """Seconds since that work under way which is silent longest last made progress.

        None when nothing is under way.
        """
        with self._lock:
            oldest = min((work.last_progress for work in self._under_way), default=None)
        return None if oldest is None else max(0.0, time.monotonic() - oldest)

    def begin(self, work: Work) -> None:
        with self._lock:
            self._under_way.add(work)
            self._call_count += work.is_call
        self.on_begin()

    def end(self, work: Work) -> None:
        """Take `work` off; that it ended is progress. A second time changes nothing."""
        with self._lock:
            if work not in self._under_way:
                return
            self._under_way.remove(work)
            self._call_count -= work.is_call
            self._counter += 1
        work.end()
        self.on_end()

    def touch(self, work: Work) -> None:
        """Count a sign of life of `work`, such as a value that it yielded."""
        with self._lock:
            self._counter += 1
            work.last_progress = time.monotonic()

    def report(self, current: CallContext, done: int, total: int, note: str) -> None:
        """Take what `Stage.progress` says.

        Args:
            current: the work that says it. Anything else (a thread of the model's own) speaks for
                all that is under way.
        """
        now = time.monotonic()
        with self._lock:
            self._counter += 1
            self._done, self._total = _bounded(done), _bounded(total)
            self._note = cut(sendable(str(note)))
            if isinstance(current, Work):
                current.last_progress = now
            else:
                for work in self._under_way:
                    work.last_progress = now
        self.on_progress()

    def show(self, note: str) -> None:
        """Say what is going on, which is no progress."""
        with self._lock:
            if note == self._note:
                return
            self._note = cut(sendable(note))
        self.on_progress()

    def reset_progress(self) -> None:
        """Begin a new scale, as each phase does; the counter goes on."""
        with self._lock:
            self._counter += 1
            self._done, self._total, self._note = 0, 0, ""

    def cancel_calls(self) -> list[str]:
        """Tell every call under way that nobody waits any more; return the endpoints' names."""
        with self._lock:
            calls = [work for work in self._under_way if work.is_call]
        for call in calls:
            call.cancel()
        return sorted(call.name for call in calls)


def _bounded(count: float) -> int:
    """Take a count as its author gave it: one that cannot be told must not end the telling."""
    return int(min(max(count, 0), LARGEST_NUMBER)) if count == count else 0


def _ignore() -> None: ...
