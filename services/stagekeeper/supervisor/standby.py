"""Waiting for one's turn beside a supervisor that lives.

Decided here: when a standby asks again, when it believes that nobody is there, and when it gives
up. It believes only what says so: a predecessor that is slow is waited for, however long. Not
decided here: who is there (`predecessor`).

Invariant: a standby opens nothing, locks nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from stagekeeper.core.ids import NO_EPOCH, Epoch
from stagekeeper.runtime.clock import Clock
from stagekeeper.supervisor.predecessor import Foreign, Free, Occupied, Outlook, Turn, refusal
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.state_lock import StateDirTaken
from stagekeeper.supervisor.store import EpochLost
from stagekeeper.supervisor.successor import HigherReign

_log = structlog.get_logger(__name__)

VACANT_LOOKS: Final = 2
"""So often in a row nobody is there, where listening does not prove it: what forwards to the stable
endpoint may only be starting anew."""

DISPOSSESSED_LOOKS: Final = 5
"""So often nobody is at the endpoint after another reign took the store: it may still be coming."""

MOST_FAILED_STARTS: Final = 3
"""Whoever won a race has opened its endpoint by then; if nobody is there, nobody won."""

HASTE: Final = 4
"""A look that only confirms comes so many times sooner."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A supervisor stands by. `epoch` is the reign it waits for; None when that did not answer."""

    endpoint: str
    epoch: Epoch | None
    why: str


class Standby:
    """One process's turns, from one reign to the next.

    Args:
        settings: whose endpoint it is.
        outlook: looks at the endpoint.
        clock: for the waits.
        random: an even chance in [0, 1).
        on_standby: told each time that it begins to wait.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        outlook: Callable[[], Awaitable[Outlook]],
        *,
        clock: Clock,
        random: Callable[[], float],
        on_standby: Callable[[Waiting], None],
    ) -> None:
        self._settings = settings
        self._outlook = outlook
        self._clock = clock
        self._random = random
        self._on_standby = on_standby
        self._shown = NO_EPOCH
        self._is_first = True
        self._is_told = False
        self._last_why = ""
        self._failed_starts = 0
        self._dispossession: EpochLost | None = None

    async def turn(self) -> Turn:
        """Return when a reign may begin.

        Raises:
            AddressTaken: another cluster or a stranger is there, and no supervisor of ours ever
                was; or waiting is not wanted.
            EpochLost: another reign took our store, and does not serve our endpoint.
        """
        vacant_looks = 0
        while True:
            outlook = await self._outlook()
            if isinstance(outlook, Free):
                vacant_looks += 1
                if self._believes(outlook, vacant_looks):
                    self._is_told = False
                    return Turn(self._shown, self._is_first)
                await self._pause(self._settings.look_s / HASTE)
            else:
                vacant_looks = 0
                self._met(outlook)
                await self._pause(self._settings.look_s)

    async def start_failed(self, error: OSError) -> None:
        """Take note of a start that came to nothing, and wait a moment: another one was quicker.

        Raises:
            OSError: `error`; nobody else can have been.
        """
        if not self._settings.standby:
            raise error
        if isinstance(error, StateDirTaken):
            if not error.may_pass:
                raise error
            self._is_first = False
            self._wait(str(error), None)
        else:
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS:
                raise error
        await self._pause(self._settings.look_s / HASTE)

    def began(self) -> None:
        """Take note that a start came to its end."""
        self._failed_starts = 0

    def deposed(self, epoch: Epoch, by: Exception) -> None:
        """Take note that our own reign, `epoch`, is over, and why."""
        self._note(epoch)
        if isinstance(by, HigherReign):
            self._note(by.epoch)
        self._dispossession = by if isinstance(by, EpochLost) else None

    def _believes(self, outlook: Free, vacant_looks: int) -> bool:
        if self._dispossession is not None:
            if vacant_looks >= DISPOSSESSED_LOOKS:
                raise self._dispossession
            return False
        return self._is_first or outlook.is_certain or vacant_looks >= VACANT_LOOKS

    def _met(self, outlook: Occupied | Foreign) -> None:
        self._failed_starts = 0
        if not self._settings.standby:
            raise refusal(outlook)
        if isinstance(outlook, Foreign):
            if self._shown == NO_EPOCH:
                raise refusal(outlook)
            self._wait(outlook.why, None)
            return
        self._is_first = False
        if outlook.epoch is not None:
            self._note(outlook.epoch)
            self._dispossession = None
        self._wait(outlook.why, outlook.epoch)

    def _note(self, epoch: Epoch) -> None:
        self._shown = max(self._shown, epoch)
        self._is_first = False

    def _wait(self, why: str, epoch: Epoch | None) -> None:
        if why != self._last_why or not self._is_told:
            _log.info("standing by", why=why)
        self._last_why = why
        if not self._is_told:
            self._is_told = True
            self._on_standby(Waiting(self._settings.stable, epoch, why))

    async def _pause(self, seconds: float) -> None:
        await self._clock.sleep(seconds * (0.5 + self._random()))
