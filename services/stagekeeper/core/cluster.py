"""The books of one reign: reports kept, replicas derived, wishes, operations, and their indexes.

Decided here: which views have to be derived again after something was touched, and what changed
by it. Not decided here: what any event means (the handlers), and what is asked of agents
(`reconcile`).

Invariant: `views` is always what `derive_replica` says of `claims` once `rederive` has run; the
cost of an event is that of the replicas it touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from stagekeeper.core.changes import ChangeLog
from stagekeeper.core.commands import (
    ChangeKind,
    Desired,
    EntombDeployment,
    HeartbeatAnswered,
    HeartbeatVerdict,
    LookForReign,
    PublishChange,
    SaveDeployment,
    SaveEpoch,
    SaveFailure,
    SaveRoster,
    Work,
    Write,
)
from stagekeeper.core.compose import compose_deployment
from stagekeeper.core.derive import ReplicaContext, derive_replica
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
from stagekeeper.core.operations import FailureNote, Operation, OperationBook
from stagekeeper.core.pending import PendingWork
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.stage_sets import Claim
from stagekeeper.core.states import WORKER_MOVES, ReplicaState, WorkerState, check_move
from stagekeeper.core.workers import Worker


class Cluster:
    """What one reign knows. Handlers change it, `registry` turns what it touched into commands.

    `hold_until` is None in NORMAL. `awaited` are workers of the roster that have not come back.
    `indexes` has, for each name, the replicas that have a view; `contested` are replicas of which
    more is reported than is shown. `due` are workers whose wanted
    stops and cancellations have to be worked out again; a dict, since order is kept in it.
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
        self.awaited: dict[WorkerId, None] = dict.fromkeys(sorted(roster))
        self.has_roster = bool(self.awaited)
        self.hold_until = None if is_new else now + settings.recovery_window_s
        self.saved_roster = tuple(self.awaited)
        self.is_roster_stale = False

        self.workers: dict[WorkerId, Worker] = {}
        self.claims: dict[ReplicaKey, dict[WorkerId, tuple[ShardRecord, ...]]] = {}
        self.notes: dict[ReplicaKey, FailureNote] = {}
        self.operations = OperationBook(epoch.supervisor_id)
        self.pending = PendingWork()
        self.failures = FailureLog(settings.failure_limit, failures)
        self.registration_count = 0

        self.views: dict[ReplicaKey, ReplicaView] = {}
        self.indexes: dict[DeploymentName, set[ReplicaIndex]] = {}
        self.contested: set[ReplicaKey] = set()
        self.composed: dict[DeploymentName, DeploymentView] = {}
        self.changes = ChangeLog(epoch, settings.change_log_limit)
        self.visible: set[DeploymentName] = set(self.desired)
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
        self.rederive()
        self.touched_names.clear()

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
        self.epoch = Epoch(seen.number + 1, self.epoch.supervisor_id)
        self.changes.begin_reign(self.epoch)
        self.set_pace()
        self.writes.append(SaveEpoch(self.epoch))

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
        worker.heard_at = now
        worker.pace_s = self.pace_s
        if worker.state is not WorkerState.ALIVE:
            what = f"worker {worker.worker_id}"
            worker.state = check_move(WORKER_MOVES, worker.state, WorkerState.ALIVE, what)
            self.touch_worker(worker)

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
        del self.workers[worker.worker_id]
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
        for index in range(desired.spec.replicas if desired is not None else 0):
            self.notes.pop(ReplicaKey(name, ReplicaIndex(index)), None)
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

    def record_failure(self, failure: Failure) -> None:
        if self.failures.add(failure):
            self.writes.append(SaveFailure(failure))

    def finish(self, operation: Operation) -> None:
        """Take an operation off the books: from here on the reports say what its replica is."""
        self.operations.remove(operation)
        self.touched[operation.plan.replica] = None
        self.touched_names[operation.plan.deployment] = None

    # Views.

    def rederive(self) -> None:
        """Derive what was touched, and note whose view it changed."""
        while self.touched:
            touched, self.touched = self.touched, {}
            for key in touched:
                self._rederive_one(key)

    def _rederive_one(self, key: ReplicaKey) -> None:
        self.derivation_count += 1
        claims = [
            Claim(worker_id, self.workers[worker_id].state, record)
            for worker_id, records in self.claims.get(key, {}).items()
            for record in records
        ]
        view = derive_replica(key, claims, self._context(key))
        if view is not None and view.state is ReplicaState.READY:
            self.notes.pop(key, None)
        self._note_contest(key, view, claims)
        if view == self.views.get(key):
            return
        if view is None:
            del self.views[key]
            self.indexes[key.deployment].discard(key.index)
            if not self.indexes[key.deployment]:
                del self.indexes[key.deployment]
        else:
            self.views[key] = view
            self.indexes.setdefault(key.deployment, set()).add(key.index)
        self.touched_names[key.deployment] = None

    def _note_contest(
        self, key: ReplicaKey, view: ReplicaView | None, claims: Sequence[Claim]
    ) -> None:
        """Have everybody asked anew who claims a replica of which several sets are reported.

        A set makes way for a READY one; when that is READY no longer, nothing makes way any more.
        """
        is_contested = view is not None and len(claims) > len(view.shards)
        if is_contested or key in self.contested:
            self.due.update(dict.fromkeys(claim.worker_id for claim in claims))
        if is_contested:
            self.contested.add(key)
        else:
            self.contested.discard(key)

    def _context(self, key: ReplicaKey) -> ReplicaContext:
        desired = self.desired.get(key.deployment)
        context = ReplicaContext(
            is_recovering=self.is_recovering, ceiling=self.tombstones.get(key.deployment)
        )
        if desired is not None:
            context.spec = desired.spec
            context.is_wanted = key.index < desired.spec.replicas
            context.is_deleting = desired.is_deleting
            context.note = self.notes.get(key)
        operation = self.operations.by_replica.get(key)
        if operation is not None:
            context.starting_on = operation.plan.worker_id
        return context

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
            desired, replicas = self.desired.get(name), self.replicas(name)
            leaving = (ReplicaState.DRAINING is replica.state for replica in replicas)
            view = self.composed[name] = compose_deployment(
                name,
                desired,
                replicas,
                is_condemned=desired is None and all(leaving),
                is_recovering=self.is_recovering,
                durable=self.durable,
            )
        return view

    def publish(self) -> list[PublishChange]:
        """Say which deployments are others now than when this was last asked."""
        published = []
        for name in self.touched_names:
            self.composed.pop(name, None)
            is_known, was_known = self.is_known(name), name in self.visible
            if is_known and not was_known:
                self.visible.add(name)
                published.append(self.changes.add(ChangeKind.ADDED, name))
            elif was_known and not is_known:
                self.visible.discard(name)
                published.append(self.changes.add(ChangeKind.REMOVED, name))
            elif is_known:
                published.append(self.changes.add(ChangeKind.MODIFIED, name))
        self.touched_names.clear()
        return published
