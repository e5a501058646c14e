"""Carries out the registry's commands to agents, each as a task; outcomes come back as events.

Decided here: how many agents are dialled back at once, and that a run which is cancelled ends here
before its agent is told. Not decided here: what is commanded, and whether what failed is tried
again (the registry).

Invariant: each command ends in one event, unless the supervisor ends first or the run of a start is
ended from outside; a start is never said to an agent once its cancellation was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from stagekeeper.core.commands import (
    AgentWork,
    CancelOperation,
    CommitOperation,
    EndRun,
    ProbeAgent,
    RejoinOperation,
    StartOperation,
    StopSlot,
)
from stagekeeper.core.errors import Refused
from stagekeeper.core.events import (
    AgentProbed,
    CommitEnded,
    Event,
    OperationCancelled,
    OperationEnded,
    SlotStopped,
)
from stagekeeper.core.ids import OperationId, WorkerId
from stagekeeper.core.states import OperationState
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime import crash_points
from stagekeeper.supervisor.agent_calls import AgentCalls, AgentError
from stagekeeper.supervisor.operation_run import OperationRun
from stagekeeper.supervisor.progress_hub import ProgressHub
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.step_call import StepCall, StepRequest
from stagekeeper.v1 import agent_service_pb2 as agent_pb2

_log = structlog.get_logger(__name__)

PROBES_AT_ONCE = 16
PROBE_INTERVAL_S = 0.02
"""Dialling costs about as much as a registration: when a whole cluster comes back at once, it must
not take the time that the registrations need."""


class _Run(NamedTuple):
    """A start that is being carried out."""

    run: OperationRun
    task: asyncio.Task[None]


class Executor:
    """Starts the work that the registry asks for.

    Args:
        settings: how long agents are waited for.
        calls: says commands to agents.
        progress: gets the progress of starts.
        tell: takes the outcomes, as events.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        calls: AgentCalls,
        progress: ProgressHub,
        tell: Callable[[Event], None],
    ) -> None:
        self._settings = settings
        self._calls = calls
        self._progress = progress
        self._tell = tell
        self._steps = StepCall(calls, lambda progress: None)
        self._tasks = TaskOwner("executor")
        self._runs: dict[OperationId, _Run] = {}
        self._probes: dict[WorkerId, ProbeAgent] = {}
        self._is_probing = False
        self._free_probes = asyncio.Semaphore(PROBES_AT_ONCE)

    def carry_out(self, work: AgentWork) -> None:
        """Start one piece of work; returns at once. While stopping, nothing is started."""
        if self._tasks.is_stopping:
            return
        if isinstance(work, ProbeAgent):
            self._calls.life_began()  # or it answers again: then nothing ends
            self._probes[work.target.worker_id] = work
            if not self._is_probing:
                self._is_probing = True
                _ = self._tasks.start("probes", self._probe_all())
        elif isinstance(work, StopSlot):
            _ = self._tasks.start(f"stop {work.slot}", self._stop(work))
        elif isinstance(work, StartOperation):
            self._begin_run(work)
        elif isinstance(work, RejoinOperation):
            if work.operation_id in self._runs:
                self._runs[work.operation_id].run.look_again(work.target)
        elif isinstance(work, EndRun):
            _ = self._end_run(work.operation_id)
        elif isinstance(work, CommitOperation):
            _ = self._tasks.start(f"commit {work.operation_id}", self._commit(work))
        else:
            # An agent that does not know the operation yet has nothing to cancel: our own run,
            # which may be about to tell it, has to be over before the agent is asked.
            ending = self._end_run(work.operation_id)
            _ = self._tasks.start(f"cancel {work.operation_id}", self._cancel(work, ending))

    def _begin_run(self, work: StartOperation) -> None:
        start = work.start
        operation_id, deployment = start.operation_id, start.replica.deployment
        run = OperationRun(
            work,
            self._calls,
            rejoin_s=self._settings.rejoin_s,
            stop_timeout_s=self._settings.stop_timeout_s,
            on_progress=lambda progress: self._progress.publish(deployment, progress),
        )
        task = self._tasks.start(f"operation {operation_id}", self._start(operation_id, run))
        self._runs[operation_id] = _Run(run, task)
        task.add_done_callback(lambda _: self._runs.pop(operation_id, None))

    def _end_run(self, operation_id: OperationId) -> asyncio.Task[None] | None:
        """Have our own run of a start end; return its task, where there is one."""
        run = self._runs.get(operation_id)
        if run is None:
            return None
        if not run.task.cancelling():  # a second time would hit its own clean-up
            run.task.cancel()
        return run.task

    async def stop(self) -> None:
        """End all work on this side; agents go on with what they were told."""
        await self._tasks.stop()

    async def _probe_all(self) -> None:
        """Dial agents back, in the order in which they came, until nobody is left to dial."""
        try:
            while self._probes:
                await self._free_probes.acquire()
                work = self._probes.pop(next(iter(self._probes)))
                _ = self._tasks.start(f"probe {work.target.worker_id}", self._probe(work))
                await self._calls.clock.sleep(PROBE_INTERVAL_S)
        finally:
            self._is_probing = False

    async def _probe(self, work: ProbeAgent) -> None:
        try:
            detail = await self._calls.probe(work.target, self._settings.probe_timeout_s)
        finally:
            self._free_probes.release()
        self._tell(AgentProbed(work.target.worker_id, work.target.incarnation, not detail, detail))

    async def _stop(self, work: StopSlot) -> None:
        error = ""
        try:
            await self._calls.stop_slot(work, self._settings.stop_timeout_s)
        except AgentError as failed:
            error = str(failed)
            _log.warning("a stop did not succeed", slot=str(work.slot), why=error)
        self._tell(SlotStopped(work.target.worker_id, work.target.incarnation, work.slot, error))

    async def _start(self, operation_id: OperationId, run: OperationRun) -> None:
        ended: Event
        try:
            ended = await run.run()
        except Exception as error:
            _log.error("an operation met a bug", operation=operation_id, exc_info=error)
            ended = OperationEnded(operation_id, None, f"the supervisor met a bug: {error!r}")
        self._tell(ended)

    async def _commit(self, work: CommitOperation) -> None:
        request = StepRequest(work.plan, agent_pb2.OPERATION_STEP_COMMIT, peers=work.peers)
        record, told, reason = None, "", ""
        try:
            record = await self._steps.say(request, work.target, limit_s=0.0)
        except AgentError as error:
            told, reason = str(error), error.reason
            _log.warning("a commit was not answered", operation=work.operation_id, why=told)
        if record is not None and record.state is OperationState.COMMITTED:
            crash_points.reached("operation-committed")
        target = work.target
        self._tell(
            CommitEnded(
                target.worker_id, target.incarnation, work.operation_id, record, told, reason
            )
        )

    async def _cancel(self, work: CancelOperation, ending: asyncio.Task[None] | None) -> None:
        error = ""
        if ending is not None:
            await asyncio.wait([ending])
        try:
            await self._calls.cancel(work, self._settings.stop_timeout_s)
        except (AgentError, Refused) as failed:
            error = str(failed)
            _log.warning("a cancellation did not succeed", operation=work.operation_id, why=error)
        target = work.target
        self._tell(
            OperationCancelled(target.worker_id, target.incarnation, work.operation_id, error)
        )
