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


class _Asked:
    """An end that some wait for."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[MeshFailure] = asyncio.get_running_loop().create_future()
        self.count = 0


class KnownEnds:
    """The ends of one mesh. For the loop's thread only."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, MeshFailure] = OrderedDict()
        self._asked: dict[str, _Asked] = {}

    def add(self, ended_id: str, failure: MeshFailure) -> None:
        """Tell of an end; only the first of an id counts."""
        if ended_id in self._known:
            return
        self._known[ended_id] = failure
        if len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)
        asked = self._asked.pop(ended_id, None)
        if asked is not None:
            asked.answer.set_result(failure)

    async def of(self, ended_id: str) -> MeshFailure | None:
        """Return how it ended; None when there is no news of an end within a second."""
        if ended_id in self._known:
            return self._known[ended_id]
        asked = self._asked.setdefault(ended_id, _Asked())
        asked.count += 1
        try:
            return await asyncio.wait_for(asyncio.shield(asked.answer), _NEWS_LIMIT_S)
        except TimeoutError:
            return None
        finally:
            asked.count -= 1
            if not asked.count and self._asked.get(ended_id) is asked:
                del self._asked[ended_id]
