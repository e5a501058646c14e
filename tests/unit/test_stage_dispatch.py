"""Calls inside a stage on a host that gives it nothing to run them with."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from stagekeeper.actor import endpoint
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.stage import Stage
from stagekeeper.stage.activity import Activity
from stagekeeper.stage.dispatch import Dispatcher
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.payload import decode, encode_arguments
from tests.harness.waiting import wait_for

LIMIT = 2
NOTHING = encode_arguments((), {})


class Plain(Stage):
    @endpoint
    def once(self) -> str:
        return "ran"

    @endpoint
    def twice(self) -> Iterator[str]:
        yield "ran"
        yield "on"


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
async def dispatcher(activity) -> Dispatcher:
    return Dispatcher(Plain(), instance_id="i", rank=0, max_in_flight=LIMIT, activity=activity)


async def _call(dispatcher: Dispatcher) -> list[object]:
    return [decode(await dispatcher.call("i", "once", NOTHING, 10.0))]


async def _stream(dispatcher: Dispatcher) -> list[object]:
    values: list[object] = []

    async def take(payload: Payload) -> None:
        values.append(decode(payload))

    await dispatcher.stream("i", "twice", NOTHING, 10.0, take)
    return values


@pytest.mark.parametrize(("say", "answers"), [(_call, ["ran"]), (_stream, ["ran", "on"])])
async def test_call_without_a_thread_is_refused_and_gives_its_place_back(
    dispatcher: Dispatcher,
    activity: Activity,
    monkeypatch: pytest.MonkeyPatch,
    say: Callable[[Dispatcher], Awaitable[list[object]]],
    answers: list[object],
):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(LIMIT + 1):
            with pytest.raises(Refused, match="nothing was executed") as caught:
                await say(dispatcher)
            assert caught.value.reason is Reason.TOO_MANY_CALLS
            assert "can't start new thread" in str(caught.value)

    await wait_for(lambda: activity.call_count == 0, "every place is free")
    assert await say(dispatcher) == answers
