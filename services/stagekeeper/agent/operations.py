"""Operations on this worker: reserve, start, commit, or all of it undone.

Decided here: what each step needs, what a repeat joins, when an operation is given up, and how the
next life of the agent goes on with it. Not decided here: how stages are brought up
(`operation_start`), put into service (`commitment`) and undone (`rollback`), the sums
(`core.planner`), what becomes of a replica (the supervisor).

Invariants: an operation is on disk before its first spawn; its file alone says that it is
committed; what is committed is never rolled back; a rollback is run once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import msgspec
import structlog

from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.agent.commitment import Commitment
from stagekeeper.agent.operation import Operation
from stagekeeper.agent.operation_start import OperationStart
from stagekeeper.agent.operation_store import OperationFile, OperationStore, StageClaims
from stagekeeper.agent.ports import Ports
from stagekeeper.agent.reservation import Admission
from stagekeeper.agent.rollback import Rollback
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.ids import Generation, OperationId, SlotKey, StageId
from stagekeeper.core.model import Failure, OperationPlan, OperationRecord, Peer
from stagekeeper.core.states import OperationState, ShardState
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime import crash_points

_log = structlog.get_logger(__name__)

_S = OperationState

_REMEMBERED_CANCELS: Final = 1_000


class Operations:
    """The operations of one agent.

    Args:
        lease_s: how long an uncommitted operation lives that no call has joined.
        on_change: called when what is reported of operations is another thing now.
        ports: leased for command stages; None where nothing is reserved.
    """

    def __init__(
        self,
        store: OperationStore,
        stages: Stages,
        ledger: Ledger,
        admission: Admission,
        start: OperationStart,
        rollback: Rollback,
        owner: TaskOwner,
        *,
        lease_s: float,
        on_change: Callable[[], None],
        ports: Ports | None = None,
    ) -> None:
        self._store = store
        self._stages = stages
        self._ledger = ledger
        self._ports = ports
        self._admission = admission
        self._start = start
        self._rollback = rollback
        self._commitment = Commitment(stages, self.undo)
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
        return self._commitment.record_of(operation_id)

    # --- steps

    def problems(self, plan: OperationPlan) -> Iterator[FieldProblem]:
        """Yield what of a plan can never be reserved here."""
        return self._admission.problems(plan)

    def reserve(self, plan: OperationPlan) -> Operation:
        """Check everything and set the memory aside, all or nothing. A repeat joins.

        Raises:
            Refused: as `Admission` says, and where it cannot be written down; BAD_FIELD: the id was
                given with another plan before; REPLICA_DRAINING: an earlier operation has started
                stages; STALE_GENERATION: it was cancelled before it came.
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
        file = OperationFile(
            OperationRecord(
                plan.operation_id,
                plan.deployment,
                plan.replica_index,
                plan.generation,
                _S.RESERVED,
            ),
            tuple(start.stage_id for start in plan.stages),
            plan,
            claims=tuple(
                StageClaims(it.stage_id, self._ledger.claims_of(it)) for it in plan.stages
            ),
        )
        with self._ledger.turn():
            self._admission.check_memory(plan, without={it.operation_id for it in others})
            ports = () if self._ports is None else self._ports.lease(plan)
            file = msgspec.structs.replace(file, record=replace(file.record, ports=ports))
            self._book(file)
        crash_points.reached("booked")
        self._take_the_place_of(others, plan)
        operation = Operation(file, self._store, self._on_change)
        try:
            operation.write()
        except OSError as error:
            for stage_id in file.stage_ids:
                self._ledger.free(Booking(plan.operation_id, stage_id))
            raise Refused(
                Reason.ADMISSION_REFUSED,
                f"worker {plan.worker_id} cannot write down what it would start ({error.filename}: "
                f"{error.strerror or error}): free some space there, or mend its state directory",
            ) from error
        self._operations[plan.operation_id] = operation
        crash_points.reached("reserve-written")
        self._await_join(operation)
        self._on_change()
        return operation

    def start(
        self,
        plan: OperationPlan,
        stage_ids: Collection[StageId],
        leaders: tuple[StagePorts, ...] = (),
    ) -> Operation:
        """Begin to start stages of a reserved operation, or join what is under way.

        Args:
            plan: as it was reserved.
            stage_ids: which of its stages.
            leaders: where command stages whose shard 0 is on another worker find it.

        Raises:
            Refused: BAD_FIELD; it was never reserved here, or with another plan.
        """
        operation = self._known(plan)
        if operation is None:
            raise _not_that_far(plan)
        if operation.state is _S.RESERVED or not operation.is_halted:
            new = operation.ask_for(stage_ids, leaders)
            if new:
                crash_points.reached("starting-written")
                self._bring_up(operation, new)
        return operation

    async def commit(self, plan: OperationPlan, peers: tuple[Peer, ...] = ()) -> Operation:
        """Make the replica routable. A repeat, and a commit of what cannot be, change nothing else
        than where the shards on other workers are.

        Raises:
            Refused: BAD_FIELD; it was never started here.
        """
        operation = self._known(plan)
        if operation is None or operation.state in (_S.RESERVED, _S.STARTING):
            raise _not_that_far(plan)
        await self._commitment.commit(operation, peers)
        return operation

    async def commit_again(self, operation_id: OperationId, peers: tuple[Peer, ...]) -> None:
        """Take in a repeated COMMIT of an operation of which only the stages are left."""
        await self._commitment.repeat(operation_id, peers)

    async def cancel(
        self, operation_id: OperationId, reason: str, *, lets_finish: bool = False
    ) -> OperationRecord | None:
        """Undo an operation that is not committed; return it when that is done.

        None when it is not known: its RESERVE may still be on its way, and is refused then. One
        that has ended is returned as it is. May be cancelled; the rollback goes on.

        Args:
            operation_id: which.
            reason: for the record.
            lets_finish: what is in flight ends by itself first.
        """
        operation = self._operations.get(operation_id)
        if operation is None:
            committed = self.committed_record(operation_id)
            if committed is None:
                self._note_cancelled(operation_id)
            return committed
        why = f"cancelled: {reason}" if reason else "cancelled"
        await self.undo(operation, why, lets_finish=lets_finish)
        return operation.record

    def close_slot(self, slot: SlotKey, up_to: Generation) -> None:
        """Refuse these generations from now on: a RESERVE that is behind its stop must not win."""
        self._store.note_generation(slot, up_to)

    async def undo(self, operation: Operation, reason: str, *, lets_finish: bool = False) -> None:
        """Roll back; joins a rollback under way. What is in flight is ended, or may finish."""
        if operation.has_ended:
            return
        self._rollback.begin(operation, reason)
        if not lets_finish:
            self._rollback.hurry(operation)
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
        if operation is not None and not self._owner.is_stopping:
            self._rollback.begin(operation, failure.message, failure)

    # --- what an earlier life of the agent left

    def take_over(self, file: OperationFile, failed: tuple[str, Failure | None] | None) -> None:
        """Hold an operation that an earlier life left on disk; its stages are held already.

        Args:
            file: as it was found.
            failed: why it cannot go on, when one of its stages ended meanwhile.
        """
        operation = Operation(file, self._store, self._on_change)
        self._operations[operation.operation_id] = operation
        if operation.state is _S.COMMITTED:
            self._commitment.mark(operation)
            return
        if operation.has_ended:
            return
        self._book(file)
        if self._ports is not None:
            for it in file.record.ports:
                self._ports.hold(Booking(operation.operation_id, StageId(it.stage_id)), it)
        was_started = operation.state is _S.STARTED
        operation.found_up(self._start.living(operation).values() if was_started else ())
        if operation.state is _S.ROLLING_BACK:
            self._rollback.begin(operation, operation.record.reason)
        elif failed is not None:
            self._rollback.begin(operation, *failed)
        elif not file.can_go_on:
            if operation.state is not _S.INTERRUPTED:
                reason = f"its agent died while it was {operation.state}, and cannot go on with it"
                operation.move(_S.INTERRUPTED, reason=reason)
            self._await_join(operation)
        elif operation.state is _S.STARTED and not operation.is_up(operation.stage_ids):
            self._rollback.begin(operation, "a stage that was up is on record no more")
        else:
            self._await_join(operation)

    def go_on(self) -> None:
        """Go on with what was taken over: what lives is waited for, what is missing is started.

        What lives takes its cards first, in all operations: nothing else may start beside it.
        """
        under_way = [it for it in self.unended() if it.plan is not None and not it.is_halted]
        for operation in under_way:
            living = self._start.living(operation).keys() & set(operation.asked_stage_ids)
            if living:
                self._bring_up(operation, living, in_turn=False)
        for operation in under_way:
            missing = set(operation.asked_stage_ids) - self._start.living(operation).keys()
            if missing:
                self._bring_up(operation, missing)
            _log.info("an operation goes on", operation=str(operation), missing=sorted(missing))

    # --- how

    def _bring_up(
        self, operation: Operation, stage_ids: Collection[StageId], *, in_turn: bool = True
    ) -> None:
        async def run() -> None:
            try:
                await self._start.run(operation, stage_ids, in_turn=in_turn)
            except asyncio.CancelledError:
                if operation.rolling_back is None:
                    raise
            if operation.state is _S.STARTED:
                crash_points.reached("started-written")

        names = ", ".join(map(str, sorted(stage_ids)))
        operation.starts.add(
            self._owner.start(f"start of {operation.operation_id}, stages {names}", run())
        )

    def _book(self, file: OperationFile) -> None:
        """Set aside what an operation claims; a stage that is held has booked already."""
        names = {} if file.plan is None else {it.stage_id: it.spec.name for it in file.plan.stages}
        for it in file.claims:
            name = names.get(it.stage_id, it.stage_id)
            self._ledger.book(
                Booking(file.record.operation_id, it.stage_id),
                f"{file.record.replica} stage {name}",
                it.claims,
            )

    def _note_cancelled(self, operation_id: OperationId) -> None:
        self._cancelled_before[operation_id] = None
        while len(self._cancelled_before) > _REMEMBERED_CANCELS:
            del self._cancelled_before[next(iter(self._cancelled_before))]

    def _replaced_by(self, plan: OperationPlan) -> list[Operation]:
        """Return the operations that this one follows.

        Raises:
            Refused: REPLICA_DRAINING: something of one is left to be stopped.
        """
        others = [it for it in self.unended() if it.record.replica == plan.replica]
        for other in others:
            if other.asked_stage_ids or self._rollback.left_of(other):
                raise Refused(Reason.REPLICA_DRAINING, f"{other} is {other.state}: cancel it first")
        return others

    def _take_the_place_of(self, others: Iterable[Operation], plan: OperationPlan) -> None:
        for other in others:
            _end_lease(other)
            reason = f"operation {plan.operation_id} took its place"
            if other.state is not _S.ROLLING_BACK:
                other.move(_S.ROLLING_BACK, reason=reason)
            self._rollback.end(other)

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
        self._rollback.begin(
            operation, f"no supervisor joined it for {self._lease_s:g} s (operation_lease_s)"
        )
        self._rollback.hurry(operation)

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
