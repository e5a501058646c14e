"""Retries of the services: exponential, full jitter, a cap, and for ever unless told otherwise.

Decided here: how long to wait after which failure, and that every failure is told. Not decided
here: what is worth a retry, and what a failure means. Time and chance are arguments, so that a
simulator runs the same code. Full jitter as in "Exponential Backoff and Jitter" (Brooker, 2015).

Invariant: no failed attempt passes without `on_failure` having been called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between 0 and min(cap_s, initial_s × factor^(failures in a row − 1)), evenly."""

    initial_s: float = 0.1
    factor: float = 2.0
    cap_s: float = 1.0

    def ceiling_s(self, failures_in_a_row: int) -> float:
        """Return the longest wait after so many failures, from 1."""
        # The exponent is cut where the cap has long won, before the power overflows.
        return min(self.cap_s, self.initial_s * self.factor ** min(failures_in_a_row - 1, 64))


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failure that will be followed by another attempt after `wait_s`."""

    failures_in_a_row: int
    error: BaseException
    wait_s: float
    elapsed_s: float


class GaveUp(Exception):
    """The time for trying is over; raised from the last failure."""

    def __init__(self, failures_in_a_row: int, elapsed_s: float, last: BaseException) -> None:
        super().__init__(f"gave up after {failures_in_a_row} attempts in {elapsed_s:.1f} s: {last}")
        self.failures_in_a_row = failures_in_a_row
        self.elapsed_s = elapsed_s
        self.last = last


class Retry:
    """Runs one piece of work until it returns. One at a time per object.

    Work that lives long calls `succeeded` when it got where it wanted: what fails afterwards is a
    first failure again.

    Args:
        sleep: waits so many seconds; cancellable.
        random: an even chance in [0, 1).
        monotonic: seconds that only grow.
        on_failure: called after every failure that is retried, before the wait; must not raise.
        is_retried: whether an exception is worth another attempt. Cancellation never is.
        at_least_s: a wait that an error asks for (a server's RetryInfo); the jitter comes on top.
    """

    def __init__(
        self,
        backoff: Backoff,
        *,
        sleep: Callable[[float], Awaitable[None]],
        random: Callable[[], float],
        monotonic: Callable[[], float],
        on_failure: Callable[[FailedAttempt], None],
        is_retried: Callable[[Exception], bool],
        at_least_s: Callable[[BaseException], float] = lambda error: 0.0,
    ) -> None:
        self._backoff = backoff
        self._sleep = sleep
        self._random = random
        self._monotonic = monotonic
        self._on_failure = on_failure
        self._is_retried = is_retried
        self._at_least_s = at_least_s
        self._failures_in_a_row = 0
        self._began = 0.0
        self._may_give_up = True

    def succeeded(self) -> None:
        """Begin the waits anew, and never give up any more."""
        self._failures_in_a_row = 0
        self._may_give_up = False
        self._began = self._monotonic()

    async def run(
        self, work: Callable[[], Awaitable[T]], *, give_up_after_s: float | None = None
    ) -> T:
        """Return what `work` returns in the end.

        Args:
            give_up_after_s: if nothing succeeded for so long; None is for ever, 0 tries once.

        Raises:
            GaveUp: from the last failure.
            Exception: from `work`, if it is not retried.
        """
        self._failures_in_a_row = 0
        self._began = self._monotonic()
        self._may_give_up = give_up_after_s is not None

        async def attempt() -> T:  # tenacity awaits only what is declared async
            return await work()

        def is_over(state: RetryCallState) -> bool:
            return self._may_give_up and self._elapsed_s() >= (give_up_after_s or 0.0)

        def give_up(state: RetryCallState) -> T:
            last = _error_of(state)
            raise GaveUp(self._failures_in_a_row, self._elapsed_s(), last) from last

        retrying = AsyncRetrying(
            sleep=self._sleep,
            stop=is_over,
            wait=self._wait_s,
            retry=retry_if_exception(
                lambda error: isinstance(error, Exception) and self._is_retried(error)
            ),
            after=self._count,
            before_sleep=self._tell,
            retry_error_callback=give_up,
        )
        return await retrying(attempt)

    def _elapsed_s(self) -> float:
        return self._monotonic() - self._began

    def _count(self, state: RetryCallState) -> None:
        self._failures_in_a_row += 1

    def _wait_s(self, state: RetryCallState) -> float:
        jitter_s = self._random() * self._backoff.ceiling_s(self._failures_in_a_row)
        return self._at_least_s(_error_of(state)) + jitter_s

    def _tell(self, state: RetryCallState) -> None:
        self._on_failure(
            FailedAttempt(
                failures_in_a_row=self._failures_in_a_row,
                error=_error_of(state),
                wait_s=state.upcoming_sleep,
                elapsed_s=self._elapsed_s(),
            )
        )


def _error_of(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error
