"""The way out of a connection: what goes first, what waits, and what is no silence."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from stagekeeper.actor.connection import outbox as module
from stagekeeper.actor.connection.calls import ReplyFuture
from stagekeeper.actor.connection.link import Link
from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.place import Place
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload

KIB = 1024


class Stream:
    """Takes one message for each `let_go`."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._turns = asyncio.Semaphore(0)

    async def write(self, message: Any) -> None:
        self.written.append(message)
        await self._turns.acquire()

    async def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self._turns.release()
        await still()

    @property
    def kinds(self) -> list[list[str]]:
        return [[str(frame.WhichOneof("body")) for frame in it.frames] for it in self.written]


async def still() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def cast(outbox: Outbox, size: int, endpoint: str = "take") -> None:
    frame = outbox.add(size)
    frame.call.endpoint = endpoint
    frame.call.payload.data = bytes(size)


async def test_a_sign_of_life_goes_before_all_that_waits_and_is_there_once():
    outbox, stream = Outbox(pb.ConnectRequest), Stream()
    writing = asyncio.create_task(outbox.run(stream.write))
    for _ in range(3):
        cast(outbox, 300 * KIB)
    await still()
    outbox.beat(pb.Beat(other_actor_count=1))
    outbox.beat(pb.Beat(other_actor_count=2))

    await stream.let_go()

    assert stream.kinds == [["call"], ["call", "beat"]]
    assert stream.written[1].frames[1].beat.other_actor_count == 2
    await stream.let_go(2)
    outbox.beat(pb.Beat())
    outbox.close()
    await stream.let_go(2)
    await asyncio.wait_for(writing, 5)
    assert stream.kinds[2:] == [["call"], ["beat"]]


async def test_little_ones_share_a_message_in_order_and_large_ones_travel_alone():
    outbox, stream = Outbox(pb.ConnectResponse), Stream()
    sizes = [10] * 70 + [200 * KIB, 200 * KIB, 10]
    for number, size in enumerate(sizes):
        cast(outbox, size, str(number))
    outbox.close()
    assert len(outbox.unsent()) == len(sizes)

    await asyncio.gather(outbox.run(stream.write), stream.let_go(10))

    assert [len(it.frames) for it in stream.written] == [64, 7, 2]
    names = [frame.call.endpoint for it in stream.written for frame in it.frames]
    assert names == [str(number) for number in range(len(sizes))]
    assert outbox.moved_bytes == sum(sizes) and not outbox.is_backed_up
    cast(outbox, 1)
    assert not outbox.unsent(), "nobody reads it after the close"


