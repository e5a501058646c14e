"""What workers' reports say of a start: which parts are there, serve, are committed, or are lost.

Decided here: nothing; these are reads of what the workers said last. What follows is decided in
`starts`.

Invariant: a worker counts as here only when it has registered with this very reign.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.ids import OperationId, WorkerId
from stagekeeper.core.model import OperationRecord, Peer, ReplicaStart, ShardRecord
from stagekeeper.core.states import OperationState, ShardState
from stagekeeper.core.workers import Worker

STAGE_ADDRESS = "stage"

GOING_DOWN = frozenset(
    {OperationState.ROLLING_BACK, OperationState.ROLLED_BACK, OperationState.INTERRUPTED}
)
"""States of a part that will never be committed."""


def is_here(cluster: Cluster, worker_id: WorkerId) -> bool:
    """Whether a worker has registered with this reign."""
    worker = cluster.workers.get(worker_id)
    return worker is not None and worker.epoch is cluster.epoch


def committed_operations(worker: Worker) -> set[OperationId]:
    """Return the operations of which a worker reports committed shards."""
    return {record.operation_id for record in worker.shards if record.committed}


def record_of(worker: Worker, operation_id: OperationId) -> OperationRecord | None:
    """Return a worker's own word on an operation; None when it has none."""
    records = worker.checked.operations
    return next((it for it in records if it.operation_id == operation_id), None)


def has_shards(worker: Worker, operation_id: OperationId) -> bool:
    """Whether a worker reports anything of a start that is not stopped."""
    return any(
        it.operation_id == operation_id and it.state is not ShardState.STOPPED
        for it in worker.shards
    )


def lost_part(cluster: Cluster, start: ReplicaStart) -> tuple[WorkerId, OperationRecord] | None:
    """Return a worker that will never commit its part, by its own report, with its word."""
    for worker_id in start.worker_ids:
        if is_here(cluster, worker_id):
            record = record_of(cluster.workers[worker_id], start.operation_id)
            if record is not None and record.state in GOING_DOWN:
                return worker_id, record
    return None


def unreported(cluster: Cluster, start: ReplicaStart) -> WorkerId | None:
    """Return a worker that does not report its part as committed; None when all do."""
    for worker_id in start.worker_ids:
        worker = cluster.workers.get(worker_id)
        if worker is None or start.operation_id not in committed_operations(worker):
            return worker_id
    return None


def without_address(cluster: Cluster, start: ReplicaStart) -> WorkerId | None:
    """Return a worker that does not report where all of its shards serve; None when all do."""
    for part in start.parts:
        known = {it.stage_id for it in _serving(cluster, start, part.worker_id)}
        if not known.issuperset(stage.stage_id for stage in part.stages):
            return part.worker_id
    return None


def peers_of(cluster: Cluster, start: ReplicaStart) -> tuple[Peer, ...] | None:
    """Return where all shards of a start serve, by stage and shard; None until all are reported.

    None at all where one worker has all of the replica: it knows that itself.
    """
    if not start.is_spanning:
        return ()
    if without_address(cluster, start) is not None:
        return None
    shards = [it for worker_id in start.worker_ids for it in _serving(cluster, start, worker_id)]
    shards.sort(key=lambda it: (it.stage_id, it.shard_index))
    return tuple(
        Peer(it.stage_id, it.stage_name, it.shard_index, it.instance_id, _url_of(it))
        for it in shards
    )


def _serving(cluster: Cluster, start: ReplicaStart, worker_id: WorkerId) -> Iterable[ShardRecord]:
    for record in cluster.claims.get(start.replica, {}).get(worker_id, ()):
        is_its = record.operation_id == start.operation_id
        if is_its and record.state is ShardState.READY and _url_of(record):
            yield record


def _url_of(record: ShardRecord) -> str:
    return next((it.url for it in record.addresses if it.name == STAGE_ADDRESS), "")
