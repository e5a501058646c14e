"""A host, a network and processes for actor trees, all within one `VirtualLoop`.

The product's own code runs on both ends: programs, connections, houses, meshes. Made up are only
the channel (in place of gRPC's), the start of a process, and the actors' threads. Everything on the
way takes a time that is drawn, so that news of one event comes in any order: an end of stream, an
answer, the kernel's word. Invariant: what a process sent to another arrives in order; after its end
nothing leaves it.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from uuid import UUID

import grpc

from stagekeeper.actor.failure import ExitInfo
from stagekeeper.actor.hosting.actor_service import ActorService
from stagekeeper.actor.hosting.actor_thread import ActorThread
from stagekeeper.actor.hosting.connect import Connections, ConnectService
from stagekeeper.actor.owning.local_procs import not_started
from stagekeeper.actor.owning.proc_places import ProcEnd, ProcFailed
from stagekeeper.actor.place import Place
from stagekeeper.actor.program import Program, set_current_program
from stagekeeper.host.proc_launch import ProcNotStarted
from stagekeeper.host.process import ExitStatus
from tests.harness.virtual_time import LoopProcess, VirtualLoop, in_no_process, process_here

_STOP_BUDGET_S = 8.0


class Host:
    """All processes of one tree, and the ways between them.

    Args:
        chance: draws how long everything takes.
    """

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.processes: dict[str, MadeUpProcess] = {}
        self.bad_starts = 0
        """So many of the next processes do not come up."""
        self.plain_code_s = 0.0
        """What each piece of plain code takes, besides what is drawn."""
        self._last_port = 0

    def process(self, name: str, parent: MadeUpProcess | None) -> MadeUpProcess:
        self._last_port += 1
        process = MadeUpProcess(self, name, f"made-up:{self._last_port}", self._last_port, parent)
        self.processes[process.address] = process
        return process

    @property
    def living(self) -> list[MadeUpProcess]:
        return [process for process in self.processes.values() if not process.is_dead]

    def soon(self, callback: Callable[[], object]) -> None:
        """Call it after what something takes on one host."""
        in_no_process(self.loop, self.delay_s(), callback)

    def delay_s(self) -> float:
        return self.chance.choice((0.0, 0.0002, 0.0005, 0.001, 0.003))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the product's code meet this host instead of the real one."""
        with (
            mock.patch("stagekeeper.actor.hosts.current_program", program_here),
            mock.patch("stagekeeper.actor.reference_codec.current_program", program_here),
            mock.patch("stagekeeper.actor.program.current_program", program_here),
            mock.patch("stagekeeper.actor.tree_root.Program", MadeUpProgram),
            mock.patch("stagekeeper.actor.hosts.LocalProcSource", MadeUpSource),
            mock.patch("stagekeeper.actor.hosting.hosted_actor.ActorThread", InlineThread),
            mock.patch("grpc.aio.insecure_channel", self._channel),
            mock.patch("uuid.uuid4", lambda: UUID(int=self.chance.getrandbits(128))),
        ):
            try:
                yield
            finally:
                set_current_program(None)

    def _channel(self, address: str, options: Any = None) -> Channel:
        caller = process_here()
        assert isinstance(caller, MadeUpProcess)
        return Channel(self, caller, address)


def program_here() -> Program:
    """Return the program of the process whose code runs here."""
    process = process_here()
    assert isinstance(process, MadeUpProcess) and process.program is not None
    return process.program


