"""How a start goes on: begun or joined, decided, committed; or it comes to nothing.

Decided here, from levels (what is on the books, what its workers report): when a start is handed
out to be carried through, when it is decided that it is committed, when it is over, and what is
given up. Not decided here: the order of a start across its workers (`start_run`), what is asked of
agents to undo it (`reconcile`), and what its replica is (the reports say so).

Invariant: the decision to commit is made once, when all parts are up and know where the others
serve; it is written down before anybody is told where several workers have to follow it, and never
taken back. A start that was decided and loses a part for good is stopped where it is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import (
    EndRun,
    RejoinOperation,
    RemoveOperation,
    SavedOperation,
    SaveOperation,
    StartOperation,
    StopSlot,
)
from stagekeeper.core.event_log import EventKind, of_replica
from stagekeeper.core.ids import OperationId, ReplicaKey, SlotKey, WorkerId
from stagekeeper.core.model import Peer, ReplicaStart
from stagekeeper.core.operations import FailureNote, Operation, failure_note, interruption_note
from stagekeeper.core.start_reports import (
    GOING_DOWN,
    committed_operations,
    has_shards,
    is_here,
    lost_part,
    peers_of,
    record_of,
    unreported,
    without_address,
)
from stagekeeper.core.start_turns import start_ahead, start_before
from stagekeeper.core.states import OperationState, ShardState, WorkerState
from stagekeeper.core.worker_news import log_stop
from stagekeeper.core.workers import Worker

COMMITTED = "all of its stages are READY and committed"
DELETED = "its deployment was deleted"
RESTARTED = "its agent was restarted while it was under way"
STARTED_ANEW = "its replica is started anew"


def begin(cluster: Cluster, start: ReplicaStart) -> None:
    """Put a start on the books, write it down, and have it carried out when it is its turn."""
    cluster.notes.pop(start.replica, None)
    operation = Operation(start)
    cluster.operations.add(operation)
    cluster.writes.append(SaveOperation(operation.saved))
    for worker_id in start.worker_ids:
        operation.targets[worker_id] = cluster.workers[worker_id].target
    if _has_turn(cluster, operation):
        _carry_out(cluster, operation)


def load(cluster: Cluster, saved: Iterable[SavedOperation]) -> None:
    """Put the starts on the books that an earlier reign wrote down and did not see the end of."""
    ascending = sorted(saved, key=lambda it: it.start.generation)
    newest = {it.start.replica: it.start.operation_id for it in ascending}
    for it in ascending:
        start = it.start
        if newest[start.replica] != start.operation_id:
            # A replica is started anew only when its start before has come to nothing.
            cluster.operations.condemned[start.operation_id] = start
            continue
        desired = cluster.desired.get(start.replica.deployment)
        operation = Operation(start, is_decided=it.is_decided, peers=it.peers)
        operation.is_cancelled = desired is not None and desired.is_deleting
        cluster.operations.add(operation)
        cluster.touched[start.replica] = None


def take_turns(cluster: Cluster) -> None:
    """Go on with the starts that waited for others, where those are over by now."""
    for operation_id in list(cluster.operations.waiting):
        operation = cluster.operations.by_id[operation_id]
        if _has_turn(cluster, operation):
            advance(cluster, operation)
    for operation_id in list(cluster.operations.behind):
        _note_before(cluster, cluster.operations.by_id[operation_id])


def worker_reported(cluster: Cluster, worker: Worker) -> None:
    """Take in what a worker's new report says of the starts that it has a part of."""
    running = cluster.operations.of_worker(worker.worker_id)
    if running:
        committed = committed_operations(worker)
        for operation in running:
            if operation.operation_id in committed:
                operation.committed.add(worker.worker_id)
            _take_in_report(cluster, operation, worker)
    for start in [*cluster.operations.condemned.values()]:
        if worker.worker_id in start.worker_ids:
            _forget_condemned(cluster, start)


def advance(cluster: Cluster, operation: Operation) -> None:
    """Do what can be done for a start now."""
    if operation.is_cancelled:
        _settle_cancelled(cluster, operation)
        return
    if operation.committed and not operation.is_decided:
        _decide(cluster, operation, peers_of(cluster, operation.start) or ())
    if operation.is_decided:
        _settle_committed(cluster, operation)
        return
    if operation.is_running:
        return
    lost = lost_part(cluster, operation.start)
    if lost is not None:
        worker_id, record = lost
        come_to_nothing(cluster, operation, failure_note(operation.start, worker_id, record))
    elif operation.started_at is None:
        _join(cluster, operation)
    else:
        peers = peers_of(cluster, operation.start)
        if peers is not None:
            _decide(cluster, operation, peers)


def come_to_nothing(
    cluster: Cluster, operation: Operation, note: FailureNote, *, undone: Collection[WorkerId] = ()
) -> None:
    """Give a start up: whatever is left of it goes.

    Where a part of it may be committed, that is remembered until its workers report nothing of it.

    Args:
        cluster: the books.
        operation: one that is on them.
        note: why.
        undone: workers that said that nothing is left; their reports are on their way.
    """
    if operation.is_running:
        cluster.work.append(EndRun(operation.operation_id))
    if operation.is_beyond_recall:
        cluster.operations.condemned[operation.operation_id] = operation.start
        note = replace(note, undoes_commit=True)
    cluster.finish(operation, note)
    left = [it for it in operation.start.worker_ids if it not in undone]
    cluster.due.update(dict.fromkeys(left))


