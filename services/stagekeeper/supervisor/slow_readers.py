"""Streams to readers that may not read: each message has its time, and then the reader is cut.

A reader that takes nothing lets its window fill, and the next message waits for it, for ever if it
must: a generator that yields to gRPC cannot notice that. So messages are written here, under a
limit. What is cut is told so: its status waits behind the message that the transport has taken
already, and reaches a reader that begins to read again. Until then, or until its connection ends,
that one message is all that is kept of it.

Invariant: once a reader is cut, nothing of what it read from is held.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import structlog

from stagekeeper.core.errors import Reason, Refused

_log = structlog.get_logger(__name__)

Message = TypeVar("Message")

PARTS: Final = 5
"""Of a limit. A stall of the supervisor's own, however long, uses up one of them."""


async def pour(
    messages: AsyncGenerator[Message, None],
    write: Callable[[Message], Awaitable[None]],
    *,
    limit_s: float,
    reader: str,
) -> None:
    """Write all messages, and close the generator, however it ends.

    Args:
        messages: closed at the end.
        write: returns when the reader has made room for the message.
        limit_s: how long one message may wait for room.
        reader: who reads, for the log.

    Raises:
        Refused: REVISION_GONE: the reader has taken nothing for so long.
    """
    async with contextlib.aclosing(messages):
        async for message in messages:
            try:
                async with _patience(limit_s):
                    await write(message)
            except TimeoutError:
                _log.info("a reader that takes nothing was cut", reader=reader, after_s=limit_s)
                raise Refused(
                    Reason.REVISION_GONE,
                    f"this reader has taken nothing for {limit_s:g} s and was cut: list, then "
                    "watch again",
                ) from None


@asynccontextmanager
async def _patience(limit_s: float) -> AsyncIterator[None]:
    """Raise TimeoutError in the block after `limit_s` in which this process itself was awake."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as scope:

        def wait(parts_left: int) -> None:
            nonlocal timer
            if parts_left:
                timer = loop.call_later(limit_s / PARTS, wait, parts_left - 1)
            else:
                scope.reschedule(loop.time())

        wait(PARTS)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
