"""What a process of an actor tree answers on a connection, frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from stagekeeper.actor.failure import FailureKind
from stagekeeper.actor.failure_wire import failure_from_proto
from stagekeeper.actor.hosting import actor_service, connect
from stagekeeper.actor.program import Program, set_current_program
from stagekeeper.core.errors import Reason
from stagekeeper.host.process import boot_id
from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire import actor_limits
from stagekeeper.wire.payload import encode_arguments
from tests.harness.tree_process import (
    LIMIT_S,
    TOKEN,
    Frames,
    TreeProcess,
    cast,
    connected_to,
    tree_process,
)
from tests.harness.verdicts import verdict_of
from tests.harness.waiting import wait_for

KEPT = "tests.stages.kept_actor:Kept"
PLAIN = "tests.stages.kept_actor:KeptPlain"
ONLOOKER = "tests.stages.kept_actor:Onlooker"
NO_ARGUMENTS = Payload(content_type="application/msgpack", data=b"\xc1")


@asynccontextmanager
async def owner() -> AsyncIterator[tuple[TreeProcess, Frames]]:
    async with tree_process() as it, it.connected() as frames:
        yield it, frames


def call_frame(frame_id: int, target_id: str, endpoint: str, *args: Any, **fields: Any) -> Any:
    payload = encode_arguments(args, {})
    call = pb.CallFrame(target_id=target_id, endpoint=endpoint, payload=payload, **fields)
    return pb.Frame(frame_id=frame_id, call=call)


async def refusal_of(frames: Frames) -> Any:
    """Read until the other end refuses the whole connection."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await frames.read()
    return verdict_of(caught.value, "the connection")


async def test_a_frame_that_is_wrong_is_answered_alone_and_calls_under_way_go_on():
    async with owner() as (it, frames):
        kept = await it.spawn("owner", KEPT)
        await frames.send(call_frame(70, kept, "wait", 0.3))
        wrong = {
            71: call_frame(71, kept, "x" * 256),
            72: call_frame(72, kept, "hear", 1, timeout_s=float("nan")),
            73: call_frame(73, "x" * 256, "hear", 1, sender="x" * 256),
            74: pb.Frame(
                frame_id=74,
                call=pb.CallFrame(target_id=kept, endpoint="hear", payload=NO_ARGUMENTS),
            ),
            75: call_frame(75, kept, "hear", 1, 2, 3),
        }
        await frames.send(*wrong.values())
        for frame_id in wrong:
            error = (await frames.answered(frame_id)).error
            assert error.reason == "BAD_FIELD"
            if frame_id == 73:
                assert "target_id" in error.message and "sender" in error.message

        await frames.send(
            call_frame(0, kept, "hear", 1),
            call_frame(70, kept, "hear", 1),
            call_frame(9, kept, "hear", 1, is_cast=True, is_stream=True),
            pb.Frame(failure=pb.RankFailed(mesh_id="x" * 256)),
            pb.Frame(reply=pb.Reply()),
            pb.Frame(),
        )
        assert (await frames.answered(70)).HasField("reply"), "nothing of that was its fault"
        assert [it.reason for it in frames.stray] == ["BAD_FIELD"] * 4
        assert await frames.value(kept, "told") == [""]


async def test_a_message_that_does_not_fit_is_told_to_the_owner_and_ends_no_actor():
    async with owner() as (it, frames):
        kept = await it.spawn("owner", KEPT)
        await frames.send(
            cast(kept, "hear", NO_ARGUMENTS),
            cast(kept, "hear", encode_arguments([1, 2, 3], {})),
            cast(kept, "nothing"),
            cast(kept, "unsendable"),
        )
        assert await frames.value(kept, "echo", 1) == 1
        kinds = [failure_from_proto(it.failure).kind for it in frames.news]
        assert kinds == [FailureKind.UNDELIVERABLE] * 3

        error = (await frames.call(kept, "unsendable")).error
        assert error.reason == "ENDPOINT_RAISED", "it ran: the arguments did fit"