def give_up_missing(cluster: Cluster) -> None:
    """At the end of the recovery go on with what waited for it, and give up what misses a worker.

    A start that was decided waits on: what is committed of it may be serving again at any time.
    """
    for operation in list(cluster.operations.by_id.values()):
        start = operation.start
        if not _is_wanted(cluster, start):
            cluster.finish(operation, None, f"the start of {start.replica} is of no wish any more")
            cluster.due.update(dict.fromkeys(start.worker_ids))
            continue
        advance(cluster, operation)
        missing = [it for it in start.worker_ids if not is_here(cluster, it)]
        is_waiting = operation.operation_id in cluster.operations.by_id and not (
            operation.is_running or operation.is_decided or operation.is_cancelled
        )
        if is_waiting and missing:
            why = "the supervisor that ran it ended, and the worker has not come back"
            come_to_nothing(cluster, operation, interruption_note(start, missing[0], why))


def give_up_lost(cluster: Cluster, worker: Worker) -> None:
    """Stop waiting for starts on a LOST worker; if it returns with one, that is cancelled.

    One that was decided is not given up: whether the worker has committed is not known.
    """
    for operation in cluster.operations.of_worker(worker.worker_id):
        if operation.is_cancelled:
            advance(cluster, operation)
        elif not operation.is_beyond_recall:
            start, lost = operation.start, worker.worker_id
            note = failure_note(start, lost, None, error="its worker is LOST")
            come_to_nothing(cluster, operation, note)


def expire(cluster: Cluster, operation: Operation, now: float) -> None:
    """Give up on reports that do not come."""
    wait_s = cluster.settings.report_wait_s
    start, committed_at = operation.start, operation.committed_at
    if committed_at is not None and now - committed_at >= wait_s:
        worker_id = unreported(cluster, start) or start.worker_ids[0]
        message = (
            f"{start.replica} was committed on worker {worker_id}, which has not reported it for "
            f"{wait_s:g} s; deploy again if it stays away"
        )
        cluster.finish(operation, FailureNote(start.generation, worker_id, message))
    elif (
        operation.started_at is not None
        and not operation.is_decided
        and not operation.is_cancelled
        and now - operation.started_at >= wait_s
    ):
        worker_id = without_address(cluster, start) or start.worker_ids[0]
        why = f"its stages have started, and it has not reported where they serve for {wait_s:g} s"
        come_to_nothing(cluster, operation, failure_note(start, worker_id, None, error=why))


def leftovers(
    cluster: Cluster, key: ReplicaKey, *, but: OperationId | None = None
) -> tuple[StopSlot, ...]:
    """Stop what is still reported of a replica, where its agent can be asked to.

    Args:
        cluster: the books.
        key: which replica.
        but: spare this start of it.
    """
    stops: dict[tuple[str, SlotKey], StopSlot] = {}
    for worker_id, records in sorted(cluster.claims.get(key, {}).items()):
        worker = cluster.workers[worker_id]
        if not worker.takes_commands:
            continue
        for record in records:
            known = stops.get((worker_id, record.slot))
            is_highest = known is None or known.up_to < record.generation
            is_left = record.state is not ShardState.STOPPED and record.operation_id != but
            if is_left and is_highest:
                stops[worker_id, record.slot] = StopSlot(
                    worker.target, record.slot, record.generation, STARTED_ANEW
                )
    return tuple(stops.values())


# How.


def _take_in_report(cluster: Cluster, operation: Operation, worker: Worker) -> None:
    worker_id = worker.worker_id
    known = operation.targets.get(worker_id)
    is_new_life = known is not None and known.incarnation != worker.incarnation
    operation.targets[worker_id] = worker.target
    record = record_of(worker, operation.operation_id)
    is_going_down = record is not None and record.state in GOING_DOWN
    if operation.is_cancelled or worker_id in operation.committed:
        pass
    elif operation.is_decided:
        if is_going_down:
            come_to_nothing(cluster, operation, failure_note(operation.start, worker_id, record))
            return
    elif (
        is_new_life
        and (operation.is_running or operation.started_at is not None)
        and not (record or has_shards(worker, operation.operation_id))
    ):
        come_to_nothing(
            cluster, operation, interruption_note(operation.start, worker_id, RESTARTED)
        )
        return
    elif operation.is_running and (is_new_life or is_going_down):
        cluster.work.append(RejoinOperation(operation.operation_id, worker.target))
    advance(cluster, operation)


def _join(cluster: Cluster, operation: Operation) -> None:
    """Go on with a start that an earlier reign began, once all of its workers are here.

    What is left of earlier starts has to go before, and not while the supervisor holds still.
    """
    start = operation.start
    if not _is_wanted(cluster, start):
        return
    if not all(is_here(cluster, worker_id) for worker_id in start.worker_ids):
        return
    stops = leftovers(cluster, start.replica, but=start.operation_id)
    if stops and cluster.is_recovering:
        return
    if _has_turn(cluster, operation):
        _carry_out(cluster, operation)


