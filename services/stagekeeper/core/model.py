"""The values that the core decides about: specs, reports, and what is derived from them.

All are frozen. A `WorkerReport` is a worker's own word and is kept as it came; a `ReplicaView` is
derived and never stored. Bytes, seconds; None means unknown, never zero. Wall-clock times are
seconds since the Unix epoch and are carried for display only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stagekeeper.core.command_stage import CommandSpec, StagePorts
from stagekeeper.core.counted import noun
from stagekeeper.core.ids import (
    NO_EPOCH,
    DeploymentName,
    DeviceId,
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
from stagekeeper.core.states import (
    DeploymentState,
    OperationState,
    Phase,
    ReplicaState,
    RollbackEnding,
    ShardState,
    Timer,
    WorkerState,
)

DEFAULT_MAX_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model behind a deployment, for people and catalogues."""

    name: str = ""
    version: str = ""
    abilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a stage needs of each of its cards: a share of the total in (0, 1], or bytes.

    `reuse_profile`: what an earlier start of this kind measured may stand in for MEASURE.
    """

    utilization: float | None = None
    bytes: int | None = None
    reserve_bytes: int = 0
    reuse_profile: bool = False

    def on_card(self, total_bytes: int) -> int:
        """Return the bytes that admission counts on a card of `total_bytes`."""
        if self.bytes is not None:
            return self.bytes + self.reserve_bytes
        return int((self.utilization or 0.0) * total_bytes) + self.reserve_bytes


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One step of a model: a Stage class, or a program with an empty `entrypoint`.

    `devices` are cards of the replica; None limits mean "no limit".
    """

    name: str
    entrypoint: str = ""
    args_json: str = "{}"
    devices: tuple[int, ...] = ()
    memory: MemoryNeed | None = None
    shard_count: int = 1
    env: tuple[tuple[str, str], ...] = ()
    start_timeout_s: float | None = None
    stall_timeout_s: float | None = None
    stop_budget_s: float | None = None
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    command: CommandSpec | None = None

    @property
    def runs(self) -> str:
        """What it runs, for people and to tell the same code by: the class, or the command line."""
        return self.entrypoint if self.command is None else " ".join(self.command.argv)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a deployment may lie; empty means anywhere."""

    workers: tuple[WorkerId, ...] = ()
    device_pool: tuple[DeviceId, ...] = ()


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """What a user wants served. Equal specs are the same wish."""

    name: DeploymentName
    stages: tuple[StageSpec, ...]
    replicas: int = 1
    entry: str = ""
    model: ModelInfo = ModelInfo()
    placement: Placement = Placement()
    overlap_loads: bool = False

    @property
    def entry_stage_id(self) -> StageId:
        """The stage that a call without a stage reaches; the first when none is named."""
        for stage_id, stage in enumerate(self.stages):
            if stage.name == self.entry:
                return StageId(stage_id)
        return StageId(0)

    @property
    def shard_count(self) -> int:
        """Shards of one whole replica."""
        return sum(stage.shard_count for stage in self.stages)

    @property
    def worker_count(self) -> int:
        """Workers of one replica: the k-th has the k-th shard of every stage that has so many."""
        return max(stage.shard_count for stage in self.stages)


@dataclass(frozen=True, slots=True)
class ForeignHolder:
    """Who holds memory of a card beside what its agent has reserved.

    `pid` is 0 where it is unknown, or several; `worker_id` is the worker of this cluster whose
    stage it is, empty for strangers.
    """

    pid: int
    name: str
    memory_bytes: int
    worker_id: WorkerId = WorkerId("")

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})" if self.pid else self.name


@dataclass(frozen=True, slots=True)
class Device:
    """A card of a worker. (worker id, device id) is its identity in the cluster.

    `sick_reason` says why nothing new goes there, and is empty where it may.
    """

    device_id: DeviceId
    kind: str
    model: str
    index: int
    total_bytes: int
    lock_domain_id: str = ""
    used_bytes: int | None = None
    reserved_bytes: int = 0
    foreign: tuple[ForeignHolder, ...] = ()
    sick_reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """What one shard holds of one device: as admission counted it, and as measured."""

    device_id: DeviceId
    reserved_bytes: int
    used_bytes: int | None = None


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
class MemoryProfile:
    """Memory of a stage on that of its cards where it is most, as its phases measured it.

    `weights_bytes` are in use after LOAD, `peak_bytes` at most in MEASURE, the weights among them;
    `graph_bytes` is what CAPTURE added, None before its end.
    """

    weights_bytes: int
    peak_bytes: int
    graph_bytes: int | None = None


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
    model: ModelInfo = ModelInfo()
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
class ExitInfo:
    """How a process ended; of an adopted one `code` and `signal` may both be unknown."""

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True)
class FailureOrigin:
    """Where a failure came from; `phase` is None when the shard was READY."""

    worker_id: WorkerId
    deployment: DeploymentName
    replica_index: ReplicaIndex
    stage_id: StageId
    stage_name: str
    shard_index: int
    instance_id: InstanceId
    generation: Generation | None = None
    phase: Phase | None = None
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An end that nobody asked for. Two reports of one death are equal in `failure_id`.

    `kind` is a name of the protocol's FailureKind without its prefix (EXITED, SIGNALED, …); `path`
    holds (owner, decision) pairs, innermost first; `causes` are root first.
    """

    failure_id: FailureId
    kind: str
    origin: FailureOrigin
    message: str
    exit: ExitInfo | None = None
    detected_by: str = ""
    detect_time: float | None = None
    last_log_lines: tuple[str, ...] = ()
    remote_traceback: str = ""
    path: tuple[tuple[str, str], ...] = ()
    restarts_tried: int = 0
    causes: tuple[Failure, ...] = ()


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


