"""Looking, while a reign lasts, for a higher one at the stable endpoint.

Decided here: before whom this supervisor gives way. It is the stable endpoint that says who reigns,
since agents and clients ask there: a higher reign that answers there lives, and ends ours. A lower
one, or none, ends nothing. Not decided here: how one gives way (`engine`, `lifetime`).

Invariant: a reign is given up only for one that answered just now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from stagekeeper.core.ids import Epoch
from stagekeeper.runtime.clock import Clock, sleep_until_set
from stagekeeper.supervisor.endpoint_look import Found, Served

_log = structlog.get_logger(__name__)


class HigherReign(Exception):
    """A higher reign lives at the stable endpoint.

    Attributes:
        epoch: its own.
    """

    def __init__(self, message: str, epoch: Epoch) -> None:
        super().__init__(message)
        self.epoch = epoch


class Successor:
    """Asks the stable endpoint now and then, and at once when a worker has shown a higher reign.

    Args:
        endpoint: the stable one.
        cluster: ours; others mean nothing.
        epoch_of: our own epoch now; it may be raised while we reign.
        ask: one question, with its own time limit.
        look_s: about so long between two looks.
        clock: for the waits.
        random: an even chance in [0, 1).
        on_found: called once; nothing is asked afterwards.
    """

    def __init__(
        self,
        endpoint: str,
        cluster: str,
        *,
        epoch_of: Callable[[], Epoch],
        ask: Callable[[], Awaitable[Found]],
        look_s: float,
        clock: Clock,
        random: Callable[[], float],
        on_found: Callable[[HigherReign], None],
    ) -> None:
        self._endpoint = endpoint
        self._cluster = cluster
        self._epoch_of = epoch_of
        self._ask = ask
        self._look_s = look_s
        self._clock = clock
        self._random = random
        self._on_found = on_found
        self._above: Epoch | None = None
        self._wake = asyncio.Event()
        self._last_said = ""

    def look_at_once(self, above: Epoch) -> None:
        """Look now, and give way before any reign above `above`, whatever ours is called by now.

        It holds until the endpoint has answered.
        """
        self._above = above if self._above is None else min(self._above, above)
        self._wake.set()

    async def run(self) -> None:
        """Look until a higher reign is found, or this is cancelled."""
        while True:
            self._wake.clear()
            above, self._above = self._above, None
            found = await self._ask()
            if above is not None and not isinstance(found, Served):
                self.look_at_once(above)
                self._wake.clear()  # whoever does not answer is not asked more often for that
            higher = self._judge(found, above)
            if higher is not None:
                self._on_found(higher)
                return
            pause_s = self._look_s * (0.5 + self._random())
            await sleep_until_set(self._clock, pause_s, self._wake)

    def _judge(self, found: Found, above: Epoch | None) -> HigherReign | None:
        if not isinstance(found, Served):
            self._say("the stable endpoint is not answered", found)
            return None
        if found.cluster != self._cluster:
            self._say("another cluster lives at the stable endpoint", found)
            return None
        mine = self._epoch_of()
        if found.epoch.supervisor_id == mine.supervisor_id:
            self._last_said = ""
            return None
        if found.epoch > (mine if above is None else min(mine, above)):
            return HigherReign(
                f"a higher reign of this cluster (epoch {found.epoch}, and ours is {mine}) lives "
                f"at {self._endpoint}",
                found.epoch,
            )
        self._say("a lower reign lives at the stable endpoint: end one of the two", found)
        return None

    def _say(self, what: str, found: Found) -> None:
        """Log what is odd, once for as long as it stays so."""
        if what != self._last_said:
            _log.warning(what, endpoint=self._endpoint, found=str(found))
        self._last_said = what
