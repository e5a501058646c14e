"""SIGKILL at random moments: whatever the supervisor and the agents are at, starting included."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tests.harness.cluster import Cluster

LONGEST_AWAY_S = 1.0


class RandomKills:
    """Kills the supervisor and every agent of a cluster so many times over a stretch of time.

    Each victim has its own moments and is started again after a pause of up to a second, without
    waiting until it is ready: the next kill may hit it while it starts, adopts or recovers.

    Attributes:
        counts: kills by victim.
    """

    def __init__(self, cluster: Cluster, chance: random.Random, *, over_s: float) -> None:
        self._cluster = cluster
        self._chance = chance
        self._over_s = over_s
        self.counts: Counter[str] = Counter()

    async def run(self, *, supervisor: int, each_agent: int) -> None:
        """Kill so often, and return when everybody is back and ready."""
        agents = {name: self._moments(each_agent) for name in self._cluster.agents}
        async with asyncio.TaskGroup() as victims:
            victims.create_task(self._kill_supervisor(self._moments(supervisor)))
            for name, moments in agents.items():
                victims.create_task(self._kill_agent(name, moments))

    def _moments(self, count: int) -> list[_Moment]:
        """Draw all of a victim's moments at once, so that a seed gives the same again."""
        draw = self._chance.uniform
        at = sorted(draw(0.0, self._over_s) for _ in range(count))
        return [_Moment(it, draw(0.0, LONGEST_AWAY_S), it == at[-1]) for it in at]

    async def _kill_supervisor(self, moments: Sequence[_Moment]) -> None:
        async for moment in _come(moments):
            assert self._cluster.supervisor is not None
            self._cluster.supervisor.kill()
            self.counts["supervisor"] += 1
            await asyncio.sleep(moment.away_s)
            await self._cluster.start_supervisor(ready=moment.is_last)

    async def _kill_agent(self, name: str, moments: Sequence[_Moment]) -> None:
        async for moment in _come(moments):
            self._cluster.agents[name].kill()
            self.counts[name] += 1
            await asyncio.sleep(moment.away_s)
            await self._cluster.start_agent(name, ready=moment.is_last)


@dataclass(frozen=True)
class _Moment:
    """When a victim is killed, counted from the start, and how long it stays away."""

    at_s: float
    away_s: float
    is_last: bool


async def _come(moments: Sequence[_Moment]) -> AsyncIterator[_Moment]:
    """Yield each moment when it has come."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for moment in moments:
        await asyncio.sleep(began + moment.at_s - loop.time())
        yield moment
