"""Looking at an endpoint: who is gone, who is only silent, and who is somebody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from stagekeeper.core.ids import Epoch
from stagekeeper.supervisor.endpoint_look import (
    Served,
    Silent,
    Stranger,
    Vacant,
    ask,
    listen_problem,
    look,
)
from tests.fakes.other_reign import OtherReign
from tests.fakes.supervisor_server import SupervisorServer
from tests.fakes.tcp_proxy import TcpProxy

SOON_S = 0.3
LONG_S = 20.0
NINE = Epoch(9, "nine")


@asynccontextmanager
async def listener(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
) -> AsyncIterator[str]:
    """Listen, and do with every connection what `answer` says."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer(reader, writer)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_supervisor_that_answers_is_served():
    async with OtherReign(NINE, cluster="blue") as other:
        assert await look(other.endpoint, LONG_S) == Served("blue", NINE)


async def test_supervisor_behind_a_name_of_several_addresses_is_found():
    async with OtherReign(NINE) as other:
        port = other.endpoint.rpartition(":")[2]
        assert await look(f"localhost:{port}", LONG_S) == Served("default", NINE)
    assert await look(f"localhost:{port}", LONG_S) == Vacant(is_refused=True)


async def test_refused_connection_is_vacant():
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        assert await look(endpoint, LONG_S) == Vacant(is_refused=True)


async def test_proxy_with_nobody_behind_it_is_vacant():
    async with TcpProxy() as proxy:
        # Closed before, while or after we say something: all the same.
        for _ in range(100):
            assert await look(proxy.url, LONG_S) == Vacant(is_refused=False)


async def test_connection_that_is_accepted_by_the_kernel_alone_is_silent():
    """So a stopped process looks; gRPC itself reports it like one that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        assert isinstance(await look(endpoint, SOON_S), Silent)
        # For longer than gRPC takes to give up such a connection by itself.
        assert isinstance(await look(endpoint, 2.5), Silent)


async def test_network_that_swallows_is_silent():
    async with OtherReign(NINE) as other, TcpProxy(other.endpoint) as proxy:
        proxy.loses_new = True
        assert isinstance(await look(proxy.url, SOON_S), Silent)


async def test_supervisor_whose_answer_is_swallowed_is_silent():
    async with OtherReign(NINE) as other, TcpProxy(other.endpoint) as proxy:
        proxy.swallow_reply()
        assert isinstance(await look(proxy.url, SOON_S), Silent)
        assert other.asked == 1


async def test_supervisor_that_is_slow_is_served_as_soon_as_it_answers():
    async with OtherReign(NINE) as other, TcpProxy(other.endpoint) as proxy:
        proxy.delay(0.1)
        assert await look(proxy.url, LONG_S) == Served("default", NINE)


async def test_name_that_cannot_be_resolved_is_silent():
    found = await look("nobody.invalid:7070", LONG_S)
    assert isinstance(found, Silent)
    assert "nobody.invalid" in found.why


async def test_grpc_server_without_discovery_is_a_stranger():
    server = await SupervisorServer().start()
    try:
        found = await look(server.endpoint, LONG_S)
        assert isinstance(found, Stranger)
        assert "UNIMPLEMENTED" in found.why
    finally:
        await server.stop()


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"?"])
async def test_whoever_speaks_something_else_is_a_stranger(said):
    def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async with listener(say) as endpoint:
        assert isinstance(await look(endpoint, LONG_S), Stranger)


async def test_asking_alone_takes_nobody_for_gone():
    assert isinstance(await ask("127.0.0.1:1", SOON_S), Silent)
    async with OtherReign(NINE) as other:
        assert await ask(other.endpoint, LONG_S) == Served("default", NINE)


def test_address_that_can_be_listened_at_has_no_problem_and_stays_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert listen_problem(address) is not None
    assert listen_problem(address) is None
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass
    assert listen_problem("127.0.0.1:0") is None
    assert listen_problem("192.0.2.1:7070") is not None, "of no machine (RFC 5737)"


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_proxy_that_says_it_has_nobody_behind_it_is_vacant(status):
    def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    async with listener(say) as endpoint:
        assert await look(endpoint, LONG_S) == Vacant(is_refused=False)


@pytest.mark.parametrize(("status", "is_vacant"), [("503", True), ("429", False)])
async def test_proxy_that_says_so_in_http2_is_vacant_too(status, is_vacant):
    """Its frames: SETTINGS, and HEADERS that end the stream, `:status` as a literal (RFC 7541)."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = b"\x08" + bytes([len(status)]) + status.encode()
        settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        writer.write(settings)
        seen = await reader.read(65_536)
        while len(seen) < 100:  # more than a knock: a request is in it, or follows
            if not (more := await reader.read(65_536)):
                break
            seen += more
        else:
            acknowledged = bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))
            frame = len(headers).to_bytes(3, "big") + bytes((1, 5, 0, 0, 0, 1)) + headers
            writer.write(acknowledged + frame)
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        found = await look(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 5.0)
    assert isinstance(found, Vacant) is is_vacant, found
