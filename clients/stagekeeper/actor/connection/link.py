"""One end of a connection: the stream that this process opened to another one of its tree.

Every call that this process makes to actors over there travels here, in order, and what they
answer comes back; so does the news of failures of what this process owns there. Decided here: how
calls and answers are paired, and when the other end is silent for too long. Not decided here:
what a broken connection means; whoever uses it is told. Invariant: every call gets an answer, an
error, or its part of the break.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol
from weakref import WeakSet

import grpc

from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.actor.place import Place
from stagekeeper.v1 import actor_service_pb2_grpc, stage_service_pb2_grpc
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.transport import CLIENT_OPTIONS

_log = logging.getLogger("stagekeeper.actor")

_CONNECT_LIMIT_S: Final = 10.0
_BEATS_IN_A_LEASE: Final = 4


class Caller(Protocol):
    """Who made a call: told when it is over, and when the connection broke under it."""

    outstanding: int

    def error_of(self, error: pb.CallError) -> BaseException:
        """Turn an error frame into what the caller is to raise."""
        ...

    def link_broke(self, link: Link, calls: list[PendingCall]) -> None:
        """Take over calls that got no answer. Also told to those without any."""
        ...


class ReplyFuture(asyncio.Future[Payload]):
    """The answer of one call; cancelling it tells the other end that nobody waits."""

    link: Link | None = None
    frame_id = 0

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.link is not None:
            self.link.give_up(self.frame_id)
        return is_cancelled


class ReplyStream:
    """The answers of one call, as they come. Read by one task; `close` gives the rest up."""

    link: Link | None = None
    frame_id = 0

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Payload | BaseException | None] = asyncio.Queue()
        self._is_over = False

    def put(self, item: Payload | BaseException | None) -> None:
        """Hand in a value, the error that ends it, or None at its end."""
        self._arrived.put_nowait(item)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> Payload:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, Payload):
            return item
        self._is_over = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def aclose(self) -> None:
        """Give up what did not come yet. A second call changes nothing."""
        self.close()

    def close(self) -> None:
        """Do as `aclose`, for code that cannot wait."""
        if not self._is_over:
            self._is_over = True
            if self.link is not None:
                self.link.give_up(self.frame_id)

    def done(self) -> bool:
        """Return whether nobody reads any more, or all has been read."""
        return self._is_over


PendingCall = ReplyFuture | ReplyStream


def fail_call(call: PendingCall, error: BaseException) -> None:
    """End a call with an error, unless nobody waits for it any more."""
    if isinstance(call, ReplyStream):
        call.put(error)
    elif not call.done():
        call.set_exception(error)
        call.exception()  # whoever awaits it gets it all the same; a lost one is no news here


class OtherEnd:
    """ActorService of the other process, over the connection and as long as that."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = actor_service_pb2_grpc.ActorServiceStub(channel)
        self.SpawnActor = _call_over(stub.SpawnActor)
        self.StopActor = _call_over(stub.StopActor)
        self.GetMesh = _call_over(stub.GetMesh)
        self.RespawnProcs = _call_over(stub.RespawnProcs)


def _call_over(call: Any) -> Callable[..., Awaitable[Any]]:
    """Have a call raise ConnectionError when the connection ends under it.

    gRPC cancels what is under way on a channel that is closed, which would look as if the caller
    itself were to end.
    """

    async def ask(request: Any, *, timeout: float | None = None) -> Any:
        try:
            return await call(request, timeout=timeout)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise ConnectionError("the connection broke") from None
        except grpc.aio.UsageError as error:  # it was closed before
            raise ConnectionError(str(error)) from None

    return ask


