"""The bare ceiling: the same grpcio in the same kind of process, doing nothing.

Run as a program it answers every unary rpc with its request's bytes, unread, and prints its port.
(So it also passes for an agent without devices when a supervisor dials one back.) The load
generator is the same for it and for what it is compared with.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from stagekeeper.wire.transport import CLIENT_OPTIONS, SERVER_OPTIONS

METHOD = "/benchmark.Ceiling/NoOp"


async def _no_op(request: bytes, _: object) -> bytes:
    return request


class AnyMethod(grpc.GenericRpcHandler):
    """Serves every method alike. Without serializers: bytes in, bytes out."""

    def __init__(self, handler: grpc.RpcMethodHandler[bytes, bytes]) -> None:
        self._handler = handler

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        return self._handler


async def serve(handler: grpc.RpcMethodHandler[bytes, bytes]) -> None:
    """Be a bare server: print the port, and end when whoever holds standard input lets go of it."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((AnyMethod(handler),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


@asynccontextmanager
async def bare_server(module: str) -> AsyncIterator[str]:
    """Run a module that calls `serve` as a process of its own; yields its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10.0)


@asynccontextmanager
async def no_op_server() -> AsyncIterator[str]:
    """Run the no-op server; yields its address."""
    async with bare_server("benchmarks.ceiling") as address:
        yield address


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


Call = Callable[[], Awaitable[object]]


def caller(channel: grpc.aio.Channel, method: str, body: bytes) -> Call:
    """Return a call of `method` that sends `body` as it is and reads nothing of the answer.

    What is compared with the ceiling is sent this way too, so that only the servers differ.
    """
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    return lambda: send(body, timeout=30.0, wait_for_ready=True)


async def rate(calls: list[Call], *, in_flight: int, for_s: float) -> float:
    """Return calls per second with `in_flight` callers, each taking its turn of `calls`."""
    end = time.perf_counter() + for_s
    done = 0

    async def caller(call: Call) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(caller(calls[index % len(calls)]) for index in range(in_flight)))
    return done / (time.perf_counter() - began)


async def round_trips(call: Call, count: int) -> list[float]:
    """Return the seconds that each of `count` calls took, one at a time."""
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - began)
    return samples


if __name__ == "__main__":
    asyncio.run(serve(grpc.unary_unary_rpc_method_handler(_no_op)))
