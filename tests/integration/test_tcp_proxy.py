"""The fault proxy itself: each fault as plain sockets see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.http2_reply import HEADERS, PING
from tests.fakes.tcp_flow import abort
from tests.fakes.tcp_proxy import DOWN, UP, TcpProxy
from tests.harness.waiting import wait_for


class Server:
    """Says its name when asked anything, and keeps what it was told."""

    def __init__(self, name: bytes = b"one") -> None:
        self.name = name
        self.url = ""
        self.heard = b""
        self.ends: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while data := await reader.read(65536):
                self.heard += data
                writer.write(self.name)
                await writer.drain()
            self.ends.append("FIN")
        except ConnectionResetError:
            self.ends.append("RST")
        writer.close()


@asynccontextmanager
async def serving(name: bytes = b"one") -> AsyncIterator[Server]:
    server = Server(name)
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.url = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()
    for writer in server.writers:
        writer.close()


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def hear(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), 10)

    async def ask(self, data: bytes = b"?") -> bytes:
        self.say(data)
        return await self.hear(3)

    async def hears_nothing(self, for_s: float = 0.2) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), for_s) is None
        except TimeoutError:
            return True


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(server.url) as proxy:
        yield proxy
    assert not proxy.established


async def connected(proxy: TcpProxy) -> Caller:
    host, _, port = proxy.url.rpartition(":")
    return Caller(*await asyncio.open_connection(host, int(port)))


async def test_bytes_and_ends_pass_both_ways(proxy: TcpProxy, server: Server) -> None:
    caller = await connected(proxy)
    assert await caller.ask(b"hello") == b"one"
    caller.writer.write_eof()
    assert await caller.reader.read() == b""
    assert (server.heard, server.ends) == (b"hello", ["FIN"])
    await wait_for(lambda: not proxy.established, "the flow is over")


async def test_move_sends_new_flows_elsewhere_and_leaves_the_old_ones(proxy: TcpProxy) -> None:
    old = await connected(proxy)
    assert await old.ask() == b"one"
    async with serving(b"two") as other:
        proxy.move(other.url)
        new = await connected(proxy)
        assert await new.ask() == b"two"
        assert await old.ask() == b"one"
        proxy.move(other.url, reset_old=True)
        with pytest.raises(ConnectionResetError):
            await old.ask()


async def test_flow_to_nobody_is_closed(server: Server) -> None:
    async with TcpProxy() as proxy:
        caller = await connected(proxy)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await caller.ask()
        proxy.move(server.url)
        assert await (await connected(proxy)).ask() == b"one"


async def test_delay_comes_with_each_byte_and_keeps_their_order(
    proxy: TcpProxy, server: Server
) -> None:
    proxy.delay(0.2, UP)
    caller = await connected(proxy)
    began = time.monotonic()
    caller.say(b"a")
    await caller.writer.drain()
    caller.say(b"b")
    assert await caller.hear(3) == b"one"
    assert time.monotonic() - began >= 0.2
    await wait_for(lambda: server.heard == b"ab", "both arrive")
    assert time.monotonic() - began < 5  # they travel together, not one after the other


async def test_stall_holds_bytes_back_and_release_lets_all_go_in_order(
    proxy: TcpProxy, server: Server
) -> None:
    caller = await connected(proxy)
    assert await caller.ask() == b"one"
    proxy.stall()
    caller.say(b"a")
    caller.say(b"b")
    assert await caller.hears_nothing()
    assert server.heard == b"?"
    proxy.release()
    assert await caller.hear(3) == b"one"
    await wait_for(lambda: server.heard == b"?ab", "all arrives")


async def test_stall_of_one_direction_lets_the_other_pass(proxy: TcpProxy, server: Server) -> None:
    proxy.stall(DOWN)
    caller = await connected(proxy)
    caller.say(b"a")
    await wait_for(lambda: server.heard == b"a", "it is heard")
    assert await caller.hears_nothing()
    proxy.release(DOWN)
    assert await caller.hear(3) == b"one"


async def test_limit_takes_the_time_that_so_many_bytes_need(
    proxy: TcpProxy, server: Server
) -> None:
    proxy.limit(100_000, UP)
    caller = await connected(proxy)
    began = time.monotonic()
    caller.say(bytes(50_000))
    await wait_for(lambda: len(server.heard) == 50_000, "all arrives")
    assert time.monotonic() - began >= 0.45
    proxy.limit(None)
    caller.say(bytes(1_000_000))
    await wait_for(lambda: len(server.heard) == 1_050_000, "all arrives")


async def test_lost_flow_stays_open_and_passes_nothing_not_even_ends(
    proxy: TcpProxy, server: Server
) -> None:
    caller = await connected(proxy)
    assert await caller.ask() == b"one"
    proxy.lose_established()
    caller.say(b"lost")
    server.writers[0].close()
    assert await caller.hears_nothing()
    assert server.heard == b"?"
    assert await (await connected(proxy)).ask() == b"one"  # a new flow passes
    caller.writer.close()
    await caller.writer.wait_closed()
    assert len(proxy.established) == 2


async def test_flow_lost_in_one_direction_passes_the_other(proxy: TcpProxy, server: Server) -> None:
    caller = await connected(proxy)
    assert await caller.ask() == b"one"
    proxy.lose_established(DOWN)
    caller.say(b"b")
    await wait_for(lambda: server.heard == b"?b", "the server hears")
    assert await caller.hears_nothing()


async def test_new_flows_are_accepted_and_lost(proxy: TcpProxy, server: Server) -> None:
    proxy.loses_new = True
    caller = await connected(proxy)
    caller.say(b"a")
    assert await caller.hears_nothing()
    assert server.heard == b""


async def test_half_open_flow_has_ended_for_the_server_alone(
    proxy: TcpProxy, server: Server
) -> None:
    caller = await connected(proxy)
    assert await caller.ask() == b"one"
    proxy.half_open()
    await wait_for(lambda: server.ends == ["FIN"], "the server sees the end")
    caller.say(b"anybody there?")
    assert await caller.hears_nothing()


async def test_reset_reaches_both_ends(proxy: TcpProxy, server: Server) -> None:
    caller = await connected(proxy)
    assert await caller.ask() == b"one"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await caller.ask()
    await wait_for(lambda: server.ends == ["RST"], "the server is reset")
    assert await (await connected(proxy)).ask() == b"one"


async def test_reset_of_the_server_reaches_the_client(proxy: TcpProxy, server: Server) -> None:
    caller = await connected(proxy)
    assert await caller.ask() == b"one"
    abort(server.writers[0])
    with pytest.raises(ConnectionResetError):
        await caller.ask()


async def test_refused_connections_find_nobody_until_accepted_again(
    proxy: TcpProxy,
) -> None:
    old = await connected(proxy)
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await connected(proxy)
    assert await old.ask() == b"one"
    await proxy.accept_again()
    assert await (await connected(proxy)).ask() == b"one"


# --- one reply of many on one connection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA = 0


def frame(kind: int, stream: int, body: bytes = b"", *, flags: int = 0) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


async def test_swallowed_reply_is_taken_out_frame_by_frame_and_all_else_passes(
    proxy: TcpProxy, server: Server
) -> None:
    server.name = b""
    caller = await connected(proxy)
    first = PREFACE + frame(HEADERS, 1, b"early")
    caller.say(first)
    await wait_for(lambda: server.heard == first, "the preface arrives")
    proxy.swallow_reply()
    second = frame(HEADERS, 3, b"muted") + frame(DATA, 3, b"x") + frame(HEADERS, 5, b"late")
    caller.say(second[:20])  # frames come in pieces
    caller.say(second[20:])
    await wait_for(lambda: server.heard == first + second, "the requests arrive whole")

    replies = [
        frame(HEADERS, 1, b"to 1"),
        frame(HEADERS, 3, b"to 3"),
        frame(PING, 0, b"12345678"),
        frame(DATA, 3, b"to 3"),
        frame(HEADERS, 3, b"", flags=0x5),
        frame(DATA, 5, b"to 5"),
    ]
    server.writers[0].write(b"".join(replies))
    nobody = 0x7FFF_FFFF
    expected = [
        replies[0],
        frame(HEADERS, nobody, b"to 3"),
        replies[2],
        frame(DATA, nobody, b"to 3"),
        frame(HEADERS, nobody, b"", flags=0x5),
        replies[5],
    ]
    assert await caller.hear(len(b"".join(replies))) == b"".join(expected)
    assert proxy.swallowed_replies == 1
    assert proxy.frames[DOWN, PING] == 1
    assert proxy.frames[UP, HEADERS] == 3