class Link:
    """The stream to one process. For the loop's thread only.

    Args:
        place: the process.
        hello: the first frame.
        lease_s: silence of this length is told to `on_silence`, once until it speaks again.
        on_failure: news of a rank that this process owns there.
        on_silence: called with the seconds since the last sign of life.
        on_broken: called once when the stream has ended, before the callers are told; with what
            went wrong, for people.
    """

    def __init__(
        self,
        place: Place,
        hello: pb.Hello,
        *,
        lease_s: float,
        on_failure: Callable[[pb.RankFailed], None],
        on_silence: Callable[[Link, float], None],
        on_broken: Callable[[Link, str], None],
    ) -> None:
        self.place = place
        self.other_actor_count = 0
        self._hello = hello
        self._lease_s = lease_s
        self._on_failure = on_failure
        self._on_silence = on_silence
        self._on_broken = on_broken
        self._channel = grpc.aio.insecure_channel(place.address, options=CLIENT_OPTIONS)
        self.actors = OtherEnd(self._channel)
        self._outbox = Outbox()
        self._pending: dict[int, tuple[PendingCall, Caller]] = {}
        # Weak: of one to whom nobody refers any more only the calls under way count.
        self._callers: WeakSet[Caller] = WeakSet()
        self._last_id = 0
        self._last_heard = time.monotonic()
        self._is_silent = False
        self._connected: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_broken = False

    def open(self) -> None:
        """Begin to connect. Frames may be sent from now on."""
        self._connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"link to {self.place.address}")

    async def connected(self) -> None:
        """Return when both ends know each other.

        Raises:
            ConnectionError: it broke, or was never made.
        """
        assert self._connected is not None
        await asyncio.shield(self._connected)

    def attach(self, caller: Caller) -> None:
        """Have `caller` told when the connection breaks, also while it has no call under way."""
        self._callers.add(caller)

    def detach(self, caller: Caller) -> None:
        """Undo `attach`. Calls under way stay as they are."""
        self._callers.discard(caller)

    # --- out

    def call(
        self,
        caller: Caller,
        call: PendingCall,
        target_id: str,
        endpoint: str,
        payload: Payload,
        sender: str,
    ) -> None:
        """Send a call; `call` gets its answers."""
        frame_id = self._last_id = self._last_id + 1
        call.link, call.frame_id = self, frame_id
        self._pending[frame_id] = (call, caller)
        caller.outstanding += 1
        frame = pb.CallFrame(
            target_id=target_id,
            endpoint=endpoint,
            payload=payload,
            is_stream=isinstance(call, ReplyStream),
            sender=sender,
        )
        self._outbox.put(pb.Frame(frame_id=frame_id, call=frame), len(payload.data))

    def cast(self, target_id: str, endpoint: str, payload: Payload, sender: str) -> None:
        """Send a message that is not answered."""
        call = pb.CallFrame(
            target_id=target_id, endpoint=endpoint, payload=payload, is_cast=True, sender=sender
        )
        self._outbox.put(pb.Frame(call=call), len(payload.data))

    def tell(self, news: pb.RankFailed) -> None:
        """Tell the process that owns a mesh of a message that did not reach one of its ranks."""
        self._outbox.put(pb.Frame(failure=news))

    def give_up(self, frame_id: int) -> None:
        """Say that nobody waits for a call any more."""
        found = self._pending.pop(frame_id, None)
        if found is not None:
            found[1].outstanding -= 1
            self._outbox.put(pb.Frame(frame_id=frame_id, cancel=pb.Cancel()))

    def withdraw(self, caller: Caller) -> list[PendingCall]:
        """Give up all calls of a caller, who ends them itself; return them."""
        calls = []
        for frame_id, (call, whose) in list(self._pending.items()):
            if whose is caller:
                self.give_up(frame_id)
                calls.append(call)
        return calls

    # --- its life

    async def close(self) -> None:
        """End the stream. Calls under way are told that it broke. A second call changes nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def look(self, now: float) -> None:
        """Send a sign of life, and judge the other end's silence; called several times a lease."""
        self._outbox.put(pb.Frame(beat=pb.Beat()))
        silent_s = now - self._last_heard
        if silent_s >= self._lease_s and not self._is_silent and not self.is_broken:
            self._is_silent = True
            self._on_silence(self, silent_s)

    def forgive(self, stalled_s: float) -> None:
        """Leave out of account a time in which this process itself did not run."""
        self._last_heard += stalled_s

    async def _run(self) -> None:
        why = "it was closed"
        try:
            await self._talk()
            why = "the other end closed it"
        except asyncio.CancelledError:
            if not is_own_cancellation():
                why = "the call was cancelled"
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
        finally:
            self._broke(why)
            await self._channel.close()

    async def _talk(self) -> None:
        stream: Any = stage_service_pb2_grpc.StageServiceStub(self._channel).Connect()
        writing: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await stream.write(pb.ConnectRequest(frames=[pb.Frame(hello=self._hello)]))
                first = await stream.read()
            if first is grpc.aio.EOF:
                return
            self._heard(first)

            async def write(frames: list[pb.Frame]) -> None:
                await stream.write(pb.ConnectRequest(frames=frames))

            writing = asyncio.create_task(self._write(write, stream), name="link writer")
            assert self._connected is not None
            self._connected.set_result(None)
            while True:
                response = await stream.read()
                if response is grpc.aio.EOF:
                    return
                self._heard(response)
        except TimeoutError:
            return
        finally:
            self._outbox.close()
            if writing is not None:
                writing.cancel()
                await asyncio.wait({writing})
            stream.cancel()

    async def _write(self, write: Any, stream: Any) -> None:
        try:
            await self._outbox.run(write)
        except (grpc.RpcError, asyncio.InvalidStateError):
            stream.cancel()  # the reader finds out why

    def _heard(self, response: pb.ConnectResponse) -> None:
        self._last_heard = time.monotonic()
        self._is_silent = False
        for frame in response.frames:
            kind = frame.WhichOneof("body")
            if kind == "reply":
                self._replied(frame.frame_id, frame.reply)
            elif kind == "error":
                found = self._pending.pop(frame.frame_id, None)
                if found is not None:
                    call, caller = found
                    caller.outstanding -= 1
                    fail_call(call, caller.error_of(frame.error))
                elif not frame.frame_id:
                    _log.warning("a message was not run: %s", frame.error.message)
            elif kind == "failure":
                self._on_failure(frame.failure)
            elif kind == "beat":
                self.other_actor_count = frame.beat.other_actor_count

    def _replied(self, frame_id: int, reply: pb.Reply) -> None:
        found = self._pending.get(frame_id)
        if found is None:
            return
        call, caller = found
        if isinstance(call, ReplyStream):
            if reply.has_more:
                call.put(reply.payload)
                return
            call.put(None)
        elif not call.done():
            call.set_result(reply.payload)
        del self._pending[frame_id]
        caller.outstanding -= 1

    def _broke(self, why: str) -> None:
        self.is_broken = True
        if self._connected is not None and not self._connected.done():
            self._connected.set_exception(ConnectionError(f"{self.place.address}: {why}"))
            self._connected.exception()
        self._on_broken(self, why)
        calls_of: dict[Caller, list[PendingCall]] = {caller: [] for caller in self._callers}
        for call, caller in self._pending.values():
            caller.outstanding -= 1
            calls_of.setdefault(caller, []).append(call)
        self._pending.clear()
        for caller, calls in calls_of.items():
            caller.link_broke(self, calls)


def beat_s_of(lease_s: float) -> float:
    """Return how often both ends of a connection say that they live."""
    return lease_s / _BEATS_IN_A_LEASE
