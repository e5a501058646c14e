"""Recorded failures: each death once, whoever reports it and how often.

Decided here: what is a repeat, and which failure of a replica is its last. Not decided here: what
is done about a failure, whether it still says anything of its replica (`rederivation`), and how
long a store keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagekeeper.core.ids import DeploymentName, FailureId, Generation, ReplicaKey
from stagekeeper.core.model import Failure


class FailureLog:
    """The last `limit` failures, in the order in which they were recorded."""

    def __init__(self, limit: int, failures: Iterable[Failure] = ()) -> None:
        self._limit = limit
        self._by_id: dict[FailureId, Failure] = {}
        self._last: dict[ReplicaKey, tuple[Generation, Failure]] = {}
        for failure in failures:
            self.add(failure)

    def add(self, failure: Failure) -> list[ReplicaKey]:
        """Record a failure; return whose failures are others now: nobody's when it was there."""
        if failure.failure_id in self._by_id:
            return []
        self._by_id[failure.failure_id] = failure
        replica, generation = _replica(failure), failure.origin.generation
        last = self._last.get(replica)
        # A death may be told long after it happened: what counts is which start it was of.
        if generation is not None and (last is None or last[0] <= generation):
            self._last[replica] = (generation, failure)
        if len(self._by_id) > self._limit:
            oldest = self._by_id.pop(next(iter(self._by_id)))
            last = self._last.get(_replica(oldest))
            if last is not None and last[1] is oldest:
                del self._last[_replica(oldest)]
            return [replica, _replica(oldest)]
        return [replica]

    def last_of(self, replica: ReplicaKey, *, since: Generation | None) -> Failure | None:
        """Return the failure of a replica's newest start that has one.

        Args:
            replica: whose failure is asked for.
            since: what failed in a start before that one is no news; None: everything is.
        """
        last = self._last.get(replica)
        if last is None or (since is not None and last[0] < since):
            return None
        return last[1]

    def newest(self, deployment: DeploymentName | None, limit: int) -> list[Failure]:
        """Return failures of one deployment, or of all, newest first."""
        found: list[Failure] = []
        for failure in reversed(self._by_id.values()):
            if len(found) >= limit:
                break
            if deployment is None or failure.origin.deployment == deployment:
                found.append(failure)
        return found


def _replica(failure: Failure) -> ReplicaKey:
    return ReplicaKey(failure.origin.deployment, failure.origin.replica_index)
