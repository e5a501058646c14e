"""Asking what an actor defines beside its endpoints: `__supervise__` and `__cleanup__`.

Decided here: that either may be plain or async, or a plain one that returns what has to be awaited,
as decorators make them; and that nobody waits for one longer than its limit and a moment, whatever
its code does about being cancelled. Invariant: what is not awaited is never taken for an answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from stagekeeper.actor.hosting.actor_thread import passable

_log = logging.getLogger("stagekeeper.actor")

_MOMENT_S: Final = 0.5
"""For what code does when it is cancelled; what takes longer goes on by itself."""

RunPlain = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs plain code where it belongs."""


class HandlerLate(TimeoutError):
    """It did not return within its limit."""


async def answer_of(
    handler: Callable[[Any], object],
    argument: object,
    limit_s: float,
    *,
    run_plain: RunPlain,
    context: contextvars.Context,
    on_exit: Callable[[BaseException], None],
    conclude: Callable[[object], object] = lambda answer: answer,
) -> object:
    """Ask a handler, and return what `conclude` makes of its answer, in the step that gave it.

    Args:
        on_exit: called when it wants the whole process to end, before that goes on up.

    Raises:
        HandlerLate: it was cancelled for that, where it is async; else it goes on.
        BaseException: whatever it raised.
    """

    def call() -> object:
        answer = handler(argument)
        return answer if inspect.isawaitable(answer) else conclude(answer)

    async def to_the_end(answer: Awaitable[object]) -> object:
        try:
            return conclude(await answer)
        except GeneratorExit as error:
            raise passable(error) from error
        except (SystemExit, KeyboardInterrupt) as wish:
            on_exit(wish)
            raise

    name = getattr(handler, "__name__", "it")
    late = HandlerLate(f"{name} did not return within {limit_s:.3g} s")
    answer: object
    if inspect.iscoroutinefunction(handler):
        answer = cast("object", handler(argument))
    else:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                answer = await run_plain(call)
        except TimeoutError:
            if limit.expired():
                raise late from None
            raise
        except (SystemExit, KeyboardInterrupt) as wish:
            on_exit(wish)
            raise
    if not inspect.isawaitable(answer):
        return answer
    work = asyncio.create_task(to_the_end(answer), name=name, context=context)
    return await _within(work, limit_s, late)


async def _within(work: asyncio.Task[object], limit_s: float, late: HandlerLate) -> object:
    """Return what a task returns; let go of it after the limit, or when who waits is cancelled."""
    try:
        await asyncio.wait({work}, timeout=limit_s)
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work}, timeout=_MOMENT_S)
        if work.cancelled() or not work.done():
            _tell_of(work)
            raise
    if not work.done():
        work.cancel()
        await asyncio.wait({work}, timeout=_MOMENT_S)
        if work.cancelled() or not work.done():
            _tell_of(work)
            raise late
    return work.result()


def _tell_of(work: asyncio.Task[object]) -> None:
    if not work.done():
        _log.warning("%s goes on, though it was cancelled: nobody waits for it", work.get_name())
