"""One rank of an actor mesh, as callers see it: there, on its way, failed or stopped.

Decided here: what a call does in each of these states. Not decided here: how the rank gets there;
its owner brings it up, and whoever holds a mere reference asks the owner. Invariant: calls leave
in the order in which they were made, also those made before the rank was up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from stagekeeper.actor.connection.link import (
    Link,
    PendingCall,
    ReplyFuture,
    ReplyStream,
    fail_call,
)
from stagekeeper.actor.errors import Died, MeshStopped
from stagekeeper.actor.failing import as_of_rank
from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.owning.answer_errors import error_of_answer
from stagekeeper.actor.owning.scope import sender_name
from stagekeeper.actor.place import Place
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload

_log = logging.getLogger("stagekeeper.actor")


class RankState(Enum):
    """How far one incarnation of a rank is."""

    WAITING = "waiting"
    UP = "up"
    """Without a link it is lost: how it ended will be known in a moment, and calls wait for it."""
    FAILED = "failed"
    STOPPED = "stopped"


class Keeper(Protocol):
    """Who keeps a rank's place up to date: the owner, or a reference."""

    @property
    def mesh_id(self) -> str: ...

    @property
    def mesh_name(self) -> str: ...

    def check_thread(self) -> None:
        """Check that the code that asks runs on the loop.

        Raises:
            RuntimeError: it does not.
        """
        ...

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run `work` in the loop's thread: at once from there, as soon as can be from others."""
        ...

    def sought(self, rank: ActorRank) -> None:
        """A call waits for a rank that is not up, or that failed as far as is known."""
        ...

    def lost(self, rank: ActorRank, link: Link, calls: list[PendingCall]) -> None:
        """The connection to a rank broke; `calls` want an end."""
        ...

    def undelivered(self, rank: ActorRank, endpoint: str, sender: str) -> None:
        """A message was for a rank that has failed."""
        ...


