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
from stagekeeper.agent.operation_store import (
    OperationFile,
    OperationStore,
    file_from,
    is_committed,
)
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.records import StageRecord, open_process
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.agent.stopping import Stopping
from stagekeeper.core.states import ShardState
from stagekeeper.runtime.process import boot_id

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
            committed = is_committed(record.shard, file)
            if not committed and file is None:
                by_id[record.shard.operation_id] = file_from(record.shard)
            await self._take_over(record, committed=committed)
        for file in by_id.values():
            self._operations.take_over(file)
        await self._answers(wait_s)
        return Adopted(len(self._held), self._gone_count, self._cleaned_count)

    async def _take_over(self, record: StageRecord, *, committed: bool) -> None:
        handle = open_process(record, self._boot_id)
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
        was_asked = state is ShardState.STOPPING  # then its end is no failure, whoever saw it
        is_news = not was_asked and state is not ShardState.FAILED
        if is_news and committed and record.process is not None:
            stage.update(committed=True)
            self._deaths.found_gone(stage)
        # Nothing watches it yet, and its children may have outlived it.
        await kill_processes(stage)
        if stage.state is ShardState.FAILED and committed:
            stage.persist()
            self._gone_count += 1
        else:
            # Never let go, never committed, or to be stopped anyway: nobody waits for it.
            self._stages.forget(stage)
            self._cleaned_count += 1

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
