"""One moment reads the same whenever it is shown."""

from __future__ import annotations

from stagekeeper.supervisor.wall_times import WallTimes

DIFFERENCE_S = 1_700_000_000.0


class HaltedClock:
    """A machine whose processes are halted for a while at each reading."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.halt_s = 0.0
        self.set_by_s = 0.0

    def _read(self) -> float:
        reading = self.now
        self.now += self.halt_s
        return reading

    def monotonic(self) -> float:
        return self._read()

    def wall(self) -> float:
        return DIFFERENCE_S + self.set_by_s + self._read()

    async def sleep(self, delay_s: float) -> None:
        raise NotImplementedError


def test_halt_between_two_readings_changes_no_time_that_is_shown() -> None:
    clock = HaltedClock()
    times = WallTimes(clock)

    clock.halt_s = 5.0

    assert times.of(900.0) == DIFFERENCE_S + 900.0


def test_clock_that_was_set_is_followed() -> None:
    clock = HaltedClock()
    times = WallTimes(clock)

    clock.set_by_s = 3600.0

    assert times.of(900.0) == DIFFERENCE_S + 3600.0 + 900.0


def test_halt_at_the_start_is_not_taken_for_a_difference() -> None:
    clock = HaltedClock()
    clock.halt_s = 5.0
    times = WallTimes(clock)
    clock.halt_s = 0.0

    assert abs(times.of(900.0) - DIFFERENCE_S - 900.0) <= 0.1
