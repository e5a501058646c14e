"""What can happen to the registry. Each event is a fact; deciding what follows is the registry's.

Outcomes of commands come back as events too, by the same door as a message from the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.ids import (
    DeploymentName,
    OperationId,
    SlotKey,
    WorkerId,
)
from stagekeeper.core.model import DeploymentSpec, Failure, OperationRecord, WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker put its whole slice. `digest` is the agent's own, compared with its heartbeats'."""

    report: WorkerReport
    digest: bytes


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    worker_id: WorkerId
    incarnation: int
    revision: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class FailureReported:
    worker_id: WorkerId
    incarnation: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class AgentProbed:
    """The supervisor dialled an agent back; `detail` says what it met when it did not answer."""

    worker_id: WorkerId
    incarnation: int
    is_reachable: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentRequested:
    """A user wants a deployment. `wall_time` (seconds since 1970) is for display only.

    `plan_id` names the plan that the user looked at; empty names none.
    """

    spec: DeploymentSpec
    wall_time: float
    plan_id: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentDeleted:
    name: DeploymentName


@dataclass(frozen=True, slots=True)
class OperationStarted:
    """All stages of a start are up, on all of its workers; nothing is committed."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True)
class OperationEnded:
    """A start came to nothing: the last word of the agent whose part failed first, or why none.

    `record` is None when that agent was lost or refused before it had a record; `error` then says
    what was met, in words for the user, and `reason` names the refusal (a `Reason`) if it was one.
    `worker_id` is that agent's; empty is read as the first one's. `others` are the last words of
    the other workers that had any.
    """

    operation_id: OperationId
    record: OperationRecord | None
    error: str = ""
    reason: str = ""
    worker_id: WorkerId = WorkerId("")
    others: tuple[tuple[WorkerId, OperationRecord], ...] = ()


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """A CommitOperation command is done: the operation as it stands there, or what was met.

    `reason` names the agent's refusal (a `Reason`) if it was one.
    """

    worker_id: WorkerId
    incarnation: int
    operation_id: OperationId
    record: OperationRecord | None
    error: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotStopped:
    """A StopSlot command is done; `error` is empty when the slot is gone."""

    worker_id: WorkerId
    incarnation: int
    slot: SlotKey
    error: str = ""


@dataclass(frozen=True, slots=True)
class OperationCancelled:
    """A CancelOperation command is done; `error` is empty when nothing of it is left."""

    worker_id: WorkerId
    incarnation: int
    operation_id: OperationId
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time went by. `stalled_s` is how late the tick came: the supervisor's own stall, forgiven."""

    stalled_s: float = 0.0


Event = (
    WorkerRegistered
    | HeartbeatReceived
    | FailureReported
    | AgentProbed
    | DeploymentRequested
    | DeploymentDeleted
    | OperationStarted
    | OperationEnded
    | CommitEnded
    | SlotStopped
    | OperationCancelled
    | Ticked
)
