"""The stages of a state directory as its files and the kernel tell of them, without an agent.

For whoever stands before a host on which no agent runs. Decided here: what is read and how a
recorded process is told to be alive. Nothing is changed: a living agent of the same directory is
not disturbed. How stages are stopped is in `local_stop`.

Invariant: a process is shown as a stage's only as an adoption would take it over, or because it
carries the instance id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from stagekeeper.agent.damaged import DamagedRecord
from stagekeeper.agent.directory import AgentDirectory, directories_in
from stagekeeper.agent.host_lock import holder_of
from stagekeeper.agent.operation_store import OperationFile, is_committed
from stagekeeper.agent.records import (
    RECORD_FILE,
    RecordDamaged,
    StageRecord,
    damaged_in,
    open_process,
    read_record,
)
from stagekeeper.core.ids import OperationId, WorkerId
from stagekeeper.core.model import ShardRecord
from stagekeeper.core.states import ShardState
from stagekeeper.host.process import (
    ProcessIdentity,
    age_s,
    boot_id,
    members_by,
    own_bytes,
    resident_bytes,
)
from stagekeeper.runtime.launch import INSTANCE_ENV, LOG_FILE, Launch

_Members = Mapping[str, Sequence[ProcessIdentity]]


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Which stages are meant: of a deployment, of one replica of it, one stage; None is every."""

    deployment: str | None = None
    replica_index: int | None = None
    stage: str | None = None
    """A stage's name, or its id."""

    def takes(self, it: ShardRecord | Launch) -> bool:
        return (
            self.deployment in (None, it.deployment)
            and self.replica_index in (None, it.replica_index)
            and self.stage in (None, it.stage_name, str(it.stage_id))
        )


class LocalState(StrEnum):
    """What the files say of a stage, unless its process is gone."""

    COMMITTED = "COMMITTED"
    UNCOMMITTED = "UNCOMMITTED"
    STOPPING = "STOPPING"
    FAILED = "FAILED"
    GONE = "GONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStage:
    """One recorded stage process.

    Attributes:
        process: the main process; None when it is gone, or was never seen.
        others: the other processes that carry its instance id, the eldest first.
        age_s: of the main process.
        memory_bytes: of all its processes.
    """

    shard: ShardRecord
    state: LocalState
    process: ProcessIdentity | None
    others: tuple[ProcessIdentity, ...]
    age_s: float | None
    memory_bytes: int | None
    log_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDamaged:
    """A stage process without a record that can be read, and what still runs of it."""

    record: DamagedRecord
    processes: tuple[ProcessIdentity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """What one worker left, or has.

    Attributes:
        agent_pid: of its agent; 0 for one whose pid cannot be told; None when none runs.
    """

    directory: AgentDirectory
    agent_pid: int | None
    stages: tuple[LocalStage, ...]
    damaged: tuple[LocalDamaged, ...]

    @property
    def worker_id(self) -> WorkerId:
        return self.directory.worker_id


def read_workers(state_dir: Path, worker_id: WorkerId | None = None) -> list[LocalWorker]:
    """Read what every worker of a state directory has on record, or one of them.

    Raises:
        OSError: something in it cannot be read by this user.
    """
    directories = [it for it in directories_in(state_dir) if worker_id in (None, it.worker_id)]
    members: _Members = members_by(INSTANCE_ENV) if directories else {}
    this_boot = boot_id()
    return [_read_worker(directory, members, this_boot) for directory in directories]


def _read_worker(directory: AgentDirectory, members: _Members, this_boot: str) -> LocalWorker:
    operations = {it.record.operation_id: it for it in _operation_files(directory)}
    stages, damaged = [], []
    for folder in _folders(directory.stages):
        try:
            record = read_record(folder / RECORD_FILE)
        except RecordDamaged:
            record = None
        if record is not None:
            stages.append(_stage(directory, record, operations, members, this_boot))
        elif (found := damaged_in(folder)) is not None:
            left = tuple(members.get(found.instance_id, ()))
            damaged.append(LocalDamaged(record=found, processes=left))
    return LocalWorker(
        directory=directory,
        agent_pid=holder_of(directory.lock_file),
        stages=tuple(sorted(stages, key=_order)),
        damaged=tuple(damaged),
    )


def _stage(
    directory: AgentDirectory,
    record: StageRecord,
    operations: Mapping[OperationId, OperationFile],
    members: _Members,
    this_boot: str,
) -> LocalStage:
    shard = record.shard
    carriers = members.get(record.instance_id, ())
    process = _main_process(record, carriers, this_boot)
    others = tuple(it for it in carriers if it != process)
    file = operations.get(shard.operation_id)
    return LocalStage(
        shard=shard,
        state=_state(shard, is_alive=process is not None, committed=is_committed(shard, file)),
        process=process,
        others=others,
        age_s=age_s(process) if process is not None else None,
        memory_bytes=_memory(process, others),
        log_path=directory.run_dir(record.instance_id) / LOG_FILE,
    )


def _main_process(
    record: StageRecord, carriers: Sequence[ProcessIdentity], this_boot: str
) -> ProcessIdentity | None:
    if record.process is None:
        # Only its intent was written before its agent died: it may wait on its pipe.
        return carriers[0] if carriers else None
    handle = open_process(record, this_boot)
    if handle is None:
        return None
    handle.close()
    return handle.identity


def _state(shard: ShardRecord, *, is_alive: bool, committed: bool) -> LocalState:
    if not is_alive:
        return LocalState.GONE
    if shard.state is ShardState.STOPPING:
        return LocalState.STOPPING
    if shard.state is ShardState.FAILED:
        return LocalState.FAILED
    return LocalState.COMMITTED if committed else LocalState.UNCOMMITTED


def _memory(process: ProcessIdentity | None, others: Sequence[ProcessIdentity]) -> int | None:
    if process is not None:
        return resident_bytes(process.pid)
    return sum(map(own_bytes, others)) or None


def _folders(parent: Path) -> Iterator[Path]:
    try:
        yield from sorted(it for it in parent.iterdir() if it.is_dir())
    except FileNotFoundError:
        return


def _operation_files(directory: AgentDirectory) -> Iterator[OperationFile]:
    for path in sorted(directory.operations.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=OperationFile)
        except (FileNotFoundError, msgspec.DecodeError):
            continue  # settled just now; or damaged, and an agent sets it aside


def _order(stage: LocalStage) -> tuple[object, ...]:
    shard = stage.shard
    return (shard.slot, shard.shard_index, shard.generation, shard.attempt)
