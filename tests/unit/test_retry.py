"""Retries of the services: waits, jitter, giving up, and that every failure is told."""

from __future__ import annotations

import asyncio

import pytest

from stagekeeper.runtime.retry import Backoff, FailedAttempt, GaveUp, Retry


class Transient(Exception):
    pass


class World:
    """Time that passes only in `sleep`, and chance that is always `chance`."""

    def __init__(self, chance: float = 1.0) -> None:
        self.now = 100.0
        self.chance = chance
        self.waits: list[float] = []
        self.told: list[FailedAttempt] = []

    async def sleep(self, delay_s: float) -> None:
        self.waits.append(delay_s)
        self.now += delay_s

    def retry(self, backoff: Backoff | None = None, **options) -> Retry:
        return Retry(
            backoff or Backoff(),
            sleep=self.sleep,
            random=lambda: self.chance,
            monotonic=lambda: self.now,
            on_failure=self.told.append,
            is_retried=lambda error: isinstance(error, Transient),
            **options,
        )


def failing(times: int, error: type[BaseException] = Transient):
    """Return work that fails so often and then returns how often it was called."""
    calls = 0

    async def work() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error(f"failure {calls}")
        return calls

    return work


async def test_failures_in_a_row_wait_exponentially_up_to_the_cap():
    world = World(chance=1.0)

    assert await world.retry().run(failing(7)) == 8

    assert world.waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


async def test_jitter_is_full_from_zero():
    world = World(chance=0.0)

    await world.retry().run(failing(5))

    assert world.waits == [0.0] * 5


async def test_every_failure_is_told_from_the_first():
    world = World()

    await world.retry().run(failing(3))

    assert [attempt.failures_in_a_row for attempt in world.told] == [1, 2, 3]
    assert [str(attempt.error) for attempt in world.told] == ["failure 1", "failure 2", "failure 3"]
    assert world.told[0].wait_s == pytest.approx(0.1)


async def test_success_begins_the_waits_anew():
    world = World(chance=1.0)
    retry = world.retry()
    calls = 0

    async def work() -> str:
        nonlocal calls
        calls += 1
        if calls == 4:
            retry.succeeded()
        if calls == 6:
            return "done"
        raise Transient

    assert await retry.run(work) == "done"

    assert world.waits == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.2])


async def test_thousand_failures_still_wait_the_cap():
    world = World(chance=1.0)

    await world.retry().run(failing(1000))

    assert world.waits[-1] == 1.0


async def test_an_error_that_asks_for_a_wait_stretches_it():
    world = World(chance=0.5)

    await world.retry(at_least_s=lambda error: 5.0).run(failing(1))

    assert world.waits == pytest.approx([5.05])


async def test_without_time_to_give_up_one_failure_is_enough():
    world = World()

    with pytest.raises(GaveUp) as raised:
        await world.retry().run(failing(10), give_up_after_s=0)

    assert isinstance(raised.value.__cause__, Transient)
    assert world.waits == []
    assert raised.value.failures_in_a_row == 1


@pytest.mark.parametrize(("give_up_after_s", "attempts"), [(0.69, 4), (0.71, 5)])
async def test_gives_up_once_the_time_is_over(give_up_after_s, attempts):
    world = World(chance=1.0)  # fails at 0, 0.1, 0.3, 0.7, 1.5 …

    with pytest.raises(GaveUp) as raised:
        await world.retry().run(failing(100), give_up_after_s=give_up_after_s)

    assert raised.value.failures_in_a_row == attempts


async def test_after_a_success_it_never_gives_up():
    world = World(chance=1.0)
    retry = world.retry()
    calls = 0

    async def work() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            retry.succeeded()
        if calls > 50:
            return calls
        raise Transient

    assert await retry.run(work, give_up_after_s=0) == 51


async def test_another_error_is_not_retried():
    world = World()

    with pytest.raises(ValueError, match="failure 1"):
        await world.retry().run(failing(1, ValueError))

    assert world.told == []


async def test_cancellation_ends_the_work_and_the_wait():
    entered = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        entered.set()
        await asyncio.Event().wait()

    retry = Retry(
        Backoff(),
        sleep=sleep,
        random=lambda: 1.0,
        monotonic=lambda: 0.0,
        on_failure=lambda attempt: None,
        is_retried=lambda error: True,
    )
    task = asyncio.create_task(retry.run(failing(9)))
    await entered.wait()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_work_is_not_taken_for_a_failure():
    world = World()
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(world.retry().run(work))
    await began.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.told == []
