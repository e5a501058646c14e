"""Watches: a snapshot, then each change and each event, for as long as the reader listens.

Decided here: what a reader is sent, and in which order. A reader pulls what it has not seen from
the change log at its own pace: several changes of one deployment become one, the writer never
waits, and a reader that the log has outrun is told so (REVISION_GONE).

Invariant: whoever resumes after any revision that was sent misses nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from stagekeeper.core.commands import ChangeKind, PublishChange
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.event_log import PublishEvent
from stagekeeper.core.ids import ChangeRevision, DeploymentName
from stagekeeper.core.model import DeploymentView
from stagekeeper.core.registry import Registry
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.convert import revision_to_proto
from stagekeeper.supervisor.convert import event_to_proto
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.pulse import wait_until_set
from stagekeeper.supervisor.slow_readers import pour
from stagekeeper.supervisor.wall_times import WallTimes
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2

SHORTEST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
PAUSE_FACTOR = 4.0
"""After a batch changes gather for this many times as long as the batch took: in a storm of changes
to something large, each reader takes a small share of the supervisor's time."""

Response = deployment_pb2.WatchDeploymentsResponse

_KINDS = {
    ChangeKind.ADDED: deployment_pb2.CHANGE_KIND_ADDED,
    ChangeKind.MODIFIED: deployment_pb2.CHANGE_KIND_MODIFIED,
    ChangeKind.REMOVED: deployment_pb2.CHANGE_KIND_REMOVED,
}


@dataclass(frozen=True, slots=True)
class WatchChoice:
    """What a reader wants to be told.

    Attributes:
        has_routes: deployments as they change.
        has_events: what happened.
        deployment: only what is about it; None means everything.
        last_events: how many of the newest events a snapshot begins with.
    """

    has_routes: bool = True
    has_events: bool = False
    deployment: DeploymentName | None = None
    last_events: int = 100


ROUTES = WatchChoice()


class Watchers:
    """Lets readers watch the deployments.

    Args:
        engine: read only.
        messages: deployments as messages.
        clock: for the pause between batches.
        bookmark_s: how long a reader hears nothing before a bookmark.
        slow_reader_s: how long a reader may take nothing before it is cut.
    """

    def __init__(
        self,
        engine: Engine,
        messages: DeploymentMessages,
        clock: Clock,
        *,
        bookmark_s: float,
        slow_reader_s: float,
    ) -> None:
        self._engine = engine
        self._messages = messages
        self._clock = clock
        self._times = WallTimes(clock)
        self._bookmark_s = bookmark_s
        self._slow_reader_s = slow_reader_s
        self._is_ending = False

    def end(self) -> None:
        """End every stream: the supervisor ends."""
        self._is_ending = True
        self._engine.changes.beat()
        self._engine.news.beat()

    async def tell(
        self,
        after: ChangeRevision | None,
        choice: WatchChoice,
        write: Callable[[Response], Awaitable[None]],
        *,
        reader: str,
    ) -> None:
        """Write what `follow` yields to a reader, for as long as it takes it.

        Raises:
            Refused: those of `follow`; REVISION_GONE, when the reader takes nothing for too long.
        """
        messages = self.follow(after, choice)
        await pour(messages, write, limit_s=self._slow_reader_s, reader=reader)

    async def follow(
        self, after: ChangeRevision | None, choice: WatchChoice = ROUTES
    ) -> AsyncGenerator[Response, None]:
        """Yield what came after a revision, or a snapshot, and then everything that comes.

        Raises:
            Refused: REVISION_GONE, when the log cannot tell any more; DRAINING, when the supervisor
                ends.
        """
        registry = self._engine.registry
        watch = _Watch(registry, self._messages, self._times, choice)
        pulse = self._engine.news if choice.has_events else self._engine.changes
        with pulse.subscribe() as news:
            was_complete = registry.is_complete
            if after is None:
                position = registry.revision
                for message in watch.snapshot(position):
                    yield message
                yield _mark(deployment_pb2.CHANGE_KIND_SYNCED, position, was_complete)
            else:
                position = after
                watch.entries(position)  # refuses at once what can never be resumed
            while not self._is_ending:
                news.clear()
                began = self._clock.monotonic()
                entries, is_complete = watch.entries(position), registry.is_complete
                newest = registry.revision
                for entry in entries:
                    position = entry.revision
                    told = watch.message(entry)
                    if told is not None:
                        yield told
                position = newest  # what lies between is not for this reader
                if is_complete != was_complete:
                    was_complete = is_complete
                    yield _mark(deployment_pb2.CHANGE_KIND_BOOKMARK, position, is_complete)
                if entries:
                    await self._clock.sleep(_pause_s(self._clock.monotonic() - began))
                elif not await wait_until_set(news, self._bookmark_s):
                    yield _mark(deployment_pb2.CHANGE_KIND_BOOKMARK, position, is_complete)
        raise Refused(
            Reason.DRAINING,
            "the supervisor ends: keep the routes you have and watch again",
            retry_after_s=0.1,
        )


