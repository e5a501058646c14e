"""Calls under way over a connection, as who made them holds them: one answer, or any number.

Decided here: when the other end is told that values of a stream were read, so that its endpoint is
never far ahead of the reader. Invariant: whoever waits no longer says so to the other end, once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.actor_limits import STREAM_WINDOW

if TYPE_CHECKING:
    from stagekeeper.actor.connection.link import Link


_TOLD_AFTER: Final = STREAM_WINDOW // 2
"""Values read before the other end is told, so that it seldom waits and is not told of each."""


class Caller(Protocol):
    """Who made a call: told when it is over, and when the connection broke under it."""

    outstanding: int

    def error_of(self, error: pb.CallError) -> BaseException:
        """Turn an error frame into what the caller is to raise."""
        ...

    def link_broke(self, link: Link, calls: list[PendingCall]) -> None:
        """Take over calls that got no answer. Also told to those without any."""
        ...


class ReplyFuture(asyncio.Future[Payload]):
    """The answer of one call; cancelling it tells the other end that nobody waits."""

    link: Link | None = None
    frame_id = 0

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.link is not None:
            self.link.give_up(self.frame_id)
        return is_cancelled


class ReplyStream:
    """The answers of one call, as they come. Read by one task; `close` gives the rest up."""

    link: Link | None = None
    frame_id = 0

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Payload | BaseException | None] = asyncio.Queue()
        self._is_over = False
        self._untold = 0

    def put(self, item: Payload | BaseException | None) -> None:
        """Hand in a value, the error that ends it, or None at its end."""
        self._arrived.put_nowait(item)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> Payload:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, Payload):
            self._untold += 1
            if self._untold >= _TOLD_AFTER and self.link is not None:
                self.link.more(self.frame_id, self._untold)
                self._untold = 0
            return item
        self._is_over = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def aclose(self) -> None:
        """Give up what did not come yet. A second call changes nothing."""
        self.close()

    def close(self) -> None:
        """Do as `aclose`, for code that cannot wait."""
        if not self._is_over:
            self._is_over = True
            if self.link is not None:
                self.link.give_up(self.frame_id)

    def done(self) -> bool:
        """Return whether nobody reads any more, or all has been read."""
        return self._is_over


PendingCall = ReplyFuture | ReplyStream


def fail_call(call: PendingCall, error: BaseException) -> None:
    """End a call with an error, unless nobody waits for it any more."""
    if isinstance(call, ReplyStream):
        call.put(error)
    elif not call.done():
        call.set_exception(error)
        call.exception()  # whoever awaits it gets it all the same; a lost one is no news here
