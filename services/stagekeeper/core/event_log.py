"""What happened, for people: the entries that the change log keeps beside the changes of routes.

Decided here: the kinds, and what an entry carries. Not decided here: when one is put down (where
the thing itself is decided) and for how long it is kept (`changes`).

Invariant: an entry never changes; nothing is ever decided by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stagekeeper.core.ids import (
    ChangeRevision,
    DeploymentName,
    FailureId,
    ReplicaIndex,
    ReplicaKey,
    StageId,
    WorkerId,
)

LONGEST_MESSAGE: Final = 500
"""Characters; a reason that quotes others may be longer, and views have it in full."""


class EventKind(StrEnum):
    """Names of the protocol's EventKind, without its prefix."""

    REIGN_BEGAN = "REIGN_BEGAN"
    EPOCH_RAISED = "EPOCH_RAISED"
    HOLD_ENDED = "HOLD_ENDED"
    WORKER_JOINED = "WORKER_JOINED"
    WORKER_RECONNECTED = "WORKER_RECONNECTED"
    WORKER_RESTARTED = "WORKER_RESTARTED"
    WORKER_SUSPECTED = "WORKER_SUSPECTED"
    WORKER_UNREACHABLE = "WORKER_UNREACHABLE"
    WORKER_LOST = "WORKER_LOST"
    WORKER_FORGOTTEN = "WORKER_FORGOTTEN"
    WORKER_SUPERSEDED = "WORKER_SUPERSEDED"
    AGENT_UNREACHABLE = "AGENT_UNREACHABLE"
    AGENT_REACHED = "AGENT_REACHED"
    ENTRIES_REFUSED = "ENTRIES_REFUSED"
    DEPLOYMENT_REQUESTED = "DEPLOYMENT_REQUESTED"
    DEPLOYMENT_DELETED = "DEPLOYMENT_DELETED"
    DEPLOYMENT_CHANGED = "DEPLOYMENT_CHANGED"
    REPLICA_CHANGED = "REPLICA_CHANGED"
    START_BEGAN = "START_BEGAN"
    START_ENDED = "START_ENDED"
    FAILURE_RECORDED = "FAILURE_RECORDED"
    STOP_REQUESTED = "STOP_REQUESTED"


@dataclass(frozen=True, slots=True)
class Subject:
    """What an event is about; empty or None where it is about no such thing."""

    deployment: DeploymentName = DeploymentName("")
    replica_index: ReplicaIndex | None = None
    stage_id: StageId | None = None
    worker_id: WorkerId = WorkerId("")
    failure_id: FailureId = FailureId("")


ITSELF: Final = Subject()
"""The supervisor."""


@dataclass(frozen=True, slots=True)
class PublishEvent:
    """Something happened; watchers read it when they get to it.

    `at` is monotonic: whoever shows it knows what the wall clock said then.
    """

    revision: ChangeRevision
    kind: EventKind
    at: float
    message: str
    subject: Subject = ITSELF
    is_warning: bool = False


def of_worker(worker_id: WorkerId) -> Subject:
    return Subject(worker_id=worker_id)


def of_replica(
    key: ReplicaKey, worker_id: WorkerId = WorkerId(""), stage_id: StageId | None = None
) -> Subject:
    return Subject(key.deployment, key.index, stage_id, worker_id)


def fitted(message: str) -> str:
    """Cut what is too long for a line of a log."""
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