class MadeUpProcess(LoopProcess):
    """One process.

    Attributes:
        program: once it is up.
        exit: how it ended.
    """

    def __init__(
        self, host: Host, name: str, address: str, pid: int, parent: MadeUpProcess | None
    ) -> None:
        super().__init__(host.loop)
        self.host = host
        self.name = name
        self.address = address
        self.pid = pid
        self.children: list[MadeUpProcess] = []
        self.program: Program | None = None
        self.services: tuple[Any, ...] = ()
        self.exit: ExitStatus | None = None
        self.exited: asyncio.Future[None] = host.loop.create_future()
        self.ways: dict[_Way, None] = {}
        if parent is not None:
            parent.children.append(self)

    def end(self, status: ExitStatus) -> None:
        """It is over, and with it all that it started."""
        if self.is_dead:
            return
        self.kill()
        self.exit = status
        for child in self.children:
            child.end(ExitStatus(signal=signal.SIGKILL))
        for way in list(self.ways):
            way.lost(self)
        self.host.soon(self._reaped)

    def _reaped(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


class _Left(BaseException):
    """Ends what runs in a process that has ended: no line after it is reached."""


class MadeUpProgram(Program):
    """A program that listens on a made-up network."""

    async def start(self) -> str:
        process = process_here()
        assert isinstance(process, MadeUpProcess)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._connections = Connections(self, self.house)
        process.services = (
            ConnectService(self._connections),
            ActorService(self, self.house, self),
        )
        process.program = self
        self.address = process.address

        def leave(error: BaseException) -> None:
            code = error.code if isinstance(error, SystemExit) else 1
            process.end(ExitStatus(code=code or 0))  # type: ignore[arg-type]
            raise _Left

        self.house.on_exit = leave
        self.links.start()
        return self.address

    async def close(self) -> None:
        await self.links.close()
        self._connections.end_streams()
        await asyncio.sleep(0.01)


class MadeUpSource:
    """Starts made-up processes as children of one."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def start(self, index: int, instance_id: str, name: str) -> MadeUpProc:
        parent = process_here()
        assert isinstance(parent, MadeUpProcess)
        host = parent.host
        process = host.process(name, parent)
        is_bad = host.bad_starts > 0
        host.bad_starts -= is_bad
        try:
            await asyncio.sleep(host.delay_s())
            if is_bad:
                process.end(ExitStatus(code=3))
            else:
                program = self._child(process, instance_id)
                await asyncio.wait({process.start(program.start())})
            await asyncio.sleep(host.delay_s())
        except BaseException:
            process.end(ExitStatus(signal=signal.SIGKILL))
            raise
        if process.is_dead:
            error = ProcNotStarted(f"{name} ended before it was up", process.exit)
            raise ProcFailed(not_started(instance_id, name, error))
        return MadeUpProc(process, instance_id, self._program.boot_id)

    def _child(self, process: MadeUpProcess, instance_id: str) -> MadeUpProgram:
        of = self._program
        return MadeUpProgram(
            instance_id=instance_id,
            tree_path=f"{of.tree_path}/{instance_id}",
            token=of.token,
            boot_id=of.boot_id,
            lease_s=of.lease_s,
        )

    async def close(self) -> None: ...


class MadeUpProc:
    """A made-up process, for who started it."""

    def __init__(self, process: MadeUpProcess, instance_id: str, boot_id: str) -> None:
        self._process = process
        self.place = Place(process.address, instance_id, process.pid, boot_id)

    async def ended(self) -> ProcEnd:
        await asyncio.shield(self._process.exited)
        return ProcEnd(ExitInfo.of(self._process.exit), detected_by="pidfd")

    async def end(self, budget_s: float) -> bool:
        process = self._process
        if not process.is_dead:
            _ = process.start(self._ask_to_end())
        try:
            await asyncio.wait_for(asyncio.shield(process.exited), budget_s)
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def _ask_to_end(self) -> None:
        program = self._process.program
        assert program is not None
        await program.house.stop_all(_STOP_BUDGET_S)
        await program.close()
        self._process.end(ExitStatus(code=0))

    async def kill(self) -> None:
        self._process.end(ExitStatus(signal=signal.SIGKILL))
        await asyncio.shield(self._process.exited)


class InlineThread(ActorThread):
    """In place of an actor's thread: its pieces run on the loop, and take as long as is drawn."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: deque[tuple[Any, ...]] = deque()

    def run(
        self, piece: Callable[[], Any], context: contextvars.Context, what: str
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsettled += 1
        self._idle.clear()
        self._waiting.append((piece, future, context, what))
        self._next()
        return future

    def _next(self) -> None:
        if self._waiting and not self.running:
            piece, future, context, self.running = self._waiting.popleft()
            asyncio.get_running_loop().call_soon(self._begin, piece, future, context)

    def _begin(
        self, piece: Callable[[], Any], future: asyncio.Future[Any], context: contextvars.Context
    ) -> None:
        result, error = None, None
        try:
            result = context.run(piece)
        except BaseException as raised:
            error = raised
        process = process_here()
        assert isinstance(process, MadeUpProcess)
        takes_s = process.host.delay_s() + process.host.plain_code_s
        asyncio.get_running_loop().call_later(takes_s, self._end, future, result, error)

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.running = ""
        self._settle(future, result, error)
        self._next()

    def close(self) -> None:
        """There is no thread to end."""


# --- the network


def _lost_error() -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNAVAILABLE, "the connection broke")


def _error(code: grpc.StatusCode, text: str, trailers: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=text
    )


class _Aborted(Exception):
    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.error = error


class _Way:
    """One call from a process to another: what both ends say, and its end.

    A call with one answer is a stream of one message each way.
    """

    def __init__(self, channel: Channel, method: str) -> None:
        self.channel = channel
        self.host = channel.host
        self.loop = channel.host.loop
        self.method = method
        self.caller = channel.caller
        self.callee: MadeUpProcess | None = None
        self.to_caller = _Queue(self)
        self.to_callee = _Queue(self)
        self.handler: asyncio.Task[Any] | None = None
        self.caller.ways[self] = None

    def dial(self) -> None:
        """Reach the other end, or find that there is none."""
        callee = self.host.processes.get(self.channel.address)
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

    def lost(self, process: MadeUpProcess) -> None:
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

    def __init__(self, way: _Way) -> None:
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

    def __init__(self, way: _Way) -> None:
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

    def __init__(self, host: Host, caller: MadeUpProcess, address: str) -> None:
        self.host = host
        self.caller = caller
        self.address = address
        self.ways: dict[_Way, None] = {}
        self._calls: dict[asyncio.Future[Any], None] = {}

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        def call(request: Any, timeout: float | None = None) -> Any:
            return self._call(method, request, timeout)

        return call

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:
        return None

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Any:
        def call() -> _Stream:
            way = _Way(self, method)
            self.ways[way] = None
            way.dial()
            return _Stream(way)

        return call

    stream_unary = unary_stream

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        way = _Way(self, method)
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

    def __init__(self, way: _Way) -> None:
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
