"""The cards of one agent, each for one start at a time.

Decided here: who may start on which cards, and that a start gets all of its cards at once: one that
waits has none, so nobody ever waits for a start that only waits. A shard may wait for the others of
its stage while it has its cards, and those may wait for cards elsewhere; with starts that kept some
cards and waited for more, that could close a circle over several workers.

Invariant: no card is taken twice, but by starts that share it because they are one. Of those that
want the same cards, who asked first gets them; one with more cards may be overtaken by others that
fit in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stagekeeper.core.ids import DeviceId


@dataclass(frozen=True, slots=True)
class _Wish:
    cards: frozenset[DeviceId]
    name: str


@dataclass(slots=True)
class _Turn:
    """A card that is taken, by so many that share it under one name."""

    name: str
    count: int = 0


class CardTurns:
    """The turns on the cards of one agent."""

    def __init__(self) -> None:
        self._taken: dict[DeviceId, _Turn] = {}
        self._waiting: dict[asyncio.Future[None], _Wish] = {}

    @asynccontextmanager
    async def alone_on(
        self, device_ids: Collection[DeviceId], *, together_with: str = ""
    ) -> AsyncIterator[None]:
        """Hold these cards alone; none at all is at once. The wait for them may be cancelled.

        Args:
            together_with: whoever names the same holds them with this one; empty is nobody.
        """
        wish = _Wish(frozenset(device_ids), together_with)
        await self._take(wish)
        try:
            yield
        finally:
            self._give_back(wish)

    async def _take(self, wish: _Wish) -> None:
        if self._grant(wish):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = wish
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:
                self._give_back(wish)  # they were granted at that very moment
            raise

    def _grant(self, wish: _Wish) -> bool:
        taken = [self._taken[card] for card in wish.cards if card in self._taken]
        if any(not wish.name or it.name != wish.name for it in taken):
            return False
        for card in wish.cards:
            self._taken.setdefault(card, _Turn(wish.name)).count += 1
        return True

    def _give_back(self, wish: _Wish) -> None:
        for card in wish.cards:
            turn = self._taken[card]
            turn.count -= 1
            if not turn.count:
                del self._taken[card]
        for waiting, wanted in list(self._waiting.items()):
            if self._grant(wanted):
                del self._waiting[waiting]
                waiting.set_result(None)
