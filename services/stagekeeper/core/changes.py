"""The change log: which deployments changed, and when, as far back as it reaches.

Decided here: what a reader that was away has to look at again, and when it was away too long. Not
decided here: what is seen (a reader reads the deployment as it is now).

Invariant: revisions ascend by one within a reign, and an entry never changes.
"""

from __future__ import annotations

from collections import deque

from stagekeeper.core.commands import ChangeKind, PublishChange
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import ChangeRevision, DeploymentName, Epoch


class ChangeLog:
    """The last `limit` changes of one reign, in memory only."""

    def __init__(self, epoch: Epoch, limit: int) -> None:
        self._epoch = epoch
        self._newest = 0
        self._entries: deque[PublishChange] = deque(maxlen=limit)

    @property
    def revision(self) -> ChangeRevision:
        return ChangeRevision(self._epoch, self._newest)

    def begin_reign(self, epoch: Epoch) -> None:
        """Start anew under another epoch: earlier positions cannot be resumed from."""
        self._epoch = epoch
        self._newest = 0
        self._entries.clear()

    def add(self, kind: ChangeKind, name: DeploymentName) -> PublishChange:
        self._newest += 1
        change = PublishChange(self.revision, kind, name)
        self._entries.append(change)
        return change

    def since(self, revision: ChangeRevision) -> list[PublishChange]:
        """Return what changed after `revision`, ascending, with each name once: its last change.

        Raises:
            Refused: REVISION_GONE, when the log cannot tell.
        """
        oldest = self._newest - len(self._entries)
        if revision.epoch != self._epoch or not oldest <= revision.n <= self._newest:
            raise Refused(
                Reason.REVISION_GONE,
                f"revision {revision.n} of reign {revision.epoch} is not in the change log (reign "
                f"{self._epoch}, {oldest} to {self._newest}): list, then watch again",
            )
        last: dict[DeploymentName, PublishChange] = {}
        for change in reversed(self._entries):
            if change.revision.n <= revision.n:
                break
            last.setdefault(change.name, change)
        return list(reversed(last.values()))
