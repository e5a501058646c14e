"""Watches: a snapshot, then each change, for as long as the reader listens.

Decided here: what a reader is sent, and in which order. A reader pulls what it has not seen from
the change log at its own pace: several changes of one deployment become one, the writer never
waits, and a reader that the log has outrun is told so (REVISION_GONE).

Invariant: whoever resumes after any revision that was sent misses nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from stagekeeper.core.commands import ChangeKind
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import ChangeRevision, DeploymentName
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.convert import revision_to_proto
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.pulse import wait_until_set
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2

SHORTEST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
PAUSE_FACTOR = 4.0
"""After a batch changes gather for this many times as long as the batch took: in a storm of changes
to something large, each reader takes a small share of the supervisor's time."""

_KINDS = {
    ChangeKind.ADDED: deployment_pb2.CHANGE_KIND_ADDED,
    ChangeKind.MODIFIED: deployment_pb2.CHANGE_KIND_MODIFIED,
    ChangeKind.REMOVED: deployment_pb2.CHANGE_KIND_REMOVED,
}


class Watchers:
    """Lets readers watch the deployments.

    Args:
        engine: read only.
        messages: deployments as messages.
        clock: for the pause between batches.
        bookmark_s: how long a reader hears nothing before a bookmark.
    """

    def __init__(
        self, engine: Engine, messages: DeploymentMessages, clock: Clock, *, bookmark_s: float
    ) -> None:
        self._engine = engine
        self._messages = messages
        self._clock = clock
        self._bookmark_s = bookmark_s
        self._is_ending = False

    def end(self) -> None:
        """End every stream: the supervisor ends."""
        self._is_ending = True
        self._engine.changes.beat()

    async def follow(
        self, after: ChangeRevision | None
    ) -> AsyncIterator[deployment_pb2.WatchDeploymentsResponse]:
        """Yield what came after a revision, or a snapshot, and then every change.

        Raises:
            Refused: REVISION_GONE, when the log cannot tell any more; DRAINING, when the supervisor
                ends.
        """
        registry = self._engine.registry
        with self._engine.changes.subscribe() as news:
            # Names that the reader has; None while that is not known, after a resumption.
            known: set[DeploymentName] | None = None
            position = after
            if position is None:
                position, was_complete = registry.revision, registry.is_complete
                views = registry.deployments()
                known = {view.name for view in views}
                for view in views:
                    yield self._message(
                        deployment_pb2.CHANGE_KIND_SNAPSHOT, position, self._messages.of(view)
                    )
                yield self._mark(deployment_pb2.CHANGE_KIND_SYNCED, position, was_complete)
            else:
                registry.changes_since(position)  # refuses at once what can never be resumed
                was_complete = registry.is_complete
            while not self._is_ending:
                news.clear()
                began = self._clock.monotonic()
                changes, is_complete = registry.changes_since(position), registry.is_complete
                for change in changes:
                    position = change.revision
                    message = self._change(change.kind, change.name, position, known)
                    if message is not None:
                        yield message
                if is_complete != was_complete:
                    was_complete = is_complete
                    yield self._mark(deployment_pb2.CHANGE_KIND_BOOKMARK, position, is_complete)
                if changes:
                    await self._clock.sleep(_pause_s(self._clock.monotonic() - began))
                elif not await wait_until_set(news, self._bookmark_s):
                    yield self._mark(deployment_pb2.CHANGE_KIND_BOOKMARK, position, is_complete)
        raise Refused(
            Reason.DRAINING,
            "the supervisor ends: keep the routes you have and watch again",
            retry_after_s=0.1,
        )

    def _change(
        self,
        kind: ChangeKind,
        name: DeploymentName,
        revision: ChangeRevision,
        known: set[DeploymentName] | None,
    ) -> deployment_pb2.WatchDeploymentsResponse | None:
        """Build the message of one change; None when a later one tells all there is to tell.

        The log has the last change of each name, which for this reader may be another kind of
        change: what was added and modified since is new to it.
        """
        view = self._engine.registry.deployment(name)
        if kind is ChangeKind.REMOVED:
            self._messages.forget(name)
            if known is not None:
                if name not in known:
                    return None
                known.discard(name)
            return self._message(_KINDS[kind], revision, deployment_pb2.Deployment(name=name))
        if view is None:
            return None
        if known is not None:
            kind = ChangeKind.MODIFIED if name in known else ChangeKind.ADDED
            known.add(name)
        return self._message(_KINDS[kind], revision, self._messages.of(view))

    def _message(
        self,
        kind: deployment_pb2.ChangeKind.ValueType,
        revision: ChangeRevision,
        deployment: deployment_pb2.Deployment,
    ) -> deployment_pb2.WatchDeploymentsResponse:
        return deployment_pb2.WatchDeploymentsResponse(
            kind=kind, deployment=deployment, revision=revision_to_proto(revision)
        )

    def _mark(
        self,
        kind: deployment_pb2.ChangeKind.ValueType,
        revision: ChangeRevision,
        is_complete: bool,
    ) -> deployment_pb2.WatchDeploymentsResponse:
        """Build a message between batches; `is_complete` was read together with `revision`.

        A slow reader takes it late, when more may have come that it has not been sent yet.
        """
        return deployment_pb2.WatchDeploymentsResponse(
            kind=kind, revision=revision_to_proto(revision), complete=is_complete
        )


def _pause_s(batch_took_s: float) -> float:
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, PAUSE_FACTOR * batch_took_s))
