"""A message to an actor, and the way of its answer.

Decided here: when an endpoint that yields waits for its reader, and what wakes it. Invariants: a
call is answered exactly once, whoever answers first; a cast never is. No more values are on their
way than the caller takes, and whoever waits for room is woken by the end of the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from stagekeeper.actor.call_context import CallContext
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload


class WayBack(Protocol):
    """Where answers wait for the other end to read them."""

    @property
    def is_crowded(self) -> bool: ...

    async def room(self) -> None:
        """Return when it is not crowded any more."""
        ...

    def add(self, payload_bytes: int = 0) -> pb.Frame:
        """Queue a frame, to be filled at once."""
        ...


_VALUES_IN_A_TURN: Final = 16
"""After so many an async generator lets others run, also one that never awaits anything."""


class Message(CallContext):
    """One message, and what its endpoint may ask about it.

    Args:
        frame: as it came.
        frame_id: pairs the answer with it.
        way_back: where answers go.
        on_end: called once, when nothing more will be said about it.
    """

    __slots__ = (
        "_allowed",
        "_has_room",
        "_made",
        "_on_end",
        "_way_back",
        "began",
        "endpoint",
        "frame_id",
        "has_progressed",
        "is_cast",
        "is_held_up",
        "is_over",
        "is_stream",
        "last_progress",
        "payload",
        "sender",
    )

    def __init__(
        self,
        frame: pb.CallFrame,
        frame_id: int,
        way_back: WayBack,
        on_end: Callable[[Message], None],
    ) -> None:
        timeout_s = frame.timeout_s if frame.HasField("timeout_s") else None
        super().__init__(None if timeout_s is None else time.monotonic() + timeout_s)
        self.endpoint = frame.endpoint
        self.payload = frame.payload
        self.is_cast = frame.is_cast
        self.is_stream = frame.is_stream
        self.sender = frame.sender
        self.frame_id = frame_id
        self.began = False
        self.is_over = False
        self.last_progress = time.monotonic()
        self.has_progressed = True
        """Since whoever looks for stalls took this back."""
        self._on_end = on_end
        self._way_back = way_back
        self.is_held_up = False
        """It waits for its reader, and is not to blame for making no progress."""
        # Written by two threads at most, each its own: values made by who makes them, values
        # allowed by the loop.
        self._made = 0
        self._allowed = frame.window
        self._has_room: asyncio.Event | None = None

    @property
    def is_crowded(self) -> bool:
        """Whether the caller reads slowly, so that what yields values waits for `room`."""
        if self._allowed and self._made >= self._allowed:
            return not self.is_cast
        return self._way_back.is_crowded

    async def room(self) -> None:
        """Return when the caller has read enough, or nobody waits any more."""
        self.is_held_up = True
        try:
            while self.is_crowded and not (self.is_over or self.cancelled):
                if self._way_back.is_crowded:
                    await self._way_back.room()
                    continue
                if self._has_room is None:
                    self._has_room = asyncio.Event()
                self._has_room.clear()
                async with asyncio.timeout(self.remaining_s):
                    await self._has_room.wait()
        except TimeoutError:
            pass  # its deadline: nobody waits any more
        finally:
            self.is_held_up = False
            self.progress()

    def more(self, count: int) -> None:
        """The caller has read so many values, and takes as many more."""
        if self._allowed:
            self._allowed += count
            self._wake()

    def cancel(self) -> None:
        super().cancel()
        self._wake()

    def _wake(self) -> None:
        if self._has_room is not None:
            self._has_room.set()

    def progress(self) -> None:
        """Say that the work goes on: it is no stall, however long it takes."""
        self.last_progress = time.monotonic()
        self.has_progressed = True

    async def send(self, payload: Payload) -> None:
        """Send one of several values, once the caller takes it."""
        self.progress()
        if self.is_crowded:
            await self.room()
        elif self._made % _VALUES_IN_A_TURN == _VALUES_IN_A_TURN - 1:
            await asyncio.sleep(0)
        self.count_value()
        self.put_value(payload)

    def count_value(self) -> None:
        """Count a value before it is put; from the thread that makes them."""
        self._made += 1
        self.progress()

    def put_value(self, payload: Payload) -> None:
        """Put a value that was counted on its way; in the loop's thread."""
        if not self.is_over and not self.is_cast:
            self._reply(payload).has_more = True

    def answer(self, payload: Payload | None) -> None:
        """Answer, or with None end a stream of values."""
        if self.is_over:
            return
        if self.is_stream and payload is not None:  # of an endpoint that has one value
            self.put_value(payload)
            payload = None
        self.is_over = True
        if not self.is_cast:
            self._reply(payload)
        self._on_end(self)

    def _reply(self, payload: Payload | None) -> pb.Reply:
        frame = self._way_back.add(0 if payload is None else len(payload.data))
        frame.frame_id = self.frame_id
        reply = frame.reply
        if payload is None:
            reply.SetInParent()
        else:
            reply.payload.CopyFrom(payload)
        return reply

    def refuse(self, error: pb.CallError) -> None:
        """Answer with an error."""
        if self.is_over:
            return
        self.is_over = True
        # Of a cast to a failed actor the owner hears; else only its sender can.
        if not self.is_cast or error.reason in ("ACTOR_STOPPED", "ACTOR_UNKNOWN"):
            frame = self._way_back.add()
            frame.frame_id = self.frame_id
            frame.error.CopyFrom(error)
        self._on_end(self)
