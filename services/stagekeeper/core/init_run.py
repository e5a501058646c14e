"""One start of many stages, all or nothing, as a state machine that does nothing itself.

Decided here: which stage may start now, what is cleaned up and in which order, and which one
exception comes out. Not decided here: how an init is run (threads or tasks), how many at once, and
how a failed one dies. A driver asks `next_order`, carries the order out, and reports its outcome.

Invariant: a stage that came up is either among the handles of a run that succeeded, or is ordered
to be cleaned exactly once, and that only when nothing is in flight any more.

Not safe for threads: a driver with threads calls it under a lock, and carries orders out without.
Times are seconds of one monotonic clock of the driver's choice.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeAlias, TypeVar

from stagekeeper.core.errors import InitError, RollbackEntry, RollbackReport

Stage = TypeVar("Stage", bound=int)
Handle = TypeVar("Handle")

StageTimeouts: TypeAlias = float | Mapping[Stage, float | None] | None
"""Seconds that each init may take: one limit for all, or one per stage; None is no limit."""

STAGES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class StartStage(Generic[Stage]):
    """Run the init of this stage. From `deadline` on it has failed; None is no deadline."""

    stage_id: Stage
    deadline: float | None


@dataclass(frozen=True, slots=True)
class CleanStage(Generic[Stage, Handle]):
    """Undo this stage; `handle` is what its init returned."""

    stage_id: Stage
    handle: Handle


class InitRun(Generic[Stage, Handle]):
    """The state of one start, from its groups to its handles or its error.

    Args:
        groups: stages that must not overlap, in the order in which they start; see `init_groups`.
        stage_timeout_s: limits for the inits.

    Raises:
        ValueError: for a limit that is not above 0.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Stage]],
        *,
        stage_timeout_s: StageTimeouts[Stage] = None,
    ) -> None:
        self._timeout_s = _timeout_of_each(groups, stage_timeout_s)
        self._successor = {a: b for group in groups for a, b in pairwise(group)}
        self._startable = deque(group[0] for group in groups if group)
        self._in_flight: set[Stage] = set()
        self._deadlines: list[tuple[float, Stage]] = []  # a heap; ended stages are dropped late
        self._ready: dict[Stage, Handle] = {}  # in order of success
        self._failures: dict[Stage, BaseException] = {}  # in order of being recorded
        self._interrupt: BaseException | None = None
        self._cleaning: tuple[Stage, float] | None = None
        self._cleanup_errors: dict[Stage, BaseException] = {}
        self._entries: list[RollbackEntry] = []

    @property
    def is_halted(self) -> bool:
        """Whether nothing new may start: a stage failed, or the caller was interrupted."""
        return bool(self._failures) or self._interrupt is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way and nothing is left to be ordered."""
        if self._in_flight or self._cleaning is not None:
            return False
        return not (self._ready if self.is_halted else self._startable)

    def next_order(self, *, now: float) -> StartStage[Stage] | CleanStage[Stage, Handle] | None:
        """Return what the caller is to do next, or None when there is nothing for it now.

        None is final for this caller as long as everybody who has an order asks again after its
        outcome: each outcome makes at most one new order possible.
        """
        self.fail_overdue(now=now)
        if not self.is_halted:
            return self._start(self._startable.popleft(), now) if self._startable else None
        if self._in_flight or self._cleaning is not None or not self._ready:
            return None
        stage_id, handle = self._ready.popitem()
        self._cleaning = (stage_id, now)
        return CleanStage(stage_id, handle)

    def stage_succeeded(self, stage_id: Stage, handle: Handle, *, now: float) -> None:
        """Record that an init returned. After its deadline it has failed all the same, and its
        handle is cleaned: nobody else knows of it.
        """
        self._land(stage_id, now)
        self._ready[stage_id] = handle
        if stage_id in self._successor:
            # In front: a group that has begun goes on before another begins.
            self._startable.appendleft(self._successor[stage_id])

    def stage_failed(self, stage_id: Stage, error: BaseException, *, now: float) -> None:
        """Record that an init raised; the first recorded failure names the error of the run."""
        self._land(stage_id, now)
        overdue = self._failures.setdefault(stage_id, error)
        if overdue is not error:
            overdue.__cause__ = error

    def fail_overdue(self, *, now: float) -> None:
        """Fail what has reached its deadline. It stays in flight: its end is waited for.

        Each method that takes `now` does it first; a driver with a timer may do it on time.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, stage_id = heapq.heappop(self._deadlines)
            if stage_id in self._in_flight:
                limit = f"stage {stage_id} was not ready within {self._timeout_s[stage_id]:g} s"
                self._failures[stage_id] = TimeoutError(limit)

    def stage_cleaned(self, stage_id: Stage, error: BaseException | None, *, now: float) -> None:
        """Record that a cleanup ended; one that raised is reported and stops no other."""
        if self._cleaning is None or self._cleaning[0] != stage_id:
            raise RuntimeError(f"stage {stage_id} is not being cleaned: {self}")
        duration_s = now - self._cleaning[1]
        self._cleaning = None
        if error is not None:
            self._cleanup_errors[stage_id] = error
        text = None if error is None else _text_of(error)
        self._entries.append(RollbackEntry(stage_id, error is None, text, duration_s))

    def interrupt(self, cause: BaseException) -> None:
        """Record that the caller wants out: nothing new starts, what came up is cleaned.

        Holds after success too, until the handles were handed out; a second one changes nothing.
        """
        if self._interrupt is None:
            self._interrupt = cause

    def handles(self) -> dict[Stage, Handle]:
        """Return the handle of each stage, ascending by stage; for a settled run without error."""
        if not self.is_settled or self.is_halted:
            raise RuntimeError(f"the stages are not all up: {self}")
        return {stage_id: self._ready[stage_id] for stage_id in sorted(self._ready)}

    def error(self) -> BaseException | None:
        """Return the one exception of a settled run, to be raised as it is; None for success.

        It is the cause of the interrupt, with the rollback as a note, or else an `InitError` from
        the failure that was recorded first.
        """
        if not self.is_settled:
            raise RuntimeError(f"stages are still under way: {self}")
        if self._interrupt is not None:
            note = self._story()
            if note not in getattr(self._interrupt, "__notes__", ()):
                self._interrupt.add_note(note)
            return self._interrupt
        if not self._failures:
            return None
        (stage_id, cause), *later = self._failures.items()
        phase = getattr(cause, "phase", None)
        error = InitError(
            stage_id,
            phase if isinstance(phase, str) else None,
            also_failed=dict(later),
            cleanup_errors=dict(self._cleanup_errors.items()),
            report=RollbackReport(tuple(self._entries)),
            message=f"{_text_of(cause)}; {self._story(but=stage_id)}",
        )
        error.__cause__ = cause
        return error

    def __repr__(self) -> str:
        return (
            f"<InitRun in flight {sorted(self._in_flight)}, ready {sorted(self._ready)}, "
            f"failed {sorted(self._failures)}, cleaning {self._cleaning}, "
            f"interrupt {self._interrupt!r}>"
        )

    def _start(self, stage_id: Stage, now: float) -> StartStage[Stage]:
        timeout_s = self._timeout_s.get(stage_id)
        deadline = None if timeout_s is None else now + timeout_s
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, stage_id))
        self._in_flight.add(stage_id)
        return StartStage(stage_id, deadline)

    def _land(self, stage_id: Stage, now: float) -> None:
        self.fail_overdue(now=now)
        if stage_id not in self._in_flight:
            raise RuntimeError(f"stage {stage_id} is not in flight: {self}")
        self._in_flight.remove(stage_id)

    def _story(self, but: Stage | None = None) -> str:
        """Say what failed (except the stage that is named elsewhere) and what the rollback did."""
        failed = [
            f"stage {stage_id} failed: {_text_of(failure)}"
            for stage_id, failure in self._failures.items()
            if stage_id != but
        ]
        cleaned = [str(entry.stage_id) for entry in self._entries if entry.cleaned]
        unclean = [
            f"the cleanup of stage {stage_id} raised {_text_of(error)}"
            for stage_id, error in self._cleanup_errors.items()
        ]
        rolled_back = f"rolled back: {', '.join(_shortened(cleaned)) or 'nothing'}"
        return "; ".join([*_shortened(failed), rolled_back, *_shortened(unclean)])


def _timeout_of_each(
    groups: Sequence[Sequence[Stage]], stage_timeout_s: StageTimeouts[Stage]
) -> dict[Stage, float]:
    if stage_timeout_s is None:
        return {}
    timeouts: dict[Stage, float] = {}
    for stage_id in (stage_id for group in groups for stage_id in group):
        timeout_s = (
            stage_timeout_s.get(stage_id)
            if isinstance(stage_timeout_s, Mapping)
            else stage_timeout_s
        )
        if timeout_s is None:
            continue
        if not timeout_s > 0:  # nan too
            raise ValueError(f"stage {stage_id}: a limit of {timeout_s} s is not above 0")
        timeouts[stage_id] = timeout_s
    return timeouts


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # it is a user's class: its text may not stop a rollback
        text = "(its text cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shortened(parts: Sequence[str]) -> list[str]:
    if len(parts) <= STAGES_SHOWN:
        return list(parts)
    return [*parts[:STAGES_SHOWN], f"and {len(parts) - STAGES_SHOWN} more"]
