"""The books of one reign: reports kept, replicas derived, wishes, operations, and their indexes.

Decided here: what a change of one book touches in the others. Not decided here: what an event means
(the handlers), what the replicas are then (`rederivation`), what is asked of agents (`reconcile`),
and what is told of all that (`publishing`).

Invariant: whatever may change a view has touched its replica; the cost of an event is that of the
replicas it touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from stagekeeper.core.changes import ChangeLog
from stagekeeper.core.commands import (
    Desired,
    EntombDeployment,
    HeartbeatAnswered,
    HeartbeatVerdict,
    LookForReign,
    RemoveOperation,
    SaveDeployment,
    SaveEpoch,
    SaveFailure,
    SaveRoster,
    Work,
    Write,
)
from stagekeeper.core.compose import compose_deployment
from stagekeeper.core.event_log import (
    ITSELF,
    EventKind,
    PublishEvent,
    Subject,
    of_replica,
    of_worker,
)
from stagekeeper.core.failure_log import FailureLog
from stagekeeper.core.ids import (
    ClusterName,
    DeploymentName,
    Epoch,
    Generation,
    ReplicaIndex,
    ReplicaKey,
    WorkerId,
)
from stagekeeper.core.model import DeploymentView, Failure, ReplicaView, ShardRecord
from stagekeeper.core.operations import FailureNote, Operation, OperationBook, rollback_story
from stagekeeper.core.pending import PendingWork
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import DeploymentState, ReplicaState, WorkerState
from stagekeeper.core.workers import Worker


class Moved(NamedTuple):
    """A replica whose state is another one than before the event; what held then."""

    before: ReplicaView | None
    was_recovering: bool


class Cluster:
    """What one reign knows. Handlers change it, `registry` turns what it touched into commands.

    `hold_until` is None in NORMAL. `awaited` are workers of the roster that have not come back.
    `indexes` has, for each name, the replicas that have a view; `contested` are replicas of which
    more is reported than is shown. `came_up` has the newest start that was READY of each replica
    that is wanted. `due` are workers whose wanted stops and cancellations have to be worked out
    again; a dict, since order is kept in it.

    `lives_told` are the incarnations of a worker that were told, by event, of a later one.
    `now` is the time of the event that is being taken in. `counts` has, for each name, how many of
    its replicas are in which state. `moved` and `news` are what `publishing` has still to tell;
    `deployment_states` what it told last, and since when that holds.
    """

    def __init__(
        self,
        *,
        name: ClusterName,
        epoch: Epoch,
        settings: RegistrySettings,
        desired: Iterable[Desired],
        tombstones: Mapping[DeploymentName, Generation],
        roster: Collection[WorkerId],
        failures: Iterable[Failure],
        durable: bool,
        now: float,
        is_new: bool,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.settings = settings
        self.durable = durable
        self.desired: dict[DeploymentName, Desired] = {it.spec.name: it for it in desired}
        self.tombstones = dict(tombstones)
        self.started_at = now
        self.now = now
        self.awaited: dict[WorkerId, None] = dict.fromkeys(sorted(roster))
        self.has_roster = bool(self.awaited)
        window_s = settings.window_s(has_roster=self.has_roster)
        self.hold_until = None if is_new else now + window_s
        self.saved_roster = tuple(self.awaited)
        self.is_roster_stale = False

        self.workers: dict[WorkerId, Worker] = {}
        self.claims: dict[ReplicaKey, dict[WorkerId, tuple[ShardRecord, ...]]] = {}
        self.notes: dict[ReplicaKey, FailureNote] = {}
        self.came_up: dict[ReplicaKey, Generation] = {}
        self.operations = OperationBook(epoch.supervisor_id)
        self.pending = PendingWork()
        self.failures = FailureLog(settings.failure_limit, failures)
        self.registration_count = 0
        self.lives_told: dict[WorkerId, set[int]] = {}

        self.views: dict[ReplicaKey, ReplicaView] = {}
        self.indexes: dict[DeploymentName, set[ReplicaIndex]] = {}
        self.contested: set[ReplicaKey] = set()
        self.composed: dict[DeploymentName, DeploymentView] = {}
        self.visible: set[DeploymentName] = set(self.desired)
        self.counts: dict[DeploymentName, Counter[ReplicaState]] = {}
        self.deployment_states: dict[DeploymentName, tuple[DeploymentState, float | None]] = {}

        self.changes = ChangeLog(epoch, settings.change_log_limit, settings.event_log_limit)
        self.news: list[PublishEvent] = []
        self.moved: dict[ReplicaKey, Moved] = {}
        self.derivation_count = 0

        self.writes: list[Write] = []
        self.work: list[Work] = []
        self.touched: dict[ReplicaKey, None] = {}
        self.touched_names: dict[DeploymentName, None] = {}
        self.due: dict[WorkerId, None] = {}
        self.heartbeat_answers: dict[HeartbeatVerdict, HeartbeatAnswered] = {}
        self.pace_s = 0.0
        self.set_pace()
        for deployment in self.desired:
            self.touch_deployment(deployment)

    # Time and reigns.

    @property
    def is_recovering(self) -> bool:
        return self.hold_until is not None

    def set_pace(self) -> None:
        """Work out the heartbeat's pace, and the answers that carry it, once for all workers."""
        self.pace_s = self.settings.pace_s(len(self.workers))
        self.heartbeat_answers = {
            verdict: HeartbeatAnswered(verdict, self.epoch, self.pace_s)
            for verdict in HeartbeatVerdict
        }

    def raise_epoch(self, seen: Epoch) -> None:
        """Go above a reign that a worker has seen; everybody else has to register anew."""
        self.work.append(LookForReign(above=self.epoch))
        ours, self.epoch = self.epoch, Epoch(seen.number + 1, self.epoch.supervisor_id)
        self.changes.begin_reign(self.epoch)
        self.log(
            EventKind.EPOCH_RAISED,
            f"reign {ours} became {self.epoch}: a worker has obeyed {seen}, and all register anew",
            is_warning=True,
        )
        self.set_pace()
        self.writes.append(SaveEpoch(self.epoch))

    def log(
        self,
        kind: EventKind,
        message: str,
        subject: Subject = ITSELF,
        *,
        is_warning: bool = False,
    ) -> None:
        """Put down that something happened. Only for what is decided: a refusal leaves no trace."""
        event = self.changes.add_event(kind, self.now, message, subject, is_warning=is_warning)
        self.news.append(event)

    def save_roster(self) -> None:
        """Write the roster down if it is another one: all but those that were given up on."""
        if not self.is_roster_stale:
            return
        self.is_roster_stale = False
        lost = WorkerState.LOST
        expected = {worker_id for worker_id, it in self.workers.items() if it.state is not lost}
        listed = tuple(sorted(expected.union(self.awaited)))
        if listed != self.saved_roster:
            self.saved_roster = listed
            self.writes.append(SaveRoster(listed))

    # Workers and their claims.

    def hear(self, worker: Worker, now: float) -> None:
        """Renew a worker's lease."""
        if worker.state is not WorkerState.ALIVE:
            self.log_return(worker, now)
            worker.move(WorkerState.ALIVE)
            self.touch_worker(worker)
        worker.heard_at = now
        worker.pace_s = self.pace_s

    def log_return(self, worker: Worker, now: float) -> None:
        """Put down that a worker that was silent is heard again."""
        self.log(
            EventKind.WORKER_RECONNECTED,
            f"worker {worker.worker_id} is heard again after {now - worker.heard_at:.1f} s (it was "
            f"{worker.state})",
            of_worker(worker.worker_id),
        )

    def admit(self, worker: Worker) -> None:
        """Put a worker in the place of its former self, or as a new one."""
        is_new = worker.worker_id not in self.workers
        self.workers[worker.worker_id] = worker
        self.awaited.pop(worker.worker_id, None)
        self.is_roster_stale = True
        if is_new:
            self.set_pace()
        worker.pace_s = self.pace_s
        self.due[worker.worker_id] = None

    def give_up_awaited(self) -> None:
        if self.awaited:
            self.awaited.clear()
            self.is_roster_stale = True

    def put_claims(
        self, worker_id: WorkerId, old: Iterable[ShardRecord], new: Iterable[ShardRecord]
    ) -> None:
        """Replace a worker's claims, touching the replicas that either report names."""
        grouped: dict[ReplicaKey, list[ShardRecord]] = {}
        for record in new:
            grouped.setdefault(record.replica, []).append(record)
        for record in old:
            grouped.setdefault(record.replica, [])
        for key, records in grouped.items():
            by_worker = self.claims.setdefault(key, {})
            if records:
                by_worker[worker_id] = tuple(records)
            else:
                by_worker.pop(worker_id, None)
            if not by_worker:
                del self.claims[key]
            self.touched[key] = None

    def touch_worker(self, worker: Worker) -> None:
        """Have everything that depends on a worker's state worked out again."""
        self.is_roster_stale = True
        for record in worker.shards:
            self.touched[record.replica] = None
        self.due[worker.worker_id] = None

    def forget(self, worker: Worker) -> None:
        """Drop a worker that holds nothing from every list."""
        self.log(
            EventKind.WORKER_FORGOTTEN,
            f"worker {worker.worker_id} has not been heard for {self.now - worker.heard_at:.0f} s, "
            "holds nothing, and is listed no more",
            of_worker(worker.worker_id),
        )
        del self.workers[worker.worker_id]
        self.lives_told.pop(worker.worker_id, None)
        self.is_roster_stale = True
        self.pending.want(worker.worker_id, ())
        self.set_pace()

    # Deployments.

    def put_desired(self, desired: Desired) -> None:
        """Write a wish down. Its replicas are derived again only if that can change them."""
        name = desired.spec.name
        old = self.desired.get(name)
        self.desired[name] = desired
        self.writes.append(SaveDeployment(desired))
        if old is None or old.is_deleting != desired.is_deleting:
            self.touch_deployment(name)
        self.touched_names[name] = None

    def entomb(self, name: DeploymentName) -> None:
        """Forget a deployment, and remember that all that was ever started for it must stop."""
        desired = self.desired.pop(name, None)
        ceiling = self.operations.newest_generation(self.epoch)
        self.tombstones.pop(name, None)
        self.tombstones[name] = ceiling
        if len(self.tombstones) > self.settings.tombstone_limit:
            oldest = next(iter(self.tombstones))
            del self.tombstones[oldest]
            self.touch_deployment(oldest)
        self.writes.append(EntombDeployment(name, ceiling))
        condemned = self.operations.condemned
        for start in [it for it in condemned.values() if it.replica.deployment == name]:
            del condemned[start.operation_id]
            self.writes.append(RemoveOperation(start.operation_id))
        for index in range(desired.spec.replicas if desired is not None else 0):
            key = ReplicaKey(name, ReplicaIndex(index))
            self.notes.pop(key, None)
            self.came_up.pop(key, None)
        self.touch_deployment(name)

    def touch_deployment(self, name: DeploymentName) -> None:
        """Have all replicas of a deployment derived again, and the workers that hold them asked."""
        desired = self.desired.get(name)
        wanted = range(desired.spec.replicas if desired is not None else 0)
        for index in {*wanted, *self.indexes.get(name, ())}:
            key = ReplicaKey(name, ReplicaIndex(index))
            self.touched[key] = None
            self.due.update(dict.fromkeys(self.claims.get(key, ())))
        self.touched_names[name] = None

    def note_failure(self, key: ReplicaKey, note: FailureNote) -> None:
        """Remember why a replica's start failed, unless nobody wants it or it is READY anyway."""
        view = self.views.get(key)
        if key.deployment not in self.desired:
            return
        if view is not None and view.state is ReplicaState.READY:
            return
        old = self.notes.get(key)
        if old is None or old.generation < note.generation:
            self.notes[key] = note
            self.touched[key] = None
        elif old.generation == note.generation:
            # Another worker's word on the same start: its story is told, what it undid is not.
            more = tuple(entry for entry in note.rollback if entry not in old.rollback)
            self.notes[key] = replace(old, rollback=old.rollback + more)

    def record_failure(self, failure: Failure) -> None:
        concerned = self.failures.add(failure)
        if not concerned:
            return
        self.touched.update(dict.fromkeys(concerned))
        self.writes.append(SaveFailure(failure))
        it = failure.origin
        subject = Subject(
            it.deployment, it.replica_index, it.stage_id, it.worker_id, failure.failure_id
        )
        where = f"{ReplicaKey(it.deployment, it.replica_index)} on worker {it.worker_id}"
        told = f"{where}: {failure.message}"
        self.log(EventKind.FAILURE_RECORDED, told, subject, is_warning=True)

    def finish(self, operation: Operation, note: FailureNote | None, ending: str = "") -> None:
        """Take an operation off the books: from here on the reports say what its replica is.

        Args:
            operation: one that is on the books.
            note: why it did not come up; None when it did, or was not to.
            ending: what became of it, where there is no note.
        """
        replica = operation.start.replica
        self.operations.remove(operation)
        if operation.operation_id not in self.operations.condemned:
            self.writes.append(RemoveOperation(operation.operation_id))
        self.touched[replica] = None
        self.touched_names[replica.deployment] = None
        worker_id = operation.start.worker_ids[0] if note is None else note.worker_id
        self.log(
            EventKind.START_ENDED,
            ending if note is None else note.message + rollback_story(note.rollback),
            of_replica(replica, worker_id),
            is_warning=note is not None,
        )
        if note is not None:
            self.note_failure(replica, note)

    # Reads.

    def is_known(self, name: DeploymentName) -> bool:
        return name in self.desired or name in self.indexes

    def replicas(self, name: DeploymentName) -> list[ReplicaView]:
        indexes = sorted(self.indexes.get(name, ()))
        return [self.views[ReplicaKey(name, index)] for index in indexes]

    def compose(self, name: DeploymentName) -> DeploymentView | None:
        """Return a deployment as it is now; None when nobody wants or reports it."""
        if not self.is_known(name):
            return None
        view = self.composed.get(name)
        if view is None:
            _, since = self.deployment_states.get(name, (None, None))
            view = self.composed[name] = compose_deployment(
                name,
                self.desired.get(name),
                self.replicas(name),
                is_condemned=self.is_condemned(name),
                is_recovering=self.is_recovering,
                durable=self.durable,
                since=since,
            )
        return view

    def is_condemned(self, name: DeploymentName) -> bool:
        """Whether a deployment was deleted and only what is left of it is still reported."""
        count = len(self.indexes.get(name, ()))
        return name not in self.desired and self.states_of(name)[ReplicaState.DRAINING] == count

    def states_of(self, name: DeploymentName) -> Counter[ReplicaState]:
        """Return how many replicas of a deployment are in which state: to be read only."""
        return self.counts.get(name) or Counter()
