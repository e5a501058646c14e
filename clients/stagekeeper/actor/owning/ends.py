"""How actors or processes ended, for those who ask after one: also before the news has come.

Invariant: an end is told the same to all who ask, as often as they ask.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from stagekeeper.actor.failure import MeshFailure

_NEWS_LIMIT_S: Final = 1.0
"""A connection breaks before the kernel tells of the process's end, by milliseconds."""

_MOST_REMEMBERED: Final = 1_000


class Ends:
    """The ends of one mesh. For the loop's thread only."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, MeshFailure] = OrderedDict()
        self._asked: dict[str, asyncio.Future[MeshFailure]] = {}

    def put(self, ended_id: str, failure: MeshFailure) -> None:
        """Tell of an end; only the first of an id counts."""
        if ended_id in self._known:
            return
        self._known[ended_id] = failure
        if len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)
        asked = self._asked.pop(ended_id, None)
        if asked is not None and not asked.done():
            asked.set_result(failure)

    async def of(self, ended_id: str) -> MeshFailure | None:
        """Return how it ended; None when there is no news of an end within a second."""
        if ended_id in self._known:
            return self._known[ended_id]
        asked = self._asked.get(ended_id)
        if asked is None:
            asked = self._asked[ended_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(asked), _NEWS_LIMIT_S)
        except TimeoutError:
            return None
