"""One start, carried out: stop what is in the way, reserve and start all parts, or undo them all.

Decided here: how an order is said to an agent, and that a step whose stream broke, whose agent
lives another life, or a stop that takes longer than a call, is joined again; the agent goes on with
it meanwhile. Agents undo what nobody joins, so a part that has nothing to do for now is joined now
and then. Not decided here: the order across workers and what a failure asks for (`start_run`),
whether a part in another life is joined (the registry says so, or ends this run), and what follows.

Invariant: this says RESERVE, START and CANCEL, never COMMIT; no order is said that `StartRun` did
not give.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import structlog

from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.commands import AgentTarget, CancelOperation, StartOperation, StopSlot
from stagekeeper.core.errors import Reason
from stagekeeper.core.events import OperationEnded, OperationStarted
from stagekeeper.core.ids import StageId, WorkerId
from stagekeeper.core.model import OperationRecord
from stagekeeper.core.planner import init_groups
from stagekeeper.core.start_run import Order, Reserve, StartRun, StartStages, Step, Undo
from stagekeeper.core.states import OperationState
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.clock import sleep_until_set
from stagekeeper.supervisor.agent_calls import AgentCalls, AgentError
from stagekeeper.supervisor.step_call import StepCall, StepRequest
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2 as pb2

_log = structlog.get_logger(__name__)

LONGEST_DEFAULT_BUDGET_S = 600.0
"""For stages that name no stop budget: they have their agent's, which is not known here."""

JOINS_A_LEASE = 4
"""How often a part that has nothing to do is joined in the time after which its agent undoes it."""

_S = OperationState
_RESERVED = frozenset({_S.RESERVED, _S.STARTING, _S.STARTED, _S.COMMITTED})
_STARTED = frozenset({_S.STARTED, _S.COMMITTED})
"""States in which a step has ended well; a repeat may find the operation further."""

_SAYS_NOTHING = frozenset({Reason.STALE_EPOCH, Reason.STALE_INCARNATION, Reason.DRAINING, ""})
"""Refusals of a RESERVE that were not about the plan: something of an earlier one may be held."""


