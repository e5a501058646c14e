"""Coroutines that somebody began: to their code and to whoever cancels them they are like tasks."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

import pytest

from stagekeeper.actor.begun import Begun, begin_task

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")


def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    kept: list[asyncio.Task[None]] = []
    begin_task(work, contextvars.copy_context(), kept.append)
    return kept[0]


async def test_first_step_is_taken_at_once_in_its_own_task_and_context():
    seen: list[object] = []

    async def work() -> None:
        seen.extend([asyncio.current_task(), variable.get()])
        variable.set("inside")
        await asyncio.sleep(0)
        seen.extend([asyncio.current_task(), variable.get()])

    context = contextvars.copy_context()
    context.run(variable.set, "given")
    kept: list[asyncio.Task[None]] = []
    begin_task(work(), context, kept.append)

    assert seen == [kept[0], "given"], "before anything is awaited here"
    assert asyncio.current_task() is not kept[0] and variable.get() == ""
    await kept[0]
    assert seen[2:] == [kept[0], "inside"]


async def test_time_limit_that_begins_in_the_first_step_is_the_tasks_own():
    async def work() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    task = begun(work())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 5)


async def test_what_the_first_step_raises_is_the_tasks_and_not_the_beginners():
    async def failing() -> None:
        raise ValueError("x")

    async def returning() -> None:
        return None

    with pytest.raises(ValueError, match="x"):
        await begun(failing())
    assert await begun(returning()) is None  # type: ignore[func-returns-value]


async def test_cancelled_before_its_second_step_it_waits_for_what_it_cancels():
    order: list[str] = []

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("child")

    async def work() -> None:
        try:
            await asyncio.create_task(child())
        finally:
            order.append("work")

    task = begun(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    early = begun(work())
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    assert order == ["child", "work", "work"], "the second child had not begun"


async def test_cancelled_before_its_second_step_it_ends_what_it_awaits_before_itself():
    order: list[str] = []

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("child")

    async def work(running: asyncio.Task[None]) -> None:
        try:
            await running
        finally:
            order.append("work")

    running = asyncio.create_task(child())
    await asyncio.sleep(0)
    task = begun(work(running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert order == ["child", "work"]


async def test_cancelled_after_its_end_it_has_ended():
    async def work() -> None:
        return None

    async def refusing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    task = begun(work())
    task.cancel()
    assert await task is None  # type: ignore[func-returns-value]
    other = begun(refusing())
    other.cancel()
    assert await other is None  # type: ignore[func-returns-value]


async def test_whoever_awaits_it_gets_the_rest_and_closing_it_ends_it():
    gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ended: list[str] = []

    async def work() -> int:
        try:
            return await gate
        finally:
            ended.append("x")

    one, other = Begun(work()), Begun(work())
    one.begin()
    other.begin()
    other.close()
    assert ended == ["x"]
    gate.set_result(3)
    assert await one == 3 and ended == ["x", "x"]
