"""How the client tries again: the only place that imports tenacity on the clients' side.

Three patterns: for ever (the watch), for a while (questions to the supervisor), and until a call's
deadline, on another replica (calls). All wait with full jitter, so that clients that lost one
supervisor at one moment do not come back at one moment. Not decided here: what is safe to repeat;
each caller says so. Invariant: only a server's own RetryInfo makes a wait longer than the cap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    before_sleep_log,
    retry_if_exception,
    retry_if_exception_type,
    stop_before_delay,
    stop_never,
    wait_random_exponential,
)

from stagekeeper.client.errors import StagekeeperError

RECONNECT_BASE_S = 0.1
RECONNECT_CAP_S = 1.0
ANOTHER_REPLICA_BASE_S = 0.02
ANOTHER_REPLICA_CAP_S = 0.5

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[None]]

_log = logging.getLogger("stagekeeper.client")


def _jitter(base_s: float, cap_s: float) -> Callable[[RetryCallState], float]:
    full_jitter = wait_random_exponential(multiplier=base_s, max=cap_s)

    def wait(state: RetryCallState) -> float:
        waited = full_jitter(state)
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, StagekeeperError) and error.retry_after_s is not None:
            return max(waited, error.retry_after_s)
        return waited

    return wait


def for_ever(what: str, *, sleep: Sleep = asyncio.sleep) -> AsyncRetrying:
    """Repeat after any of our errors until it succeeds; log the first one and each tenth."""

    def say(state: RetryCallState) -> None:
        if state.attempt_number % 10 == 1:
            error = state.outcome.exception() if state.outcome else None
            _log.warning("%s failed, attempt %d: %s", what, state.attempt_number, error)

    return AsyncRetrying(
        sleep=sleep,
        stop=stop_never,
        wait=_jitter(RECONNECT_BASE_S, RECONNECT_CAP_S),
        retry=retry_if_exception_type(StagekeeperError),
        before_sleep=say,
        reraise=True,
    )


def for_a_while(
    patience_s: float,
    is_safe: Callable[[BaseException], bool],
    *,
    sleep: Sleep = asyncio.sleep,
) -> AsyncRetrying:
    """Repeat what is safe to repeat for `patience_s`, then raise the last error.

    It counts from the first failure. An attempt over a connection that is dead and does not say so
    fails only when the transport has noticed, and that is when trying begins.
    """
    return AsyncRetrying(
        sleep=sleep,
        stop=_after_the_first_failure(patience_s),
        wait=_jitter(RECONNECT_BASE_S, RECONNECT_CAP_S),
        retry=retry_if_exception(is_safe),
        reraise=True,
    )


def _after_the_first_failure(patience_s: float) -> Callable[[RetryCallState], bool]:
    failed_at: list[float] = []

    def is_over(state: RetryCallState) -> bool:
        now = state.outcome_timestamp or 0.0
        failed_at.append(now)
        return now - failed_at[0] + state.upcoming_sleep >= patience_s

    return is_over


async def on_another_replica(
    attempt: Callable[[], Awaitable[Answer]],
    first_error: StagekeeperError,
    *,
    patience_s: float,
    may_repeat: Callable[[], bool],
    has_another: Callable[[], bool],
    sleep: Sleep = asyncio.sleep,
) -> Answer:
    """Go on after a first attempt that failed: at once while there is another replica to try.

    Args:
        attempt: one more try.
        first_error: how the first one failed. It was made without this machinery, which costs more
            than the rest of a call's own path.
        patience_s: no wait goes beyond it; the last error is raised then.
        may_repeat: whether the last failure allows another try.
        has_another: whether a replica is left that has not been tried.
        sleep: how to wait.
    """
    pause = _jitter(ANOTHER_REPLICA_BASE_S, ANOTHER_REPLICA_CAP_S)
    pending: list[StagekeeperError] = [first_error]

    async def again() -> Answer:
        if pending:
            raise pending.pop()
        return await attempt()

    def wait(state: RetryCallState) -> float:
        return 0.0 if has_another() else pause(state)

    def is_safe(error: BaseException) -> bool:
        return isinstance(error, StagekeeperError) and may_repeat()

    retrying = AsyncRetrying(
        sleep=sleep,
        stop=stop_before_delay(patience_s),
        wait=wait,
        retry=retry_if_exception(is_safe),
        before_sleep=before_sleep_log(_log, logging.DEBUG),
        reraise=True,
    )
    return await retrying(again)
