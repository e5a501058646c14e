"""A message to an actor, and the way of its answer.

Invariant: a call is answered exactly once, whoever answers first; a cast never is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stagekeeper.actor.call_context import CallContext
from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload

Answer = Callable[[pb.Frame, int], None]
"""Takes a frame and about how many bytes of payload it has."""


class Message(CallContext):
    """One message, and what its endpoint may ask about it.

    Args:
        frame: as it came.
        frame_id: pairs the answer with it.
        answer: where answers go.
        on_end: called once, when nothing more will be said about it.
        outbox: where answers wait for the other end to read them.
    """

    __slots__ = (
        "_answer",
        "_on_end",
        "_outbox",
        "began",
        "endpoint",
        "frame_id",
        "is_cast",
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
        answer: Answer,
        on_end: Callable[[Message], None],
        outbox: Outbox | None = None,
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
        self._answer = answer
        self._on_end = on_end
        self._outbox = outbox

    @property
    def is_crowded(self) -> bool:
        """Whether the caller reads slowly, so that what yields values should wait for `room`."""
        return self._outbox is not None and self._outbox.is_crowded

    async def room(self) -> None:
        """Return when the caller has read enough, or is gone."""
        if self._outbox is not None:
            await self._outbox.room()

    def progress(self) -> None:
        """Say that the work goes on: it is no stall, however long it takes."""
        self.last_progress = time.monotonic()

    def yield_value(self, payload: Payload) -> None:
        """Send one of several values."""
        if not self.is_over and not self.is_cast:
            reply = pb.Reply(payload=payload, has_more=True)
            self._answer(pb.Frame(frame_id=self.frame_id, reply=reply), len(payload.data))

    def answer(self, payload: Payload | None) -> None:
        """Answer, or with None end a stream of values."""
        if self.is_over:
            return
        self.is_over = True
        if not self.is_cast:
            reply = pb.Reply() if payload is None else pb.Reply(payload=payload)
            size = 0 if payload is None else len(payload.data)
            self._answer(pb.Frame(frame_id=self.frame_id, reply=reply), size)
        self._on_end(self)

    def refuse(self, error: pb.CallError) -> None:
        """Answer with an error."""
        if self.is_over:
            return
        self.is_over = True
        # Of a cast to a failed actor the owner hears; else only its sender can.
        if not self.is_cast or error.reason in ("ACTOR_STOPPED", "ACTOR_UNKNOWN"):
            self._answer(pb.Frame(frame_id=self.frame_id, error=error), 0)
        self._on_end(self)
