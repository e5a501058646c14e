"""Who is connected to this process, and whose actors end when a connection does.

A session is one other process. It lasts as long as its connection, and where that may come back
(the other end is on another host) for a lease after it. Decided here: when a session is over, and
what the other process is told again when it comes back. Invariant: an actor outlives its session by
no more than its own end takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from stagekeeper.actor.connection.outbox import Outbox
from stagekeeper.v1 import stage_service_pb2 as pb

_MOST_KEPT_NEWS: Final = 1_000
"""Nobody says which news has arrived when a connection broke, so the last of it are told again; who
hears something twice knows it by the failure's id."""


class Session:
    """One process that owns actors here, or calls them. For the loop's thread only.

    Args:
        session_id: that process, as a start.
        on_over: called once, when nobody can come back under this name.
    """

    def __init__(
        self,
        session_id: str,
        *,
        lease_s: float,
        is_same_host: bool,
        on_over: Callable[[Session], None],
    ) -> None:
        self.session_id = session_id
        self.is_over = False
        self._lease_s = lease_s
        self.is_same_host = is_same_host
        self._on_over = on_over
        self._outbox: Outbox | None = None
        self._news: deque[pb.RankFailed] = deque(maxlen=_MOST_KEPT_NEWS)
        self.was_attached = False
        """It has had a connection: what was spawned under its name is still there."""
        self._last_heard = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, outbox: Outbox) -> None:
        """Take a connection; what the owner may not have been told leaves on it first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._outbox = outbox
        self.was_attached = True
        self.heard()
        for news in self._news:
            outbox.put(pb.Frame(failure=news))

    def detach(self, outbox: Outbox) -> None:
        """The connection is gone: on one host so is the process, elsewhere a lease decides."""
        if self._outbox is not outbox:
            return  # another one took its place
        self._outbox = None
        if self.is_same_host:
            self.end()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lease_s, self.end)

    def heard(self) -> None:
        """The other process gave a sign of life."""
        self._last_heard = time.monotonic()

    def look(self, now: float) -> None:
        """End the session when a process of another host is silent for the lease."""
        is_silent = now - self._last_heard >= self._lease_s
        if self._outbox is not None and not self.is_same_host and is_silent:
            self.end()

    def forgive(self, stalled_s: float) -> None:
        """Leave out of account a time in which this process itself did not run."""
        self._last_heard += stalled_s

    def push_failure(self, news: pb.RankFailed) -> None:
        """Tell the process of a rank of its own, now and whenever it comes back."""
        if self._outbox is not None:
            self._outbox.put(pb.Frame(failure=news))
        if not self.is_over and not self.is_same_host:
            self._news.append(news)

    def end(self) -> None:
        """The session is over. A second call changes nothing."""
        if not self.is_over:
            self.is_over = True
            if self._timer is not None:
                self._timer.cancel()
            if self._outbox is not None:
                self._outbox.close()
            self._on_over(self)
