"""The keepalive settings of both ends, as the pair that they are: recovery-R37.

Pings and GOAWAYs are counted on the wire. Ten idle minutes are run in three seconds, with
every number that has to do with pings scaled by the same; the whole length is a soak test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from stagekeeper.wire.transport import BEATING_CLIENT_OPTIONS, CLIENT_OPTIONS, SERVER_OPTIONS
from tests.fakes.http2_reply import GOAWAY, PING
from tests.fakes.tcp_proxy import DOWN, UP, TcpProxy
from tests.harness.waiting import wait_for

Options = Sequence[tuple[str, int]]
EchoCall = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

SCALE = 200
SCALED = (
    "grpc.keepalive_time_ms",
    "grpc.http2.min_ping_interval_without_data_ms",
)
STRIKES_ALLOWED_BY_DEFAULT = 2


def scaled(options: Options) -> Options:
    return [(name, value // SCALE if name in SCALED else value) for name, value in options]


class Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def echo(request: bytes, context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


@pytest.mark.parametrize("client_options", [CLIENT_OPTIONS, BEATING_CLIENT_OPTIONS])
def test_recovery_R37_server_allows_what_the_client_sends(client_options: Options) -> None:
    client, server = dict(client_options), dict(SERVER_OPTIONS)
    allowed_each_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert 2 * allowed_each_ms <= client["grpc.keepalive_time_ms"]  # with room for jitter
    assert server["grpc.http2.max_ping_strikes"] == 0  # 0: none is counted
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.max_pings_without_data"] == 0  # 0: as many as it likes
    assert server["grpc.http2.max_pings_without_data"] == 0
    assert client["grpc.http2.ping_timeout_ms"] >= client["grpc.keepalive_timeout_ms"]
    # A dead connection is found out in this time: tests of that run in a quarter of it.
    assert client["grpc.keepalive_time_ms"] + client["grpc.keepalive_timeout_ms"] <= 8_000
    # What a client sends by default after two minutes of trying is what ours sends after a second.
    assert client["grpc.use_local_subchannel_pool"] == 1
    assert client["grpc.max_reconnect_backoff_ms"] <= 1_000


async def idle(seconds: float, client: Options, server_options: Options) -> TcpProxy:
    """Let one connection be idle for so long; return the proxy that counted its frames."""
    server = grpc.aio.server(handlers=[Echo()], options=list(server_options))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with TcpProxy(f"127.0.0.1:{port}") as proxy:
            async with grpc.aio.insecure_channel(proxy.url, options=list(client)) as channel:
                echo: EchoCall = channel.unary_unary("/any/echo")
                assert await echo(b"before", timeout=10) == b"before"
                loop = asyncio.get_running_loop()
                until = loop.time() + seconds
                await wait_for(
                    lambda: loop.time() > until or proxy.frames[DOWN, GOAWAY],
                    "an idle while",
                    within_s=seconds + 60,
                )
                assert await echo(b"after", timeout=10) == b"after"
            return proxy
    finally:
        await server.stop(0)


async def test_recovery_R37_ten_idle_minutes_in_short_without_a_goaway() -> None:
    proxy = await idle(600 / SCALE, scaled(CLIENT_OPTIONS), scaled(SERVER_OPTIONS))
    assert proxy.frames[UP, PING] >= 30  # 150 on a machine that has nothing else to do
    assert proxy.frames[DOWN, GOAWAY] == 0
    assert proxy.connection_count == 1


async def test_recovery_R37_server_that_was_not_told_sends_such_a_client_away() -> None:
    """That the test above can fail: the same client before gRPC's own defaults."""
    proxy = await idle(600 / SCALE, scaled(CLIENT_OPTIONS), [("grpc.so_reuseport", 0)])
    assert proxy.frames[DOWN, GOAWAY] >= 1
    assert proxy.frames[UP, PING] > STRIKES_ALLOWED_BY_DEFAULT


@pytest.mark.soak
@pytest.mark.timeout(700)
async def test_recovery_R37_ten_idle_minutes_without_a_goaway() -> None:
    proxy = await idle(600, CLIENT_OPTIONS, SERVER_OPTIONS)
    assert proxy.frames[UP, PING] >= 100
    assert proxy.frames[DOWN, GOAWAY] == 0
    assert proxy.connection_count == 1