def _is_wanted(cluster: Cluster, start: ReplicaStart) -> bool:
    desired = cluster.desired.get(start.replica.deployment)
    return desired is not None and start.replica.index < desired.spec.replicas


def _has_turn(cluster: Cluster, operation: Operation) -> bool:
    """Say whether a start may be handed out; one that may not goes on in `take_turns`."""
    ahead = start_ahead(cluster, operation)
    before, operation.waits_for = operation.waits_for, _replica_of(ahead)
    _note(cluster, operation, cluster.operations.waiting, before, operation.waits_for)
    return ahead is None


def _note_before(cluster: Cluster, operation: Operation) -> None:
    """Note which start its agent has begun before, for as long as there is one."""
    first = start_before(cluster, operation)
    before, operation.behind = operation.behind, _replica_of(first)
    _note(cluster, operation, cluster.operations.behind, before, operation.behind)


def _replica_of(operation: Operation | None) -> ReplicaKey | None:
    return None if operation is None else operation.start.replica


def _note(
    cluster: Cluster,
    operation: Operation,
    held_back: dict[OperationId, None],
    before: ReplicaKey | None,
    now: ReplicaKey | None,
) -> None:
    """Keep an operation among those that another one holds back; a change is shown."""
    if now is None:
        held_back.pop(operation.operation_id, None)
    else:
        held_back[operation.operation_id] = None
    if now != before:
        cluster.touched[operation.start.replica] = None


def _carry_out(cluster: Cluster, operation: Operation) -> None:
    start = operation.start
    if start.generation.epoch.supervisor_id == cluster.epoch.supervisor_id:
        names = ", ".join(stage.spec.name for stage in start.parts[0].stages)
        told = f"{start.replica} starts on {start.where}: {names} "
    else:
        told = f"the start of {start.replica} on {start.where} goes on under this supervisor "
    told += f"(operation {start.operation_id})"
    operation.is_running = True
    cluster.touched[start.replica] = None
    _note_before(cluster, operation)
    cluster.log(EventKind.START_BEGAN, told, of_replica(start.replica, start.worker_ids[0]))
    stops = leftovers(cluster, start.replica, but=start.operation_id)
    for stop in stops:
        log_stop(cluster, stop)
    targets = tuple(operation.targets[worker_id] for worker_id in start.worker_ids)
    cluster.work.append(StartOperation(start, targets, stops))


def _decide(cluster: Cluster, operation: Operation, peers: tuple[Peer, ...]) -> None:
    """Decide that a start is committed.

    On one worker its agent's word is all there is to it. Several have to follow the one decision,
    so it is on disk before the first of them is told.
    """
    operation.is_decided, operation.peers = True, peers
    start = operation.start
    if start.is_spanning:
        cluster.writes.append(SaveOperation(operation.saved))
    cluster.touched[start.replica] = None
    cluster.due.update(dict.fromkeys(start.worker_ids))


def _settle_committed(cluster: Cluster, operation: Operation) -> None:
    """See how far the commit is: over, when every worker reports it."""
    start = operation.start
    if unreported(cluster, start) is None:
        if operation.is_running:
            cluster.work.append(EndRun(start.operation_id))
        cluster.finish(operation, None, f"{start.replica} has started: {COMMITTED}")
    elif operation.committed.issuperset(start.worker_ids):
        if operation.committed_at is None:
            operation.committed_at = cluster.now
            cluster.touched[start.replica] = None  # it waits for another thing now
    else:
        cluster.due.update(dict.fromkeys(start.worker_ids))


def _settle_cancelled(cluster: Cluster, operation: Operation) -> None:
    """Take a start off the books once every worker has answered that it is cancelled there.

    A worker that is given up on is not waited for: the deletion stops what it returns with.
    """
    start = operation.start
    answered = operation.cancelled | operation.committed
    for worker_id in start.worker_ids:
        worker = cluster.workers.get(worker_id)
        is_away = worker is None and not cluster.is_recovering
        if worker is not None and worker.state is WorkerState.LOST:
            is_away = True
        if not (is_away or worker_id in answered):
            return
    if operation.committed:
        cluster.finish(operation, None, f"{start.replica} has started, and is stopped: {DELETED}")
    else:
        cluster.finish(operation, None, f"the start of {start.replica} was cancelled: {DELETED}")
    cluster.due.update(dict.fromkeys(start.worker_ids))


def _forget_condemned(cluster: Cluster, start: ReplicaStart) -> None:
    """Forget a start that lost a part once none of its workers has anything of it."""
    for worker_id in start.worker_ids:
        if not is_here(cluster, worker_id):
            return
        worker = cluster.workers[worker_id]
        record = record_of(worker, start.operation_id)
        if has_shards(worker, start.operation_id) or (
            record is not None and record.state is not OperationState.ROLLED_BACK
        ):
            return
    del cluster.operations.condemned[start.operation_id]
    cluster.writes.append(RemoveOperation(start.operation_id))
