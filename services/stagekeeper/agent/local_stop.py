"""Stages stopped where no agent runs: the stop is written down, and then done as an agent does it.

What is written is what an agent leaves that dies in the middle of a stop or of a rollback, and what
is done about it is what the next agent would do: it is adopted, and ended. So whoever dies here, at
any point, leaves nothing that an agent does not settle. Decided here: what is written, and what is
taken over for it. Not decided here: how processes end (`ending`) and what an adoption does.

The agent's lock is held meanwhile: an agent that starts is refused, and told who holds it.

Invariant: a stage that was not chosen is not touched, unless it belongs to a start that was never
committed, of which another one was chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import msgspec

from stagekeeper.agent.adoption import Adoption
from stagekeeper.agent.cards.ledger import Ledger
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.entrypoints import Entrypoints
from stagekeeper.agent.failures import FailureSpool
from stagekeeper.agent.host_lock import FileLock
from stagekeeper.agent.local_stages import StageChoice
from stagekeeper.agent.operation_start import OperationStart
from stagekeeper.agent.operation_store import (
    OperationFile,
    OperationStore,
    file_from,
    is_committed,
)
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.records import RecordStore, StageRecord, open_process
from stagekeeper.agent.reservation import Admission
from stagekeeper.agent.rollback import Rollback
from stagekeeper.agent.stages import Stages
from stagekeeper.agent.stopping import Stopping
from stagekeeper.core.ids import (
    NO_EPOCH,
    DeploymentName,
    Generation,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
)
from stagekeeper.core.model import ShardRecord
from stagekeeper.core.states import (
    OPERATION_MOVES,
    SHARD_MOVES,
    OperationState,
    ShardState,
    check_move,
)
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.process import boot_id, members_by, read_stat
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import SystemClock
from stagekeeper.runtime.launch import INSTANCE_ENV, Launch

REASON: Final = "stopped by `stagekeeper stages --local`"

_ROLLBACK_BUDGET_S: Final = 3.0
"""What a stage gets that never was in service; an agent gives it the same."""

_NO_LEASE_S: Final = 3600.0
"""Nothing waits for a reign here: what is taken over is being undone already."""


@dataclass(frozen=True, slots=True)
class LocalStopped:
    """What became of one stage.

    Attributes:
        is_gone: every process of it is proven gone, and its record is settled.
        was_undone: it belonged to a start that was not committed, which was rolled back.
        had_ended: its main process was gone before; its end is told by the next agent.
    """

    shard: ShardRecord
    is_gone: bool
    was_undone: bool
    had_ended: bool = False


async def stop_stages(
    directory: AgentDirectory,
    choices: Collection[StageChoice],
    *,
    budget_s: float | None = None,
    on_begin: Callable[[ShardRecord, bool], None] = lambda shard, had_ended: None,
) -> list[LocalStopped]:
    """Stop what one worker has on record of these choices; return when it is gone.

    May be cancelled: what was written down goes on with the next call, or the next agent.

    Args:
        budget_s: from the request to end until SIGKILL; None is each stage's own.
        on_begin: told of each stage before it is asked, and whether it had ended already.

    Raises:
        LockHeld: an agent of this worker runs, or another stop.
        OSError: the files cannot be read or written.
    """
    lock = FileLock.take(directory.lock_file, f"state dir {directory.root}")
    try:
        directory.create()
        written = _WrittenDown(directory, choices, budget_s)
        for record in written.records:
            on_begin(record.shard, record.instance_id in written.ended)
        ending = _Ending(directory, written, budget_s)
        try:
            left = await ending.run()
        finally:
            await ending.let_go()
        return [
            LocalStopped(
                it.shard,
                is_gone=it.instance_id not in left,
                was_undone=it.instance_id in written.undone,
                had_ended=it.instance_id in written.ended,
            )
            for it in written.records
        ]
    finally:
        lock.release()


class _WrittenDown:
    """What is to be stopped, on disk as what it is from now on.

    Attributes:
        records: of all stages that are to end.
        operations: the files of their operations.
        undone: the instances that end because their operation is undone.
        ended: the instances that had ended by themselves.
    """

    def __init__(
        self, directory: AgentDirectory, choices: Collection[StageChoice], budget_s: float | None
    ) -> None:
        self.store = OperationStore(directory)
        self.record_store = RecordStore(directory)
        self._budget_s = budget_s
        self.ended: set[InstanceId] = set()
        self._boot_id = boot_id()
        found = self.record_store.load()
        found += _mended(self.record_store, choices, self._boot_id)
        found.sort(key=lambda it: (it.shard.slot, it.shard.shard_index))
        files = {file.record.operation_id: file for file in self.store.load()}
        chosen = [it for it in found if any(choice.takes(it.shard) for choice in choices)]
        undone_ids = {it.shard.operation_id for it in chosen if _is_open(it, files)}
        undone = [it for it in found if it.shard.operation_id in undone_ids]
        self.undone = {it.instance_id for it in undone}
        for operation_id in undone_ids:
            files[operation_id] = self._undo(operation_id, files, undone)
        self.records = undone + [
            self._stop(it) for it in chosen if it.instance_id not in self.undone
        ]
        touched = {it.shard.operation_id for it in self.records}
        self.operations = [files[it] for it in sorted(touched) if it in files]
        for record in self.records:
            self.store.note_generation(record.shard.slot, record.shard.generation)
        self.store.write_generations()

    def _undo(
        self,
        operation_id: OperationId,
        files: Mapping[OperationId, OperationFile],
        found: Sequence[StageRecord],
    ) -> OperationFile:
        """Write down that an operation is being rolled back, unless that is so already."""
        file = files.get(operation_id)
        if file is None:
            file = file_from(
                next(it.shard for it in found if it.shard.operation_id == operation_id)
            )
        if file.record.state is OperationState.ROLLING_BACK:
            return file
        state = check_move(
            OPERATION_MOVES,
            file.record.state,
            OperationState.ROLLING_BACK,
            f"operation {operation_id}",
        )
        file = msgspec.structs.replace(
            file, record=replace(file.record, state=state, reason=REASON)
        )
        self.store.write(file)
        return file

    def _stop(self, record: StageRecord) -> StageRecord:
        """Write down that a stage was asked to stop, if it can still be asked.

        One that ended by itself before is left as it is: its end is a failure, which is to be told.
        """
        handle = open_process(record, self._boot_id)
        if handle is None and record.process is not None:
            self.ended.add(record.instance_id)
            return record
        if handle is not None:
            handle.close()
        budget_s = record.stop_budget_s if self._budget_s is None else self._budget_s
        if record.shard.state is ShardState.STOPPING and budget_s == record.stop_budget_s:
            return record
        state = check_move(SHARD_MOVES, record.shard.state, ShardState.STOPPING, str(record.shard))
        shard = replace(record.shard, state=state, state_reason=REASON, busy_for_s=None)
        record = msgspec.structs.replace(record, shard=shard, stop_budget_s=budget_s)
        self.record_store.write(record)
        return record


def _is_open(record: StageRecord, files: Mapping[OperationId, OperationFile]) -> bool:
    """Return whether a stage belongs to an operation that is neither committed nor undone."""
    file = files.get(record.shard.operation_id)
    if is_committed(record.shard, file):
        return False
    return file is None or file.record.state is not OperationState.ROLLED_BACK


def _mended(
    store: RecordStore, choices: Collection[StageChoice], this_boot: str
) -> Iterator[StageRecord]:
    """Write a record of each chosen stage whose own is damaged: it is to be stopped, no more."""
    damaged = [
        (it, it.launch)
        for it in store.damaged
        if it.launch is not None and any(choice.takes(it.launch) for choice in choices)
    ]
    members = members_by(INSTANCE_ENV) if damaged else {}
    for it, launch in damaged:
        carriers = members.get(it.instance_id, [])
        # The first of them has started the others; it leads its session if it is the main process.
        eldest = carriers[0] if carriers else None
        stat = read_stat(eldest.pid) if eldest is not None else None
        main = eldest if stat is not None and stat.session == stat.identity.pid else None
        record = StageRecord(
            incarnation=0,
            boot_id=this_boot,
            shard=_shard_from(launch),
            control_socket=launch.control_socket,
            stop_budget_s=launch.stop_budget_s,
            pid=main.pid if main is not None else 0,
            start_ticks=main.start_ticks if main is not None else 0,
        )
        store.write(record)
        yield record


def _shard_from(launch: Launch) -> ShardRecord:
    """Make up the shard of a launch. Its generation is not known: it is below every other."""
    return ShardRecord(
        deployment=DeploymentName(launch.deployment),
        replica_index=ReplicaIndex(launch.replica_index),
        stage_id=StageId(launch.stage_id),
        stage_name=launch.stage_name,
        stage_count=launch.stage_count,
        shard_index=launch.shard_index,
        shard_count=launch.shard_count,
        generation=Generation(NO_EPOCH, 0),
        operation_id=OperationId(""),
        instance_id=InstanceId(launch.instance_id),
        state=ShardState.STOPPING,
        state_reason=REASON,
        committed=True,  # no operation is left that could undo it
    )


class _Ending:
    """The parts of an agent that it takes to end what is written down; without a network."""

    def __init__(
        self, directory: AgentDirectory, written: _WrittenDown, budget_s: float | None
    ) -> None:
        self._written = written
        self._errors: list[BaseException] = []
        self._owner = TaskOwner("local stop", lambda _, error: self._errors.append(error))
        spool = FailureSpool(directory)
        spool.load()
        clock = SystemClock()
        records, store = written.record_store, written.store
        ledger = Ledger(())
        deaths = Deaths(directory.worker_id, spool, records, OomWitness(), clock)
        self._stages = Stages(records, ledger, deaths, self._owner, clock, lambda: None)
        rollback = Rollback(
            directory.worker_id,
            self._stages,
            ledger,
            self._owner,
            budget_s=_ROLLBACK_BUDGET_S if budget_s is None else budget_s,
        )
        self._operations = Operations(
            store,
            self._stages,
            ledger,
            Admission(store, self._stages, ledger, Entrypoints((), ())),
            OperationStart(_start_nothing, self._stages, deaths, rollback),
            rollback,
            self._owner,
            lease_s=_NO_LEASE_S,
            on_change=lambda: None,
        )
        deaths.on_failure = self._operations.stage_failed
        self._stopping = Stopping(self._stages, self._operations, self._owner)
        self._adoption = Adoption(
            self._stages, self._operations, store, deaths, self._stopping, records
        )

    async def run(self) -> set[InstanceId]:
        """End all of it; return the instances that are not settled."""
        await self._adoption.run(self._written.records, self._written.operations, wait_s=0.0)
        tasks: set[asyncio.Future[Any]] = {
            *self._stopping.tasks,
            *(it.rolling_back for it in self._operations.unended() if it.rolling_back is not None),
        }
        # Those that ended by themselves: their failure is on disk now, and nothing runs of them.
        tasks |= {
            self._owner.start("settle", self._stages.take_down(stage, 0.0, REASON))
            for stage in self._stages
            if stage.state is ShardState.FAILED
        }
        if tasks:
            await asyncio.wait(tasks)
        for error in self._errors:
            raise error
        return {stage.instance_id for stage in self._stages}

    async def let_go(self) -> None:
        await self._owner.stop()
        await self._stages.let_go()


def _start_nothing(*_: object) -> NoReturn:
    raise AssertionError("a local stop starts nothing")
