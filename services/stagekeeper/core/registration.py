"""What workers say: their slices, their signs of life, their failures; and whether they answer.

Decided here: which messages are late, which come from a life or a host that has no say any more,
and what the verdict on a heartbeat is. Not decided here: what follows for replicas.

Invariant: a message that is fenced off changes nothing; one worker's message changes nothing of
another's.
"""

from __future__ import annotations

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import (
    FailureAcknowledged,
    HeartbeatAnswered,
    HeartbeatVerdict,
    ProbeAgent,
    RegistrationAccepted,
)
from stagekeeper.core.errors import Reason, Refused, bad_fields
from stagekeeper.core.events import (
    AgentProbed,
    FailureReported,
    HeartbeatReceived,
    WorkerRegistered,
)
from stagekeeper.core.failure_check import failure_problems
from stagekeeper.core.ids import NO_EPOCH
from stagekeeper.core.model import WorkerReport
from stagekeeper.core.operations import record_note
from stagekeeper.core.report_check import (
    CheckedReport,
    check_entries,
    check_slice,
)
from stagekeeper.core.starts import worker_reported
from stagekeeper.core.states import OperationState, WorkerState
from stagekeeper.core.worker_news import log_probe, log_registration, log_superseded
from stagekeeper.core.workers import Worker

ENDED = frozenset({OperationState.ROLLED_BACK, OperationState.COMMITTED})


def worker_registered(
    cluster: Cluster, event: WorkerRegistered, now: float
) -> RegistrationAccepted:
    """Put a worker's whole slice.

    Raises:
        Refused: BAD_FIELD, WORKER_ID_IN_USE, STALE_INCARNATION.
    """
    report = event.report
    newest = cluster.operations.newest_generation(cluster.epoch)
    old = cluster.workers.get(report.worker_id)
    check_slice(report, event.digest, newest, known=old.incarnation if old is not None else 0)
    if old is not None:
        _check_authority(cluster, old, report, now)
        if report.incarnation == old.incarnation and report.revision < old.report.revision:
            cluster.hear(old, now)
            return _answer(cluster, old)
    checked = check_entries(report, newest)
    _go_above(cluster, report, checked)
    worker = Worker(report, checked, event.digest, cluster.epoch, now, cluster.pace_s)
    _succeed(cluster, old, worker)
    cluster.put_claims(worker.worker_id, old.shards if old is not None else (), worker.shards)
    cluster.registration_count += 1
    worker_reported(cluster, worker)
    for failure in checked.failures:
        cluster.record_failure(failure)
    return _answer(cluster, worker)


def _check_authority(cluster: Cluster, old: Worker, report: WorkerReport, now: float) -> None:
    """Fence off another host under a living lease, and an earlier life of this worker."""
    if report.host_id != old.report.host_id and old.has_lease(cluster.settings, now):
        raise Refused(
            Reason.WORKER_ID_IN_USE,
            f"worker {report.worker_id} is held by host {old.report.hostname or '?'} "
            f"({old.report.host_id}) and was heard {now - old.heard_at:.1f} s ago: choose another "
            "--worker-id, or stop that agent and wait for its lease to end",
            metadata={"host_id": old.report.host_id},
        )
    left_s = old.lease_left_s(cluster.settings, now)
    if not _is_same_or_later_life(old, report, has_lease=left_s > 0):
        raise Refused(
            Reason.STALE_INCARNATION,
            f"worker {report.worker_id} registered as incarnation {report.incarnation} from "
            f"{report.agent_address}, and incarnation {old.incarnation} at "
            f"{old.report.agent_address} "
            + (
                f"was heard {now - old.heard_at:.1f} s ago: choose another --worker-id, or stop "
                "that agent and wait for its lease to end"
                if left_s > 0
                else f"is known: whoever holds the host's lock takes {old.incarnation + 1}"
            ),
            metadata={"highest_incarnation": str(old.incarnation)},
            # A living agent keeps its worker. One that lost its state has to outwait itself.
            retry_after_s=left_s if left_s > 0 else None,
        )


def _is_same_or_later_life(old: Worker, report: WorkerReport, *, has_lease: bool) -> bool:
    """Say whether a report may replace what is known of its worker, or is a late one of that life.

    Agents that know nothing of each other, or lost their state, count from 1, so that two lives may
    have one number. An agent keeps its address for life, and its revisions only rise: another
    address is another life, and so is a lower revision when the lease is over, since no message is
    so late that anybody still waits for its answer.
    """
    if report.incarnation != old.incarnation:
        return report.incarnation > old.incarnation
    if report.agent_address != old.report.agent_address:
        return False
    return has_lease or report.revision >= old.report.revision