class _Watch:
    """What one reader chose, and what it has.

    `_known` are the names that it has; None while that is not known, after a resumption.
    """

    def __init__(
        self,
        registry: Registry,
        messages: DeploymentMessages,
        times: WallTimes,
        choice: WatchChoice,
    ) -> None:
        self._registry = registry
        self._messages = messages
        self._times = times
        self._choice = choice
        self._known: set[DeploymentName] | None = None

    def snapshot(self, position: ChangeRevision) -> Iterator[Response]:
        """Build what there is at `position`, message by message."""
        views, events = self._views(), self._newest_events()
        self._known = {view.name for view in views}
        for event in events:
            yield self._event(event)
        for view in views:
            message = self._messages.of(view)
            yield _change(deployment_pb2.CHANGE_KIND_SNAPSHOT, position, message)

    def entries(self, position: ChangeRevision) -> list[PublishChange | PublishEvent]:
        """Return what came after `position`, in order.

        Raises:
            Refused: REVISION_GONE, when the log cannot tell.
        """
        choice, entries = self._choice, list[PublishChange | PublishEvent]()
        if choice.has_routes:
            changes = self._registry.changes_since(position)
            entries += (it for it in changes if choice.deployment in (None, it.name))
        if choice.has_events:
            entries += self._registry.events_since(position, choice.deployment)
            entries.sort(key=lambda entry: entry.revision.n)
        return entries

    def message(self, entry: PublishChange | PublishEvent) -> Response | None:
        """Build the message of one entry; None when a later one tells all there is to tell."""
        if isinstance(entry, PublishEvent):
            return self._event(entry)
        return self._message_of(entry.kind, entry.name, entry.revision)

    def _views(self) -> list[DeploymentView]:
        if not self._choice.has_routes:
            return []
        if self._choice.deployment is None:
            return self._registry.deployments()
        view = self._registry.deployment(self._choice.deployment)
        return [] if view is None else [view]

    def _newest_events(self) -> list[PublishEvent]:
        if not self._choice.has_events:
            return []
        return self._registry.newest_events(self._choice.last_events, self._choice.deployment)

    def _event(self, event: PublishEvent) -> Response:
        return Response(
            kind=deployment_pb2.CHANGE_KIND_EVENT,
            revision=revision_to_proto(event.revision),
            event=event_to_proto(event, self._times),
        )

    def _message_of(
        self, kind: ChangeKind, name: DeploymentName, revision: ChangeRevision
    ) -> Response | None:
        """Build the message of a change.

        The log has the last change of each name, which for this reader may be another kind of
        change: what was added and modified since is new to it.
        """
        view, known = self._registry.deployment(name), self._known
        if kind is ChangeKind.REMOVED:
            self._messages.forget(name)
            if known is not None:
                if name not in known:
                    return None
                known.discard(name)
            return _change(_KINDS[kind], revision, deployment_pb2.Deployment(name=name))
        if view is None:
            return None
        if known is not None:
            kind = ChangeKind.MODIFIED if name in known else ChangeKind.ADDED
            known.add(name)
        return _change(_KINDS[kind], revision, self._messages.of(view))


def _change(
    kind: deployment_pb2.ChangeKind.ValueType,
    revision: ChangeRevision,
    deployment: deployment_pb2.Deployment,
) -> Response:
    return Response(kind=kind, deployment=deployment, revision=revision_to_proto(revision))


def _mark(
    kind: deployment_pb2.ChangeKind.ValueType, revision: ChangeRevision, is_complete: bool
) -> Response:
    """Build a message between batches; `is_complete` was read together with `revision`.

    A slow reader takes it late, when more may have come that it has not been sent yet.
    """
    return Response(kind=kind, revision=revision_to_proto(revision), complete=is_complete)


def _pause_s(batch_took_s: float) -> float:
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, PAUSE_FACTOR * batch_took_s))
