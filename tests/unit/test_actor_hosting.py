"""One actor in its process, without any connection: what odd code of its own can do to it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stagekeeper.actor import Actor, FailureKind, MeshFailure, context, endpoint
from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure_wire import failure_from_proto
from stagekeeper.actor.hosting import handlers, hosted_actor
from stagekeeper.actor.hosting.hosted_actor import ActorState
from stagekeeper.actor.hosting.house import House
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.sessions import Session
from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.payload import encode_arguments
from tests.harness.waiting import wait_for

GATE = threading.Event()
CLEANED: list[str] = []
SOON_S = 10.0


class Odd(Actor):
    """Raises what ends generators, and blocks its thread."""

    def __init__(self, raises_in_cleanup: bool = False) -> None:
        self._raises_in_cleanup = raises_in_cleanup

    @endpoint
    def leave(self) -> None:
        raise GeneratorExit

    @endpoint
    def add(self, x: int, y: int) -> int:
        return x + y

    @endpoint
    def block(self) -> None:
        assert GATE.wait(SOON_S)

    def __cleanup__(self, exc: BaseException | None) -> None:
        if self._raises_in_cleanup:
            raise GeneratorExit


class OddAsync(Actor):
    @endpoint
    async def leave(self) -> None:
        raise GeneratorExit

    @endpoint
    async def add(self, x: int, y: int) -> int:
        return x + y

    async def __cleanup__(self, exc: BaseException | None) -> None:
        raise GeneratorExit


class Stubborn(Actor):
    """Its handlers are as decorators make them, and ends when it likes."""

    __supervise_limit_s__ = 0.1

    def __init__(self) -> None:
        self.cleaned_up = False

    @endpoint
    async def wait(self) -> None:
        await asyncio.sleep(SOON_S)

    @endpoint
    def wait_plainly(self) -> None:
        while not context().cancelled:
            GATE.wait(0.01)

    @endpoint
    def add(self, x: int, y: int) -> int:
        return x + y

    def __supervise__(self, failure: MeshFailure) -> Any:
        return self._supervise(failure.message)

    async def _supervise(self, how: str) -> bool:
        while how == "never":
            try:
                await asyncio.sleep(SOON_S)
            except asyncio.CancelledError:
                how = "late" if GATE.is_set() else "never"
        return how == "handled"

    def __cleanup__(self, exc: BaseException | None) -> Any:
        return self._clean_up()

    async def _clean_up(self) -> None:
        CLEANED.append("up")


class Slow(Actor):
    def __init__(self) -> None:
        CLEANED.append("begins")
        assert GATE.wait(SOON_S)

    @endpoint
    async def add(self, x: int, y: int) -> int:
        return x + y

    def __cleanup__(self, exc: BaseException | None) -> None:
        CLEANED.append("up")


class Dynamic(Actor):
    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"there is no {name}")


class Told(Session):
    news: list[pb.RankFailed]

    def push_failure(self, news: pb.RankFailed) -> None:
        self.news.append(news)


class Hosted:
    """A house with one owner; `call` does what a connection would."""

    def __init__(self) -> None:
        self.house = House(refuse_class=lambda _: "")
        self.news: list[pb.RankFailed] = []
        self.session = Told("owner", lease_s=60, is_same_host=True, on_over=lambda _: None)
        self.session.news = self.news

    def request(self, cls: type[Actor], *args: Any) -> actor_pb.SpawnActorRequest:
        return actor_pb.SpawnActorRequest(
            actor_id=cls.__name__,
            mesh_name="odd",
            size=1,
            entrypoint=f"{__name__}:{cls.__name__}",
            arguments=encode_arguments(args, {}),
        )

    async def spawn(self, cls: type[Actor], *args: Any) -> str:
        assert await self.house.spawn(self.request(cls, *args), self.session) is None
        return cls.__name__

    def send(self, actor_id: str, name: str, *args: Any, is_cast: bool = False) -> Answer:
        answer = Answer()
        call = pb.CallFrame(
            target_id=actor_id, endpoint=name, payload=encode_arguments(args, {}), is_cast=is_cast
        )

        def over(message: Message) -> None:
            self.house.over(actor_id, message)
            answer.is_over.set()

        self.house.take(actor_id, Message(call, 1, answer, over))
        return answer

    async def call(self, actor_id: str, name: str, *args: Any) -> pb.Frame:
        answer = self.send(actor_id, name, *args)
        await asyncio.wait_for(answer.is_over.wait(), SOON_S)
        (frame,) = answer.unsent()
        return frame

    async def stop(self, actor_id: str, budget_s: float = SOON_S) -> actor_pb.StopActorResponse:
        request = actor_pb.StopActorRequest(actor_id=actor_id, budget_s=budget_s)
        return await asyncio.wait_for(self.house.stop(request), SOON_S)


class Answer(Outbox):
    def __init__(self) -> None:
        super().__init__(pb.ConnectResponse)
        self.is_over = asyncio.Event()


@asynccontextmanager
async def hosted() -> AsyncIterator[Hosted]:
    it = Hosted()
    GATE.clear()
    try:
        yield it
    finally:
        GATE.set()
        await it.house.stop_all(1.0)


@pytest.mark.parametrize("cls", [Odd, OddAsync])
async def test_what_ends_generators_ends_one_call_and_no_actor(cls):
    async with hosted() as it:
        actor_id = await it.spawn(cls, *[True] * (cls is Odd))

        error = (await it.call(actor_id, "leave")).error

        assert error.reason == "ENDPOINT_RAISED" and "GeneratorExit" in error.message
        assert (await it.call(actor_id, "add", 1, 2)).HasField("reply")
        stopped = await it.stop(actor_id)
        assert "GeneratorExit" in stopped.cleanup_failure.message
        assert not stopped.is_stuck


async def test_turns_that_break_end_the_actor_and_are_told():
    async with hosted() as it:
        actor_id = await it.spawn(Odd)

        async def broken() -> None:
            raise LookupError("what nobody foresaw")

        it.house._actors[actor_id]._turns.queue(broken)
        error = (await it.call(actor_id, "add", 1, 2)).error

        assert error.reason == "ACTOR_FAILED"
        assert "what nobody foresaw" in it.news[0].failure.message


async def test_a_cleanup_that_cannot_begin_says_what_still_runs(monkeypatch):
    monkeypatch.setattr(hosted_actor, "LEAST_CLEANUP_S", 0.1)
    async with hosted() as it:
        actor_id = await it.spawn(Odd)
        it.send(actor_id, "block")

        stopped = await it.stop(actor_id, 0.0)

        told = stopped.cleanup_failure.message
        assert "__cleanup__ could not begin" in told and "odd.block still runs" in told
        assert stopped.unrun[0].endpoint == "block"


async def test_of_what_has_ended_only_what_answers_need_is_kept():
    async with hosted() as it:
        actor_id = await it.spawn(Odd)
        gone = weakref.ref(it.house._actors[actor_id])

        assert not (await it.stop(actor_id)).is_stuck

        gc.collect()
        assert gone() is None
        assert it.house.knows(actor_id)
        assert (await it.call(actor_id, "add", 1, 2)).error.reason == "ACTOR_STOPPED"
        assert await it.house.spawn(it.request(Odd), it.session) is None, "a repeat joins"
        assert not it.house.actor_count
        assert not (await it.stop(actor_id)).is_stuck


async def test_what_failed_answers_with_its_failure_for_good():
    async with hosted() as it:
        failure = await it.house.spawn(it.request(Odd, 1, 2, 3), it.session)
        assert failure is not None and failure.kind == "INIT_RAISED"
        await wait_for(lambda: not it.house.actor_count, "it has ended")

        assert (await it.house.spawn(it.request(Odd, 1, 2, 3), it.session)) == failure
        assert (await it.call("Odd", "add", 1, 2)).error.reason == "ACTOR_FAILED"
        late = it.send("Odd", "add", 1, 2, is_cast=True)
        await asyncio.wait_for(late.is_over.wait(), SOON_S)
        assert "add from  was not run: odd has failed" in it.news[0].failure.message


async def test_a_stop_of_an_actor_that_has_failed_answers_with_what_ended_it():
    async with hosted() as it:
        actor_id = await it.spawn(Odd)
        it.send(actor_id, "leave", is_cast=True)
        for _ in ("while it ends, or after", "after"):
            await wait_for(lambda: bool(it.news), "its owner is told")
            assert (await it.stop(actor_id)).cleanup_failure == it.news[0].failure


async def test_what_is_stuck_is_kept_until_it_is_not(monkeypatch):
    monkeypatch.setattr(hosted_actor, "LEAST_CLEANUP_S", 0.1)
    async with hosted() as it:
        actor_id = await it.spawn(Odd)
        it.send(actor_id, "block")
        assert (await it.stop(actor_id, 0.0)).is_stuck
        gone = weakref.ref(it.house._ended[actor_id]._stuck)
        assert gone() is not None

        GATE.set()

        def is_gone() -> bool:
            it.house.look(0.0, 0.0)
            gc.collect()
            return gone() is None

        await wait_for(is_gone, "it is let go of")
        assert not (await it.stop(actor_id)).is_stuck


async def test_each_stall_is_told_once_and_a_time_in_which_the_process_stood_still_is_none():
    async with hosted() as it:
        request = it.request(Stubborn)
        request.stall_after_s = 5.0
        assert await it.house.spawn(request, it.session) is None
        actor_id, now = request.actor_id, time.monotonic()
        first = it.send(actor_id, "wait")
        it.house.look(now + 20.0, 20.0)
        assert not it.news, "the process was frozen, not the message"
        for later_s in (26.0, 27.0):
            it.house.look(now + later_s, 0.0)
        it.send(actor_id, "add", 1, 2)
        it.house.look(now + 28.0, 0.0)
        assert len(it.news) == 1, "it is the same stall"

        for message in it.house._actors[actor_id]._inbox.running():
            message.progress()
        for later_s in (40.0, 41.0):
            it.house.look(now + later_s, 0.0)

        assert not first.is_over.is_set()
        failures = [failure_from_proto(news.failure) for news in it.news]
        assert [failure.kind for failure in failures] == [FailureKind.STALLED] * 2
        assert failures[0].id != failures[1].id


async def supervised(it: Hosted, how: str) -> MeshFailure:
    """Have a stubborn actor asked; return what its owner is told."""
    actor_id = await it.spawn(Stubborn)
    scope = it.house._actors[actor_id].scope
    scope.deliver(failure_of(scope.identity, FailureKind.GONE, how))
    await wait_for(lambda: it.news, "the owner is told", within_s=SOON_S)
    return failure_from_proto(it.news[0].failure)


async def test_a_plain_supervise_that_returns_what_has_to_be_awaited_is_awaited():
    async with hosted() as it:
        failure = await supervised(it, "refused")
        assert failure.kind == FailureKind.UNHANDLED
        assert failure.path[0].decision == "refused"
    async with hosted() as it:
        actor_id = await it.spawn(Stubborn)
        scope = it.house._actors[actor_id].scope
        scope.deliver(failure_of(scope.identity, FailureKind.GONE, "handled"))
        await asyncio.wait_for(scope.drained(), SOON_S)
        assert not it.news and (await it.call(actor_id, "add", 1, 2)).HasField("reply")


async def test_special_methods_are_those_of_the_class():
    async with hosted() as it:
        actor_id = await it.spawn(Dynamic)
        scope = it.house._actors[actor_id].scope
        scope.deliver(failure_of(scope.identity, FailureKind.GONE, "gone"))
        await wait_for(lambda: it.news, "the owner is told", within_s=SOON_S)
        decision = failure_from_proto(it.news[0].failure).path[0].decision
        assert decision == "has no __supervise__"
    async with hosted() as it:
        assert not (await it.stop(await it.spawn(Dynamic))).HasField("cleanup_failure")


async def test_a_supervise_that_does_not_end_when_it_is_cancelled_is_late_all_the_same(
    monkeypatch,
):
    monkeypatch.setattr(handlers, "_MOMENT_S", 0.05)
    async with hosted() as it:
        failure = await supervised(it, "never")
        GATE.set()
        assert failure.kind == FailureKind.SUPERVISE_RAISED
        assert failure.path[0].decision == (
            "raised TimeoutError: __supervise__ did not return within 0.1 s"
        )
        await wait_for(lambda: not it.house.actor_count, "the actor has ended", within_s=SOON_S)
        for task in asyncio.all_tasks():
            if task.get_name() == "__supervise__":
                task.cancel()


async def test_a_plain_cleanup_that_returns_what_has_to_be_awaited_is_awaited():
    async with hosted() as it:
        CLEANED.clear()
        actor_id = await it.spawn(Stubborn)
        assert not (await it.stop(actor_id)).HasField("cleanup_failure")
        assert CLEANED == ["up"]


@pytest.mark.parametrize("name", ["wait", "wait_plainly"])
async def test_what_ended_after_nobody_waited_for_it_is_forgotten(name):
    async with hosted() as it:
        actor_id = await it.spawn(Stubborn)
        it.send(actor_id, name)
        await wait_for(lambda: list(it.house._actors[actor_id]._inbox.running()), "it runs")
        (message,) = it.house._actors[actor_id]._inbox.running()

        message._on_end = lambda _: None  # its connection asks for no answer any more
        it.house.cancel(actor_id, message)

        assert not (await it.stop(actor_id, 3_600)).unrun


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after the stop"])
async def test_what_comes_up_while_it_is_stopped_cleans_up_all_the_same(monkeypatch, is_late):
    monkeypatch.setattr(hosted_actor, "LEAST_CLEANUP_S", 0.1 if is_late else SOON_S)
    CLEANED.clear()
    async with hosted() as it:
        starting = asyncio.create_task(it.house.spawn(it.request(Slow), it.session))
        await wait_for(lambda: "begins" in CLEANED, "its __init__ runs")
        actor = it.house._actors["Slow"]
        stopping = asyncio.create_task(it.stop("Slow", 0.0))
        if is_late:
            assert (await stopping).is_stuck
            monkeypatch.undo()
        await wait_for(lambda: actor.state is not ActorState.STARTING, "it is stopped")

        GATE.set()

        assert await asyncio.wait_for(starting, SOON_S) is None
        assert is_late or not (await stopping).is_stuck
        assert CLEANED == ["begins", "up"]


async def test_what_was_sent_while_it_came_up_runs_within_the_budget_of_a_stop():
    CLEANED.clear()
    async with hosted() as it:
        starting = asyncio.create_task(it.house.spawn(it.request(Slow), it.session))
        await wait_for(lambda: "begins" in CLEANED, "its __init__ runs")
        actor = it.house._actors["Slow"]
        calling = asyncio.create_task(it.call("Slow", "add", 1, 2))
        stopping = asyncio.create_task(it.stop("Slow", 3_600.0))
        await wait_for(lambda: actor.state is not ActorState.STARTING, "it is stopped")

        GATE.set()

        assert (await calling).HasField("reply")
        assert not (await stopping).unrun
        assert await starting is None
        assert CLEANED == ["begins", "up"]
