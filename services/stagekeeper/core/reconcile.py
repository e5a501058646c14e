"""What agents are asked to stop, cancel or commit, by levels; and when a wish is settled.

Decided here: which reported shards must go, which operations nobody runs any more, when a creation
is over and when a deletion is done. Not decided here: when a command may be repeated (`pending`),
and that a start is committed (`starts`).

Invariant: in HOLD nothing is stopped or cancelled; what is only known from reports is never stopped
by itself; a shard that another set supersedes goes only while that set is READY on live workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import CancelOperation, CommitOperation, StopSlot
from stagekeeper.core.counted import counted, noun
from stagekeeper.core.event_log import EventKind
from stagekeeper.core.ids import (
    DeploymentName,
    Generation,
    OperationId,
    ReplicaIndex,
    ReplicaKey,
    SlotKey,
    WorkerId,
)
from stagekeeper.core.model import OperationRecord, ShardRecord
from stagekeeper.core.operations import NO_GENERATION, FailureNote, record_note
from stagekeeper.core.starts import DELETED, give_up_missing
from stagekeeper.core.states import OperationState, ReplicaState, ShardState, WorkerState
from stagekeeper.core.worker_news import log_stop
from stagekeeper.core.workers import Worker

UNDER_WAY = frozenset(
    {
        OperationState.RESERVED,
        OperationState.STARTING,
        OperationState.STARTED,
        OperationState.INTERRUPTED,
    }
)
"""States in which an operation waits for a reign. One that is rolling back ends by itself."""

WORKERS_NAMED = 5

FELL_APART = "the rest of its start is lost"
SUPERSEDED = "a newer start of its replica is READY"


def reconcile_worker(cluster: Cluster, worker: Worker) -> None:
    """Work out anew what is wanted of one worker.

    While the supervisor holds still, a decision that was taken before is carried out, and no more.
    """
    commits = _commits(cluster, worker)
    if cluster.is_recovering:
        cluster.pending.want(worker.worker_id, commits)
        return
    cancels = _cancels(cluster, worker)
    stops: dict[SlotKey, StopSlot] = {}
    for record in worker.shards:
        if record.operation_id in cancels and not record.committed:
            continue
        wanted = _stop(cluster, record)
        if wanted is not None:
            up_to, reason = wanted
            known = stops.get(record.slot)
            if known is None or known.up_to < up_to:
                stops[record.slot] = StopSlot(worker.target, record.slot, up_to, reason)
    cluster.pending.want(worker.worker_id, [*commits, *cancels.values(), *stops.values()])


def _cancels(cluster: Cluster, worker: Worker) -> dict[OperationId, CancelOperation]:
    """Return the operations to cancel: those deleted meanwhile, and those that nobody runs."""
    cancels: dict[OperationId, CancelOperation] = {}
    worker_id = worker.worker_id
    for operation in cluster.operations.of_worker(worker_id):
        target = operation.targets.get(worker_id)
        if operation.is_cancelled and target and worker_id not in operation.cancelled:
            operation_id = operation.operation_id
            cancels[operation_id] = CancelOperation(target, operation_id, DELETED)
    for record in worker.checked.operations:
        if record.state in UNDER_WAY and not cluster.operations.is_open(record.operation_id):
            why = _interruption(cluster, record)
            cancels[record.operation_id] = CancelOperation(worker.target, record.operation_id, why)
            cluster.note_failure(record.replica, record_note(record, worker_id, why))
    return cancels


def _commits(cluster: Cluster, worker: Worker) -> list[CommitOperation]:
    """Return what a worker has to commit: parts of starts that were decided."""
    commits = []
    worker_id = worker.worker_id
    for operation in cluster.operations.of_worker(worker_id):
        start, target = operation.start, operation.targets.get(worker_id)
        if (
            operation.is_decided
            and not operation.is_cancelled
            and worker_id not in operation.committed
            and target is not None
            and start.replica.deployment in cluster.desired
        ):
            shard_index = start.worker_ids.index(worker_id)
            elsewhere = [it for it in operation.peers if it.shard_index != shard_index]
            commits.append(CommitOperation(target, start.part_of(worker_id), tuple(elsewhere)))
    return commits


def _interruption(cluster: Cluster, record: OperationRecord) -> str:
    if record.operation_id in cluster.operations.condemned:
        return FELL_APART
    if record.reason:
        return record.reason
    if record.state is OperationState.INTERRUPTED:
        return "its agent ended while it was under way"
    return "the supervisor that ran it ended"


def _stop(cluster: Cluster, record: ShardRecord) -> tuple[Generation, str] | None:
    """Say up to which generation a reported shard's slot has to be stopped, and why."""
    if record.state is ShardState.STOPPED:
        return None
    desired = cluster.desired.get(record.deployment)
    if desired is not None and desired.is_deleting:
        return record.generation, DELETED
    ceiling = cluster.tombstones.get(record.deployment)
    if ceiling is not None and record.generation <= ceiling:
        return ceiling, DELETED
    if record.committed and record.operation_id in cluster.operations.condemned:
        return record.generation, FELL_APART
    if desired is not None and _is_superseded(cluster, record):
        return record.generation, SUPERSEDED
    return None


