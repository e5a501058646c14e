"""The serving end of a connection that is cut off: it leaves nothing that speaks up later."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import grpc
import pytest

from stagekeeper.actor.hosting.connect import Connections
from stagekeeper.actor.program import Program
from stagekeeper.v1 import stage_service_pb2 as pb

HELLO = pb.Hello(token="secret", session_id="owner", lease_s=600, beat_s=150, boot_id="boot")


class Stream:
    """What gRPC gives a handler; reads and writes fail once the server has stopped, as its do."""

    def __init__(self, *, writes: bool, beat_s: float = HELLO.beat_s) -> None:
        hello = pb.Hello()
        hello.CopyFrom(HELLO)
        hello.beat_s = beat_s
        self._first = [pb.ConnectRequest(frames=[pb.Frame(hello=hello)])]
        self._writes = writes
        self.beats: asyncio.Queue[pb.Beat] = asyncio.Queue()
        self.stopped: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_read = asyncio.Event()

    async def read(self) -> Any:
        if self._first:
            return self._first.pop()
        self.is_read.set()
        return await asyncio.shield(self.stopped)

    async def write(self, response: pb.ConnectResponse) -> None:
        if not self._writes:
            raise grpc.aio.UsageError("Server already stopped.")
        for frame in response.frames:
            if frame.HasField("beat"):
                self.beats.put_nowait(frame.beat)

    def stop(self) -> None:
        self.stopped.set_exception(grpc.aio.UsageError("Server already stopped."))


@pytest.mark.parametrize("writes", [True, False], ids=["cut off", "cannot write"])
async def test_a_connection_that_the_servers_stop_cuts_off_is_no_error_of_anybodys(writes):
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    program = Program(instance_id="here", tree_path="t", token="secret", boot_id="boot")
    stream = Stream(writes=writes)
    serving = asyncio.create_task(
        Connections(program, program.house).serve(cast(Any, stream)), name="serving"
    )
    if writes:
        await stream.is_read.wait()
        serving.cancel()
    await asyncio.wait({serving})
    assert serving.cancelled() == writes

    stream.stop()
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(grpc.aio.UsageError):
        await stream.stopped
    del serving
    gc.collect()

    assert not noise
    assert program.house.session_count == 0


async def test_the_serving_end_says_by_itself_that_it_lives():
    program = Program(instance_id="here", tree_path="t", token="secret", boot_id="boot")
    stream = Stream(writes=True, beat_s=0.02)
    serving = asyncio.create_task(Connections(program, program.house).serve(cast(Any, stream)))

    for _ in range(2):
        await asyncio.wait_for(stream.beats.get(), 5)

    serving.cancel()
    await asyncio.wait({serving})
    stream.stop()
    with pytest.raises(grpc.aio.UsageError):
        await stream.stopped