class OperationRun:
    """Carries one start as far as it goes.

    Args:
        command: what to start, where, and what to stop before.
        calls: says commands to agents.
        rejoin_s: how long an agent that is not reached is tried; agents undo what nobody joins for
            about as long.
        stop_timeout_s: how long one call to stop or to undo is waited for; it is repeated, to join
            it, for as long beyond the stage's own budget.
        on_progress: gets every sign of progress.
    """

    def __init__(
        self,
        command: StartOperation,
        calls: AgentCalls,
        *,
        rejoin_s: float,
        stop_timeout_s: float,
        on_progress: Callable[[pb2.StageProgress], None],
    ) -> None:
        self._command = command
        self._start = command.start
        self._calls = calls
        self._rejoin_s = rejoin_s
        self._stop_timeout_s = stop_timeout_s
        self._step_call = StepCall(calls, on_progress)
        self._targets = dict(zip(self._start.worker_ids, command.targets, strict=True))
        self._lives: dict[WorkerId, asyncio.Event] = {
            worker_id: asyncio.Event() for worker_id in self._targets
        }
        specs = {stage.stage_id: stage.spec for stage in self._start.parts[0].stages}
        self._run = StartRun(
            {part.worker_id: [it.stage_id for it in part.stages] for part in self._start.parts},
            init_groups({stage_id: it.devices for stage_id, it in specs.items()}),
        )
        self._budgets = {stage_id: it.stop_budget_s for stage_id, it in specs.items()}
        self._records: dict[WorkerId, OperationRecord] = {}
        self._first: OperationEnded | None = None
        self._reserved: set[WorkerId] = set()
        self._in_flight: Counter[WorkerId] = Counter()
        self._landed = asyncio.Event()
        self._woken = asyncio.Event()

    async def run(self) -> OperationStarted | OperationEnded:
        """Carry it out; return how it ended. When cancelled, agents go on with what they do."""
        operation_id = self._start.operation_id
        owner = TaskOwner(f"operation {operation_id}")
        try:
            await self._stop_what_is_in_the_way()
            if self._start.is_spanning:
                for worker_id in self._targets:
                    _ = owner.start(f"joining {worker_id}", self._keep_joined(worker_id))
            while True:
                self._woken.clear()
                for order in self._run.next_orders():
                    _ = owner.start(str(order), self._carry_out(order))
                if self._run.is_over:
                    break
                await self._woken.wait()
        except AgentError as error:
            _log.warning("a start ended", operation=operation_id, why=str(error))
            return OperationEnded(operation_id, None, str(error), error.reason)
        finally:
            await owner.stop()
        return OperationStarted(operation_id) if self._run.is_started else self._ended()

    def look_again(self, target: AgentTarget) -> None:
        """Join a part anew: its worker lives another life, or has begun to undo it."""
        worker_id = target.worker_id
        self._targets[worker_id] = target
        lives, self._lives[worker_id] = self._lives[worker_id], asyncio.Event()
        lives.set()

    # Orders.

    async def _carry_out(self, order: Order) -> None:
        try:
            if isinstance(order, Undo):
                await self._undo(order)
            else:
                await self._take(order)
        except Exception as error:  # a bug here must not leave the start hanging
            _log.error("an order met a bug", order=str(order), exc_info=error)
            if isinstance(order, Undo):
                self._run.undone(order.worker_id)
            else:
                self._fail(order, None, error=f"the supervisor met a bug: {error!r}")
        finally:
            self._woken.set()

    async def _take(self, order: Step) -> None:
        """Say RESERVE or START, and tell how it ended."""
        is_start = isinstance(order, StartStages)
        stage_ids = order.stage_ids if isinstance(order, StartStages) else ()
        step = agent_pb2.OPERATION_STEP_START if is_start else agent_pb2.OPERATION_STEP_RESERVE
        self._in_flight[order.worker_id] += 1
        try:
            record = await self._say(order.worker_id, step, stage_ids)
        except AgentError as error:
            is_refused = not is_start and error.reason not in _SAYS_NOTHING
            self._fail(order, None, error=str(error), reason=error.reason, is_clean=is_refused)
            return
        finally:
            self._in_flight[order.worker_id] -= 1
            landed, self._landed = self._landed, asyncio.Event()
            landed.set()
        self._records[order.worker_id] = record
        if isinstance(order, Reserve) and record.state in _RESERVED:
            crash_points.reached("operation-reserved")
            self._reserved.add(order.worker_id)
            self._run.reserved(order)
        elif isinstance(order, StartStages) and _is_up(record, order.stage_ids):
            self._run.started(order)
            if self._run.is_started:
                crash_points.reached("operation-started")
        else:
            self._fail(order, record, is_clean=record.state is _S.ROLLED_BACK)

    def _fail(
        self,
        order: Step,
        record: OperationRecord | None,
        *,
        error: str = "",
        reason: str = "",
        is_clean: bool = False,
    ) -> None:
        self._note_first(order.worker_id, record, error, reason)
        crash_points.reached("step-failed")
        self._run.failed(order, is_clean=is_clean)

    def _note_first(
        self, worker_id: WorkerId, record: OperationRecord | None, error: str, reason: str
    ) -> None:
        """Remember what went wrong first; a part that was only told to end is no cause."""
        if self._first is None:
            operation_id = self._start.operation_id
            self._first = OperationEnded(operation_id, record, error, reason, worker_id)
            why = error or (record.reason if record is not None else "")
            _log.warning("a start fails", operation=operation_id, worker=worker_id, why=why)

    async def _undo(self, order: Undo) -> None:
        """Have a worker undo its part, for as long as that takes; who cannot be asked is let go."""
        worker_id = order.worker_id
        give_up_at = self._calls.clock.monotonic() + LONGEST_DEFAULT_BUDGET_S
        why = "its start failed"
        if self._first is not None and self._first.worker_id != worker_id:
            why = f"its start failed on worker {self._first.worker_id}"
        try:
            while True:
                command = CancelOperation(self._targets[worker_id], self._start.operation_id, why)
                try:
                    record = await self._calls.cancel(
                        command, self._stop_timeout_s, lets_finish=not order.is_urgent
                    )
                except AgentError as error:
                    if error.is_late and self._calls.clock.monotonic() < give_up_at:
                        continue
                    _log.warning("a part was not undone", worker=worker_id, why=str(error))
                    return
                if record is not None:
                    self._records[worker_id] = record
                crash_points.reached("part-undone")
                return
        finally:
            self._run.undone(worker_id)

    def _ended(self) -> OperationEnded:
        """Put the story together: who failed first, and what became of the others."""
        first = self._first
        if first is None:
            return OperationEnded(self._start.operation_id, None, "it was given up")
        record, last = first.record, self._records.get(first.worker_id)
        if record is not None and last is not None:
            # Why it failed is what was said first; what was undone, what was said last.
            record = replace(last, reason=record.reason, failure=record.failure or last.failure)
        others = tuple(
            (worker_id, it)
            for worker_id, it in self._records.items()
            if record is None or worker_id != first.worker_id
        )
        return OperationEnded(
            first.operation_id, record, first.error, first.reason, first.worker_id, others
        )

    # Joining.

    async def _say(
        self,
        worker_id: WorkerId,
        step: agent_pb2.OperationStep.ValueType,
        stage_ids: Sequence[StageId] = (),
    ) -> OperationRecord:
        """Say a step, or join it where it is under way, in whichever life its worker is.

        Raises:
            AgentError: it was refused, or its agent not reached for long.
        """
        part = self._start.part_of(worker_id)
        if len(stage_ids) == len(part.stages):
            stage_ids = ()  # all of them
        request = StepRequest(
            part,
            step,
            start_stage_ids=tuple(stage_ids),
            leaders=self._leaders() if step == agent_pb2.OPERATION_STEP_START else (),
        )
        while True:
            target, other_life = self._targets[worker_id], self._lives[worker_id]
            try:
                return await self._step_call.say(request, target, limit_s=self._rejoin_s)
            except AgentError as error:
                if error.reason != Reason.STALE_INCARNATION:
                    raise
            # The registry hears of every life: it has this part joined there, or ends this run.
            await other_life.wait()

    def _leaders(self) -> tuple[StagePorts, ...]:
        """Return where shard 0 of each stage has its ports: its worker said so when it reserved."""
        first = self._records.get(self._start.worker_ids[0])
        return first.ports if first is not None and self._start.is_spanning else ()

    async def _keep_joined(self, worker_id: WorkerId) -> None:
        """Join a part that waits for others, so that its agent does not undo it; see its end."""
        while True:
            other_life = self._lives[worker_id]
            await sleep_until_set(self._calls.clock, self._rejoin_s / JOINS_A_LEASE, other_life)
            while other_life.is_set() and self._in_flight[worker_id]:
                await self._landed.wait()  # its answer may be older than what is to be looked at
            if worker_id in self._reserved and not self._in_flight[worker_id]:
                await self._join(worker_id)

    async def _join(self, worker_id: WorkerId) -> None:
        if self._run.has_failed:
            return
        try:
            record = await self._say(worker_id, agent_pb2.OPERATION_STEP_RESERVE)
        except AgentError as error:
            if error.may_pass or error.is_late or self._run.has_failed:
                return
            self._note_first(worker_id, None, str(error), error.reason)
        else:
            if record.state in _RESERVED or self._run.has_failed:
                return
            self._records[worker_id] = record
            self._note_first(worker_id, record, "", "")
        self._run.part_lost(worker_id)
        self._woken.set()

    # What is in the way.

    async def _stop_what_is_in_the_way(self) -> None:
        """Stop what is left of earlier starts: stage by stage, the shards of each at once."""
        stops = sorted(self._command.stop_first, key=lambda it: it.slot)
        for _, shards in groupby(stops, key=lambda it: it.slot):
            together = [*shards]
            if len(together) == 1:
                await self._stop(together[0])
                continue
            ends = await asyncio.gather(
                *(self._stop(stop) for stop in together), return_exceptions=True
            )
            for end in ends:
                if isinstance(end, BaseException):
                    raise end

    async def _stop(self, stop: StopSlot) -> None:
        """Stop a slot, for as long as its budget lets it take."""
        budget_s = self._budgets.get(stop.slot.stage_id)
        if budget_s is None:
            budget_s = LONGEST_DEFAULT_BUDGET_S
        give_up_at = self._calls.clock.monotonic() + budget_s + self._stop_timeout_s
        while True:
            try:
                return await self._calls.stop_slot(stop, self._stop_timeout_s)
            except AgentError as error:
                if not error.is_late or self._calls.clock.monotonic() >= give_up_at:
                    raise


def _is_up(record: OperationRecord, stage_ids: Sequence[StageId]) -> bool:
    """Whether the stages that were asked for are up, though others may have yet to start."""
    if record.state in _STARTED:
        return True
    return record.state is _S.STARTING and set(stage_ids) <= set(record.up_stage_ids)
