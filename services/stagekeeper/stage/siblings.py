"""Calls from one stage to another of the same replica: `self.siblings["talker"].speak.call_one(…)`.

Decided here: how a name becomes an address, and that a call inside a call gets no more time than
is left of the outer one. Not decided here: the addresses (the agent pushes them) and the transport
(the client's own). Invariant: one attempt; a sibling that is gone is an error for the author.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from stagekeeper.actor import context
from stagekeeper.client.channels import StageCaller
from stagekeeper.client.errors import EndpointRaised, NoReplica
from stagekeeper.wire.payload import Tensors

T = TypeVar("T")


class SiblingUnknown(KeyError):
    """The replica has no stage of that name; the message lists those that it has."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One shard of the replica, as its agent says that it can be called."""

    stage_id: int
    stage_name: str
    shard_index: int
    instance_id: str
    url: str


class Siblings(Mapping[str, "Sibling"]):
    """The other stages of the replica, by name.

    A handle may be taken at any time, in `load` too, and kept; it can be called once the replica is
    READY, and follows the stage when that gets a new address. Iteration knows the stages only from
    then on.
    """

    def __init__(self, own_stage_id: int) -> None:
        self._own_stage_id = own_stage_id
        self._peers: dict[str, PeerAddress] = {}
        self._caller: StageCaller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.tensors: Tensors = "numpy"
        """What tensors in answers become."""

    def __getitem__(self, name: str) -> Sibling:
        if self._peers and name not in self._peers:
            raise SiblingUnknown(self._unknown(name))
        return Sibling(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(
            [name for name, peer in self._peers.items() if peer.stage_id != self._own_stage_id]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    # --- for the host

    def serve(self) -> None:
        """Make calls possible, from the event loop on which they will run."""
        self._loop = asyncio.get_running_loop()

    def set_peers(self, peers: Sequence[PeerAddress]) -> None:
        """Replace all addresses; repeats change nothing. Of several shards the first is called."""
        ordered = sorted(peers, key=lambda peer: (peer.stage_id, -peer.shard_index))
        self._peers = {peer.stage_name: peer for peer in ordered}
        if self._caller is not None:
            self._caller.keep_only({peer.url for peer in peers})

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()

    # --- for the handles

    def route(self, name: str) -> tuple[StageCaller, PeerAddress]:
        """Find where to call; on the loop.

        Raises:
            SiblingUnknown: there is no such stage.
            NoReplica: the addresses are not known yet.
        """
        peer = self._peers.get(name)
        if peer is None:
            if self._peers:
                raise SiblingUnknown(self._unknown(name))
            raise NoReplica(
                f"stage {name} cannot be called yet: the replica is not READY",
                reason="NO_REPLICA",
                never_ran=True,
            )
        if self._caller is None:
            self._caller = StageCaller()
        return self._caller, peer

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the stage's event loop, from a worker thread.

        Raises:
            RuntimeError: this is the loop's own thread, which would wait for itself.
        """
        loop = self._loop
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if loop is None or running is not None:
            work.close()
            raise RuntimeError(
                "in async code await call_one(…); call_one_sync(…) would wait for its own thread"
                if loop is not None
                else "siblings can be called once the replica is READY"
            )
        return asyncio.run_coroutine_threadsafe(work, loop)

    def _unknown(self, name: str) -> str:
        return f"the replica has no stage {name!r}; it has: {', '.join(self._peers)}"


class Sibling:
    """A handle to one stage; its attributes are that stage's endpoints."""

    __slots__ = ("_name", "_siblings")

    def __init__(self, siblings: Siblings, name: str) -> None:
        self._siblings = siblings
        self._name = name

    def __getattr__(self, name: str) -> SiblingEndpoint:
        if name.startswith("__"):
            raise AttributeError(name)
        return SiblingEndpoint(self._siblings, self._name, name, None)

    def __repr__(self) -> str:
        return f"<sibling {self._name}>"


class SiblingEndpoint:
    """One endpoint of another stage.

    Each call passes on what is left of the deadline of the call that it is made in, and is
    cancelled with it. Errors are those of `stagekeeper.client.errors`.
    """

    __slots__ = ("_endpoint", "_siblings", "_stage", "_timeout_s")

    def __init__(
        self, siblings: Siblings, stage: str, endpoint: str, timeout_s: float | None
    ) -> None:
        self._siblings = siblings
        self._stage = stage
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    def within(self, timeout_s: float) -> SiblingEndpoint:
        """Return the same endpoint, with a limit to each call."""
        return SiblingEndpoint(self._siblings, self._stage, self._endpoint, timeout_s)

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Call the endpoint and return its answer; from async code."""
        return await self._call(args, kwargs, self._time_left())

    def call_one_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the endpoint and wait for its answer; from a plain endpoint or phase.

        Raises:
            concurrent.futures.CancelledError: the caller of the running call gave up.
            RuntimeError: called from async code.
        """
        # The deadline is read here: the loop's thread knows nothing of this call.
        return self._wait(self._call(args, kwargs, self._time_left()))

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Call an endpoint that yields; from async code."""
        async with contextlib.aclosing(self._stream(args, kwargs, self._time_left())) as values:
            async for value in values:
                yield value

    def stream_sync(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Call an endpoint that yields; from a plain endpoint or phase. Raises as call_one_sync."""
        values = self._stream(args, kwargs, self._time_left())

        async def one() -> tuple[Any, ...]:
            async for value in values:
                return (value,)
            return ()

        try:
            while got := self._wait(one()):
                yield got[0]
        finally:
            self._siblings.submit(values.aclose())

    async def _call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> Any:
        caller, peer = self._siblings.route(self._stage)
        with _remote_traceback():
            return await caller.call(
                peer.url,
                peer.instance_id,
                self._endpoint,
                args,
                kwargs,
                timeout_s,
                tensors=self._siblings.tensors,
            )

    async def _stream(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> Any:
        caller, peer = self._siblings.route(self._stage)
        values = caller.call_stream(
            peer.url,
            peer.instance_id,
            self._endpoint,
            args,
            kwargs,
            timeout_s,
            tensors=self._siblings.tensors,
        )
        async with contextlib.aclosing(values):
            with _remote_traceback():
                async for value in values:
                    yield value

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._siblings.submit(work)
        forget: Callable[[], None] = context().on_cancel(future.cancel)
        try:
            return future.result()
        finally:
            forget()

    def _time_left(self) -> float | None:
        limits = [self._timeout_s, context().remaining_s]
        return min((limit for limit in limits if limit is not None), default=None)


@contextlib.contextmanager
def _remote_traceback() -> Iterator[None]:
    """Let the traceback of what a sibling raised show in the traceback of who called it."""
    try:
        yield
    except EndpointRaised as error:
        if error.remote_traceback:
            error.add_note(f"The sibling's traceback:\n{error.remote_traceback}")
        raise
