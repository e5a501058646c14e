"""What became of the work that agents were given, and what time does.

Decided here: what an answer says of a part of a start, and which silence changes a worker's state.
Not decided here: how a start goes on then (`starts`), what the replicas are (reports say so) and
what is asked of agents next (`reconcile`).

Invariant: outcomes are hints about work, never about shards: a start counts as done when the
worker's own report shows its shards committed.
"""

from __future__ import annotations

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import ProbeAgent
from stagekeeper.core.errors import Reason
from stagekeeper.core.events import (
    CommitEnded,
    OperationCancelled,
    OperationEnded,
    OperationStarted,
    SlotStopped,
    Ticked,
)
from stagekeeper.core.operations import failure_note
from stagekeeper.core.start_reports import GOING_DOWN
from stagekeeper.core.starts import advance, come_to_nothing, expire, give_up_lost
from stagekeeper.core.states import OperationState, WorkerState
from stagekeeper.core.worker_news import log_silence
from stagekeeper.core.workers import Worker, fall_silent, state_after_silence

_LOST_FOR_GOOD = frozenset({Reason.BAD_FIELD, Reason.STALE_GENERATION})
"""Refusals of a commit by an agent that has nothing of the start, and never will."""


def operation_started(cluster: Cluster, event: OperationStarted, now: float) -> None:
    """Note that all stages of a start are up; one that is off the books (by now) is ignored."""
    operation = cluster.operations.by_id.get(event.operation_id)
    if operation is not None and operation.is_running:
        operation.is_running = False
        operation.started_at = now
        advance(cluster, operation)


def operation_ended(cluster: Cluster, event: OperationEnded, now: float) -> None:
    """Take in how a start ended. One that is off the books (by now) is late and ignored."""
    operation = cluster.operations.by_id.get(event.operation_id)
    if operation is None or not operation.is_running:
        return
    operation.is_running = False
    worker_id = event.worker_id or operation.start.worker_ids[0]
    records = dict(event.others)
    if event.record is not None:
        records[worker_id] = event.record
    for record in records.values():
        if record.failure is not None:
            cluster.record_failure(record.failure)
    note = failure_note(
        operation.start,
        worker_id,
        event.record,
        error=event.error,
        reason=event.reason,
        others=[record for _, record in event.others],
    )
    undone = [it for it in records if records[it].state is OperationState.ROLLED_BACK]
    come_to_nothing(cluster, operation, note, undone=undone)


def commit_ended(cluster: Cluster, event: CommitEnded, now: float) -> None:
    """Take in how far a worker's commit is. What says nothing of its part is asked again later."""
    retry_at = now + cluster.settings.retry_s
    cluster.pending.answered(event.worker_id, event.incarnation, event.operation_id, retry_at)
    operation = cluster.operations.by_id.get(event.operation_id)
    if operation is None or not operation.is_decided:
        return
    record, worker_id = event.record, event.worker_id
    if record is not None and record.failure is not None:
        cluster.record_failure(record.failure)
    if record is not None and record.state is OperationState.COMMITTED:
        operation.committed.add(worker_id)
        advance(cluster, operation)
    elif operation.is_cancelled:
        pass
    elif (record is not None and record.state in GOING_DOWN) or event.reason in _LOST_FOR_GOOD:
        note = failure_note(
            operation.start, worker_id, record, error=event.error, reason=event.reason
        )
        come_to_nothing(cluster, operation, note)


def operation_cancelled(cluster: Cluster, event: OperationCancelled, now: float) -> None:
    """Note that a cancellation was answered; one that failed is asked for again later."""
    retry_at = now + cluster.settings.retry_s
    cluster.pending.answered(event.worker_id, event.incarnation, event.operation_id, retry_at)
    operation = cluster.operations.by_id.get(event.operation_id)
    if operation is not None and operation.is_cancelled and not event.error:
        operation.cancelled.add(event.worker_id)
        cluster.due[event.worker_id] = None
        advance(cluster, operation)


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
        expire(cluster, operation, now)
    if not cluster.is_recovering and now - cluster.started_at >= cluster.settings.lost_s:
        cluster.give_up_awaited()
    cluster.save_roster()


def _forgive(cluster: Cluster, stalled_s: float, now: float) -> None:
    """Move every deadline by a stall of the supervisor."""
    for worker in cluster.workers.values():
        worker.heard_at = min(now, worker.heard_at + stalled_s)
    for operation in cluster.operations.by_id.values():
        if operation.started_at is not None:
            operation.started_at += stalled_s
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
            give_up_lost(cluster, worker)
    if worker.state is WorkerState.LOST and silent_s >= settings.forget_s and not worker.shards:
        cluster.forget(worker)
    elif (
        worker.state is WorkerState.ALIVE
        and worker.failed_probe_at is not None
        and now - worker.failed_probe_at >= settings.probe_retry_s
    ):
        worker.failed_probe_at = None
        cluster.work.append(ProbeAgent(worker.target))
