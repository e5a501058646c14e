"""Streamed calls between caller and endpoint: the window, and what wakes who waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stagekeeper.actor.connection.calls import ReplyStream
from stagekeeper.actor.hosting.message import Message
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.actor_limits import STREAM_WINDOW

VALUE = Payload(content_type="application/msgpack", data=b"\x01")


class Wire:
    """Both ends of one streamed call; stands for the link of the caller."""

    def __init__(self, window: int, **fields: Any) -> None:
        self.stream = ReplyStream()
        self.stream.link, self.stream.frame_id = self, 1  # type: ignore[assignment]
        call = pb.CallFrame(endpoint="pour", is_stream=True, window=window, **fields)
        self.message = Message(call, 1, self, lambda _: None)
        self.told: list[int] = []
        self.sent = 0

    is_crowded = False

    async def room(self) -> None:
        raise AssertionError("it is never crowded")

    def add(self, payload_bytes: int = 0) -> pb.Frame:
        frame = pb.Frame()
        asyncio.get_running_loop().call_soon(self.arrived, frame)
        return frame

    def arrived(self, frame: pb.Frame) -> None:
        self.sent += frame.reply.has_more
        self.stream.put(frame.reply.payload if frame.reply.has_more else None)

    def more(self, frame_id: int, count: int) -> None:
        self.told.append(count)
        self.message.more(count)

    def give_up(self, frame_id: int) -> None:
        self.message.cancel()

    async def pour(self, count: int) -> None:
        for _ in range(count):
            await self.message.send(VALUE)
        self.message.answer(None)


async def still(wire: Wire) -> int:
    """Let all that can run run; return how much was sent then."""
    for _ in range(20):
        await asyncio.sleep(0)
    return wire.sent


async def test_no_more_is_on_its_way_than_the_window_and_reading_lets_more_come():
    wire = Wire(STREAM_WINDOW)
    pouring = asyncio.create_task(wire.pour(100))

    assert await still(wire) == STREAM_WINDOW
    read = 0
    async for _ in wire.stream:
        read += 1
        assert await still(wire) <= read + STREAM_WINDOW

    assert read == 100 and sum(wire.told) <= read
    assert len(wire.told) <= 2 * read / STREAM_WINDOW, "it is not told of each"
    await pouring


async def test_without_a_window_all_is_sent_and_others_run_meanwhile():
    wire = Wire(0)
    pouring = asyncio.create_task(wire.pour(10_000))
    assert 0 < await still(wire) < 10_000
    await pouring

    assert await still(wire) == 10_000
    wire.message.more(5)  # of no consequence
    assert not wire.message.is_crowded


async def test_more_counts_on_top_of_what_is_left():
    wire = Wire(3)
    pouring = asyncio.create_task(wire.pour(100))
    assert await still(wire) == 3

    wire.message.more(2**32 - 1)

    await pouring
    assert await still(wire) == 100


@pytest.mark.parametrize("end", ["cancel", "refuse", "deadline"])
async def test_the_end_of_the_call_wakes_who_waits_for_room(end):
    fields = {"timeout_s": 0.01} if end == "deadline" else {}
    wire = Wire(1, **fields)
    await wire.message.send(VALUE)
    waiting = asyncio.create_task(wire.message.room())
    await still(wire)
    assert wire.message.is_held_up
    if end == "refuse":
        wire.message.refuse(pb.CallError(reason="ACTOR_STOPPED"))
        wire.message.cancel()
    elif end == "cancel":
        wire.stream.close()

    await asyncio.wait_for(waiting, 5)

    assert wire.message.cancelled


async def test_who_waits_for_room_makes_no_progress_and_is_no_stall():
    wire = Wire(1)
    await wire.message.send(VALUE)
    began = wire.message.last_progress
    waiting = asyncio.create_task(wire.message.room())
    await still(wire)
    assert wire.message.last_progress == began and wire.message.is_held_up
    wire.message.more(1)
    await asyncio.wait_for(waiting, 5)

    assert wire.message.last_progress > began


async def test_an_endpoint_with_one_value_yields_it_in_a_stream():
    wire = Wire(STREAM_WINDOW)
    wire.message.answer(VALUE)

    assert [value async for value in wire.stream] == [VALUE]


async def test_what_nobody_waits_for_is_never_held_up():
    wire = Wire(0)
    call = pb.CallFrame(endpoint="pour", is_cast=True, window=1)
    wire.message = Message(call, 0, wire, lambda _: None)
    for _ in range(100):
        await asyncio.wait_for(wire.message.send(VALUE), 5)

    assert await still(wire) == 0
