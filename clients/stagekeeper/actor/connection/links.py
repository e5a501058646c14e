"""All connections that this process made: one to each other process, watched together.

Decided here: when all are looked at, and that a time in which this process itself did not run is no
silence of anybody's. Invariant: there is one link to a process at a time, and a broken one is never
handed out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stagekeeper.actor.connection.link import Link, beat_s_of
from stagekeeper.actor.place import Place
from stagekeeper.v1 import stage_service_pb2 as pb


class Links:
    """The links of one process. For the loop's thread only.

    Args:
        hello_to: makes the first frame for a place.
        lease_s: as in Link.
        on_failure, on_silence: as in Link.
        on_tick: called at every look, with the time on the monotonic clock, and for how long this
            process did not run before it; 0 for what is nothing out of the way.
        comes_back_s: tells of a place how long its connection may be broken; see Link.
    """

    def __init__(
        self,
        *,
        hello_to: Callable[[Place], pb.Hello],
        lease_s: float,
        on_failure: Callable[[pb.RankFailed], None],
        on_silence: Callable[[Link], None],
        on_tick: Callable[[float, float], None],
        comes_back_s: Callable[[Place], float] = lambda _: 0.0,
    ) -> None:
        self._hello_to = hello_to
        self._lease_s = lease_s
        self._on_failure = on_failure
        self._on_silence = on_silence
        self._on_tick = on_tick
        self._comes_back_s = comes_back_s
        self._links: dict[str, Link] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send signs of life and to watch for those of others."""
        self._watching = asyncio.create_task(self._watch(), name="links")

    def to(self, place: Place) -> Link:
        """Return the link to a process; make it where there is none."""
        link = self._links.get(place.instance_id)
        if link is None:
            link = Link(
                place,
                self._hello_to(place),
                lease_s=self._lease_s,
                on_failure=self._on_failure,
                on_silence=self._on_silence,
                on_broken=self._broke,
                comes_back_s=self._comes_back_s(place),
            )
            self._links[place.instance_id] = link
            link.open()
        return link

    def existing(self, instance_id: str) -> Link | None:
        """Return the link to a process, if there is one."""
        return self._links.get(instance_id)

    async def close(self) -> None:
        """End all of them."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        links = list(self._links.values())
        await asyncio.gather(*(link.close() for link in links))

    def _broke(self, link: Link, why: str) -> None:
        if self._links.get(link.place.instance_id) is link:
            del self._links[link.place.instance_id]

    async def _watch(self) -> None:
        beat_s = beat_s_of(self._lease_s)
        last = time.monotonic()
        while True:
            await asyncio.sleep(beat_s)
            now = time.monotonic()
            late_s = now - last - beat_s
            stalled_s = late_s if late_s > beat_s else 0.0
            last = now
            if stalled_s:
                for link in self._links.values():
                    link.forgive(stalled_s)
            for link in list(self._links.values()):
                link.look(now)
            self._on_tick(now, stalled_s)
