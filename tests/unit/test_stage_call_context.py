from __future__ import annotations

import asyncio
import time

from stagekeeper.actor import CallContext, context
from stagekeeper.actor.call_context import enter_call, leave_call


def test_outside_of_a_call_nothing_is_cancelled_and_nothing_is_kept():
    told = []
    here = context()

    here.cancel()
    here.on_cancel(lambda: told.append(1))
    here.cancel()

    assert (here.cancelled, here.deadline, here.remaining_s) == (False, None, None)
    assert told == []


def test_call_is_what_context_answers_until_it_is_left():
    call = CallContext()
    token = enter_call(call)
    assert context() is call
    leave_call(token)

    assert context() is not call


def test_cancel_tells_each_listener_once():
    told: list[str] = []
    call = CallContext()
    call.on_cancel(lambda: told.append("a"))
    call.on_cancel(lambda: told.append("b"))

    call.cancel()
    call.cancel()

    assert call.cancelled
    assert told == ["a", "b"]


def test_listener_that_raises_holds_up_neither_others_nor_who_cancels(caplog):
    told: list[str] = []
    call = CallContext()
    call.on_cancel(lambda: told[1])
    call.on_cancel(lambda: told.append("b"))

    call.cancel()

    assert told == ["b"]
    assert "IndexError" in caplog.text


def test_listener_that_comes_late_is_told_at_once():
    told: list[str] = []
    call = CallContext()
    call.cancel()

    call.on_cancel(lambda: told.append("late"))

    assert told == ["late"]


def test_listener_that_took_its_wish_back_is_not_told():
    told: list[str] = []
    call = CallContext()
    forget = call.on_cancel(lambda: told.append("a"))
    forget()
    forget()

    call.cancel()

    assert told == []


def test_deadline_that_has_passed_counts_as_cancelled():
    now = time.monotonic()

    assert CallContext(deadline=now - 0.001).cancelled
    assert CallContext(deadline=now - 0.001).remaining_s == 0.0
    assert not CallContext(deadline=now + 60).cancelled


async def test_background_task_is_on_its_own_once_the_call_is_over():
    call = CallContext(deadline=time.monotonic() - 1)
    over = asyncio.Event()

    async def background() -> list[float | None]:
        during = context().remaining_s
        await over.wait()
        return [during, context().remaining_s]

    token = enter_call(call)
    task = asyncio.create_task(background())
    await asyncio.sleep(0)
    leave_call(token)
    call.end()
    over.set()

    assert await task == [0.0, None]
