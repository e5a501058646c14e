"""A TCP proxy that misbehaves on demand: what a network does to connections that it does not end.

Decided here: which fault is on, and for which flows. Not decided here: how one flow carries it out
(`tcp_flow`) and what a reply is (`http2_reply`). It runs in the event loop of the test; every
control is a plain call that holds at once.

What is faithful and what is not: the proxy is an end of both connections, so its kernel
acknowledges what it takes. Bytes that it loses look delivered to TCP; the sender learns nothing
from its own kernel, and only what the programs themselves ask of each other can tell. A cut that
heals again, where TCP would repeat what was lost, is `stall` and `release`.

Invariant: a flow that has lost bytes never passes another one, for what came behind a gap would be
another stream than the one that was sent.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from tests.fakes.http2_reply import Direction, ReplySwallower
from tests.fakes.tcp_flow import DOWN, UP, Conditions, Flow

__all__ = ["DOWN", "NOBODY", "UP", "Direction", "TcpProxy"]

BOTH: tuple[Direction, ...] = (UP, DOWN)
NOBODY = "127.0.0.1:1"
"""A target at which nobody listens."""


class TcpProxy:
    """Forwards to `target` (`host:port`), and does it badly when told to.

    `async with TcpProxy(target) as proxy`, or `start` and `stop`. With a target where nobody
    listens a new flow is reset as soon as it is accepted.

    Attributes:
        url: where it listens; stays the same, whatever its target is.
        target: where new flows go.
        accepted_at: when each flow was accepted, by the loop's clock.
        loses_new: new flows are accepted, and nothing passes on them.
    """

    def __init__(self, target: str = NOBODY, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        self.url = ""
        self.accepted_at: list[float] = []
        self.loses_new = False
        self._host = host
        self._port = port
        self._conditions: dict[Direction, Conditions] = {way: Conditions() for way in BOTH}
        self._replies = ReplySwallower()
        self._server: asyncio.Server | None = None
        self._place: socket.socket | None = None
        self._flows: set[Flow] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> TcpProxy:
        await self._listen()
        return self

    async def stop(self) -> None:
        """Reset every flow and stop listening."""
        self._close_listener()
        if self._place is not None:
            self._place.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connection_count(self) -> int:
        """Return how many flows were accepted so far."""
        return len(self.accepted_at)

    @property
    def established(self) -> frozenset[Flow]:
        """Return the flows of now, to do something to them later; lost ones are among them."""
        return frozenset(self._flows)

    @property
    def swallowed_replies(self) -> int:
        return self._replies.swallowed

    @property
    def frames(self) -> Counter[tuple[Direction, int]]:
        """Return how many HTTP/2 frames came by so far, by direction and type."""
        return self._replies.frames

    # --- where flows go

    def move(self, target: str, *, reset_old: bool = False) -> None:
        """Send new flows to another target; those of now stay where they are, or are reset."""
        self.target = target
        if reset_old:
            self.reset()

    def refuse(self) -> None:
        """Refuse new flows (RST at the SYN); the port stays ours. Those of now go on."""
        if self._place is None:
            self._close_listener()
            self._place = _bound(self._host, self._port)

    async def accept_again(self) -> None:
        """Accept flows again after `refuse`."""
        if self._place is not None:
            self._place.close()
            self._place = None
            await self._listen()

    # --- how bytes travel, on the flows of now and on new ones

    def delay(self, seconds: float, *ways: Direction) -> None:
        """Let every byte arrive so much later, in order; 0 ends it for what comes after."""
        for way in ways or BOTH:
            self._conditions[way].delay_s = seconds

    def limit(self, bytes_per_s: float | None, *ways: Direction) -> None:
        """Let so many bytes through in a second, per flow and direction; None: all."""
        for way in ways or BOTH:
            self._conditions[way].bytes_per_s = bytes_per_s

    def stall(self, *ways: Direction) -> None:
        """Hold everything back until `release`; nothing is lost."""
        for way in ways or BOTH:
            self._conditions[way].passes.clear()

    def release(self, *ways: Direction) -> None:
        """Let go what was stalled, in order, and all that follows."""
        for way in ways or BOTH:
            self._conditions[way].passes.set()

    def swallow_reply(self, count: int = 1) -> None:
        """Keep the reply of the next `count` HTTP/2 requests from whoever asks them.

        The request arrives and is carried out; the connection itself stays whole. Only requests
        that begin after this call count.
        """
        self._replies.wanted += count

    # --- what is done to the flows of now

    def lose_established(self, *ways: Direction) -> None:
        """Let nothing more through on the flows of now: no byte, no FIN, no RST, for ever.

        With one direction, that one only: the other goes on, as behind a one-way failure.
        """
        for flow in self._flows:
            flow.lose(*ways)

    def half_open(self) -> None:
        """End the flows of now towards the server, and never tell their clients."""
        for flow in self._flows:
            flow.half_open()

    def reset(self) -> None:
        """End the flows of now with a RST to both ends."""
        for flow in self._flows:
            flow.reset()

    # --- inside

    async def _listen(self) -> None:
        listener = _bound(self._host, self._port)
        self._server = await asyncio.start_server(self._accept, sock=listener)
        self._port = listener.getsockname()[1]
        self.url = f"{self._host}:{self._port}"

    def _close_listener(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_at.append(asyncio.get_running_loop().time())
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        flow = Flow(reader, writer, self._conditions, self._replies.flow())
        self._flows.add(flow)
        if self.loses_new:
            flow.lose()
        try:
            await flow.run(self.target)
        except asyncio.CancelledError:
            pass  # the proxy stops; asyncio would log the cancellation as an error of its server
        finally:
            flow.reset()
            self._flows.discard(flow)
            self._tasks.discard(task)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the port and does not listen: connecting to it is refused."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    bound.bind((host, port))
    return bound
