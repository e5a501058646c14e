"""Time that passes only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

_TURNS = 40
"""Turns of the loop after which everything that needs no time has happened."""


class VirtualClock:
    """A `Clock` whose sleepers are woken in order by `advance`."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, delay_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(0.0, delay_s), next(self._order), future))
        await future

    @property
    def sleeper_count(self) -> int:
        return sum(not future.done() for _, _, future in self._sleepers)

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Let time pass, sleeper by sleeper; each is followed by what it sets off."""
        target = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            self._now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
                await self.settle()
        self._now = target