def _is_superseded(cluster: Cluster, record: ShardRecord) -> bool:
    view = cluster.views.get(record.replica)
    if view is None or view.state is not ReplicaState.READY:
        return False
    return all(
        winner.record.generation > record.generation and winner.worker_state is WorkerState.ALIVE
        for winner in view.shards
    )


def ask_due(cluster: Cluster, worker_ids: Iterable[WorkerId], now: float) -> None:
    """Send what is wanted of these workers and not under way, unless they are silent."""
    for worker_id in worker_ids:
        worker = cluster.workers.get(worker_id)
        if worker is not None and worker.takes_commands:
            due = cluster.pending.take_due(worker_id, now)
            for command in due:
                if isinstance(command, StopSlot) and cluster.pending.is_first(command):
                    log_stop(cluster, command)
            cluster.work += due


def end_recovery(cluster: Cluster) -> None:
    """Leave HOLD(RECOVERING): whoever is missing now is missing, and what was left is settled."""
    cluster.hold_until = None
    _log_end_of_recovery(cluster)
    give_up_missing(cluster)
    for key, view in cluster.views.items():
        if view.state is not ReplicaState.READY:
            cluster.touched[key] = None
    cluster.touched_names.update(dict.fromkeys(cluster.visible))
    for worker in cluster.workers.values():
        reconcile_worker(cluster, worker)
        cluster.due[worker.worker_id] = None
    for desired in cluster.desired.values():
        if desired.is_creating and not desired.is_deleting:
            for index in range(desired.spec.replicas):
                _note_interrupted_creation(
                    cluster, ReplicaKey(desired.spec.name, ReplicaIndex(index))
                )


def _log_end_of_recovery(cluster: Cluster) -> None:
    count = len(cluster.workers)
    told = "the supervisor holds still no longer: "
    told += f"{counted(count, 'worker')} {noun(count, 'has', 'have')} registered"
    if cluster.awaited:
        missing = list(cluster.awaited)
        told += f", and the time is over for {', '.join(missing[:WORKERS_NAMED])}"
        more = len(missing) - WORKERS_NAMED
        told += f" and {more} more" if more > 0 else ""
    cluster.log(EventKind.HOLD_ENDED, told, is_warning=bool(cluster.awaited))


def _note_interrupted_creation(cluster: Cluster, key: ReplicaKey) -> None:
    """Say why a replica is missing whose creation an earlier reign began and never settled."""
    if key in cluster.notes or key in cluster.operations.by_replica:
        return
    message = (
        f"the creation of {key} was interrupted by the end of the supervisor that ran it; deploy "
        "again"
    )
    cluster.notes[key] = FailureNote(NO_GENERATION, WorkerId(""), message)
    cluster.touched[key] = None


def settle_deployment(cluster: Cluster, name: DeploymentName) -> None:
    """Write down that a creation or a deletion is over, once it is."""
    desired = cluster.desired.get(name)
    if desired is None or cluster.is_recovering or name in cluster.operations.by_deployment:
        return
    if desired.is_deleting:
        if name not in cluster.indexes:
            cluster.entomb(name)
    elif desired.is_creating:
        cluster.put_desired(replace(desired, is_creating=False))
