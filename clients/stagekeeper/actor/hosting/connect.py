"""The serving end of a connection: frames in, each to its actor; answers out, as they are ready.

Decided here: who is let in (the token, and the process that was meant), and how a stream ends.
Invariant: what a stream brought in is given up when the stream is over; nobody could be answered.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Final, Protocol

import grpc

from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.sessions import Session
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceServicer
from stagekeeper.wire.error_details import pack

Context = grpc.aio.ServicerContext[Any, Any]

_HELLO_LIMIT_S: Final = 10.0
"""How long a stream may stay without its first frame."""


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

    def session(self, hello: pb.Hello, own_boot_id: str) -> Session: ...

    def others_count(self, session_id: str) -> int: ...

    def take(self, target_id: str, message: Message) -> None: ...

    def cancel(self, target_id: str, message: Message) -> None: ...

    def over(self, target_id: str, message: Message) -> None: ...


async def refuse(context: Context, code: grpc.StatusCode, reason: str, message: str) -> None:
    """End a call with a reason."""
    await context.abort(code, message, trailing_metadata=pack(code, message, reason=reason))


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
            await connection.serve(first)
        finally:
            self._open.discard(connection.outbox)

    async def _admit(self, first: Any, context: Context) -> pb.Hello:
        code = grpc.StatusCode
        if first is grpc.aio.EOF or not first.frames or not first.frames[0].HasField("hello"):
            await refuse(
                context, code.INVALID_ARGUMENT, "BAD_FIELD", "frames[0]: has to be a hello"
            )
        hello: pb.Hello = first.frames[0].hello
        if self._proc.token and not is_token(hello.token, self._proc.token):
            await refuse(
                context,
                code.UNAUTHENTICATED,
                "BAD_TOKEN",
                "hello.token: is not that of the actor tree that this process belongs to",
            )
        if hello.peer_instance_id and hello.peer_instance_id != self._proc.instance_id:
            await refuse(
                context,
                code.ABORTED,
                "STALE_ROUTE",
                f"this is process {self._proc.instance_id}, not {hello.peer_instance_id:.64}",
            )
        if not hello.session_id or not 0 < hello.lease_s <= 3_600:
            await refuse(
                context,
                code.INVALID_ARGUMENT,
                "BAD_FIELD",
                "hello: session_id is missing, or lease_s is not within 0 and 3,600",
            )
        if self._house.is_closing:
            await refuse(context, code.UNAVAILABLE, "DRAINING", "this process is ending")
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


class _Connection:
    """One stream."""

    def __init__(
        self, proc: ProcIdentity, house: TakesMessages, hello: pb.Hello, context: Context
    ) -> None:
        self.outbox = Outbox()
        self._proc = proc
        self._house = house
        self._context = context
        self._session = house.session(hello, proc.boot_id)
        self._running: dict[int, tuple[str, Message]] = {}
        self._casts: dict[Message, str] = {}

    async def serve(self, first: pb.ConnectRequest) -> None:
        context = self._context

        async def write(frames: list[pb.Frame]) -> None:
            await context.write(pb.ConnectResponse(frames=frames))

        own = pb.Hello(instance_id=self._proc.instance_id, boot_id=self._proc.boot_id)
        self.outbox.put(pb.Frame(hello=own))
        writing = asyncio.create_task(self.outbox.run(write), name="connect writer")
        self._session.attach(self.outbox)
        try:
            self._heard(first.frames[1:])
            reading = asyncio.ensure_future(self._read())
            # The writer ends first when this process is ending.
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await asyncio.wait({reading})
        finally:
            self._give_up()
            self.outbox.close()
            writing.cancel()
            self._session.detach(self.outbox)

    async def _read(self) -> None:
        read = self._context.read
        while (request := await read()) is not grpc.aio.EOF:
            self._heard(request.frames)

    def _heard(self, frames: Any) -> None:
        self._session.heard()
        for frame in frames:
            kind = frame.WhichOneof("body")
            if kind == "call":
                call = frame.call
                message = Message(call, frame.frame_id, self.outbox.put, self._over)
                if not call.is_cast:
                    self._running[frame.frame_id] = (call.target_id, message)
                else:
                    self._casts[message] = call.target_id
                self._house.take(call.target_id, message)
            elif kind == "cancel":
                found = self._running.pop(frame.frame_id, None)
                if found is not None:
                    self._house.cancel(*found)
            elif kind == "failure":
                self._proc.rank_failed(frame.failure)
            elif kind == "beat":
                count = self._house.others_count(self._session.session_id)
                self.outbox.put(pb.Frame(beat=pb.Beat(other_actor_count=count)))

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
