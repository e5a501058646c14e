"""A network between the processes of a `VirtualLoop`: in place of gRPC's channels and contexts.

What is sent arrives in order and late; what a call ends with comes as late, and news of the end of
a process comes to each who had to do with it in its own time. Closing a channel cancels the calls
on it, as gRPC does. Invariant: after the end of a process nothing leaves it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from tests.harness.virtual_time import LoopProcess, VirtualLoop, in_no_process


class Network(Protocol):
    """Where processes are found, and how long the way between two of them takes."""

    loop: VirtualLoop
    chance: random.Random

    def at(self, address: str) -> End | None:
        """Return the process that listens at an address."""
        ...

    def soon(self, callback: Callable[[], object]) -> None: ...

    def delay_s(self) -> float: ...


class End(LoopProcess):
    """A process, as the network knows it."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self.services: tuple[Any, ...] = ()
        self.ways: dict[Way, None] = {}


def _lost_error() -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNAVAILABLE, "the connection broke")


def _error(code: grpc.StatusCode, text: str, trailers: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=text
    )


class _Aborted(Exception):
    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.error = error


class Way:
    """One call from a process to another: what both ends say, and its end.

    A call with one answer is a stream of one message each way.
    """

    def __init__(self, channel: Channel, method: str) -> None:
        self.channel = channel
        self.host = channel.host
        self.loop = channel.host.loop
        self.method = method
        self.caller = channel.caller
        self.callee: End | None = None
        self.to_caller = _Queue(self)
        self.to_callee = _Queue(self)
        self.handler: asyncio.Task[Any] | None = None
        self.caller.ways[self] = None

    def dial(self) -> None:
        """Reach the other end, or find that there is none."""
        callee = self.host.at(self.channel.address)
        if callee is None or callee.is_dead:
            self.host.soon(lambda: self._caller_hears(_lost_error()))
            return
        self.callee = callee
        callee.ways[self] = None
        self.host.soon(self._begin)

    def _begin(self) -> None:
        callee = self.callee
        if callee is None or callee.is_dead or self.to_caller.end is not None:
            return
        service, name = self.method.rsplit("/", 1)
        found = callee.services[0 if service.endswith("StageService") else 1]
        self.handler = callee.start(self._handle(getattr(found, name), name == "Connect"))

    async def _handle(self, method: Any, is_stream: bool) -> None:
        """Run in the process that is called."""
        context = _ServerContext(self)
        try:
            if is_stream:
                await method(None, context)
            else:
                self.to_caller.send(await method(await self.to_callee.get(), context))
            end: Any = grpc.aio.EOF
        except _Aborted as aborted:
            end = aborted.error
        except asyncio.CancelledError:
            return
        except Exception as error:
            end = _error(grpc.StatusCode.UNKNOWN, repr(error))
        self.to_caller.send_end(end)
        self._let_go()

    def lost(self, process: End) -> None:
        """One of the two processes has ended."""
        self._let_go()
        if process is self.caller:
            self.cancel()
        else:
            self.to_caller.send_end(_lost_error())

    def cancel(self) -> None:
        """The caller wants no more, or is no more."""

        def arrived() -> None:
            self.to_callee.finish(grpc.aio.EOF)
            if self.handler is not None and self.host.chance.random() < 0.7:
                self.handler.cancel()

        self.to_callee.send_last(arrived)
        self._let_go()

    def _caller_hears(self, end: Any) -> None:
        self._let_go()
        self.to_caller.finish(end)

    def _let_go(self) -> None:
        self.caller.ways.pop(self, None)
        self.channel.ways.pop(self, None)
        if self.callee is not None:
            self.callee.ways.pop(self, None)


class _Queue:
    """One direction, in order."""

    def __init__(self, way: Way) -> None:
        self._host = way.host
        self._arrived: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last_at = 0.0
        self.end: Any = None

    def send(self, message: Any) -> None:
        copy = type(message).FromString(message.SerializeToString())
        self.send_last(lambda: self._put(copy))

    def send_end(self, end: Any) -> None:
        self.send_last(lambda: self.finish(end))

    def send_last(self, arrive: Callable[[], object]) -> None:
        now = self._host.loop.now
        # A little later than what went before: timers of one moment come in any order.
        self._last_at = max(self._last_at + 1e-7, now + self._host.delay_s())
        in_no_process(self._host.loop, self._last_at - now, arrive)

    def _put(self, message: Any) -> None:
        if self.end is None:
            self._arrived.append(message)
            self._wake()

    def finish(self, end: Any) -> None:
        """Say that nothing comes any more: EOF, or an error."""
        if self.end is None:
            self.end = end
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        while not self._arrived and self.end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._arrived:
            return self._arrived.popleft()
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


class _ServerContext:
    """What a handler has of gRPC's context."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def read(self) -> Any:
        return await self._way.to_callee.get()

    async def write(self, message: Any) -> None:
        await asyncio.sleep(0)
        self._way.to_caller.send(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise _Aborted(_error(code, details, trailing_metadata))


class Channel:
    """In place of gRPC's: what the generated stubs need of it."""

    def __init__(self, host: Network, caller: End, address: str) -> None:
        self.host = host
        self.caller = caller
        self.address = address
        self.ways: dict[Way, None] = {}
        self._calls: dict[asyncio.Future[Any], None] = {}

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        def call(request: Any, timeout: float | None = None) -> Any:
            return self._call(method, request, timeout)

        return call

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:
        return None

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Any:
        def call() -> _Stream:
            way = Way(self, method)
            self.ways[way] = None
            way.dial()
            return _Stream(way)

        return call

    stream_unary = unary_stream

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        way = Way(self, method)
        self.ways[way] = None
        way.dial()
        way.to_callee.send(request)
        answer = asyncio.ensure_future(way.to_caller.get())
        self._calls[answer] = None
        try:
            # As gRPC does: a close of the channel cancels the call, not the task that awaits it.
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            self._calls.pop(answer, None)
            if not answer.done() or answer.cancelled():
                answer.cancel()
                way.cancel()
        assert found is not grpc.aio.EOF
        return found

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls):
            call.cancel()
        for way in list(self.ways):
            way.cancel()


class _Stream:
    """The caller's end of a stream."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def write(self, message: Any) -> None:
        await asyncio.sleep(0)
        end = self._way.to_caller.end
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            raise asyncio.InvalidStateError("the stream is over")
        self._way.to_callee.send(message)

    async def read(self) -> Any:
        return await self._way.to_caller.get()

    def cancel(self) -> None:
        self._way.cancel()
