"""Frames on their way out: in order, written by one task, several in a message when they pile up.

gRPC takes one message at a time from a stream, so somebody has to queue; and a message costs far
more than a frame. Decided here: what shares a message, and that a sign of life waits behind
nothing. Frames are filled where they lie, since every copy of a payload counts. Invariant: but for
signs of life frames leave in the order in which they were put, and none is put aside for another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from stagekeeper.actor.begun import Begun
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.actor_limits import MOST_UNREAD_BYTES, MOST_UNREAD_FRAMES

_MOST_FRAMES: Final = 64
_BATCH_BYTES: Final = 256 * 1024
"""A message is closed when its payloads reach this; what is larger alone travels alone."""

Write = Callable[[Any], Coroutine[Any, Any, object]]
"""Writes one message of the outbox's type."""


class _Message:
    """One that is being filled, or waits."""

    __slots__ = ("frame_count", "frames", "message", "payload_bytes")

    def __init__(self, message: pb.ConnectRequest | pb.ConnectResponse) -> None:
        self.message = message
        self.frames = message.frames
        self.frame_count = 0
        self.payload_bytes = 0


class Outbox:
    """The way out of one end of a connection. For the loop's thread only.

    Args:
        new_message: makes what this end writes.
    """

    def __init__(self, new_message: type[pb.ConnectRequest] | type[pb.ConnectResponse]) -> None:
        self._new_message = new_message
        self._messages: deque[_Message] = deque()
        self._beat: pb.Beat | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._frame_count = 0
        self._payload_bytes = 0
        self._write: Write | None = None
        self._writing: tuple[_Message, Begun[object]] | None = None
        self._has_room = asyncio.Event()
        self._has_space = asyncio.Event()
        self.moved_bytes = 0
        """Of payloads, written since the beginning."""

    @property
    def is_full(self) -> bool:
        """Whether so much waits that whoever adds to it by reading should not read on."""
        return self._holds(MOST_UNREAD_BYTES, MOST_UNREAD_FRAMES)

    @property
    def is_crowded(self) -> bool:
        """Whether half of that waits, so that whoever can wait should: the other end reads slowly.

        Half, since who yields without end fills up whatever there is, and what the other end has
        to say (that it reads no more) must be read all the same.
        """
        return self._holds(MOST_UNREAD_BYTES // 2, MOST_UNREAD_FRAMES // 2)

    @property
    def is_backed_up(self) -> bool:
        """Whether payloads wait, or are being written."""
        is_writing_payload = self._writing is not None and self._writing[0].payload_bytes > 0
        return is_writing_payload or self._payload_bytes > 0

    def _holds(self, payload_bytes: int, frame_count: int) -> bool:
        return self._payload_bytes > payload_bytes or self._frame_count > frame_count

    async def room(self) -> None:
        """Return when it is not crowded any more, or closed."""
        while self.is_crowded and not self._is_closed:
            self._has_room.clear()
            await self._has_room.wait()

    async def space(self) -> None:
        """Return when it is not full any more, or closed."""
        while self.is_full and not self._is_closed:
            self._has_space.clear()
            await self._has_space.wait()

    def unsent(self) -> list[pb.Frame]:
        """Return what no writer has taken yet, in order."""
        return [frame for message in self._messages for frame in message.frames]

    def add(self, payload_bytes: int = 0) -> pb.Frame:
        """Queue a frame, to be filled at once. After `close` nobody will read it.

        Args:
            payload_bytes: about how large it is, when it carries a payload.
        """
        if self._is_closed:
            return pb.Frame()
        last = self._messages[-1] if self._messages else None
        if (
            last is None
            or last.frame_count >= _MOST_FRAMES
            or last.payload_bytes + payload_bytes > _BATCH_BYTES
        ):
            last = _Message(self._new_message())
            self._messages.append(last)
        last.frame_count += 1
        last.payload_bytes += payload_bytes
        self._frame_count += 1
        self._payload_bytes += payload_bytes
        self._wake()
        return last.frames.add()

    def put(self, frame: pb.Frame) -> None:
        """Queue a frame that is whole, and small."""
        self.add().CopyFrom(frame)

    def beat(self, beat: pb.Beat) -> None:
        """Send a sign of life before all that waits; in place of one that waits itself."""
        if not self._is_closed:
            self._beat = beat
            self._wake()

    def close(self) -> None:
        """Let `run` return once all that was put is written."""
        self._is_closed = True
        self._has_room.set()
        self._has_space.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def flush(self) -> None:
        """Begin to write what was put now, not in the loop's next turn, where nobody writes.

        For whoever has no more to put in this turn: what is put later is another message.
        """
        if self._writing is None and self._messages and self._beat is None:
            self._begin()

    def _begin(self) -> None:
        """Begin to write what is next, where anybody writes."""
        if self._write is None:
            return
        next_up = self._messages.popleft() if self._messages else _Message(self._new_message())
        if self._beat is not None:
            next_up.frames.add(beat=self._beat)
            self._beat = None
        self._frame_count -= next_up.frame_count
        self._payload_bytes -= next_up.payload_bytes
        if not self.is_full:
            self._has_space.set()
        if not self.is_crowded:
            self._has_room.set()
        begun = Begun(self._write(next_up.message))
        self._writing = next_up, begun
        begun.begin()

    async def run(self, write: Write) -> None:
        """Write what is put, until `close` and until all of it is written.

        Cancelled, what it was writing is lost; the next `run` goes on with what is left. Raises
        whatever `write` raises: the stream is over.
        """
        loop = asyncio.get_running_loop()
        self._write = write
        try:
            while True:
                if self._writing is None:
                    if not self._messages and self._beat is None:
                        if self._is_closed:
                            return
                        self._waiter = loop.create_future()
                        await self._waiter
                        continue
                    self._begin()
                    assert self._writing is not None
                message, begun = self._writing
                await begun
                self._writing = None
                self.moved_bytes += message.payload_bytes
        finally:
            self._write = None
            if self._writing is not None:
                self._writing[1].close()
                self._writing = None
