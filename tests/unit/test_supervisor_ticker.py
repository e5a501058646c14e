"""Ticks: what the supervisor's own standing still is told as."""

from __future__ import annotations

import asyncio

import pytest

from stagekeeper.supervisor.ticker import tick_for_ever


class Ended(Exception):
    pass


class SteppingClock:
    """A clock whose sleeps take exactly as long as they should, and no time otherwise."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now += delay_s
        await asyncio.sleep(0)


async def told(stalls: list[float]) -> tuple[list[float], list[float]]:
    """Return what was told of ticks that take `stalls` seconds each, and the sleeps between."""
    clock, heard = SteppingClock(), []

    def tick(stalled_s: float) -> None:
        heard.append(stalled_s)
        if len(heard) > len(stalls):
            raise Ended
        clock.now += stalls[len(heard) - 1]

    with pytest.raises(Ended):
        await tick_for_ever(clock, 0.5, tick)
    return heard, clock.slept


async def test_a_stall_inside_a_tick_is_told_by_the_next_one():
    heard, _ = await told([0.0, 5.0, 0.0])
    assert heard == [0.0, 0.0, 4.5, 0.0]


async def test_a_tick_that_takes_a_while_delays_the_next_one_by_nothing():
    heard, slept = await told([0.2, 0.2])
    assert heard == [0.0, 0.0, 0.0]
    assert slept == [0.5, pytest.approx(0.3), pytest.approx(0.3)]
