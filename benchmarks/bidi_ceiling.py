"""The bare ceiling of a connection: a bidi stream between two processes that echoes what it hears.

Run as a program it serves, and prints its port. What is compared with it sends the same number of
bytes, one message at a time or many in flight; several in one message are not the ceiling's to use,
since a plain stream has no frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from benchmarks.ceiling import bare_server, channel_to, serve

METHOD = "/benchmark.Ceiling/Echo"


async def _echo(_: object, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


class EchoStream:
    """One stream to the echo: `call` sends a message and waits for its echo, in order."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._to_write: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

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
    async with bare_server("benchmarks.bidi_ceiling") as address, channel_to(address) as channel:
        opened: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        stream = EchoStream(opened())
        yield stream
        await stream.close()


if __name__ == "__main__":
    asyncio.run(serve(grpc.stream_stream_rpc_method_handler(_echo)))
