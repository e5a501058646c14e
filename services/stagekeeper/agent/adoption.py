"""A new agent takes over what an earlier one left: every recorded process, and every operation.

Each record ends up in one of three ways before the agent registers: held (a live process that does
not answer in time is reported as ADOPTING), proven gone and reported as failed, or proven gone and
forgotten. Stopped here is only what the records say was never let go, or was asked to stop already.
What is not recorded is never touched.

Invariant: a process is ours only if pid, start ticks, boot and instance id all say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
import structlog

from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.ending import kill_processes
from stagekeeper.agent.operation_store import OperationFile, OperationStore
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.records import StageRecord
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.agent.stopping import Stopping
from stagekeeper.core.ids import OperationId
from stagekeeper.core.model import OperationRecord
from stagekeeper.core.states import OperationState, ShardState
from stagekeeper.runtime.launch import INSTANCE_ENV
from stagekeeper.runtime.process import ProcessHandle, boot_id, environment_holds

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """How many recorded processes are held, were found gone, and were cleaned away."""

    held_count: int
    gone_count: int
    cleaned_count: int


class Adoption:
    """One start of an agent. Used once."""

    def __init__(
        self,
        stages: Stages,
        operations: Operations,
        store: OperationStore,
        deaths: Deaths,
        stopping: Stopping,
    ) -> None:
        self._stages = stages
        self._operations = operations
        self._store = store
        self._deaths = deaths
        self._stopping = stopping
        self._boot_id = boot_id()
        self._held: list[StageProcess] = []
        self._gone_count = 0
        self._cleaned_count = 0

    async def run(
        self,
        records: Iterable[StageRecord],
        operations: Iterable[OperationFile],
        *,
        wait_s: float,
    ) -> Adopted:
        """Take everything over; return when each held process has answered, or `wait_s` is over."""
        by_id = {file.record.operation_id: file for file in operations}
        for record in records:
            file = by_id.get(record.shard.operation_id)
            self._store.note_generation(record.shard.slot, record.shard.generation)
            is_committed = record.shard.committed or (
                file is not None and file.record.state is OperationState.COMMITTED
            )
            if not is_committed and file is None:
                by_id[record.shard.operation_id] = _file_from(record)
            await self._take_over(record, is_committed=is_committed)
        for file in by_id.values():
            self._operations.take_over(file)
        await self._answers(wait_s)
        return Adopted(len(self._held), self._gone_count, self._cleaned_count)

    async def _take_over(self, record: StageRecord, *, is_committed: bool) -> None:
        handle = self._open(record)
        state = record.shard.state
        if handle is not None and state not in (ShardState.STOPPING, ShardState.FAILED):
            stage = self._stages.add(_with_state(record, ShardState.ADOPTING))
            self._stages.hold(stage, handle)
            self._held.append(stage)
            return
        stage = self._stages.add(record)
        if handle is not None and state is ShardState.STOPPING:
            self._stages.hold(stage, handle)
            _ = self._stopping.stop(stage, None, record.shard.state_reason)
            self._cleaned_count += 1
            return
        stage.handle = handle
        if state is not ShardState.FAILED and is_committed and record.process is not None:
            stage.update(committed=True)
            self._deaths.found_gone(stage)
        # Nothing watches it yet, and its children may have outlived it.
        await kill_processes(stage)
        if stage.state is ShardState.FAILED and is_committed:
            stage.persist()
            self._gone_count += 1
        else:
            # Never let go, never committed, or to be stopped anyway: nobody waits for it.
            self._stages.forget(stage)
            self._cleaned_count += 1

    def _open(self, record: StageRecord) -> ProcessHandle | None:
        """Take hold of the recorded process if it lives and is surely the one."""
        if record.process is None or record.boot_id != self._boot_id:
            return None
        handle = ProcessHandle.open(record.process)
        if handle is None:
            return None
        if environment_holds(handle.pid, INSTANCE_ENV, record.instance_id) is False:
            _log.error(
                "a pid of a record is another's now", pid=handle.pid, stage=str(record.shard)
            )
            handle.close()
            return None
        return handle

    async def _answers(self, wait_s: float) -> None:
        waits = [asyncio.ensure_future(_until_reached(stage)) for stage in self._held]
        if not waits:
            return
        _, pending = await asyncio.wait(waits, timeout=wait_s)
        for wait in pending:
            wait.cancel()
        if pending:
            await asyncio.wait(pending)
        for stage in self._held:
            if stage.state is ShardState.ADOPTING:
                _log.warning("a live stage has not answered; it is held", stage=str(stage))


async def _until_reached(stage: StageProcess) -> None:
    while stage.state is ShardState.ADOPTING:
        await stage.changed()


def _with_state(record: StageRecord, state: ShardState) -> StageRecord:
    return msgspec.structs.replace(record, shard=replace(record.shard, state=state))


def _file_from(record: StageRecord) -> OperationFile:
    """Make up the file of an operation of which only a stage's record is left."""
    shard = record.shard
    return OperationFile(
        OperationRecord(
            OperationId(shard.operation_id),
            shard.deployment,
            shard.replica_index,
            shard.generation,
            OperationState.INTERRUPTED,
            reason="its agent died, and its file is gone",
        ),
        (shard.stage_id,),
    )