async def test_who_yields_without_end_leaves_the_reader_its_turn(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNREAD_BYTES", 64 * KIB)
    outbox, stream = Outbox(pb.ConnectResponse), Stream()
    writing = asyncio.create_task(outbox.run(stream.write))
    message = Message(pb.CallFrame(is_stream=True), 1, outbox, lambda _: None)

    async def pour() -> None:
        while not message.cancelled:
            await message.send(Payload(data=bytes(8 * KIB)))

    pouring = asyncio.create_task(pour())
    await still()
    for _ in range(20):
        assert outbox.is_backed_up and not outbox.is_full
        await asyncio.wait_for(outbox.space(), 5)
        await stream.let_go()

    cast(outbox, 100 * KIB)
    reading = asyncio.create_task(outbox.space())
    await still()
    assert outbox.is_full and not reading.done()
    await stream.let_go(2)
    await asyncio.wait_for(reading, 5)
    message.cancel()
    outbox.close()
    await asyncio.wait_for(pouring, 5)
    writing.cancel()


def a_link(silences: list[float]) -> Link:
    return Link(
        Place("127.0.0.1:1", "there", 1, "boot"),
        pb.Hello(),
        lease_s=10.0,
        on_failure=lambda _: None,
        on_silence=lambda link: silences.append(link.silent_s),
        on_broken=lambda *_: None,
    )


@pytest.mark.parametrize("drains", [True, False])
async def test_an_end_that_takes_a_backlog_is_not_silent(drains):
    silences: list[float] = []
    link, stream = a_link(silences), Stream()
    link._is_up = link._has_been_up = True
    for _ in range(6):
        link.cast("a", "take", Payload(data=bytes(300 * KIB)), "test")
    writing = asyncio.create_task(link._outbox.run(stream.write))
    now = time.monotonic()

    for beat in range(1, 5):
        await still()
        if drains:
            await stream.let_go()
        link.look(now + 3.0 * beat)

    assert bool(silences) is not drains
    writing.cancel()
    await link._channel.close()


async def test_small_things_that_a_frozen_end_still_takes_are_no_sign_of_life():
    silences: list[float] = []
    link, stream = a_link(silences), Stream()
    link._is_up = link._has_been_up = True
    writing = asyncio.create_task(link._outbox.run(stream.write))
    now = time.monotonic()

    for beat in range(1, 5):
        link.cast("a", "take", Payload(data=b"1"), "test")
        await stream.let_go(2)
        link.look(now + 3.0 * beat)
        await stream.let_go()

    assert len(silences) == 1
    writing.cancel()
    await link._channel.close()


async def test_a_connection_that_is_closed_before_it_began_has_broken_too():
    link = a_link([])
    link.open()

    await link.close()

    with pytest.raises(ConnectionError, match="it was closed"):
        await asyncio.wait_for(link.connected(), 10.0)
    assert link.is_broken


async def test_a_call_is_whole_on_its_way():
    link = a_link([])

    class Anybody:
        outstanding = 0

    payload = Payload(content_type="application/msgpack", data=b"\x01")
    link.call(Anybody(), ReplyFuture(), "a", "add", payload, "test")  # type: ignore[arg-type]
    link.cast("a", "add", payload, "test")

    called, told = link._outbox.unsent()
    common: dict[str, Any] = {
        "target_id": "a",
        "endpoint": "add",
        "payload": payload,
        "sender": "test",
    }
    assert called == pb.Frame(frame_id=1, call=pb.CallFrame(**common))
    assert told == pb.Frame(call=pb.CallFrame(is_cast=True, **common))
    await link._channel.close()


async def test_what_is_flushed_is_written_at_once_unless_something_is_being_written():
    outbox, stream = Outbox(pb.ConnectRequest), Stream()
    cast(outbox, 1, "before anybody writes")
    outbox.flush()
    assert len(outbox.unsent()) == 1
    writing = asyncio.create_task(outbox.run(stream.write))
    await still()
    await stream.let_go()

    cast(outbox, 1, "alone")
    outbox.flush()
    assert len(stream.written) == 2, "not in the loop's next turn"
    cast(outbox, 1, "waits")
    outbox.flush()
    assert len(stream.written) == 2 and outbox.is_backed_up
    await still()
    await stream.let_go(2)
    assert [it.frames[0].call.endpoint for it in stream.written[1:]] == ["alone", "waits"]
    assert outbox.moved_bytes == 3

    cast(outbox, 1, "lost")
    outbox.flush()
    writing.cancel()
    await asyncio.wait({writing})
    cast(outbox, 1, "kept")
    outbox.flush()
    assert [it.call.endpoint for it in outbox.unsent()] == ["kept"]
    again = asyncio.create_task(outbox.run(stream.write))
    await still()
    assert stream.written[-1].frames[0].call.endpoint == "kept"
    again.cancel()


async def test_error_of_a_write_that_was_flushed_ends_the_writer():
    async def broken(message: Any) -> None:
        raise ConnectionError("gone")

    outbox = Outbox(pb.ConnectRequest)
    writing = asyncio.create_task(outbox.run(broken))
    await still()
    cast(outbox, 1)
    outbox.flush()
    with pytest.raises(ConnectionError, match="gone"):
        await asyncio.wait_for(writing, 5)
