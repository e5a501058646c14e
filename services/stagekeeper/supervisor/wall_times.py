"""From the monotonic times that are decided by to the wall clock that people read.

Decided here: that one moment reads the same whenever it is shown, unless the wall clock itself was
set meanwhile. Invariant: nothing is decided by what comes out.
"""

from __future__ import annotations

from typing import Final

from stagekeeper.runtime.clock import Clock

SET_BY_S: Final = 0.1
"""The two clocks drift apart by less between two looks; what is more was set by somebody."""


class WallTimes:
    """Says what the wall clock said."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = clock.wall() - clock.monotonic()

    def of(self, at: float) -> float:
        """Return the seconds since 1970 of a monotonic time of this process."""
        offset_s = self._clock.wall() - self._clock.monotonic()
        if abs(offset_s - self._offset_s) > SET_BY_S:
            self._offset_s = offset_s
        return self._offset_s + at
