"""What the registry asks of the outside: replies to the caller, writes, work for agents.

The engine carries them out in the order given. Writes come before the work that they announce.
Every command to an agent names the worker's incarnation, so that it can be refused when it is late.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stagekeeper.core.event_log import PublishEvent
from stagekeeper.core.ids import (
    ChangeRevision,
    DeploymentName,
    Epoch,
    FailureId,
    Generation,
    OperationId,
    ReplicaIndex,
    SlotKey,
    WorkerId,
)
from stagekeeper.core.model import (
    DeploymentSpec,
    Failure,
    OperationPlan,
    Peer,
    RefusedEntry,
    ReplicaStart,
)


class HeartbeatVerdict(StrEnum):
    OK = "OK"
    REGISTER = "REGISTER"
    SUPERSEDED = "SUPERSEDED"


class ChangeKind(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    REMOVED = "REMOVED"


# Replies: at most one per event, for whoever sent it.


@dataclass(frozen=True, slots=True)
class RegistrationAccepted:
    epoch: Epoch
    next_heartbeat_s: float
    refused: tuple[RefusedEntry, ...] = ()
    settled_failures: tuple[FailureId, ...] = ()
    settled_operations: tuple[OperationId, ...] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    verdict: HeartbeatVerdict
    epoch: Epoch
    next_heartbeat_s: float


@dataclass(frozen=True, slots=True)
class FailureAcknowledged:
    is_settled: bool


@dataclass(frozen=True, slots=True)
class CreationAccepted:
    """The wish is taken; `starting` are the replicas that begin now, ascending."""

    starting: tuple[ReplicaIndex, ...]


@dataclass(frozen=True, slots=True)
class DeletionAccepted:
    """The deletion is taken; the stopping goes on by itself."""


Reply = (
    RegistrationAccepted
    | HeartbeatAnswered
    | FailureAcknowledged
    | CreationAccepted
    | DeletionAccepted
)


# Writes: what must survive this process.


@dataclass(frozen=True, slots=True)
class Desired:
    """A deployment as its user wants it, as it is written down.

    `is_creating` until its creation is settled: a reign that finds it set knows that the creation
    was interrupted. `create_time` is wall time, for display.
    """

    spec: DeploymentSpec
    spec_revision: int
    is_creating: bool
    is_deleting: bool = False
    create_time: float | None = None


@dataclass(frozen=True, slots=True)
class SaveDeployment:
    desired: Desired


@dataclass(frozen=True, slots=True)
class EntombDeployment:
    """Forget the deployment, but remember that everything up to `ceiling` was to be stopped."""

    name: DeploymentName
    ceiling: Generation


@dataclass(frozen=True, slots=True)
class SaveEpoch:
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SaveRoster:
    """Which workers were there; best effort, off the caller's path."""

    worker_ids: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class SaveFailure:
    failure: Failure


@dataclass(frozen=True, slots=True)
class SavedOperation:
    """A start that is under way, as it is written down: for a reign that has to go on with it.

    `is_decided`: it is committed, whatever comes; `peers` are then the shards of all of its
    workers. Nothing of that is written of a start on one worker, which needs nobody's agreement.
    """

    start: ReplicaStart
    is_decided: bool = False
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveOperation:
    saved: SavedOperation


@dataclass(frozen=True, slots=True)
class RemoveOperation:
    """Nothing of a start has to be done any more."""

    operation_id: OperationId


# Work for agents.


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """Which life of which agent a command is for, and where it listens."""

    worker_id: WorkerId
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class ProbeAgent:
    target: AgentTarget


@dataclass(frozen=True, slots=True)
class StopSlot:
    target: AgentTarget
    slot: SlotKey
    up_to: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class StartOperation:
    """Stop `stop_first`, then reserve and start all parts of `start`, or join what is under way.

    Ends with OperationStarted or OperationEnded. `targets` has one for each part, in their order.
    """

    start: ReplicaStart
    targets: tuple[AgentTarget, ...]
    stop_first: tuple[StopSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class RejoinOperation:
    """Look again at what a worker has of a start that is being carried out.

    It lives another life than the one that was told, or its report says that it undoes its part.
    """

    operation_id: OperationId
    target: AgentTarget


@dataclass(frozen=True, slots=True)
class EndRun:
    """Carry a start out no longer. What it has begun is cancelled by commands of its own."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True)
class CommitOperation:
    """Have a worker commit its part of a start that was decided to be; ends with CommitEnded.

    `peers` are the shards on the other workers.
    """

    target: AgentTarget
    plan: OperationPlan
    peers: tuple[Peer, ...] = ()

    @property
    def operation_id(self) -> OperationId:
        return self.plan.operation_id


@dataclass(frozen=True, slots=True)
class CancelOperation:
    target: AgentTarget
    operation_id: OperationId
    reason: str


# Work beside the agents.


@dataclass(frozen=True, slots=True)
class LookForReign:
    """See at once whether a reign above `above` lives at the stable endpoint.

    A worker has obeyed a higher one. `above` is our own epoch as it was before it went above that:
    on paper we are the higher one now, and two that live must not go on outbidding each other.
    """

    above: Epoch


# For watchers.


@dataclass(frozen=True, slots=True)
class PublishChange:
    """A deployment's view is another one now; watchers read it when they get to it."""

    revision: ChangeRevision
    kind: ChangeKind
    name: DeploymentName


Write = (
    SaveDeployment
    | EntombDeployment
    | SaveEpoch
    | SaveRoster
    | SaveFailure
    | SaveOperation
    | RemoveOperation
)
AgentWork = (
    ProbeAgent
    | StopSlot
    | StartOperation
    | RejoinOperation
    | EndRun
    | CommitOperation
    | CancelOperation
)
Work = AgentWork | LookForReign
Command = Reply | Write | Work | PublishChange | PublishEvent
