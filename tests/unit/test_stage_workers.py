from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from weakref import ref

import pytest

from stagekeeper.actor import CallContext, context
from stagekeeper.stage.value_channel import ValueChannel
from stagekeeper.stage.workers import NoThread, Workers

variable: ContextVar[str] = ContextVar("variable", default="clean")


async def test_value_comes_back_and_the_call_is_visible_in_the_thread():
    work = CallContext()

    where, seen = await Workers("w", 1).run(
        work, lambda: (threading.current_thread().name, context())
    )

    assert where == "w-1"
    assert seen is work


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
async def test_whatever_is_raised_comes_back(error):
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await Workers("w", 1).run(CallContext(), fail)

    assert caught.value is error


async def test_stop_iteration_does_not_get_lost():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await Workers("w", 1).run(CallContext(), lambda: next(iter(())))


async def test_threads_are_made_as_needed_and_never_more_than_the_limit():
    workers = Workers("w", 3)
    for _ in range(20):
        await workers.run(CallContext(), lambda: None)
    one_at_a_time = workers._thread_count

    barrier = threading.Barrier(3)
    await asyncio.gather(*[workers.run(CallContext(), barrier.wait) for _ in range(9)])

    assert one_at_a_time == 1
    assert workers._thread_count == 3


@pytest.fixture
def threads_run_out(monkeypatch):
    """Let no thread start any more, as on a host whose limit is reached; `undo` lifts that."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def run_out() -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse)

    run_out.undo = monkeypatch.undo  # type: ignore[attr-defined]
    return run_out


async def test_work_that_gets_no_thread_ends_and_leaves_no_trace(threads_run_out):
    workers = Workers("w", 1)
    ended: list[int] = []
    threads_run_out()
    for _ in range(3):
        with pytest.raises(NoThread, match="can't start new thread"):
            await workers.run(CallContext(), lambda: None, on_end=lambda: ended.append(1))
    threads_run_out.undo()

    assert ended == [1, 1, 1]
    assert await asyncio.wait_for(workers.run(CallContext(), lambda: "ran"), 10) == "ran"


async def test_work_waits_for_the_threads_there_are_when_no_other_can_start(threads_run_out):
    workers = Workers("w", 2)
    gate = threading.Event()
    first = asyncio.create_task(workers.run(CallContext(), gate.wait))
    await asyncio.sleep(0)
    threads_run_out()
    second = asyncio.create_task(workers.run(CallContext(), lambda: "ran"))
    await asyncio.sleep(0)
    threads_run_out.undo()
    was_done = second.done()

    gate.set()

    assert not was_done
    assert await asyncio.wait_for(first, 10)
    assert await asyncio.wait_for(second, 10) == "ran"


async def test_variable_that_a_call_sets_is_not_there_for_the_next():
    workers = Workers("w", 1)
    await workers.run(CallContext(), lambda: variable.set("dirty"))

    assert await workers.run(CallContext(), variable.get) == "clean"


async def test_end_is_told_when_the_code_ends_and_not_when_its_caller_goes():
    workers = Workers("w", 1)
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def code() -> bool:
        began.set()
        return gate.wait()

    running = asyncio.create_task(workers.run(CallContext(), code, on_end=ended.set))
    await asyncio.to_thread(began.wait, 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    was_ended_early = ended.is_set()

    gate.set()

    assert not was_ended_early
    assert await asyncio.to_thread(ended.wait, 10)


async def test_work_whose_caller_is_gone_before_it_began_never_begins():
    workers = Workers("w", 1)
    gate, ended = threading.Event(), threading.Event()
    ran: list[int] = []
    first = asyncio.create_task(workers.run(CallContext(), gate.wait))
    second = asyncio.create_task(
        workers.run(CallContext(), lambda: ran.append(1), on_end=ended.set)
    )
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)

    gate.set()
    await first

    assert await asyncio.to_thread(ended.wait, 10)
    assert ran == []


async def test_idle_thread_keeps_nothing_alive():
    class Tensor: ...

    tensor = Tensor()
    watch = ref(tensor)
    workers = Workers("w", 1)
    await workers.run(CallContext(), lambda held=tensor: None)  # type: ignore[misc]

    del tensor

    for _ in range(1000):
        if watch() is None:
            break
        await asyncio.to_thread(lambda: None)
    assert watch() is None


async def test_channel_keeps_order_and_ends():
    channel: ValueChannel[int] = ValueChannel()

    def write() -> None:
        for number in range(1000):
            assert channel.put(number)
        channel.close()

    writing = asyncio.create_task(asyncio.to_thread(write))
    values = [value async for value in channel]
    await writing

    assert values == list(range(1000))


async def test_writer_is_a_few_values_ahead_at_most():
    channel: ValueChannel[int] = ValueChannel()
    written: list[int] = []

    def write() -> None:
        for number in range(100):
            if not channel.put(number):
                return
            written.append(number)

    writing = asyncio.create_task(asyncio.to_thread(write))
    reader = aiter(channel)
    await anext(reader)
    channel.abandon()
    await writing

    assert len(written) <= 10


async def test_writer_that_waits_is_freed_when_the_reader_goes():
    channel: ValueChannel[int] = ValueChannel()

    def write() -> int:
        count = 0
        while channel.put(count):
            count += 1
        return count

    writing = asyncio.create_task(asyncio.to_thread(write))
    reader = aiter(channel)
    await anext(reader)

    channel.abandon()

    assert await asyncio.wait_for(writing, 10) >= 1
