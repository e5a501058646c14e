"""What became of the work that agents were given, and what time does.

Decided here: when an operation has ended, and which silence changes a worker's state. Not decided
here: what the replicas are then (reports say so) and what is asked of agents next (`reconcile`).

Invariant: outcomes are hints about work, never about shards: a start counts as done when the
worker's own report shows its shards committed.
"""

from __future__ import annotations

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import ProbeAgent
from stagekeeper.core.events import OperationCancelled, OperationEnded, SlotStopped, Ticked
from stagekeeper.core.operations import FailureNote, Operation, failure_note
from stagekeeper.core.reconcile import DELETED
from stagekeeper.core.registration import COMMITTED, committed_operations
from stagekeeper.core.states import OperationState, WorkerState
from stagekeeper.core.worker_news import log_silence
from stagekeeper.core.workers import Worker, fall_silent, state_after_silence


def operation_ended(cluster: Cluster, event: OperationEnded, now: float) -> None:
    """Take in how a start went. One that is not on the books (any more) is late and ignored."""
    operation = cluster.operations.by_id.get(event.operation_id)
    if operation is None:
        return
    plan, record = operation.plan, event.record
    if record is not None and record.failure is not None:
        cluster.record_failure(record.failure)
    if record is not None and record.state is OperationState.COMMITTED:
        worker = cluster.workers.get(plan.worker_id)
        is_shown = worker is not None and plan.operation_id in committed_operations(worker)
        if is_shown or operation.is_cancelled:
            ending = f"{plan.replica} has started: {COMMITTED}"
            if operation.is_cancelled:
                ending = f"{plan.replica} has started, and is stopped: {DELETED}"
            cluster.finish(operation, None, ending)
        else:
            operation.committed_at = now
            cluster.touched[plan.replica] = None  # it waits for another thing now
    else:
        cluster.finish(operation, failure_note(plan, record, event.error, event.reason))
    if record is None or record.state is not OperationState.ROLLED_BACK:
        cluster.due[plan.worker_id] = None


def operation_cancelled(cluster: Cluster, event: OperationCancelled, now: float) -> None:
    """Note that a cancellation was answered; one that failed is asked for again later."""
    retry_at = now + cluster.settings.retry_s
    cluster.pending.answered(event.worker_id, event.incarnation, event.operation_id, retry_at)
    operation = cluster.operations.by_id.get(event.operation_id)
    if operation is not None and operation.is_cancelled and not event.error:
        ending = f"the start of {operation.plan.replica} was cancelled: {DELETED}"
        cluster.finish(operation, None, ending)
        cluster.due[event.worker_id] = None


def slot_stopped(cluster: Cluster, event: SlotStopped, now: float) -> None:
    """Note that a stop was answered; it stays wanted until the report says that it is done."""
    retry_at = now + cluster.settings.retry_s
    cluster.pending.answered(event.worker_id, event.incarnation, event.slot, retry_at)


def ticked(cluster: Cluster, event: Ticked, now: float) -> None:
    """Let time pass. A stall of the supervisor's own is nobody's silence."""
    if event.stalled_s > 0:
        _forgive(cluster, event.stalled_s, now)
    for worker in list(cluster.workers.values()):
        is_well = worker.state is WorkerState.ALIVE and worker.failed_probe_at is None
        if not (is_well and now - worker.heard_at < worker.pace_s):
            _let_time_pass(cluster, worker, now)
    for operation in list(cluster.operations.by_id.values()):
        _expire(cluster, operation, now)
    if not cluster.is_recovering and now - cluster.started_at >= cluster.settings.lost_s:
        cluster.give_up_awaited()
    cluster.save_roster()


def _forgive(cluster: Cluster, stalled_s: float, now: float) -> None:
    """Move every deadline by a stall of the supervisor."""
    for worker in cluster.workers.values():
        worker.heard_at = min(now, worker.heard_at + stalled_s)
    for operation in cluster.operations.by_id.values():
        if operation.committed_at is not None:
            operation.committed_at += stalled_s
    cluster.started_at += stalled_s
    if cluster.hold_until is not None:
        cluster.hold_until += stalled_s


def _let_time_pass(cluster: Cluster, worker: Worker, now: float) -> None:
    settings = cluster.settings
    silent_s = now - worker.heard_at
    state = state_after_silence(
        silent_s,
        settings=settings,
        pace_s=worker.pace_s,
        may_be_lost=not cluster.is_recovering,
    )
    if fall_silent(worker, state):
        log_silence(cluster, worker, silent_s)
        cluster.touch_worker(worker)
        if worker.state is WorkerState.LOST:
            _give_up_operations(cluster, worker)
    if worker.state is WorkerState.LOST and silent_s >= settings.forget_s and not worker.shards:
        cluster.forget(worker)
    elif (
        worker.state is WorkerState.ALIVE
        and worker.failed_probe_at is not None
        and now - worker.failed_probe_at >= settings.probe_retry_s
    ):
        worker.failed_probe_at = None
        cluster.work.append(ProbeAgent(worker.target))


def _give_up_operations(cluster: Cluster, worker: Worker) -> None:
    """Stop waiting for starts on a LOST worker; if it returns with one, that is cancelled."""
    for operation in cluster.operations.of_worker(worker.worker_id):
        cluster.finish(operation, failure_note(operation.plan, None, "its worker is LOST", ""))


def _expire(cluster: Cluster, operation: Operation, now: float) -> None:
    """Give up on a committed start that its worker does not report."""
    if operation.committed_at is None:
        return
    if now - operation.committed_at < cluster.settings.report_wait_s:
        return
    plan = operation.plan
    message = (
        f"{plan.replica} was committed on worker {plan.worker_id}, which has not reported it for "
        f"{cluster.settings.report_wait_s:g} s; deploy again if it stays away"
    )
    cluster.finish(operation, FailureNote(plan.generation, plan.worker_id, message))