def _go_above(cluster: Cluster, report: WorkerReport, checked: CheckedReport) -> None:
    """Keep this reign, and what it mints, above everything that a report shows."""
    generations = [record.generation for record in checked.shards]
    generations += [operation.generation for operation in checked.operations]
    highest = max(generations, default=None)
    seen = max(report.highest_epoch, highest.epoch if highest is not None else NO_EPOCH)
    if seen > cluster.epoch:
        cluster.raise_epoch(seen)
    elif highest is not None and highest.epoch == cluster.epoch:
        cluster.operations.mint_above(highest.n)


def _succeed(cluster: Cluster, old: Worker | None, worker: Worker) -> None:
    """Put a worker in its former self's place; dial it back if it is another life or place."""
    log_registration(cluster, old, worker)
    if old is not None:
        is_same_life = old.incarnation == worker.incarnation
        old.move(WorkerState.ALIVE if is_same_life else WorkerState.SUPERSEDED)
    cluster.admit(worker)
    worker.registration_count = 1
    if old is not None:
        worker.registration_count += old.registration_count
        if worker.target == old.target:
            worker.is_reachable = old.is_reachable
            worker.unreachable_detail = old.unreachable_detail
            worker.failed_probe_at = old.failed_probe_at
            return
    cluster.work.append(ProbeAgent(worker.target))


def _answer(cluster: Cluster, worker: Worker) -> RegistrationAccepted:
    """Answer a registration; a late one is answered like the newest."""
    settled = []
    for record in worker.checked.operations:
        if record.state in ENDED and not cluster.operations.is_open(record.operation_id):
            settled.append(record.operation_id)
            if record.state is OperationState.ROLLED_BACK:
                why = record.reason or "it was rolled back"
                note = record_note(record, worker.worker_id, why)
                cluster.note_failure(record.replica, note)
    return RegistrationAccepted(
        epoch=cluster.epoch,
        next_heartbeat_s=cluster.pace_s,
        refused=worker.checked.refused,
        settled_failures=tuple([it.failure_id for it in worker.checked.failures]),
        settled_operations=tuple(settled),
    )


def heartbeat_received(cluster: Cluster, event: HeartbeatReceived, now: float) -> HeartbeatAnswered:
    """Renew a lease, if the slice behind it is the one that is known, and say whether it is.

    A heartbeat does not say its host: one with another slice may come from another host that took
    the same worker id, and must not keep alive what it does not hold. Late ones change nothing.
    The fast path: when nothing is new it makes nothing and touches nothing.
    """
    answers = cluster.heartbeat_answers
    worker = cluster.workers.get(event.worker_id)
    if worker is None:
        return answers[HeartbeatVerdict.REGISTER]
    report = worker.report
    if event.incarnation != report.incarnation:
        if event.incarnation > report.incarnation:
            return answers[HeartbeatVerdict.REGISTER]
        log_superseded(cluster, worker, event.incarnation)
        return answers[HeartbeatVerdict.SUPERSEDED]
    if event.revision < report.revision:
        # Late, or of a life that lost its state and counts as this one did: it has to register.
        is_late = worker.has_lease(cluster.settings, now)
        return answers[HeartbeatVerdict.OK if is_late else HeartbeatVerdict.REGISTER]
    if event.revision > report.revision or event.digest != worker.digest:
        return answers[HeartbeatVerdict.REGISTER]
    cluster.hear(worker, now)
    is_of_this_reign = worker.epoch is cluster.epoch
    return answers[HeartbeatVerdict.OK if is_of_this_reign else HeartbeatVerdict.REGISTER]


def agent_probed(cluster: Cluster, event: AgentProbed, now: float) -> None:
    """Note whether an agent answered; a probe of an earlier life says nothing."""
    worker = cluster.workers.get(event.worker_id)
    if worker is None or worker.incarnation != event.incarnation:
        return
    log_probe(cluster, worker, event)
    worker.is_reachable = event.is_reachable
    worker.unreachable_detail = event.detail
    worker.failed_probe_at = None if event.is_reachable else now


def failure_reported(cluster: Cluster, event: FailureReported, now: float) -> FailureAcknowledged:
    """Record a failure once.

    Raises:
        Refused: BAD_FIELD, WORKER_UNKNOWN, STALE_INCARNATION.
    """
    if problems := failure_problems(event.failure, "failure"):
        raise bad_fields(problems, "the failure")
    worker = cluster.workers.get(event.worker_id)
    if worker is None or event.incarnation > worker.incarnation:
        raise Refused(
            Reason.WORKER_UNKNOWN,
            f"worker {event.worker_id} (incarnation {event.incarnation}) is not registered here: "
            "register, then report again",
        )
    if event.incarnation < worker.incarnation:
        raise Refused(
            Reason.STALE_INCARNATION,
            f"worker {event.worker_id} is incarnation {worker.incarnation} now; incarnation "
            f"{event.incarnation} has no say any more",
            metadata={"highest_incarnation": str(worker.incarnation)},
        )
    cluster.record_failure(event.failure)
    return FailureAcknowledged(is_settled=True)
