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
        # Whoever is halted between the two readings takes its halt for a difference of the clocks.
        lowest_s, highest_s = min(
            (self._offsets_s() for _ in range(3)), key=lambda it: it[1] - it[0]
        )
        self._offset_s = (lowest_s + highest_s) / 2

    def of(self, at: float) -> float:
        """Return the seconds since 1970 of a monotonic time of this process."""
        lowest_s, highest_s = self._offsets_s()
        if not lowest_s - SET_BY_S <= self._offset_s <= highest_s + SET_BY_S:
            self._offset_s = (lowest_s + highest_s) / 2
        return self._offset_s + at

    def _offsets_s(self) -> tuple[float, float]:
        """Return between what the difference of the clocks lies, halted meanwhile or not."""
        before = self._clock.monotonic()
        wall = self._clock.wall()
        return wall - self._clock.monotonic(), wall - before
