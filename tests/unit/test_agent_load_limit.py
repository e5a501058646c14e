"""Turns to load: never more than the limit, in the order in which they were asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stagekeeper.agent.load_limit import LoadLimit, is_loading
from stagekeeper.core.states import Phase


class Loading:
    """A stage as far as the limit looks at it."""

    def __init__(self, phase: Phase | None = None, ready_time: float | None = None) -> None:
        self.holds_processes = True
        self.shard = SimpleNamespace(phase=phase, ready_time=ready_time)
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def become(self, **changes: Any) -> None:
        self.holds_processes = changes.pop("holds_processes", self.holds_processes)
        vars(self.shard).update(changes)
        self._changed.set()
        self._changed = asyncio.Event()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_loads", [1, 2, 3])
async def test_startup_35_next_one_begins_when_one_has_left_load_and_not_before(max_loads):
    stages: list[Any] = []
    limit = LoadLimit(stages, max_loads)
    started: list[int] = []

    async def start(number: int) -> None:
        async with limit.turn():
            started.append(number)
            stages.append(Loading())

    starts = [asyncio.create_task(start(number)) for number in range(7)]
    for left in range(8):
        await settled()
        assert started == list(range(min(7, left + max_loads)))
        if left < 7:
            stages[left].become(phase=Phase.LOAD)
            await settled()
            assert len(started) == min(7, left + max_loads)
            stages[left].become(phase=Phase.MEASURE)
    await asyncio.gather(*starts)


@pytest.mark.parametrize(
    "left", [{"holds_processes": False}, {"ready_time": 1.0}, {"phase": Phase.CAPTURE}]
)
async def test_every_way_out_of_load_lets_the_next_one_begin(left):
    (first,) = stages = [Loading(Phase.LOAD)]
    limit: Any = LoadLimit(stages, 1)  # type: ignore[arg-type]
    turn = asyncio.create_task(limit.turn().__aenter__())
    await settled()
    assert not turn.done()

    first.become(**left)

    await asyncio.wait_for(turn, 5)


async def test_change_between_the_look_and_the_wait_is_not_missed():
    (first,) = stages = [Loading(Phase.LOAD)]
    limit: Any = LoadLimit(stages, 1)  # type: ignore[arg-type]
    turn = asyncio.create_task(limit.turn().__aenter__())
    # Runs right after the first look of the turn, and there is no later change.
    asyncio.get_running_loop().call_soon(lambda: first.become(phase=Phase.MEASURE))

    await asyncio.wait_for(turn, 5)


async def test_start_that_is_cancelled_while_it_waits_gives_its_turn_on():
    (first,) = stages = [Loading(Phase.LOAD)]
    limit: Any = LoadLimit(stages, 1)  # type: ignore[arg-type]
    given_up, next_one = (asyncio.create_task(limit.turn().__aenter__()) for _ in range(2))
    await settled()
    given_up.cancel()
    await asyncio.wait({given_up})

    first.become(phase=Phase.MEASURE)

    await asyncio.wait_for(next_one, 5)


async def test_without_a_limit_nothing_waits():
    stages: Any = [Loading(Phase.LOAD) for _ in range(100)]
    async with LoadLimit(stages, None).turn():
        pass


def test_stage_that_has_said_nothing_yet_loads_and_a_ready_one_does_not():
    # An adopted one has no phase either, and was READY.
    assert is_loading(Loading(None))  # type: ignore[arg-type]
    assert not is_loading(Loading(None, ready_time=5.0))  # type: ignore[arg-type]
