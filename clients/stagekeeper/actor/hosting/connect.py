"""The serving end of a connection: frames in, each to its actor; answers out, as they are ready.

Decided here: who is let in (the token, and the process that was meant), what is taken of it, and
how a stream ends. Not decided here: what a sound frame is (message_check). Invariants: what a
stream brought in is given up when the stream is over, since nobody could be answered; and a frame
that is wrong is answered by itself, and ends nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any, Final, Protocol

import grpc

from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.message_check import (
    Problem,
    call_problems,
    hello_problems,
    news_problems,
    told,
)
from stagekeeper.actor.hosting.sessions import Session
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceServicer
from stagekeeper.wire.actor_limits import MOST_CONNECTION_CALLS, MOST_CONNECTIONS, MOST_FRAMES
from stagekeeper.wire.error_details import fit_message, pack

Context = grpc.aio.ServicerContext[Any, Any]

_HELLO_LIMIT_S: Final = 10.0
"""How long a stream may stay without its first frame."""

_LEAST_BEAT_S: Final = 0.02


class ProcIdentity(Protocol):
    """Which process serves. One without a token lets everybody in that reaches it."""

    @property
    def instance_id(self) -> str: ...

    @property
    def token(self) -> str: ...

    @property
    def boot_id(self) -> str: ...

    def rank_failed(self, news: pb.RankFailed) -> None:
        """Hear of a mesh of this process, from one that met its end."""
        ...


class TakesMessages(Protocol):
    """What is behind a connection: the actors of a process, or a deployed stage."""

    @property
    def is_closing(self) -> bool: ...

    @property
    def session_count(self) -> int:
        """Of those whose connection may come back, with those that have one."""
        ...

    def session(self, hello: pb.Hello, own_boot_id: str) -> Session: ...

    def others_count(self, session_id: str) -> int: ...

    def take(self, target_id: str, message: Message) -> None: ...

    def cancel(self, target_id: str, message: Message) -> None: ...

    def over(self, target_id: str, message: Message) -> None: ...

    def no_room(self, call: pb.CallFrame, why: str) -> None:
        """Hear of a message that nobody waits for, and that is not even taken."""
        ...


async def refuse(
    context: Context,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    problems: Sequence[Problem] = (),
) -> None:
    """End a call with a reason."""
    trailers = pack(code, message, reason=reason, violations=problems)
    await context.abort(code, fit_message(message), trailing_metadata=trailers)


async def refuse_fields(context: Context, problems: Sequence[Problem]) -> None:
    """End a call whose request is wrong."""
    code = grpc.StatusCode.INVALID_ARGUMENT
    await refuse(context, code, "BAD_FIELD", f"the request is refused: {told(problems)}", problems)


def is_token(given: str, own: str) -> bool:
    """Compare two secrets in a time that says nothing of them."""
    return hmac.compare_digest(given.encode(), own.encode())


class Connections:
    """Serves `Connect` for one process."""

    def __init__(self, proc: ProcIdentity, house: TakesMessages) -> None:
        self._proc = proc
        self._house = house
        self._open: set[Outbox] = set()

    def end_streams(self) -> None:
        """Let every stream end when what it has to say is said."""
        for outbox in self._open:
            outbox.close()

    async def serve(self, context: Context) -> None:
        """Serve one stream until either end closes it."""
        try:
            first = await asyncio.wait_for(context.read(), _HELLO_LIMIT_S)
        except TimeoutError:
            first = grpc.aio.EOF
        hello = await self._admit(first, context)
        connection = _Connection(self._proc, self._house, hello, context)
        self._open.add(connection.outbox)
        try:
            problems = await connection.serve(first)
        finally:
            self._open.discard(connection.outbox)
        if problems:
            await refuse_fields(context, problems)

    async def _admit(self, first: Any, context: Context) -> pb.Hello:
        code = grpc.StatusCode
        if first is grpc.aio.EOF or not first.frames or not first.frames[0].HasField("hello"):
            await refuse_fields(context, [("frames[0]", "has to be a hello")])
        hello: pb.Hello = first.frames[0].hello
        if self._proc.token and not is_token(hello.token, self._proc.token):
            await refuse(
                context,
                code.UNAUTHENTICATED,
                "BAD_TOKEN",
                "hello.token: is not that of the actor tree that this process belongs to",
            )
        if problems := [*hello_problems(hello), *_too_many(first)]:
            await refuse_fields(context, problems)
        if hello.peer_instance_id and hello.peer_instance_id != self._proc.instance_id:
            await refuse(
                context,
                code.ABORTED,
                "STALE_ROUTE",
                f"this is process {self._proc.instance_id}, not {hello.peer_instance_id:.64}",
            )
        if self._house.is_closing:
            await refuse(context, code.UNAVAILABLE, "DRAINING", "this process is ending")
        if max(len(self._open), self._house.session_count) >= MOST_CONNECTIONS:
            await refuse(
                context,
                code.RESOURCE_EXHAUSTED,
                "TOO_MANY_CALLS",
                f"this process has {MOST_CONNECTIONS} connections, and takes no more",
            )
        return hello


class ConnectService(StageServiceServicer):
    """Serves `Connect` for all actors of a process; `Call` is for deployed stages."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def Connect(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        await self._connections.serve(context)

    async def Call(self, request: pb.CallRequest, context: Context) -> pb.CallResponse:
        await _refuse_call(context)
        raise AssertionError("refuse returned")

    async def CallStream(  # type: ignore[override]
        self, request: pb.CallStreamRequest, context: Context
    ) -> None:
        await _refuse_call(context)


