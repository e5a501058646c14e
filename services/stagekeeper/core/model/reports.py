"""What workers say they hold: a slice, its shards and operations.

Invariant: a `WorkerReport` is a worker's own word and is kept as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.ids import (
    NO_EPOCH,
    DeploymentName,
    Epoch,
    FailureId,
    Generation,
    HostId,
    InstanceId,
    OperationId,
    ReplicaIndex,
    ReplicaKey,
    SlotKey,
    StageId,
    WorkerId,
)
from stagekeeper.core.model.cards import Device, DeviceClaim, MemoryProfile
from stagekeeper.core.model.failures import Failure
from stagekeeper.core.model.specs import NO_MODEL, ModelInfo
from stagekeeper.core.states import OperationState, Phase, RollbackEnding, ShardState


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """An address at which a shard serves; `protocol` is "grpc" or "http"."""

    name: str
    protocol: str
    url: str


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """A method that calls may name."""

    name: str
    idempotent: bool = False
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something long is; `counter` grows with every sign of life."""

    counter: int = 0
    done: int = 0
    total: int = 0
    note: str = ""


NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard as its agent holds it: an entry of a worker's slice."""

    deployment: DeploymentName
    replica_index: ReplicaIndex
    stage_id: StageId
    stage_name: str
    stage_count: int
    shard_index: int
    shard_count: int
    generation: Generation
    operation_id: OperationId
    instance_id: InstanceId
    state: ShardState
    committed: bool = False
    state_reason: str = ""
    phase: Phase | None = None
    spec_revision: int = 0
    model: ModelInfo = NO_MODEL
    attempt: int = 0
    devices: tuple[DeviceClaim, ...] = ()
    addresses: tuple[ShardAddress, ...] = ()
    endpoints: tuple[EndpointInfo, ...] = ()
    create_time: float | None = None
    ready_time: float | None = None
    memory_bytes: int | None = None
    restart_ages_s: tuple[float, ...] = ()
    pid: int = 0
    busy_for_s: float | None = None
    entry: bool = False
    failure_id: FailureId = FailureId("")
    progress: Progress = NO_PROGRESS
    predicted_memory: MemoryProfile | None = None
    measured_memory: MemoryProfile | None = None

    @property
    def replica(self) -> ReplicaKey:
        return ReplicaKey(self.deployment, self.replica_index)

    @property
    def slot(self) -> SlotKey:
        return SlotKey(self.deployment, self.replica_index, self.stage_id)


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """What became of one stage in an operation's rollback.

    `was` and `phase` are what it was when it was stopped. The memory is what anybody used on its
    cards then, and when it was gone; None where that is unknown, and for a stage without cards.
    """

    stage_id: StageId
    cleaned: bool
    error: str = ""
    duration_s: float = 0.0
    stage_name: str = ""
    worker_id: WorkerId = WorkerId("")
    was: ShardState | None = None
    phase: Phase | None = None
    ending: RollbackEnding | None = None
    memory_before_bytes: int | None = None
    memory_after_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One start of a replica's stages, as one worker sees it."""

    operation_id: OperationId
    deployment: DeploymentName
    replica_index: ReplicaIndex
    generation: Generation
    state: OperationState
    reason: str = ""
    rollback: tuple[RollbackRecord, ...] = ()
    failure: Failure | None = None
    up_stage_ids: tuple[StageId, ...] = ()
    ports: tuple[StagePorts, ...] = ()

    @property
    def replica(self) -> ReplicaKey:
        return ReplicaKey(self.deployment, self.replica_index)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's whole slice: its own word, kept as it came.

    `notes` are for its operator: a sentence each, about what no other field tells. With
    `inventory_unknown`, `devices` are the cards as they were last read, and `inventory_reason` says
    why they could not be read since.
    """

    worker_id: WorkerId
    host_id: HostId
    incarnation: int
    revision: int
    agent_address: str
    hostname: str = ""
    stages_outlive_agent: bool = True
    outlive_reason: str = ""
    highest_epoch: Epoch = NO_EPOCH
    devices: tuple[Device, ...] = ()
    inventory_unknown: bool = False
    inventory_reason: str = ""
    shards: tuple[ShardRecord, ...] = ()
    operations: tuple[OperationRecord, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedEntry:
    """An entry of a slice that was wrong in itself and was not kept."""

    index: int
    reason: str
    message: str
