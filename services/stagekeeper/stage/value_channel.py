"""Values from a generator in a worker thread to a coroutine, in order, a few ahead at most.

The generator runs in one thread from its first step to its last, since what it holds across a yield
(inference mode, a CUDA stream) belongs to the thread. Invariant: the thread never waits for a
reader that is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")

_AHEAD = 8
"""Values that the generator may be ahead of its reader. More would only delay a cancellation."""


class ValueChannel(Generic[T]):
    """One writer in a thread, one reader on the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._values: deque[T] = deque()
        self._room = threading.Semaphore(_AHEAD)
        self._is_closed = False
        self._is_abandoned = False
        self._changed = asyncio.Event()
        self._is_waking = False

    def put(self, value: T) -> bool:
        """Hand over `value`, waiting while the reader is behind. False: there is no reader."""
        self._room.acquire()
        if self._is_abandoned:
            return False
        self._values.append(value)
        self._wake()
        return True

    def close(self) -> None:
        """Say that no value follows."""
        self._is_closed = True
        self._wake()

    def abandon(self) -> None:
        """Say that nobody reads any more; a waiting `put` returns. From the loop."""
        self._is_abandoned = True
        self._room.release()

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            while self._values:
                yield self._values.popleft()
                self._room.release()
            if self._is_closed:
                if self._values:
                    continue  # put just before the close
                return
            self._changed.clear()
            if not self._values and not self._is_closed:
                await self._changed.wait()

    def _wake(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._on_wake)
            except RuntimeError:
                pass  # the loop has ended, and with it every reader

    def _on_wake(self) -> None:
        self._is_waking = False
        self._changed.set()
