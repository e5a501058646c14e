"""Operations on this worker: reserve, start, commit, or all of it undone.

Decided here: what each step needs, what a repeat joins, when an operation is rolled back. Not
decided here: the order of a start and of its rollback (`core.init_run`), the sums (`core.planner`),
what becomes of a replica (the supervisor).

Invariants: an operation is on disk before its first spawn; its file alone says that it is
committed; what is committed is never rolled back; a rollback is run once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from stagekeeper.agent.ledger import Booking, Ledger
from stagekeeper.agent.operation import Operation
from stagekeeper.agent.operation_start import OperationStart
from stagekeeper.agent.operation_store import OperationFile, OperationStore
from stagekeeper.agent.reservation import Admission
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.errors import FieldProblem, InitError, Reason, Refused, bad_fields
from stagekeeper.core.ids import Generation, OperationId, SlotKey
from stagekeeper.core.model import Failure, OperationPlan, OperationRecord
from stagekeeper.core.states import OperationState, ShardState
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.tasks import TaskOwner

_log = structlog.get_logger(__name__)

_S = OperationState

_PUSHES: Final = 3
_PUSH_AGAIN_S: Final = 1.0
_REMEMBERED_CANCELS: Final = 1_000


class Operations:
    """The operations of one agent.

    Args:
        lease_s: how long an uncommitted operation lives that no call has joined.
        on_change: called when what is reported of operations is another thing now.
    """

    def __init__(
        self,
        store: OperationStore,
        stages: Stages,
        ledger: Ledger,
        admission: Admission,
        start: OperationStart,
        owner: TaskOwner,
        *,
        lease_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._stages = stages
        self._ledger = ledger
        self._admission = admission
        self._start = start
        self._owner = owner
        self._lease_s = lease_s
        self._on_change = on_change
        self._operations: dict[OperationId, Operation] = {}
        # In memory only: a late command is meant for this life of the agent, or for none.
        self._cancelled_before: dict[OperationId, None] = {}
        stages.on_progress = self._stage_progressed

    def records(self) -> list[OperationRecord]:
        """Return what is reported: all that no reign has settled."""
        return [operation.record for operation in self._operations.values()]

    def unended(self) -> list[Operation]:
        """Return those that are neither committed nor rolled back yet."""
        return [it for it in self._operations.values() if not it.has_ended]

    def holder_of(self, stage: StageProcess) -> Operation | None:
        """Return the operation that a stage belongs to and that is not committed yet."""
        operation = self._operations.get(stage.shard.operation_id)
        return None if operation is None or operation.has_ended else operation

    def committed_record(self, operation_id: OperationId) -> OperationRecord | None:
        """Describe a committed operation of which only the stages are left; None for others."""
        if operation_id in self._operations:
            return None
        for stage in self._stages.of_operation(operation_id):
            it = stage.shard
            if it.committed:
                return OperationRecord(
                    operation_id, it.deployment, it.replica_index, it.generation, _S.COMMITTED
                )
        return None

    # --- steps

    def problems(self, plan: OperationPlan) -> Iterator[FieldProblem]:
        """Yield what of a plan can never be reserved here."""
        return self._admission.problems(plan)

    def reserve(self, plan: OperationPlan) -> Operation:
        """Check everything and set the memory aside, all or nothing. A repeat joins.

        Raises:
            Refused: as `Admission` says; BAD_FIELD: the id was given with another plan before;
                REPLICA_DRAINING: an earlier operation has started stages; STALE_GENERATION: it
                was cancelled before it came.
        """
        known = self._known(plan)
        if known is not None:
            return known
        if plan.operation_id in self._cancelled_before:
            raise Refused(
                Reason.STALE_GENERATION,
                f"operation {plan.operation_id} was cancelled before it came: start another one",
            )
        self._admission.check_slots(plan)
        others = self._replaced_by(plan)
        self._admission.check_memory(plan, without={it.operation_id for it in others})
        self._take_the_place_of(others, plan)
        operation = Operation(
            OperationRecord(
                plan.operation_id,
                plan.deployment,
                plan.replica_index,
                plan.generation,
                _S.RESERVED,
            ),
            tuple(start.stage_id for start in plan.stages),
            self._store,
            self._on_change,
            plan,
        )
        operation.write()
        self._operations[plan.operation_id] = operation
        for start in plan.stages:
            self._ledger.book(
                Booking(plan.operation_id, start.stage_id),
                f"{plan.replica} stage {start.spec.name}",
                self._ledger.claims_of(start),
            )
        crash_points.reached("reserve-written")
        self._await_join(operation)
        self._on_change()
        return operation

    def start(self, plan: OperationPlan) -> Operation:
        """Begin to start the stages of a reserved operation, or join what is under way.

        Raises:
            Refused: BAD_FIELD; it was never reserved here, or with another plan.
        """
        operation = self._known(plan)
        if operation is None:
            raise _not_that_far(plan)
        if operation.state is _S.RESERVED:
            operation.move(_S.STARTING)
            crash_points.reached("starting-written")
            operation.starting = self._owner.start(
                f"start of {plan.operation_id}", self._run_start(operation, plan)
            )
        return operation

    async def commit(self, plan: OperationPlan) -> Operation:
        """Make the replica routable. A repeat, and a commit of what cannot be, change nothing.

        Raises:
            Refused: BAD_FIELD; it was never started here.
        """
        operation = self._known(plan)
        if operation is None or operation.state in (_S.RESERVED, _S.STARTING):
            raise _not_that_far(plan)
        async with operation.committing:
            await self._tell_siblings(operation)
            # Asked again: a stage may have died meanwhile, and then all is being rolled back.
            if operation.state is _S.STARTED:
                operation.move(_S.COMMITTED)
                crash_points.reached("commit-written")
                self._mark_committed(operation)
        return operation

    async def cancel(self, operation_id: OperationId, reason: str) -> OperationRecord | None:
        """Undo an operation that is not committed; return it when that is done.

        None when it is not known: its RESERVE may still be on its way, and is refused then. One
        that has ended is returned as it is. May be cancelled; the rollback goes on.
        """
        operation = self._operations.get(operation_id)
        if operation is None:
            committed = self.committed_record(operation_id)
            if committed is None:
                self._note_cancelled(operation_id)
            return committed
        await self.undo(operation, f"cancelled: {reason}" if reason else "cancelled")
        return operation.record

    def close_slot(self, slot: SlotKey, up_to: Generation) -> None:
        """Refuse these generations from now on: a RESERVE that is behind its stop must not win."""
        self._store.note_generation(slot, up_to)

    async def undo(self, operation: Operation, reason: str) -> None:
        """Roll back without waiting for what is still starting; joins a rollback under way."""
        if operation.has_ended:
            return
        self._begin_rollback(operation, reason)
        self._hurry(operation)
        assert operation.rolling_back is not None
        await asyncio.shield(operation.rolling_back)

    def settle(self, operation_ids: Iterable[OperationId]) -> None:
        """Forget what has ended and need not be told again."""
        for operation_id in operation_ids:
            operation = self._operations.get(operation_id)
            if operation is not None and operation.has_ended:
                self._store.remove(operation_id)
                del self._operations[operation_id]
                self._on_change()

    # --- what happens to them

    @contextmanager
    def joined(self, operation: Operation) -> Iterator[None]:
        """Keep the lease from running out while a call is joined; it begins anew afterwards."""
        operation.joined_count += 1
        _end_lease(operation)
        try:
            yield
        finally:
            operation.joined_count -= 1
            self._await_join(operation)

    def stage_failed(self, stage: StageProcess, failure: Failure) -> None:
        """Undo the operation of an uncommitted stage that failed; the first failure counts."""
        operation = self.holder_of(stage)
        if operation is None or self._owner.is_stopping:
            return
        self._begin_rollback(operation, failure.message, failure)
        if stage in operation.up:
            self._hurry(operation)  # the start does not see it, and would go on

    def take_over(self, file: OperationFile) -> None:
        """Hold an operation that an earlier life left on disk; its stages are held already."""
        operation = Operation(file.record, file.stage_ids, self._store, self._on_change)
        self._operations[operation.operation_id] = operation
        if operation.state is _S.COMMITTED:
            self._mark_committed(operation)
        elif operation.state is _S.ROLLING_BACK:
            operation.rolling_back = self._owner.start(
                f"rollback of {operation.operation_id}", self._run_rollback(operation)
            )
        elif not operation.has_ended:
            if operation.state is not _S.INTERRUPTED:
                reason = f"its agent died while it was {operation.state}"
                operation.move(_S.INTERRUPTED, reason=reason)
            self._await_join(operation)

    # --- how

    async def _run_start(self, operation: Operation, plan: OperationPlan) -> None:
        try:
            await self._start.run(operation, plan)
        except InitError as error:
            self._begin_rollback(operation, str(error))
            return
        except asyncio.CancelledError:
            if operation.rolling_back is None:
                raise
            return
        if operation.rolling_back is None:
            operation.move(_S.STARTED)
            crash_points.reached("started-written")

    def _begin_rollback(
        self, operation: Operation, reason: str, failure: Failure | None = None
    ) -> None:
        if operation.rolling_back is not None or operation.has_ended:
            return
        _end_lease(operation)
        operation.move(_S.ROLLING_BACK, reason=reason, failure=failure)
        crash_points.reached("rollback-written")
        operation.rolling_back = self._owner.start(
            f"rollback of {operation.operation_id}", self._run_rollback(operation)
        )

    async def _run_rollback(self, operation: Operation) -> None:
        """Wait for what is starting to end, then stop what is left, the last to come up first."""
        if operation.starting is not None:
            await asyncio.wait({operation.starting})
        for stage in self._start.left_of(operation):
            await self._start.clean(operation, stage)
        self._end_rollback(operation)

    def _hurry(self, operation: Operation) -> None:
        """Cancel the inits in flight; once, since a second time would hit their clean-up."""
        starting = operation.starting
        if starting is not None and not starting.done() and not starting.cancelling():
            starting.cancel()

    async def _tell_siblings(self, operation: Operation) -> None:
        """Tell every stage of the others, or undo the operation: a deaf one is no replica's."""
        untold: list[StageProcess] = []
        for attempt in range(_PUSHES):
            if operation.state is not _S.STARTED:
                return
            if attempt:
                await asyncio.sleep(_PUSH_AGAIN_S)
            untold = await self._stages.siblings.push(operation.operation_id)
            if not untold:
                crash_points.reached("peers-pushed")
                return
        await self.undo(operation, f"{untold[0]} could not be told where its siblings are")

    def _note_cancelled(self, operation_id: OperationId) -> None:
        self._cancelled_before[operation_id] = None
        while len(self._cancelled_before) > _REMEMBERED_CANCELS:
            del self._cancelled_before[next(iter(self._cancelled_before))]

    def _mark_committed(self, operation: Operation) -> None:
        """Let the shards of a committed operation say so; its file has said so already."""
        _end_lease(operation)
        for stage in self._stages.of_operation(operation.operation_id):
            stage.update(committed=True)
            stage.persist()
            crash_points.reached("commit-half-written")
        crash_points.reached("committed")
        _log.info("committed", operation=str(operation))

    def _replaced_by(self, plan: OperationPlan) -> list[Operation]:
        """Return the operations that this one follows.

        Raises:
            Refused: REPLICA_DRAINING: something of one is left to be stopped.
        """
        others = [it for it in self.unended() if it.record.replica == plan.replica]
        for other in others:
            if other.starting is not None or self._start.left_of(other):
                raise Refused(Reason.REPLICA_DRAINING, f"{other} is {other.state}: cancel it first")
        return others

    def _take_the_place_of(self, others: Iterable[Operation], plan: OperationPlan) -> None:
        for other in others:
            _end_lease(other)
            reason = f"operation {plan.operation_id} took its place"
            if other.state is not _S.ROLLING_BACK:
                other.move(_S.ROLLING_BACK, reason=reason)
            self._end_rollback(other)

    def _end_rollback(self, operation: Operation) -> None:
        # A stage whose clean-up failed may still hold its memory: it is freed when it is gone.
        left = self._stages.of_operation(operation.operation_id)
        holding = {it.shard.stage_id for it in left if it.holds_processes}
        for stage_id in operation.stage_ids:
            if stage_id not in holding:
                self._ledger.free(Booking(operation.operation_id, stage_id))
        if not operation.has_ended:
            operation.move(_S.ROLLED_BACK, rollback=tuple(operation.rollback))
            crash_points.reached("rolled-back")
            _log.warning("rolled back", operation=str(operation), reason=operation.record.reason)

    def _known(self, plan: OperationPlan) -> Operation | None:
        operation = self._operations.get(plan.operation_id)
        if operation is not None and operation.plan not in (None, plan):
            problem = f"{plan.operation_id} was given with another plan before"
            raise bad_fields([FieldProblem("operation_id", problem)])
        return operation

    def _await_join(self, operation: Operation) -> None:
        if (
            operation.joined_count == 0
            and operation.lease is None
            and operation.rolling_back is None
            and not operation.has_ended
            and not self._owner.is_stopping
        ):
            operation.lease = self._owner.start(
                f"lease of {operation.operation_id}", self._expire(operation)
            )

    async def _expire(self, operation: Operation) -> None:
        await asyncio.sleep(self._lease_s)
        operation.lease = None
        self._begin_rollback(
            operation, f"no supervisor joined it for {self._lease_s:g} s (operation_lease_s)"
        )
        self._hurry(operation)

    def _stage_progressed(self, stage: StageProcess) -> None:
        operation = self._operations.get(stage.shard.operation_id)
        if operation is not None and stage.state is not ShardState.ADOPTING:
            operation.note_progress(stage)


def _end_lease(operation: Operation) -> None:
    if operation.lease is not None:
        operation.lease.cancel()
        operation.lease = None


def _not_that_far(plan: OperationPlan) -> Refused:
    problem = f"operation {plan.operation_id} is not that far on this agent: begin with RESERVE"
    return bad_fields([FieldProblem("step", problem)])
