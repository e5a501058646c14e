"""Run plain code in a worker thread, as part of a call or a phase.

Decided here: how the work's context gets into the thread, and how what is raised there gets out.
Invariant: whatever plain code raises comes back as an exception of the awaiting coroutine, whereas
the hand-over of asyncio would lose a StopIteration for ever, and end the loop on a SystemExit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from stagekeeper.actor import CallContext
from stagekeeper.actor.call_context import enter_call, leave_call

T = TypeVar("T")


async def run_in_thread(
    pool: Executor,
    work: CallContext,
    function: Callable[[], T],
    on_end: Callable[[], None] | None = None,
) -> T:
    """Return what `function` returns, or raise what it raises.

    Cancelling the await does not end the function: it can look at `context().cancelled`.

    Args:
        on_end: called once, in any thread, when the function has ended, or when it is certain that
            it will never run since the await was cancelled first.
    """

    def run() -> tuple[list[T], BaseException | None]:
        token = enter_call(work)
        try:
            return [function()], None
        except BaseException as error:
            return [], error
        finally:
            leave_call(token)

    future = pool.submit(run)
    if on_end is not None:
        # Before asyncio's own callback: who awaits finds the work ended.
        future.add_done_callback(lambda _: on_end())
    values, error = await asyncio.wrap_future(future)
    if error is not None:
        raise error
    return values[0]
