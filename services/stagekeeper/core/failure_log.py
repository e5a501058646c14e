"""Recorded failures: each death once, whoever reports it and how often.

Decided here: what is a repeat. Not decided here: what is done about a failure (nothing yet), and
how long a store keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagekeeper.core.ids import DeploymentName, FailureId
from stagekeeper.core.model import Failure


class FailureLog:
    """The last `limit` failures, in the order in which they were recorded."""

    def __init__(self, limit: int, failures: Iterable[Failure] = ()) -> None:
        self._limit = limit
        self._by_id: dict[FailureId, Failure] = {}
        for failure in failures:
            self.add(failure)

    def add(self, failure: Failure) -> bool:
        """Record a failure; return False when it was there already."""
        if failure.failure_id in self._by_id:
            return False
        self._by_id[failure.failure_id] = failure
        if len(self._by_id) > self._limit:
            del self._by_id[next(iter(self._by_id))]
        return True

    def newest(self, deployment: DeploymentName | None, limit: int) -> list[Failure]:
        """Return failures of one deployment, or of all, newest first."""
        found: list[Failure] = []
        for failure in reversed(self._by_id.values()):
            if len(found) >= limit:
                break
            if deployment is None or failure.origin.deployment == deployment:
                found.append(failure)
        return found
