"""Calls that may never return: their deadline, and the one thread that they hold."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from stagekeeper.agent.cards.call_thread import CallOverdue, CallThread
from tests.harness.waiting import wait_for

SHORT_S = 0.05
LONG_S = 30.0


class Driver:
    """A driver whose calls return when the test says so."""

    def __init__(self, deadline_s: float) -> None:
        self.thread = CallThread("test", self.work, deadline_s=deadline_s)
        self.may_return = threading.Event()
        self.begun_count = 0

    def work(self) -> int:
        self.begun_count += 1
        self.thread.call("nap", self.may_return.wait, LONG_S)
        return self.begun_count


async def test_result_and_error_of_the_work_are_those_of_the_run():
    results: Iterator[int | Exception] = iter([1, ValueError("broken"), 3])

    def work() -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    thread = CallThread("test", work, deadline_s=LONG_S)

    assert await thread.run() == 1
    with pytest.raises(ValueError, match="broken"):
        await thread.run()
    assert await thread.run() == 3


async def test_call_over_its_deadline_is_told_by_name_at_once_from_then_on_and_never_repeated():
    driver = Driver(SHORT_S)
    for _ in range(3):
        with pytest.raises(CallOverdue, match="nap"):
            await driver.thread.run()
    assert driver.begun_count == 1

    driver.may_return.set()

    async def is_back() -> bool:
        return await driver.thread.run() >= 1

    await wait_for(is_back, "the call has returned")


async def test_run_that_was_cancelled_leaves_its_work_to_the_next():
    driver = Driver(LONG_S)
    first = asyncio.create_task(driver.thread.run())
    await wait_for(lambda: driver.begun_count, "the work has begun")
    first.cancel()
    await asyncio.wait({first})

    driver.may_return.set()

    assert await driver.thread.run() == 1
    assert driver.begun_count == 1


async def test_each_call_has_the_whole_deadline():
    deadline_s = 0.8

    def work() -> float:
        began = time.monotonic()
        for _ in range(9):
            thread.call("step", time.sleep, deadline_s / 8)
        return time.monotonic() - began

    thread = CallThread("test", work, deadline_s=deadline_s)

    assert await thread.run() > deadline_s


async def test_halt_of_the_whole_process_is_no_call_that_hangs():
    """SIGSTOP holds caller and call alike: the look that comes after it finds an old call."""
    driver = Driver(SHORT_S)
    running = asyncio.create_task(driver.thread.run())
    await wait_for(lambda: driver.begun_count, "the work has begun")

    time.sleep(2 * SHORT_S)  # noqa: ASYNC251 - this halts the loop, on purpose
    driver.may_return.set()

    assert await running == 1


async def test_two_that_wait_for_one_piece_of_work_share_the_next_one_too():
    """Else the one that comes second would forget what the first has begun."""
    runs: list[int] = []

    def work() -> int:
        time.sleep(0.01)
        runs.append(len(runs))
        return len(runs)

    thread = CallThread("test", work, deadline_s=60)

    async def twice() -> int:
        await thread.run()
        return await thread.run()

    assert [*await asyncio.gather(twice(), twice())] == [2, 2]
    assert runs == [0, 1]