@dataclass(frozen=True, slots=True)
class RoutedShard:
    """A shard, and the worker that holds it as the supervisor knows that worker now."""

    record: ShardRecord
    worker_id: WorkerId
    worker_state: WorkerState


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One copy of a deployment, derived from the claims on it.

    `shards` are the shards of the set that is shown, in the order of (stage_id, shard_index).
    `timer` is what brings `next_action` about, where the clock does. `since` is when it came into
    its state (monotonic); None when it was in it before this reign.
    """

    key: ReplicaKey
    state: ReplicaState
    ready_shard_count: int
    shard_count: int
    reason: str = ""
    next_action: str = ""
    shards: tuple[RoutedShard, ...] = ()
    timer: Timer | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment: what is wanted (`spec` None when only workers know of it) and what is there.

    `since` is when it came into its state (monotonic); None when it was in it before this reign.
    """

    name: DeploymentName
    state: DeploymentState
    reason: str = ""
    spec: DeploymentSpec | None = None
    spec_revision: int = 0
    replicas: tuple[ReplicaView, ...] = ()
    durable: bool = False
    create_time: float | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True)
class StageStart:
    """One stage's part of an operation: what to run and on which real devices."""

    stage_id: StageId
    spec: StageSpec
    device_ids: tuple[DeviceId, ...] = ()
    shard_index: int = 0
    shard_count: int = 1
    restart_ages_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """A shard of a replica as the other stages call it: the process, and where it serves."""

    stage_id: StageId
    stage_name: str
    shard_index: int
    instance_id: InstanceId
    url: str


@dataclass(frozen=True, slots=True)
class OperationPlan:
    """One start of a replica on one worker: all that reserve, start and commit need to know.

    `overlap_loads`: stages that share a card and start in one step load side by side.
    """

    operation_id: OperationId
    deployment: DeploymentName
    replica_index: ReplicaIndex
    generation: Generation
    worker_id: WorkerId
    stages: tuple[StageStart, ...]
    stage_count: int
    entry_stage_id: StageId
    spec_revision: int
    model: ModelInfo = field(default_factory=ModelInfo)
    overlap_loads: bool = False

    @property
    def replica(self) -> ReplicaKey:
        return ReplicaKey(self.deployment, self.replica_index)


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """One start of a replica on all of its workers, under one operation and one generation.

    `parts` has one for each worker: the k-th holds the k-th shard of every stage that has so many,
    and so the first one has all stages.
    """

    parts: tuple[OperationPlan, ...]

    @property
    def operation_id(self) -> OperationId:
        return self.parts[0].operation_id

    @property
    def generation(self) -> Generation:
        return self.parts[0].generation

    @property
    def replica(self) -> ReplicaKey:
        return self.parts[0].replica

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Its workers, in shard order."""
        return tuple(part.worker_id for part in self.parts)

    @property
    def is_spanning(self) -> bool:
        """Whether several workers have to agree."""
        return len(self.parts) > 1

    @property
    def where(self) -> str:
        """Its workers, for people."""
        return f"{noun(len(self.parts), 'worker')} {', '.join(self.worker_ids)}"

    def part_of(self, worker_id: WorkerId) -> OperationPlan:
        """Return what a worker has of it; the worker is one of `worker_ids`."""
        return next(part for part in self.parts if part.worker_id == worker_id)
