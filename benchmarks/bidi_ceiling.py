"""The bare ceiling of a connection: a bidi stream between two processes that echoes what it hears.

Run as a program it serves, and prints its port. What is compared with it sends the same number of
bytes, one message at a time or many in flight; several in one message are not the ceiling's to use,
since a plain stream has no frames.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from benchmarks.ceiling import channel_to
from stagekeeper.wire.transport import SERVER_OPTIONS

METHOD = "/benchmark.Ceiling/Echo"


async def _echo(_: object, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


class _AnyMethod(grpc.GenericRpcHandler):
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_echo)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        return self.handler


async def _serve() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_AnyMethod(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


class EchoStream:
    """One stream to the echo: `call` sends a message and waits for its echo, in order."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._to_write: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def one(self, body: bytes) -> bytes:
        """Send one and read one, with nothing in between: the least that a round trip can cost."""
        await self._stream.write(body)
        echo: bytes = await self._stream.read()
        return echo

    async def call(self, body: bytes) -> bytes:
        """Send one of many."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._to_write.put_nowait(body)
        return await future

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._stream.cancel()

    async def _write(self) -> None:
        while True:
            await self._stream.write(await self._to_write.get())

    async def _read(self) -> None:
        while (echo := await self._stream.read()) is not grpc.aio.EOF:
            self._waiting.popleft().set_result(echo)


@asynccontextmanager
async def echo_stream() -> AsyncIterator[EchoStream]:
    """Run the echo as a process of its own; yields a stream to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.bidi_ceiling", stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        async with channel_to(f"127.0.0.1:{port}") as channel:
            opened: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            opened = channel.stream_stream(METHOD)
            stream = EchoStream(opened())
            yield stream
            await stream.close()
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10.0)


if __name__ == "__main__":
    asyncio.run(_serve())
