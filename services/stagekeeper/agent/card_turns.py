"""The cards of one agent, each for one start at a time.

Decided here: who may start on which cards, and that a start gets all of its cards at once: one that
waits has none, so nobody ever waits for a start that only waits. A shard may wait for the others of
its stage while it has its cards, and those may wait for cards elsewhere; with starts that kept some
cards and waited for more, that could close a circle over several workers.

Invariant: no card is taken twice. Of those that want the same cards, who asked first gets them; one
with more cards may be overtaken by others that fit in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from stagekeeper.core.ids import DeviceId


class CardTurns:
    """The turns on the cards of one agent."""

    def __init__(self) -> None:
        self._taken: set[DeviceId] = set()
        self._waiting: dict[asyncio.Future[None], frozenset[DeviceId]] = {}

    @asynccontextmanager
    async def alone_on(self, device_ids: Collection[DeviceId]) -> AsyncIterator[None]:
        """Hold these cards alone; none at all is at once. The wait for them may be cancelled."""
        wanted = frozenset(device_ids)
        await self._take(wanted)
        try:
            yield
        finally:
            self._give_back(wanted)

    async def _take(self, wanted: frozenset[DeviceId]) -> None:
        if self._taken.isdisjoint(wanted):
            self._taken |= wanted
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = wanted
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:
                self._give_back(wanted)  # they were granted at that very moment
            raise

    def _give_back(self, cards: frozenset[DeviceId]) -> None:
        self._taken -= cards
        for turn, wanted in list(self._waiting.items()):
            if self._taken.isdisjoint(wanted):
                del self._waiting[turn]
                self._taken |= wanted
                turn.set_result(None)
