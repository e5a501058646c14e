"""The change log: which deployments changed and what happened, as far back as it reaches.

Decided here: what a reader that was away has to look at again, and when it was away too long. Not
decided here: what is seen (a reader reads the deployment as it is now).

Changes of routes and events share one order and are kept apart: a mass of events, as when a whole
cluster comes back, takes no reader the changes that it routes by.

Invariant: revisions ascend by one within a reign, and an entry never changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from stagekeeper.core.commands import ChangeKind, PublishChange
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.event_log import ITSELF, EventKind, PublishEvent, Subject, fitted
from stagekeeper.core.ids import ChangeRevision, DeploymentName, Epoch

Entry = TypeVar("Entry", PublishChange, PublishEvent)


class _Kept(Generic[Entry]):
    """The last `limit` entries of one sort. `floor` is the newest revision that it cannot tell."""

    def __init__(self, limit: int) -> None:
        self.entries: deque[Entry] = deque()
        self.floor = 0
        self._limit = limit

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if len(self.entries) > self._limit:
            self.floor = self.entries.popleft().revision.n

    def since(self, n: int) -> list[Entry]:
        """Return what came after revision `n` of this reign, newest first."""
        found: list[Entry] = []
        for entry in reversed(self.entries):
            if entry.revision.n <= n:
                break
            found.append(entry)
        return found


class ChangeLog:
    """The last changes and events of one reign, in memory only.

    Args:
        epoch: the reign.
        limit: changes of deployments that are kept.
        event_limit: events that are kept.
    """

    def __init__(self, epoch: Epoch, limit: int, event_limit: int) -> None:
        self._epoch = epoch
        self._newest = 0
        self._limits = limit, event_limit
        self._changes: _Kept[PublishChange] = _Kept(limit)
        self._events: _Kept[PublishEvent] = _Kept(event_limit)
        self._events_before: tuple[PublishEvent, ...] = ()

    @property
    def revision(self) -> ChangeRevision:
        return ChangeRevision(self._epoch, self._newest)

    def begin_reign(self, epoch: Epoch) -> None:
        """Start anew under another epoch: earlier positions cannot be resumed from.

        What happened before is still shown to those who ask for the newest events.
        """
        self._events_before = tuple(self.newest_events(None, self._limits[1]))
        self._epoch = epoch
        self._newest = 0
        self._changes, self._events = _Kept(self._limits[0]), _Kept(self._limits[1])

    def add(self, kind: ChangeKind, name: DeploymentName) -> PublishChange:
        self._newest += 1
        change = PublishChange(self.revision, kind, name)
        self._changes.add(change)
        return change

    def add_event(
        self,
        kind: EventKind,
        at: float,
        message: str,
        subject: Subject = ITSELF,
        *,
        is_warning: bool = False,
    ) -> PublishEvent:
        self._newest += 1
        event = PublishEvent(self.revision, kind, at, fitted(message), subject, is_warning)
        self._events.add(event)
        return event

    def since(self, revision: ChangeRevision) -> list[PublishChange]:
        """Return what changed after `revision`, ascending, with each name once: its last change.

        Raises:
            Refused: REVISION_GONE, when the log cannot tell.
        """
        self._check(revision, self._changes.floor)
        last: dict[DeploymentName, PublishChange] = {}
        for change in self._changes.since(revision.n):
            last.setdefault(change.name, change)
        return list(reversed(last.values()))

    def events_since(
        self, revision: ChangeRevision, deployment: DeploymentName | None = None
    ) -> list[PublishEvent]:
        """Return what happened after `revision`, ascending; of one deployment, or all.

        Raises:
            Refused: REVISION_GONE, when the log cannot tell.
        """
        self._check(revision, self._events.floor)
        return _about(reversed(self._events.since(revision.n)), deployment)

    def newest_events(self, deployment: DeploymentName | None, limit: int) -> list[PublishEvent]:
        """Return the newest events, ascending; those before the reign was raised included."""
        kept = _about([*self._events_before, *self._events.entries], deployment)
        return kept[-limit:]

    def _check(self, revision: ChangeRevision, floor: int) -> None:
        if revision.epoch != self._epoch or not floor <= revision.n <= self._newest:
            raise Refused(
                Reason.REVISION_GONE,
                f"revision {revision.n} of reign {revision.epoch} is not in the change log (reign "
                f"{self._epoch}, {floor} to {self._newest}): list, then watch again",
            )


def _about(events: Iterable[PublishEvent], deployment: DeploymentName | None) -> list[PublishEvent]:
    return [it for it in events if deployment is None or it.subject.deployment == deployment]
