"""One connection through the fault proxy: two directions, each a queue between a reader and a
writer.

Decided here: what a fault does to the bytes of one flow. Not decided here: which fault is on
(`tcp_proxy`). Invariant: bytes leave in the order in which they came, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.fakes.http2_reply import Direction, FlowReplies

UP = Direction.UP
DOWN = Direction.DOWN

_CHUNK_BYTES = 16_384
_CHUNKS_HELD = 256
"""What one direction holds back at most (4 MiB) before its sender feels it."""


@dataclass(slots=True)
class Conditions:
    """How bytes travel in one direction; shared by all flows of a proxy."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    passes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passes.set()


Chunks = asyncio.Queue[tuple[float, bytes]]


class Flow:
    """Two connections, to the client and to the server, and what passes between them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        conditions: Mapping[Direction, Conditions],
        replies: FlowReplies,
    ) -> None:
        self._client = (reader, writer)
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._conditions = conditions
        self._replies = replies
        self._lost: set[Direction] = set()
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self, target: str) -> None:
        """Carry bytes until both ends are through, or one breaks, or the flow is reset."""
        host, _, port = target.rpartition(":")
        try:
            self._server = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as both:
                _ = both.create_task(self._carry(UP, self._client[0], self._server[1]))
                _ = both.create_task(self._carry(DOWN, self._server[0], self._client[1]))
        except* OSError:
            self.reset()  # one end was reset, and so is the other

    def lose(self, *ways: Direction) -> None:
        """Pass nothing more in these directions (both, if none is named), not even an end."""
        self._lost.update(ways or (UP, DOWN))

    def half_open(self) -> None:
        """End the flow towards the server with a FIN; the client hears nothing more."""
        self._lost = {UP, DOWN}
        if self._server is not None:
            self._server[1].close()

    def reset(self) -> None:
        """End both connections with a RST; one that has ended already stays as it is."""
        self._over.set()
        for end in (self._client, self._server):
            if end is not None:
                abort(end[1])

    async def _carry(
        self, way: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        chunks: Chunks = asyncio.Queue(_CHUNKS_HELD)
        pouring = asyncio.create_task(self._pour(way, chunks, sink))
        try:
            await self._draw(way, source, chunks)
            await pouring
        finally:
            pouring.cancel()
            await asyncio.gather(pouring, return_exceptions=True)

    async def _draw(self, way: Direction, source: asyncio.StreamReader, chunks: Chunks) -> None:
        """Take what comes, until its end."""
        data = b"first"
        while data:
            try:
                data = await source.read(_CHUNK_BYTES)
            except OSError:
                if way not in self._lost:
                    raise
                data = b""
            passed = self._replies.passed(way, data) if data else data
            if passed or not data:
                await chunks.put((self._loop.time() + self._conditions[way].delay_s, passed))

    async def _pour(self, way: Direction, chunks: Chunks, sink: asyncio.StreamWriter) -> None:
        """Give on what was taken, as the conditions allow; nothing of a lost direction."""
        conditions = self._conditions[way]
        while True:
            due, data = await chunks.get()
            if (wait_s := due - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            await conditions.passes.wait()
            if way not in self._lost:
                with contextlib.suppress(OSError):  # the reader of that end tells how it broke
                    await self._give(conditions, data, sink)
            if not data:
                break
        if way in self._lost:
            await self._over.wait()  # nobody is told of an end

    async def _give(self, conditions: Conditions, data: bytes, sink: asyncio.StreamWriter) -> None:
        if not data:
            if sink.can_write_eof() and not sink.is_closing():
                sink.write_eof()
            return
        if (rate := conditions.bytes_per_s) is not None:
            step = max(1, int(rate / 50))
            for start in range(0, len(data), step):
                piece = data[start : start + step]
                sink.write(piece)
                await asyncio.sleep(len(piece) / rate)
        else:
            sink.write(data)
        await sink.drain()


def abort(writer: asyncio.StreamWriter) -> None:
    """End a connection with a RST."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
