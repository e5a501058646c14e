"""Reading what happened, and what happens: over any number of streams and supervisors.

Decided here: where a reader goes on after its stream broke, that it is told no event twice, and
that it hears of every gap. Events are in a supervisor's memory only: another reign begins anew.

Invariant: the first answer comes within the link's patience or not at all; once there was one, only
its reader ends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from enum import Enum, auto

from stagekeeper.client.errors import SupervisorUnreachable
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.client.watching import SILENCE_S, deployment_changes
from stagekeeper.v1.deployment_service_pb2 import (
    CHANGE_KIND_EVENT,
    CHANGE_KIND_SYNCED,
    WATCH_CONTENT_EVENTS,
    Event,
    WatchDeploymentsRequest,
    WatchDeploymentsResponse,
)
from stagekeeper.v1.types_pb2 import ChangeRevision

MOST_EVENTS = 10_000
"""Of another reign, when this one goes on with it: all that it has."""


class Gap(Enum):
    """What a reader of events hears between them."""

    AWAY = auto()
    """Nobody answers at the endpoint, or the stream broke. Trying goes on."""

    BACK = auto()
    """The same supervisor answers again; nothing was missed."""

    OTHER_REIGN = auto()
    """Another supervisor reigns; what happened before it, and was not read, is gone."""

    BEHIND = auto()
    """This reader fell behind; events may have been missed."""


OnGap = Callable[[Gap], None]


async def read_events(
    link: SupervisorLink, name: str, *, last: int, follow: bool, on_gap: OnGap
) -> AsyncGenerator[Event, None]:
    """Yield the last events, and then those that come; `Client.events` says the rest."""
    request = WatchDeploymentsRequest(
        content=WATCH_CONTENT_EVENTS, deployment=name, last_events=max(last, 1)
    )

    async def attempt() -> list[WatchDeploymentsResponse]:
        return await _snapshot(link, request)

    *told, synced = await link.while_unreachable(attempt)
    for message in told if last else ():
        yield message.event
    if follow:
        request.last_events = MOST_EVENTS
        following = _Following(synced.revision, on_gap)
        changes = deployment_changes(link, request, after=synced.revision, on_lost=following.lost)
        async with contextlib.aclosing(changes):
            async for change in changes:
                if following.is_new(change) and change is not None:
                    yield change.event


async def _snapshot(
    link: SupervisorLink, request: WatchDeploymentsRequest
) -> list[WatchDeploymentsResponse]:
    """Read a snapshot, its SYNCED included."""
    messages = []
    stream = link.stream(lambda stub: stub.WatchDeployments, request, silence_s=SILENCE_S)
    async with contextlib.aclosing(stream):
        async for message in stream:
            messages.append(message)
            if message.kind == CHANGE_KIND_SYNCED:
                return messages
    raise SupervisorUnreachable(f"the supervisor at {link.endpoint} ended in its answer")


class _Following:
    """Where a reader is, and what it has to be told of besides events."""

    def __init__(self, position: ChangeRevision, on_gap: OnGap) -> None:
        self._newest = _triple(position)
        self._on_gap = on_gap
        self._is_away = False
        self._is_snapshot = False

    def lost(self) -> None:
        """Note that the stream broke."""
        if not self._is_away:
            self._is_away = True
            self._on_gap(Gap.AWAY)

    def is_new(self, message: WatchDeploymentsResponse | None) -> bool:
        """Take in a message, None where a snapshot follows; say whether it is an unread event."""
        if message is None:
            self._is_snapshot = True
            return False
        revision = _triple(message.revision)
        if self._is_away or self._is_snapshot:
            self._resume(revision)
        is_new = message.kind == CHANGE_KIND_EVENT and revision > self._newest
        if revision > self._newest:
            self._newest = revision
        return is_new

    def _resume(self, revision: tuple[int, str, int]) -> None:
        is_same_supervisor = revision[1] == self._newest[1]
        if not is_same_supervisor:
            self._newest = (0, "", 0)
            self._on_gap(Gap.OTHER_REIGN)
        else:
            self._on_gap(Gap.BEHIND if self._is_snapshot else Gap.BACK)
        self._is_away = self._is_snapshot = False


def _triple(revision: ChangeRevision) -> tuple[int, str, int]:
    return (revision.epoch.number, revision.epoch.supervisor_id, revision.n)
