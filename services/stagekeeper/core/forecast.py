"""When a replica's next action happens by the clock, looked up when somebody asks.

Decided here: where each timer's end is found. Not decided here: which timer a view has
(`next_action`), and what happens then (`outcomes`).

Invariant: a read. What it says is true while nobody is heard in the meantime.
"""

from __future__ import annotations

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.ids import WorkerId
from stagekeeper.core.model import ReplicaView
from stagekeeper.core.next_action import silent_shard
from stagekeeper.core.states import Timer, WorkerState
from stagekeeper.core.workers import Worker, lease_s, lost_after_s


def next_action_at(cluster: Cluster, view: ReplicaView) -> float | None:
    """Return the (monotonic) time of a view's next action; None when no clock brings it about."""
    match view.timer:
        case Timer.RECOVERY:
            return cluster.hold_until
        case Timer.SILENCE:
            shard = silent_shard(view.shards)
            return None if shard is None else judged_at(cluster, shard.worker_id)
        case Timer.REPORT:
            operation = cluster.operations.by_replica.get(view.key)
            if operation is None or operation.committed_at is None:
                return None
            return operation.committed_at + cluster.settings.report_wait_s
        case Timer.RETRY:
            return _retry_at(cluster, view)
        case None:
            return None


def judged_at(cluster: Cluster, worker_id: WorkerId) -> float | None:
    """Return when a silent worker goes to its next state; None when it is heard, or LOST."""
    worker = cluster.workers.get(worker_id)
    if worker is None:
        return None
    if worker.state is WorkerState.SUSPECT:
        return worker.heard_at + lease_s(cluster.settings, worker.pace_s)
    if worker.state is WorkerState.UNREACHABLE:
        # Nobody is declared LOST while the supervisor holds still.
        lost_at = worker.heard_at + lost_after_s(cluster.settings, worker.pace_s)
        return max(lost_at, cluster.hold_until or lost_at)
    return None


def probed_at(cluster: Cluster, worker: Worker) -> float | None:
    """Return when an agent that did not answer is dialled again; None when that is not wanted."""
    if worker.failed_probe_at is None or worker.state is not WorkerState.ALIVE:
        return None
    return worker.failed_probe_at + cluster.settings.probe_retry_s


def _retry_at(cluster: Cluster, view: ReplicaView) -> float | None:
    """Return when the first stop of a replica that was answered in vain is asked for again."""
    times = [
        at
        for shard in view.shards
        if (at := cluster.pending.retry_at(shard.worker_id, shard.record.slot)) is not None
    ]
    return min(times, default=None)
