"""Waking those who look at the registry, without ever waiting for them.

The writer only sets events; each reader reads what there is when it gets to it, so a slow reader
costs the writer nothing and sees several changes as one. Invariant: a reader that clears its event
before it reads misses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Pulse:
    """Something happened; whoever cares shall look."""

    def __init__(self) -> None:
        self._events: set[asyncio.Event] = set()

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """Lend an event that every `beat` inside the block sets."""
        event = asyncio.Event()
        self._events.add(event)
        try:
            yield event
        finally:
            self._events.discard(event)

    def beat(self) -> None:
        for event in self._events:
            event.set()


async def wait_until_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for `event` for `timeout_s` at most (None: for ever); return whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
