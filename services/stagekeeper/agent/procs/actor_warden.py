"""Who ends what actors had started when the agent itself is killed: a warden, once there are any.

The processes for actors end with their agent, by the kernel's word; what they had started in
sessions of their own does not. Decided here: that there is one warden from the first process on,
and another when that one was killed. Invariant: it watches over this life's place alone, so that
it never ends what the agent's next life has started.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

from stagekeeper.host.tasks import TaskOwner
from stagekeeper.host.warden import Warden, start_warden

_log = structlog.get_logger(__name__)

_END_LIMIT_S: Final = 5.0
"""How long its end is waited for; what the kernel still holds is the warden's to see through."""

_PAUSE_S: Final = 1.0
"""Before the next one, where something ends them as they come."""


class ActorWarden:
    """The warden of one life of an agent.

    Args:
        place: in the tree of what agents have started.
    """

    def __init__(self, place: str, owner: TaskOwner) -> None:
        self._place = place
        self._owner = owner
        self._warden: Warden | None = None
        self._staying: asyncio.Task[Any] | None = None
        self._is_ending = False

    def watch(self) -> None:
        """Have a warden from now on. Repeats change nothing.

        Raises:
            OSError: none can be started.
        """
        if self._warden is None and not self._is_ending:
            self._warden = start_warden(self._place)
            self._staying = self._owner.start("warden of actors", self._stay())

    async def end(self) -> None:
        """End what is left of the place, and the warden with it."""
        self._is_ending = True
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.wait({self._staying})
        if self._warden is not None and not await self._warden.close(_END_LIMIT_S):
            _log.error("not all that actors started is gone", place=self._place)

    async def _stay(self) -> None:
        while self._warden is not None:
            await self._warden.ended()
            _log.warning("the warden of actors ended; another one takes its place")
            await asyncio.sleep(_PAUSE_S)
            try:
                self._warden = start_warden(self._place)
            except OSError as error:
                _log.error("no warden of actors can be started", why=str(error))
                self._warden = None
