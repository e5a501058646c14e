"""Ways of calling the ranks of a mesh, over ranks that answer when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stagekeeper.actor import Actor, endpoint
from stagekeeper.actor.calling import EndpointRef, Ranked
from stagekeeper.actor.errors import Died, MeshError, MeshStopped, NotSendable
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.value_mesh import ValueMesh
from stagekeeper.client.errors import UnreadableAnswer
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.payload import Tensors, decode_arguments, encode


class Worker(Actor):
    @endpoint
    async def step(self, batch: int, *, fast: bool = False) -> int:
        return batch

    @endpoint
    async def count(self) -> AsyncIterator[int]:
        yield 1


class Values:
    """One call's values on their way, as a link hands them out."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Payload | Exception | None] = asyncio.Queue()
        self.is_closed = False

    def put(self, *values: Any) -> None:
        """Let values arrive, and at the end an exception, or None for a good one."""
        for value in values:
            ends = value is None or isinstance(value, Exception)
            self.items.put_nowait(value if ends else encode(value))

    def __aiter__(self) -> Values:
        return self

    async def __anext__(self) -> Payload:
        item = await self.items.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self.is_closed = True


class Link:
    """A rank of the test's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_failed = False
        self.error: Exception = Gone(f"rank {rank} is gone")
        self.outstanding = 0
        self.calls: list[tuple[str, Any]] = []
        self.answers: list[asyncio.Future[Payload]] = []
        self.streams: list[Values] = []
        self.casts: list[tuple[str, Any]] = []

    def call(self, endpoint: str, payload: Payload) -> asyncio.Future[Payload]:
        self.calls.append((endpoint, decode_arguments(payload)))
        future = asyncio.get_running_loop().create_future()
        self.answers.append(future)
        if self.is_failed:
            future.set_exception(self.error)
        return future

    def stream(self, endpoint: str, payload: Payload) -> Values:
        self.calls.append((endpoint, decode_arguments(payload)))
        self.streams.append(Values())
        return self.streams[-1]

    def cast(self, endpoint: str, payload: Payload) -> None:
        self.casts.append((endpoint, decode_arguments(payload)))

    def answer(self, value: object) -> None:
        self.answers[-1].set_result(encode(value))

    def fail(self, error: Exception) -> None:
        self.answers[-1].set_exception(error)


class Gone(Exception):
    pass


def death(rank: int) -> Died:
    kind = FailureKind.SIGNALED
    failure = MeshFailure(id="p-end-1", kind=kind, mesh_name="workers", ranks=(rank,))
    return Died(failure, rank=rank)


class View:
    name = "workers"
    tensors: Tensors = "numpy"

    def __init__(self, *ranks: int) -> None:
        self._links = [Link(rank) for rank in ranks]
        self.is_stopped = False

    @property
    def links(self) -> list[Link]:
        if self.is_stopped:
            raise MeshStopped("workers was stopped")
        return self._links


def ref(view: View, name: str = "step", *, knows_class: bool = True) -> EndpointRef:
    return EndpointRef(name, view, Worker.__endpoints__[name] if knows_class else None)


async def begun(coroutine: Any) -> asyncio.Task[Any]:
    """Start a call and let it come to where it waits."""
    task = asyncio.create_task(coroutine)
    await all_that_can_run()
    return task


async def all_that_can_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# --- one rank


async def test_call_one_sends_the_arguments_and_returns_the_answer():
    view = View(2)
    task = await begun(ref(view).call_one(7, fast=True))
    view.links[0].answer({"loss": 0.5})
    assert await task == {"loss": 0.5}
    assert view.links[0].calls == [("step", ((7,), {"fast": True}))]


async def test_call_one_raises_what_the_rank_answered_as_it_is():
    view = View(0)
    task = await begun(ref(view).call_one(7))
    error = Gone()
    view.links[0].fail(error)
    with pytest.raises(Gone) as caught:
        await task
    assert caught.value is error


async def test_call_one_of_several_ranks_says_what_to_say_instead():
    view = View(0, 1, 2)
    with pytest.raises(ValueError, match=r"exactly one rank, and here are 3: say \.call\(…\)"):
        await ref(view).call_one(7)
    assert not any(link.calls for link in view.links)


async def test_call_one_takes_no_task_of_its_own():
    view = View(0)
    before = len(asyncio.all_tasks())
    task = await begun(ref(view).call_one(7))
    assert len(asyncio.all_tasks()) == before + 1  # the test's
    view.links[0].answer(1)
    await task


async def test_cancelling_who_waits_cancels_the_call():
    view = View(0)
    task = await begun(ref(view).call_one(7))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert view.links[0].answers[0].cancelled()


async def test_answer_that_cannot_be_decoded_is_an_error_of_its_own():
    view = View(0)
    task = await begun(ref(view).call_one(7))
    view.links[0].answers[0].set_result(Payload(data=b"\xc1"))
    with pytest.raises(UnreadableAnswer, match=r"workers\.step answered cannot be decoded"):
        await task


# --- before anything is sent


@pytest.mark.parametrize("way", ["call", "call_one", "choose", "stream", "broadcast"])
async def test_argument_that_cannot_travel_is_named_and_nothing_is_sent(way):
    view = View(0)
    with pytest.raises(NotSendable, match=r"^batch\[1\] of workers\.step cannot be sent") as caught:
        sent = getattr(ref(view), way)([1, object()])
        await sent
    assert caught.value.argument == "batch[1]"
    assert caught.value.never_ran
    assert view.links[0].calls == view.links[0].casts == []


async def test_argument_is_counted_where_the_class_is_not_known():
    with pytest.raises(NotSendable, match=r"^argument 1 of workers"):
        await ref(View(0), knows_class=False).call_one(1, object())


@pytest.mark.parametrize("way", ["call", "call_one", "choose"])
async def test_generator_is_not_called_as_if_it_answered_once(way):
    view = View(0)
    with pytest.raises(TypeError, match=r"yields several values: say \.stream"):
        await getattr(ref(view, "count"), way)()
    assert view.links[0].calls == []


@pytest.mark.parametrize("way", ["call", "call_one", "choose", "broadcast"])
async def test_stopped_mesh_takes_no_call(way):
    view = View(0)
    view.is_stopped = True
    with pytest.raises(MeshStopped):
        await getattr(ref(view), way)(1)


def test_mesh_is_not_called_like_a_method():
    with pytest.raises(TypeError, match=r"say workers\.step\.call_one\(…\).*\.call\(…\)"):
        ref(View(0))(7)


def test_endpoint_shows_what_it_is():
    assert repr(ref(View(0))) == "<endpoint workers.step>"


# --- all ranks


async def test_call_returns_the_answers_in_order_of_rank():
    view = View(1, 3, 5)
    task = await begun(ref(view).call(7))
    for link in reversed(view.links):
        link.answer(link.rank * 10)
    answers = await task
    assert isinstance(answers, ValueMesh)
    assert list(answers.items()) == [(1, 10), (3, 30), (5, 50)]
    assert all(link.calls == [("step", ((7,), {}))] for link in view.links)


async def test_call_waits_for_the_others_when_a_rank_fails():
    view = View(0, 1, 2)
    task = await begun(ref(view).call(7))
    error = Gone()
    view.links[1].fail(error)
    view.links[2].answer("c")
    await all_that_can_run()
    assert not task.done()
    view.links[0].answer("a")
    with pytest.raises(
        MeshError, match=r"workers\.step: no answer of 1 of 3 ranks \(1\)"
    ) as caught:
        await task
    assert caught.value.failed == {1: error}
    assert caught.value.failed[1] is error
    assert caught.value.ok == {0: "a", 2: "c"}


async def test_call_waits_for_nobody_when_a_rank_dies_and_the_others_hear_of_it():
    view = View(0, 1, 2, 3)
    task = await begun(ref(view).call(7))
    view.links[0].answer("a")
    await all_that_can_run()
    both = {rank: death(rank) for rank in (2, 3)}
    for rank, error in both.items():  # of one process, so at the same time
        view.links[rank].fail(error)
    with pytest.raises(MeshError) as caught:
        await task
    assert caught.value.failed == both
    assert caught.value.ok == {0: "a"}
    assert view.links[1].answers[0].cancelled()


@pytest.mark.parametrize("dead", [[0], [2], [0, 2]])
async def test_call_of_a_mesh_with_a_dead_rank_is_sent_to_no_other(dead):
    view = View(0, 1, 2)
    for rank in dead:
        view.links[rank].is_failed = True
        view.links[rank].error = death(rank)
    with pytest.raises(MeshError) as caught:
        await ref(view).call(7)
    assert {rank: type(error) for rank, error in caught.value.failed.items()} == dict.fromkeys(
        dead, Died
    )
    assert [link.rank for link in view.links if link.calls] == dead


async def test_selection_without_the_dead_rank_goes_on_working():
    view = View(0, 2)
    task = await begun(ref(view).call(7))
    for link in view.links:
        link.answer(link.rank)
    assert await task == {0: 0, 2: 2}


async def test_call_of_one_rank_raises_a_group_too():
    view = View(4)
    task = await begun(ref(view).call(7))
    view.links[0].fail(Gone())
    with pytest.raises(MeshError) as caught:
        await task
    assert list(caught.value.failed) == [4]


async def test_answer_that_cannot_be_decoded_fails_its_rank_alone():
    view = View(0, 1)
    task = await begun(ref(view).call(7))
    view.links[0].answers[0].set_result(Payload(data=b"\xc1"))
    view.links[1].answer(1)
    with pytest.raises(MeshError) as caught:
        await task
    assert isinstance(caught.value.failed[0], UnreadableAnswer)
    assert caught.value.ok == {1: 1}


async def test_cancelling_a_call_cancels_it_on_every_rank_that_has_not_answered():
    view = View(0, 1, 2)
    task = await begun(ref(view).call(7))
    view.links[0].answer(1)
    view.links[1].fail(Gone())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    first, second, third = (link.answers[0] for link in view.links)
    assert not first.cancelled() and not second.cancelled() and third.cancelled()


async def test_error_of_a_rank_that_nobody_waits_for_is_not_reported_as_lost(caplog):
    view = View(0, 1)
    task = await begun(ref(view).call(7))
    view.links[0].fail(Gone())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for link in view.links:
        link.answers.clear()
    del task
    gc.collect()
    await all_that_can_run()
    assert "never retrieved" not in caplog.text


# --- any rank


async def test_choose_takes_the_living_rank_with_the_fewest_calls_under_way():
    view = View(0, 1, 2)
    view.links[0].outstanding = 3
    view.links[1].is_failed = True
    view.links[2].outstanding = 1
    task = await begun(ref(view).choose(7))
    assert [len(link.calls) for link in view.links] == [0, 0, 1]
    view.links[2].answer("c")
    assert await task == "c"


async def test_choose_spreads_over_ranks_that_are_alike():
    view = View(0, 1, 2)
    tasks = [await begun(ref(view).choose(7)) for _ in range(120)]
    counts = Counter({link.rank: len(link.calls) for link in view.links})
    assert sum(counts.values()) == 120
    assert min(counts.values()) > 0  # by chance wrong once in 10^20 runs
    for task in tasks:
        task.cancel()


async def test_choose_raises_the_error_of_the_rank_as_it_is():
    view = View(0)
    task = await begun(ref(view).choose(7))
    view.links[0].fail(Gone())
    with pytest.raises(Gone):
        await task


async def test_choose_without_a_living_rank_says_what_each_died_of():
    view = View(0, 1)
    for link in view.links:
        link.is_failed = True
    with pytest.raises(MeshError, match="none of 2 ranks is alive") as caught:
        await ref(view).choose(7)
    assert {rank: type(error) for rank, error in caught.value.failed.items()} == {0: Gone, 1: Gone}


# --- messages without an answer


def test_broadcast_sends_to_every_rank_and_returns():
    view = View(0, 1)
    ref(view).broadcast(7, fast=True)
    assert all(link.casts == [("step", ((7,), {"fast": True}))] for link in view.links)


def test_broadcast_with_wrong_arguments_is_refused_here():
    view = View(0)
    with pytest.raises(
        TypeError, match=r"it is called as step\(batch: int, \*, fast: bool = False\)"
    ):
        ref(view).broadcast()
    assert view.links[0].casts == []


# --- streams


async def test_stream_yields_values_as_they_come_each_with_its_rank():
    view = View(0, 1)
    async with contextlib.aclosing(ref(view, "count").stream()) as values:
        reading = await begun(anext(values))
        view.links[1].streams[0].put("b1")
        assert await reading == Ranked(1, "b1")
        view.links[0].streams[0].put("a1", None)
        assert await anext(values) == (0, "a1")
        view.links[1].streams[0].put("b2", None)
        rank, value = await anext(values)
        assert (rank, value) == (1, "b2")
        with pytest.raises(StopAsyncIteration):
            await anext(values)
    assert all(link.streams[0].is_closed for link in view.links)


@pytest.mark.parametrize("ranks", [(3,), (1, 3, 5)])
async def test_rank_that_fails_ends_alone_and_is_told_at_the_end(ranks):
    view = View(*ranks)
    got: list[Any] = []

    async def read() -> None:
        async for item in ref(view, "count").stream():
            got.append(item)  # noqa: PERF401 (kept when the stream raises)

    task = await begun(read())
    error = Gone()
    for link in view.links:
        link.streams[0].put(link.rank, error if link.rank == 3 else link.rank * 10)
        if link.rank != 3:
            link.streams[0].put(None)
    with pytest.raises(MeshError) as caught:
        await task
    assert caught.value.failed == {3: error}
    assert caught.value.ok == {rank: 2 for rank in ranks if rank != 3}
    assert sorted(got) == sorted(
        [(3, 3), *((rank, value) for rank in ranks if rank != 3 for value in (rank, rank * 10))]
    )


async def test_value_that_cannot_be_decoded_ends_its_rank_and_the_call_there():
    view = View(0, 1)
    task = await begun(_all_of(ref(view, "count").stream()))
    view.links[0].streams[0].items.put_nowait(Payload(data=b"\xc1"))
    view.links[1].streams[0].put(1, None)
    with pytest.raises(MeshError) as caught:
        await task
    assert isinstance(caught.value.failed[0], UnreadableAnswer)
    assert view.links[0].streams[0].is_closed


async def _all_of(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)])
async def test_leaving_the_loop_early_cancels_the_rest(ranks):
    view = View(*ranks)
    stream = ref(view, "count").stream()
    task = await begun(_first_of(stream))
    view.links[0].streams[0].put(1)
    assert await task == (0, 1)
    # Nobody closed it: what asyncio does for generators that are dropped has to be enough.
    del stream, task
    for _ in range(100):
        if all(link.streams[0].is_closed for link in view.links):
            break
        await asyncio.sleep(0)
    assert all(link.streams[0].is_closed for link in view.links)


async def _first_of(values: AsyncIterator[Any]) -> Any:
    async for value in values:
        return value
    raise AssertionError("no value came")


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)])
async def test_closing_a_stream_has_cancelled_the_rest_when_it_returns(ranks):
    view = View(*ranks)
    before = asyncio.all_tasks()
    async with contextlib.aclosing(ref(view, "count").stream()) as values:
        reading = await begun(anext(values))
        view.links[0].streams[0].put(1)
        await reading
    assert all(link.streams[0].is_closed for link in view.links)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)])
async def test_cancelling_who_reads_cancels_the_calls(ranks):
    view = View(*ranks)
    task = await begun(_all_of(ref(view, "count").stream()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(link.streams[0].is_closed for link in view.links)


async def test_stream_that_nobody_reads_sends_nothing():
    view = View(0)
    ref(view, "count").stream()
    assert view.links[0].calls == []


async def test_slow_reader_holds_up_the_taking_of_values():
    view = View(0, 1)
    async with contextlib.aclosing(ref(view, "count").stream()) as values:
        reading = await begun(anext(values))
        for link in view.links:
            link.streams[0].put(*range(1, 101))
        await reading
        for _ in range(300):
            await asyncio.sleep(0)
        assert all(link.streams[0].items.qsize() > 80 for link in view.links)
