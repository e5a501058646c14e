"""Time, handed in.

Decisions use `monotonic`; `wall` is for display alone. A simulator passes its own clock, so code
that takes a `Clock` never calls `time` or `asyncio.sleep` itself.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the programs need of time, in seconds."""

    def monotonic(self) -> float:
        """Return a time that only grows; its zero means nothing."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, for display only."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s`; cancellable."""
        ...


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


async def sleep_until_set(clock: Clock, delay_s: float, event: asyncio.Event) -> None:
    """Return after `delay_s`, or as soon as `event` is set."""
    sleeping = asyncio.ensure_future(clock.sleep(delay_s))
    waking = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({sleeping, waking}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sleeping, waking):
            task.cancel()
        await asyncio.wait({sleeping, waking})