async def test_an_actor_that_is_not_there_says_why():
    async with owner() as (it, frames):
        stopped, failed = [await it.spawn("owner", KEPT) for _ in range(2)]
        request = actor_pb.StopActorRequest(
            token=TOKEN, instance_id=it.instance_id, actor_id=stopped
        )
        await it.actors.StopActor(request, timeout=LIMIT_S)
        await frames.send(cast(failed, "fail"))

        errors = [(await frames.call(whom, "told")).error for whom in ("nobody", stopped, failed)]
        assert [it.reason for it in errors] == ["ACTOR_UNKNOWN", "ACTOR_STOPPED", "ACTOR_FAILED"]
        assert set(map(str, [it.reason for it in errors])) <= set(Reason)
        assert failure_from_proto(errors[2].failure).kind is FailureKind.BROADCAST_RAISED
        assert (await frames.call(failed, "x" * 255)).error.reason == "ACTOR_FAILED"

        for whom in ("nobody", stopped):
            await frames.send(cast(whom, "told"))
        await frames.others()
        assert [it.reason for it in frames.stray] == ["ACTOR_UNKNOWN", "ACTOR_STOPPED"]


async def test_too_many_frames_in_a_message_end_the_connection_and_nothing_of_them_runs():
    async with owner() as (it, frames):
        kept = await it.spawn("owner", KEPT)
        async with it.connected("another") as another:
            many = [cast(kept, "hear", encode_arguments([1], {}))] * (actor_limits.MOST_FRAMES + 1)
            await another.send(*many)
            refused = await refusal_of(another)
        assert (refused.reason, refused.paths) == ("BAD_FIELD", ("frames",))
        assert await frames.value(kept, "told") == [""]


@pytest.mark.parametrize("entrypoint", [KEPT, pytest.param(PLAIN, marks=pytest.mark.soak)])
async def test_values_that_nobody_reads_are_not_made_without_end(entrypoint):
    count, size = 1_000, 4 << 20
    async with owner() as (it, frames):
        yields = await it.spawn("owner", entrypoint)
        looks = await it.spawn("owner", ONLOOKER)
        async with it.connected("slow") as slow:
            call = call_frame(1, yields, "chunks", count, size, is_stream=True)
            await slow.send(call)
            before = -1

            async def stands_still() -> bool:
                nonlocal before
                if entrypoint is KEPT:
                    now = int((await frames.value(yields, "told"))[0] or 0)
                else:
                    now = await frames.value(looks, "at")
                is_still, before = now == before and now > 0, now
                await asyncio.sleep(0.1)
                return is_still

            await wait_for(stands_still, "what yields waits for its reader")
            assert before * size < 2 * actor_limits.MOST_UNREAD_BYTES
            first = await slow.answered(1)
            assert first.reply.has_more


@asynccontextmanager
async def a_program() -> AsyncIterator[tuple[Program, grpc.aio.Channel]]:
    program = Program(
        instance_id="here", tree_path="t/here", token=TOKEN, boot_id=boot_id(), lease_s=60
    )
    set_current_program(program)
    try:
        address = await program.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield program, channel
    finally:
        set_current_program(None)
        await program.house.stop_all(0.1)
        await program.close()


async def test_connections_actors_and_calls_are_limited(monkeypatch):
    monkeypatch.setattr(connect, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(connect, "MOST_CONNECTION_CALLS", 1)
    monkeypatch.setattr(actor_service, "MOST_ACTORS", 1)
    async with a_program() as (program, channel):
        it = TreeProcess(None, None, channel, "here")
        async with it.connected() as frames, connected_to(channel, it.hello("away", boot_id="x")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with it.connected("third"):
                    pass
            assert verdict_of(caught.value, "a third").reason == "TOO_MANY_CALLS"

            request = it.spawn_request("owner", KEPT)
            for _ in range(2):  # a repeat joins
                await it.actors.SpawnActor(request, timeout=LIMIT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.spawn("owner", KEPT)
            assert verdict_of(caught.value, "a second actor").reason == "ADMISSION_REFUSED"

            kept = request.actor_id
            await frames.send(
                call_frame(1, kept, "wait", 30), call_frame(2, kept, "told"), cast(kept, "told")
            )
            assert (await frames.answered(2)).error.reason == "TOO_MANY_CALLS"
            await frames.others()
            assert [it.reason for it in frames.stray] == ["TOO_MANY_CALLS"]
            told = [failure_from_proto(it.failure) for it in frames.news]
            assert [(it.kind, it.endpoint) for it in told] == [(FailureKind.UNDELIVERABLE, "told")]

        # That of this host has ended with its connection; the other may come back, and counts.
        await wait_for(lambda: program.house.session_count == 1, "one session is over")
        async with it.connected():
            with pytest.raises(grpc.aio.AioRpcError):
                async with it.connected("third"):
                    pass
