"""What users ask for: deployments, their stages, and where they may lie."""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.command_stage import CommandSpec
from stagekeeper.core.ids import DeploymentName, DeviceId, StageId, WorkerId

DEFAULT_MAX_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model behind a deployment, for people and catalogues."""

    name: str = ""
    version: str = ""
    abilities: tuple[str, ...] = ()


NO_MODEL = ModelInfo()


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
    model: ModelInfo = NO_MODEL
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
