"""Ending with the reader of our output, also where there is nothing to write for a long time.

Decided here: how a reader that left is noticed: his end of the pipe is closed. Invariant: nothing
is read or written here.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


async def while_read(work: Awaitable[Result]) -> Result:
    """Wait for `work` as long as somebody may read stdout.

    Raises:
        BrokenPipeError: the reader has left (`… | head -1`); `work` was cancelled.
    """
    pipe = _pipe_of_stdout()
    if pipe is None:
        return await work
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    has_left = False

    def left() -> None:
        nonlocal has_left
        has_left = True
        loop.remove_reader(pipe)
        task.cancel()

    # There is nothing to read at this end: the loop is woken by the error alone.
    loop.add_reader(pipe, left)
    try:
        return await task
    except asyncio.CancelledError:
        if has_left:
            raise BrokenPipeError from None
        raise
    finally:
        loop.remove_reader(pipe)


def _pipe_of_stdout() -> int | None:
    try:
        descriptor = sys.stdout.fileno()
        return descriptor if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    except (OSError, AttributeError):  # a program that has put something else in its place
        return None
