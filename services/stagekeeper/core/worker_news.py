"""What is put down of workers: that they come, fall silent, return, answer, and are asked to stop.

Decided here: the words, and what is said once only. Not decided here: the states themselves
(`workers`, `registration`, `outcomes`).

Invariant: a message that changes nothing puts nothing down.
"""

from __future__ import annotations

from typing import Final

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import StopSlot
from stagekeeper.core.counted import counted, noun
from stagekeeper.core.event_log import EventKind, of_replica, of_worker
from stagekeeper.core.events import AgentProbed
from stagekeeper.core.states import WorkerState
from stagekeeper.core.workers import Worker

MOST_LIVES_TOLD: Final = 16
"""Older lives of one worker that an event is put down for; nobody has so many by accident."""

_OF_SILENCE: Final = {
    WorkerState.SUSPECT: (EventKind.WORKER_SUSPECTED, "it missed heartbeats"),
    WorkerState.UNREACHABLE: (
        EventKind.WORKER_UNREACHABLE,
        "its lease is over; its shards stay in routes",
    ),
    WorkerState.LOST: (
        EventKind.WORKER_LOST,
        "it is given up on; clients try its shards last",
    ),
}


def log_registration(cluster: Cluster, old: Worker | None, worker: Worker) -> None:
    """Tell who registered, unless it is a worker that is known and was heard all the time."""
    worker_id, report = worker.worker_id, worker.report
    held = counted(len(worker.shards), "shard")
    if old is None:
        how = "is back" if worker_id in cluster.awaited else "joined"
        told = f"worker {worker_id} {how} from {report.hostname or 'its host'} with {held}"
        cluster.log(EventKind.WORKER_JOINED, told, of_worker(worker_id))
    elif old.incarnation != worker.incarnation:
        told = (
            f"worker {worker_id} has another agent: incarnation {worker.incarnation} follows "
            f"{old.incarnation}, with {held}"
        )
        cluster.log(EventKind.WORKER_RESTARTED, told, of_worker(worker_id))
    elif old.state is not WorkerState.ALIVE:
        cluster.log_return(old, cluster.now)
    refused = worker.checked.refused
    if refused and (old is None or old.checked.refused != refused):
        entries = counted(len(refused), "entry", "entries")
        were = noun(len(refused), "was", "were")
        told = f"{entries} of worker {worker_id} {were} refused: {refused[0].message}"
        cluster.log(EventKind.ENTRIES_REFUSED, told, of_worker(worker_id), is_warning=True)


def log_silence(cluster: Cluster, worker: Worker, silent_s: float) -> None:
    """Tell how far a worker has fallen."""
    kind, why = _OF_SILENCE[worker.state]
    told = f"worker {worker.worker_id} is {worker.state}: {why} (silent for {silent_s:.1f} s)"
    cluster.log(kind, told, of_worker(worker.worker_id), is_warning=True)


def log_superseded(cluster: Cluster, worker: Worker, incarnation: int) -> None:
    """Tell once of each older life that still beats."""
    told = cluster.lives_told.setdefault(worker.worker_id, set())
    if incarnation in told or len(told) >= MOST_LIVES_TOLD:
        return
    told.add(incarnation)
    cluster.log(
        EventKind.WORKER_SUPERSEDED,
        f"incarnation {incarnation} of worker {worker.worker_id} still beats, and was told that "
        f"{worker.incarnation} has followed it",
        of_worker(worker.worker_id),
        is_warning=True,
    )


def log_probe(cluster: Cluster, worker: Worker, probed: AgentProbed) -> None:
    """Tell when an agent answers no longer, and when it does again."""
    about = of_worker(worker.worker_id)
    address = worker.report.agent_address
    if not probed.is_reachable and worker.is_reachable is not False:
        told = f"the agent of worker {worker.worker_id} does not answer at {address}"
        told = probed.detail or told
        cluster.log(EventKind.AGENT_UNREACHABLE, told, about, is_warning=True)
    elif probed.is_reachable and worker.is_reachable is False:
        told = f"the agent of worker {worker.worker_id} answers at {address}"
        cluster.log(EventKind.AGENT_REACHED, told, about)


def log_stop(cluster: Cluster, stop: StopSlot) -> None:
    """Tell that an agent is asked to stop a slot."""
    worker_id, slot = stop.target.worker_id, stop.slot
    cluster.log(
        EventKind.STOP_REQUESTED,
        f"worker {worker_id} is asked to stop stage {slot.stage_id} of {slot.replica}: "
        f"{stop.reason}",
        of_replica(slot.replica, worker_id, slot.stage_id),
    )
