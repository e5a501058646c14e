"""One end of a connection: the stream that this process opened to another one of its tree.

Every call that this process makes to actors over there travels here, in order, and what they
answer comes back; so does the news of failures of what this process owns there. Decided here: how
calls and answers are paired, when the other end is silent for too long, and that a connection to
another host is made anew within the lease: what was not sent yet goes on then, calls that were are
lost, since they may have run. Not decided here: what a broken connection means; whoever uses it is
told. Invariant: every call gets an answer, an error, or its part of the break.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import grpc

from stagekeeper.actor.connection.calls import (
    Caller,
    PendingCall,
    ReplyFuture,
    ReplyStream,
    fail_call,
)
from stagekeeper.actor.connection.other_end import OtherEnd
from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.actor.place import Place
from stagekeeper.client.errors import CONNECTION_LOST, CallLost
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1 import stage_service_pb2_grpc
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.actor_limits import STREAM_WINDOW
from stagekeeper.wire.error_details import describe, is_own_cancellation
from stagekeeper.wire.transport import CLIENT_OPTIONS

__all__ = [
    "Caller",
    "Link",
    "PendingCall",
    "ReplyFuture",
    "ReplyStream",
    "beat_s_of",
    "fail_call",
]

_log = logging.getLogger("stagekeeper.actor")

_CONNECT_LIMIT_S: Final = 10.0
_BEATS_IN_A_LEASE: Final = 4

_REDIAL_PAUSE_S: Final = 0.1
_MOST_REMEMBERED_NEWS: Final = 1_000
"""As many as the other end tells again."""


class Link:
    """The stream to one process. For the loop's thread only.

    Args:
        place: the process.
        hello: the first frame.
        lease_s: silence of this length is told to `on_silence`, once until it speaks again.
        on_failure: news of a rank that this process owns there.
        on_broken: called once when the stream has ended for good, before the callers are told; with
            what went wrong, for people.
        comes_back_s: how long a stream that broke is tried anew; 0 where a break says that the
            process is gone.
    """

    def __init__(
        self,
        place: Place,
        hello: pb.Hello,
        *,
        lease_s: float,
        on_failure: Callable[[pb.RankFailed], None],
        on_silence: Callable[[Link], None],
        on_broken: Callable[[Link, str], None],
        comes_back_s: float = 0.0,
    ) -> None:
        self.place = place
        self.other_actor_count = 0
        self._hello = hello
        self._lease_s = lease_s
        self._on_failure = on_failure
        self._on_silence = on_silence
        self._on_broken = on_broken
        self._comes_back_s = comes_back_s
        self._is_up = False
        self._has_been_up = False
        self._news: deque[bytes] = deque(maxlen=_MOST_REMEMBERED_NEWS)
        self._channel = grpc.aio.insecure_channel(place.address, options=CLIENT_OPTIONS)
        self.actors = OtherEnd(self._channel)
        self._outbox = Outbox(pb.ConnectRequest)
        self._moved_at_look = 0
        self._pending: dict[int, tuple[PendingCall, Caller]] = {}
        # Weak: of one to whom nobody refers any more only the calls under way count.
        self._callers: WeakSet[Caller] = WeakSet()
        self._last_id = 0
        self._last_heard = time.monotonic()
        self.is_silent = False
        """It gave no sign of life for the lease."""
        self.silences = 0
        """How often it has been silent."""
        self._connected: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_broken = False

    @property
    def silent_s(self) -> float:
        """The seconds since the last sign of life."""
        return time.monotonic() - self._last_heard

    def open(self) -> None:
        """Begin to connect. Frames may be sent from now on."""
        self._connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"link to {self.place.address}")

    async def connected(self) -> None:
        """Return when both ends know each other, at once when they do.

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
        is_stream = isinstance(call, ReplyStream)
        frame = self._outbox.add(len(payload.data))
        frame.frame_id = frame_id
        out = frame.call
        out.target_id, out.endpoint, out.sender = target_id, endpoint, sender
        out.payload.CopyFrom(payload)
        if is_stream:
            out.is_stream, out.window = True, STREAM_WINDOW
        if len(self._pending) == 1:  # where more are under way, more may follow in this turn
            self._outbox.flush()

    def cast(self, target_id: str, endpoint: str, payload: Payload, sender: str) -> None:
        """Send a message that is not answered."""
        out = self._outbox.add(len(payload.data)).call
        out.target_id, out.endpoint, out.sender = target_id, endpoint, sender
        out.payload.CopyFrom(payload)
        out.is_cast = True

    def tell(self, news: pb.RankFailed) -> None:
        """Tell the process that owns a mesh of a message that did not reach one of its ranks."""
        self._outbox.put(pb.Frame(failure=news))

    def more(self, frame_id: int, count: int) -> None:
        """Say that values of a call were read; nothing when all of it has arrived."""
        if frame_id in self._pending:
            self._outbox.put(pb.Frame(frame_id=frame_id, more=pb.More(count=count)))

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
            if not self.is_broken:  # it had not begun
                await self._end("it was closed")

    def look(self, now: float) -> None:
        """Send a sign of life, and judge the other end's silence; called several times a lease."""
        if self._has_been_up and not self._is_up:
            return  # it is being made anew, or has ended
        self._outbox.beat(pb.Beat())
        moved_bytes = self._outbox.moved_bytes
        if self._outbox.is_backed_up and moved_bytes != self._moved_at_look:
            # It takes what this end sends, though what it says may be long in coming. Only of a
            # backlog: a process that is frozen takes little things for a long while.
            self._last_heard = now
        self._moved_at_look = moved_bytes
        is_late = now - self._last_heard >= self._lease_s
        if is_late and not self.is_silent and not self.is_broken:
            self.is_silent = True
            self.silences += 1
            self._on_silence(self)

    def forgive(self, stalled_s: float) -> None:
        """Leave out of account a time in which this process itself did not run."""
        self._last_heard += stalled_s

    async def _run(self) -> None:
        why = "it was closed"
        try:
            why = await self._stay()
        finally:
            await self._end(why)

    async def _end(self, why: str) -> None:
        self._is_up = False
        self._outbox.close()
        self._broke(why)
        await self._channel.close()

    async def _stay(self) -> str:
        """Talk until the other end is gone, as far as can be known from here; return why."""
        until = 0.0
        while True:
            why, is_final = await self._talk_once(until)
            if self._is_up:
                self._is_up = False
                until = time.monotonic() + self._comes_back_s
            if is_final or time.monotonic() >= until:
                return why
            self._lose_what_was_sent(why)
            await asyncio.sleep(_REDIAL_PAUSE_S * random.uniform(0.5, 1.0))
            # A channel of its own: the old one would wait out a back-off first.
            await self._channel.close()
            self._channel = grpc.aio.insecure_channel(self.place.address, options=CLIENT_OPTIONS)
            self.actors = OtherEnd(self._channel)

    async def _talk_once(self, until: float) -> tuple[str, bool]:
        """Talk over one stream; return why it ended, and whether that is for good."""
        limit_s = until - time.monotonic() if self._has_been_up else _CONNECT_LIMIT_S
        try:
            return await self._talk(max(_REDIAL_PAUSE_S, limit_s)), True
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            return "the call was cancelled", False
        except TimeoutError:
            return "it does not answer", False
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}", bool(describe(error).reason)

    async def _talk(self, limit_s: float) -> str:
        stream: Any = stage_service_pb2_grpc.StageServiceStub(self._channel).Connect()
        writing: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(limit_s):
                await stream.write(pb.ConnectRequest(frames=[pb.Frame(hello=self._hello)]))
                first = await stream.read()
            if first is grpc.aio.EOF:
                return "the other end closed it"
            is_new = not (first.frames and first.frames[0].hello.session_id)
            if self._has_been_up and is_new:
                return "it was away for longer than its lease, and what it had here has ended"
            self._heard(first)

            writing = asyncio.create_task(self._write(stream), name="link writer")
            assert self._connected is not None
            self._is_up = self._has_been_up = True
            self._connected.set_result(None)
            while True:
                response = await stream.read()
                if response is grpc.aio.EOF:
                    return "the other end closed it"
                self._heard(response)
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.wait({writing})
            stream.cancel()

    def _lose_what_was_sent(self, why: str) -> None:
        """End the calls that were under way: they may have run, so nobody sends them again."""
        assert self._connected is not None
        if self._connected.done():
            self._connected = asyncio.get_running_loop().create_future()
        unsent = {frame.frame_id for frame in self._outbox.unsent() if frame.HasField("call")}
        for frame_id, (call, caller) in list(self._pending.items()):
            if frame_id not in unsent:
                del self._pending[frame_id]
                caller.outstanding -= 1
                what = (
                    f"the connection to {self.place.address} broke ({why}): the call may have run"
                )
                fail_call(call, CallLost(what, reason=CONNECTION_LOST))

    async def _write(self, stream: Any) -> None:
        try:
            await self._outbox.run(stream.write)
        except (grpc.RpcError, asyncio.InvalidStateError):
            stream.cancel()  # the reader finds out why

    def _heard(self, response: pb.ConnectResponse) -> None:
        self._last_heard = time.monotonic()
        self.is_silent = False
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
                self._told(frame.failure)
            elif kind == "beat":
                self.other_actor_count = frame.beat.other_actor_count

    def _told(self, news: pb.RankFailed) -> None:
        if self._comes_back_s:  # what comes back tells its last news again
            data = news.SerializeToString(deterministic=True)
            if data in self._news:
                return
            self._news.append(data)
        self._on_failure(news)

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
