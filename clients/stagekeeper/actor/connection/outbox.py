"""Frames on their way out: in order, written by one task, several in a message when they pile up.

gRPC takes one message at a time from a stream, so somebody has to queue; and a message costs far
more than a frame. Decided here: what shares a message. Invariant: frames leave in the order in
which they were put, and none is put aside for another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.actor_limits import MOST_UNREAD_BYTES, MOST_UNREAD_FRAMES

_MOST_FRAMES: Final = 64
_BATCH_BYTES: Final = 256 * 1024
"""A message is closed when its payloads reach this; what is larger alone travels alone."""

Write = Callable[[list[pb.Frame]], Awaitable[object]]


class Outbox:
    """The way out of one end of a connection. For the loop's thread only."""

    def __init__(self) -> None:
        self._frames: deque[tuple[pb.Frame, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._payload_bytes = 0
        self._has_room = asyncio.Event()

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits that whoever can wait should: the other end reads slowly."""
        return self._payload_bytes > MOST_UNREAD_BYTES or len(self._frames) > MOST_UNREAD_FRAMES

    async def room(self) -> None:
        """Return when it is not crowded any more, or closed."""
        while self.is_crowded and not self._is_closed:
            self._has_room.clear()
            await self._has_room.wait()

    def unsent(self) -> list[pb.Frame]:
        """Return what no writer has taken yet, in order."""
        return [frame for frame, _ in self._frames]

    def put(self, frame: pb.Frame, payload_bytes: int = 0) -> None:
        """Queue a frame. After `close` it is dropped: nobody is there to read it.

        Args:
            payload_bytes: about how large it is, when it carries a payload.
        """
        if self._is_closed:
            return
        self._frames.append((frame, payload_bytes))
        self._payload_bytes += payload_bytes
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Let `run` return once all that was put is written."""
        self._is_closed = True
        self._has_room.set()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, write: Write) -> None:
        """Write what is put, until `close` and until all of it is written.

        Cancelled, what it was writing is lost; the next `run` goes on with what is left. Raises
        whatever `write` raises: the stream is over.
        """
        loop = asyncio.get_running_loop()
        frames = self._frames
        while True:
            if not frames:
                if self._is_closed:
                    return
                self._waiter = loop.create_future()
                await self._waiter
                continue
            batch: list[pb.Frame] = []
            size = 0
            while frames and len(batch) < _MOST_FRAMES:
                payload_bytes = frames[0][1]
                if batch and size + payload_bytes > _BATCH_BYTES:
                    break
                batch.append(frames.popleft()[0])
                size += payload_bytes
            self._payload_bytes -= size
            if not self.is_crowded:
                self._has_room.set()
            await write(batch)