async def _refuse_call(context: Context) -> None:
    await refuse(
        context,
        grpc.StatusCode.UNIMPLEMENTED,
        "NOT_YET",
        "a process of an actor tree is called over Connect, by the processes of its tree",
    )


def _is_read(task: asyncio.Task[Any]) -> None:
    """Take what ended a reader or writer: the stream is over, and how is nobody's news."""
    if not task.cancelled():
        task.exception()


def _too_many(request: pb.ConnectRequest) -> list[Problem]:
    count = len(request.frames)
    if count <= MOST_FRAMES:
        return []
    return [("frames", f"has {count} entries, at most {MOST_FRAMES} are taken")]


class _Connection:
    """One stream."""

    def __init__(
        self, proc: ProcIdentity, house: TakesMessages, hello: pb.Hello, context: Context
    ) -> None:
        self.outbox = Outbox(pb.ConnectResponse)
        self._beat_s = hello.beat_s
        self._proc = proc
        self._house = house
        self._context = context
        self._session = house.session(hello, proc.boot_id)
        self._running: dict[int, tuple[str, Message]] = {}
        self._casts: dict[Message, str] = {}

    async def serve(self, first: pb.ConnectRequest) -> list[Problem]:
        """Serve until either end has enough; return what was wrong, where that is why."""
        own = pb.Hello(
            instance_id=self._proc.instance_id,
            boot_id=self._proc.boot_id,
            session_id=self._session.session_id if self._session.was_attached else "",
        )
        self.outbox.put(pb.Frame(hello=own))
        writing = asyncio.create_task(self.outbox.run(self._write), name="connect writer")
        reading: asyncio.Task[list[Problem]] | None = None
        beating = asyncio.create_task(self._beat_on(), name="connect beats")
        self._session.attach(self.outbox)
        try:
            self._heard(first.frames[1:])
            reading = asyncio.create_task(self._read(), name="connect reader")
            # The writer ends first when this process is ending.
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await asyncio.wait({reading})
            return [] if reading.cancelled() or reading.exception() else reading.result()
        finally:
            self._give_up()
            self.outbox.close()
            for task in (writing, reading, beating):
                if task is not None:
                    task.cancel()
                    task.add_done_callback(_is_read)
            self._session.detach(self.outbox)

    async def _beat_on(self) -> None:
        """Say that this process lives, whatever it reads or does not read meanwhile."""
        while self._beat_s:
            await asyncio.sleep(max(_LEAST_BEAT_S, self._beat_s))
            self._beat()

    def _beat(self) -> None:
        count = self._house.others_count(self._session.session_id)
        self.outbox.beat(pb.Beat(other_actor_count=count))

    async def _write(self, message: pb.ConnectResponse) -> None:
        await self._context.write(message)
        if self.outbox.is_crowded:
            self._session.heard()  # it reads, slowly; meanwhile its own word may have to wait

    async def _read(self) -> list[Problem]:
        read = self._context.read
        while (request := await read()) is not grpc.aio.EOF:
            if problems := _too_many(request):
                return problems
            self._heard(request.frames)
            if self.outbox.is_full:
                await self.outbox.space()
        return []

    def _heard(self, frames: Any) -> None:
        self._session.heard()
        for frame in frames:
            kind = frame.WhichOneof("body")
            if kind == "call":
                self._called(frame.frame_id, frame.call)
            elif kind == "cancel":
                found = self._running.pop(frame.frame_id, None)
                if found is not None:
                    self._house.cancel(*found)
            elif kind == "more":
                running = self._running.get(frame.frame_id)
                if running is not None:
                    running[1].more(frame.more.count)
            elif kind == "failure":
                if problems := news_problems(frame.failure):
                    self._is_wrong(0, problems)
                else:
                    self._proc.rank_failed(frame.failure)
            elif kind == "beat":
                self._beat()
        self.outbox.flush()

    def _called(self, frame_id: int, call: pb.CallFrame) -> None:
        is_taken = frame_id in self._running
        if problems := call_problems(call, frame_id, is_taken=is_taken):
            # A number that is taken is that of a call which has done nothing wrong.
            self._is_wrong(0 if is_taken or call.is_cast else frame_id, problems)
            return
        if len(self._running) + len(self._casts) >= MOST_CONNECTION_CALLS:
            what = f"{MOST_CONNECTION_CALLS} of this connection are under way"
            if call.is_cast:
                self._house.no_room(call, what)
            error = pb.CallError(
                reason="TOO_MANY_CALLS", message=f"{call.endpoint} did not run: {what}"
            )
            self.outbox.put(pb.Frame(frame_id=0 if call.is_cast else frame_id, error=error))
            return
        message = Message(call, frame_id, self.outbox, self._over)
        if call.is_cast:
            self._casts[message] = call.target_id
        else:
            self._running[frame_id] = (call.target_id, message)
        self._house.take(call.target_id, message)

    def _is_wrong(self, frame_id: int, problems: Sequence[Problem]) -> None:
        error = pb.CallError(reason="BAD_FIELD", message=f"the frame is refused: {told(problems)}")
        self.outbox.put(pb.Frame(frame_id=frame_id, error=error))

    def _over(self, message: Message) -> None:
        if message.is_cast:
            target = self._casts.pop(message, None)
        else:
            found = self._running.pop(message.frame_id, None)
            target = None if found is None else found[0]
        if target is not None:
            self._house.over(target, message)

    def _give_up(self) -> None:
        running, self._running = self._running, {}
        for target_id, message in running.values():
            self._house.cancel(target_id, message)
