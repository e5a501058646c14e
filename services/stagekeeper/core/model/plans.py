"""What workers are told to start: one operation, and its part on each worker."""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.counted import noun
from stagekeeper.core.ids import (
    DeploymentName,
    DeviceId,
    Generation,
    InstanceId,
    OperationId,
    ReplicaIndex,
    ReplicaKey,
    StageId,
    WorkerId,
)
from stagekeeper.core.model.specs import NO_MODEL, ModelInfo, StageSpec


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
    model: ModelInfo = NO_MODEL
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
