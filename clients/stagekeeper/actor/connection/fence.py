"""Waiting until another process has taken all that this one has sent to it so far.

What is asked beside a stream, such as the end of an actor, would overtake the messages on it.
Decided here: that a call to nobody is sent behind them, and its refusal says that they are there.
Invariant: whoever waits goes on after the limit at the latest, and when the connection breaks.
"""

from __future__ import annotations

import asyncio
from typing import Final

from stagekeeper.actor.connection.link import Link, PendingCall, ReplyFuture, fail_call
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload

_NOBODY: Final = "nobody"
"""No actor's id, which are all UUIDs."""


class _Fence:
    """Who makes the call."""

    outstanding = 0

    def error_of(self, error: pb.CallError) -> BaseException:
        return LookupError(error.message)

    def link_broke(self, link: Link, calls: list[PendingCall]) -> None:
        for call in calls:
            fail_call(call, ConnectionError("the connection broke"))


async def all_taken(link: Link, limit_s: float) -> None:
    """Return when all that was sent over `link` until now was taken, or at the limit."""
    refused = ReplyFuture()
    link.call(_Fence(), refused, _NOBODY, _NOBODY, Payload(), _NOBODY)
    try:
        await asyncio.wait({refused}, timeout=limit_s)
    finally:
        refused.cancel()