class ActorRank:
    """One rank. For the loop's thread only."""

    def __init__(self, keeper: Keeper, rank: int, *, is_reference: bool = False) -> None:
        self.rank = rank
        self.outstanding = 0
        self.state = RankState.WAITING
        self.incarnation = 1
        self.actor_id = ""
        self.place: Place | None = None
        self.failure: MeshFailure | None = None
        self._keeper = keeper
        self._is_reference = is_reference
        self._link: Link | None = None
        self._waiting: deque[Callable[[Link], None]] = deque()
        self._waiting_calls: list[PendingCall] = []
        self._late_casts: list[tuple[str, str]] = []
        """(endpoint, sender) of what waits and is not answered, to tell of if the rank is gone."""
        self._up: asyncio.Event = asyncio.Event()

    @property
    def is_sought(self) -> bool:
        """Something waits for a place of the rank."""
        return bool(self._waiting) and self.state is not RankState.UP

    @property
    def is_failed(self) -> bool:
        return self.state in (RankState.FAILED, RankState.STOPPED)

    # --- calls (RankLink)

    def call(self, endpoint: str, payload: Payload) -> asyncio.Future[Payload]:
        """Send a call that is answered once."""
        self._keeper.check_thread()
        future = ReplyFuture()
        self._send(future, endpoint, payload, sender_name())
        return future

    def stream(self, endpoint: str, payload: Payload) -> ReplyStream:
        """Send a call that is answered any number of times."""
        self._keeper.check_thread()
        stream = ReplyStream()
        self._send(stream, endpoint, payload, sender_name())
        return stream

    def cast(self, endpoint: str, payload: Payload) -> None:
        """Send a message that is not answered. From any thread: plain code may broadcast."""
        sender = sender_name()
        self._keeper.on_loop(lambda: self._cast(endpoint, payload, sender))

    def _cast(self, endpoint: str, payload: Payload, sender: str) -> None:
        if self._link is not None:
            self._link.cast(self.actor_id, endpoint, payload, sender)
        elif self.state is RankState.STOPPED:
            _log.warning("%s from %s was for %s, which was stopped", endpoint, sender, self.name)
        elif self.state is RankState.FAILED and not self._is_reference:
            self._keeper.undelivered(self, endpoint, sender)
        else:
            self._late_casts.append((endpoint, sender))
            self._waiting.append(lambda link: link.cast(self.actor_id, endpoint, payload, sender))
            self._keeper.sought(self)

    @property
    def name(self) -> str:
        """For people: `worker[2]`."""
        return f"{self._keeper.mesh_name}[{self.rank}]"

    def _send(self, call: PendingCall, endpoint: str, payload: Payload, sender: str) -> None:
        if self._link is not None:
            self._link.call(self, call, self.actor_id, endpoint, payload, sender)
        elif self.state is RankState.STOPPED:
            fail_call(call, MeshStopped(f"{self.name} was stopped: {endpoint} is not called"))
        elif self.state is RankState.FAILED and not self._is_reference:
            fail_call(call, self._died())
        else:
            self.outstanding += 1
            self._waiting_calls.append(call)

            def send(link: Link) -> None:
                self.outstanding -= 1
                if not call.done():
                    link.call(self, call, self.actor_id, endpoint, payload, sender)

            self._waiting.append(send)
            self._keeper.sought(self)

    def error_of(self, error: pb.CallError) -> BaseException:
        found = error_of_answer(error, self._keeper.mesh_name, self.rank)
        if self._is_reference and isinstance(found, Died | MeshStopped):
            self._mistrust(found)
        return found

    def _mistrust(self, error: Died | MeshStopped) -> None:
        """Ask the owner before the next call: this life is over, and there may be another one."""
        if self.state is RankState.UP:
            self.state = RankState.FAILED
            self.failure = error.failure if isinstance(error, Died) else None
            self._leave_link()

    def link_broke(self, link: Link, calls: list[PendingCall]) -> None:
        if link is self._link:
            self._link = None
            self._keeper.lost(self, link, calls)
        else:
            for call in calls:
                fail_call(call, self._died())

    def failed_with(self, end: MeshFailure) -> MeshFailure:
        """Return the end of its process as a failure of the rank."""
        return as_of_rank(
            end,
            mesh_name=self._keeper.mesh_name,
            mesh_id=self._keeper.mesh_id,
            rank=self.rank,
            incarnation=self.incarnation,
        )

    # --- its states, set by the keeper

    def up(self, link: Link, actor_id: str, place: Place) -> None:
        """Send what waits, and from now on everything, over `link`."""
        self.actor_id, self.place, self._link = actor_id, place, link
        self.state = RankState.UP
        self.failure = None
        link.attach(self)
        waiting, self._waiting = self._waiting, deque()
        self._waiting_calls, self._late_casts = [], []
        for send in waiting:
            send(link)
        self._up.set()

    def fail(self, failure: MeshFailure, calls: Sequence[PendingCall] = ()) -> None:
        """Take the rank for failed; `calls` and those that wait raise Died."""
        if self.state is not RankState.STOPPED:
            self.state = RankState.FAILED
        self.failure = failure
        self._leave_link()
        self._end_calls(calls, self._died)

    def take_late_casts(self) -> list[tuple[str, str]]:
        """Return (endpoint, sender) of what waited without an answer, after the rank has ended."""
        late, self._late_casts = self._late_casts, []
        return late

    def withdraw(self) -> list[PendingCall]:
        """Expect no more answers of a rank that does not give any; return the calls."""
        return [] if self._link is None else self._link.withdraw(self)

    def stopped(self, calls: Sequence[PendingCall] = ()) -> None:
        """Take the rank for stopped, for good; `calls` and those that wait raise MeshStopped.

        Other calls under way are answered already, and their answers on the way.
        """
        self.state = RankState.STOPPED
        self._leave_link()
        self._end_calls(calls, lambda: MeshStopped(f"{self.name} was stopped"))

    def renew(self) -> None:
        """Begin the next incarnation: calls wait for it from now on."""
        self._leave_link()
        self.incarnation += 1
        self.actor_id = ""  # late news of the earlier one is not of this one
        self.state = RankState.WAITING
        self.failure = None
        self.place = None
        self._up = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether the rank is up, failed or stopped."""
        return self._up.is_set()

    async def settled(self) -> None:
        """Return when the rank is up, failed or stopped."""
        await self._up.wait()

    def end_calls(self, calls: Sequence[PendingCall]) -> None:
        """Raise Died in calls that a broken connection left."""
        for call in calls:
            fail_call(call, self._died())

    def end_calls_with(self, calls: Sequence[PendingCall], failure: MeshFailure) -> None:
        """Raise Died in calls to an incarnation that is no longer this rank's."""
        for call in calls:
            fail_call(call, Died(failure, rank=self.rank))

    def _leave_link(self) -> None:
        if self._link is not None:
            self._link.detach(self)
            self._link = None

    def _end_calls(self, calls: Sequence[PendingCall], error: Callable[[], BaseException]) -> None:
        waiting, self._waiting_calls = self._waiting_calls, []
        self.outstanding -= len(waiting)
        self._waiting.clear()
        for call in (*waiting, *calls):
            fail_call(call, error())
        self._up.set()

    def _died(self) -> BaseException:
        if self.failure is None:
            return MeshStopped(f"{self.name} was stopped")
        return Died(self.failure, rank=self.rank)
