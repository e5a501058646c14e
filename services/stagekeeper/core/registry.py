"""The registry: events in, commands out, and the reads that answer from memory.

Decided here: nothing but the order of things inside one event (a handler changes the books, then
what it touched is derived again, then commands go out: reply, writes, work, changes). The rules are
in the modules that it calls.

Invariant: an event that is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from stagekeeper.core import outcomes, publishing, registration, starts, wishes
from stagekeeper.core.cluster import Cluster
from stagekeeper.core.commands import (
    AgentTarget,
    Command,
    Desired,
    PublishChange,
    Reply,
    SavedOperation,
)
from stagekeeper.core.event_log import PublishEvent
from stagekeeper.core.events import (
    AgentProbed,
    CommitEnded,
    DeploymentDeleted,
    DeploymentRequested,
    Event,
    FailureReported,
    HeartbeatReceived,
    OperationCancelled,
    OperationEnded,
    OperationStarted,
    SlotStopped,
    Ticked,
    WorkerRegistered,
)
from stagekeeper.core.forecast import judged_at, next_action_at, probed_at
from stagekeeper.core.ids import (
    ChangeRevision,
    ClusterName,
    DeploymentName,
    Epoch,
    Generation,
    WorkerId,
)
from stagekeeper.core.model import DeploymentSpec, DeploymentView, Failure, ReplicaView
from stagekeeper.core.operations import CreationView, ReplicaFailure
from stagekeeper.core.plan import Plan, plan_deployment
from stagekeeper.core.reconcile import (
    ask_due,
    end_recovery,
    reconcile_worker,
    settle_deployment,
)
from stagekeeper.core.rederivation import rederive
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import HoldReason, Mode, ReplicaState
from stagekeeper.core.workers import WorkerView, awaited_view, worker_view

__all__ = ["Registry", "RegistrySettings"]


class Registry:
    """All that one reign knows, behind one door.

    Args:
        cluster: compared by the servers; carried here for messages.
        epoch: this reign; above everything that store and endpoint showed.
        settings: see `RegistrySettings`.
        desired: what the store holds; deployments being deleted included.
        tombstones: names that were deleted, each with the highest generation that was to stop.
        roster: workers that were there before; they are waited for, never counted as alive.
        failures: recorded ones, oldest first.
        operations: starts that were under way: they are joined once their workers are back.
        durable: whether what is wanted survives this process.
        now: monotonic seconds.
        is_new: nothing was ever kept here, so there is nobody to wait for. None: judged by
            whether anything was handed in. Say False where the memory is gone (no store): the
            registry then holds still for the whole recovery window.
    """

    def __init__(
        self,
        *,
        cluster: ClusterName,
        epoch: Epoch,
        settings: RegistrySettings,
        desired: Iterable[Desired] = (),
        tombstones: Mapping[DeploymentName, Generation] | None = None,
        roster: Collection[WorkerId] = (),
        failures: Iterable[Failure] = (),
        operations: Iterable[SavedOperation] = (),
        durable: bool,
        now: float,
        is_new: bool | None = None,
    ) -> None:
        wanted, deleted, begun = tuple(desired), dict(tombstones or {}), tuple(operations)
        self._cluster = Cluster(
            name=cluster,
            epoch=epoch,
            settings=settings,
            desired=wanted,
            tombstones=deleted,
            roster=roster,
            failures=failures,
            durable=durable,
            now=now,
            is_new=not (wanted or deleted or roster or begun) if is_new is None else is_new,
        )
        starts.load(self._cluster, begun)
        rederive(self._cluster)
        publishing.begin(self._cluster)

    def apply(self, event: Event, *, now: float) -> list[Command]:
        """Take in one event and say what follows from it.

        Returns:
            Commands in the order in which to carry them out: the reply (at most one, first),
            writes, work for agents, changes to publish.

        Raises:
            Refused: nothing has changed, and nothing is to be done. In HOLD(RECOVERING) a
                DeploymentRequested that is right in itself is refused with SUPERVISOR_RECOVERING:
                hand it in again once `is_complete`, within the caller's deadline.
        """
        cluster = self._cluster
        cluster.now = now
        if isinstance(event, HeartbeatReceived):
            answer = registration.heartbeat_received(cluster, event, now)
            return self._settle(answer, now, ()) if cluster.due or cluster.news else [answer]
        reply = self._handle(event, now)
        # Time is over only when a tick says so: it knows how long this process was stalled itself.
        is_tick = isinstance(event, Ticked)
        if cluster.hold_until is not None and (
            (cluster.has_roster and not cluster.awaited) or (is_tick and now >= cluster.hold_until)
        ):
            rederive(cluster)
            end_recovery(cluster)
        return self._settle(reply, now, cluster.pending.workers() if is_tick else ())

    def _handle(self, event: Event, now: float) -> Reply | None:
        cluster = self._cluster
        match event:
            case WorkerRegistered():
                return registration.worker_registered(cluster, event, now)
            case HeartbeatReceived():
                return registration.heartbeat_received(cluster, event, now)
            case FailureReported():
                return registration.failure_reported(cluster, event, now)
            case DeploymentRequested():
                return wishes.deployment_requested(cluster, event, now)
            case DeploymentDeleted():
                return wishes.deployment_deleted(cluster, event, now)
            case AgentProbed():
                registration.agent_probed(cluster, event, now)
            case OperationStarted():
                outcomes.operation_started(cluster, event, now)
            case OperationEnded():
                outcomes.operation_ended(cluster, event, now)
            case CommitEnded():
                outcomes.commit_ended(cluster, event, now)
            case OperationCancelled():
                outcomes.operation_cancelled(cluster, event, now)
            case SlotStopped():
                outcomes.slot_stopped(cluster, event, now)
            case Ticked():
                outcomes.ticked(cluster, event, now)
        return None

    def _settle(self, reply: Reply | None, now: float, ask: Iterable[WorkerId]) -> list[Command]:
        """Derive what was touched, work out what follows, and hand out the commands."""
        cluster = self._cluster
        asked = dict.fromkeys(ask)
        starts.take_turns(cluster)
        rederive(cluster)
        while cluster.due:
            worker_id, _ = cluster.due.popitem()
            worker = cluster.workers.get(worker_id)
            if worker is not None:
                reconcile_worker(cluster, worker)
                asked[worker_id] = None
                rederive(cluster)
        for name in list(cluster.touched_names):
            settle_deployment(cluster, name)
        rederive(cluster)
        ask_due(cluster, sorted(asked), now)
        commands: list[Command] = [] if reply is None else [reply]
        commands += cluster.writes
        commands += cluster.work
        cluster.writes, cluster.work = [], []
        commands += publishing.publish(cluster)
        return commands

    # Reads: from memory, without side effects.

    @property
    def epoch(self) -> Epoch:
        return self._cluster.epoch

    @property
    def mode(self) -> Mode:
        return Mode.HOLD if self._cluster.is_recovering else Mode.NORMAL

    @property
    def hold_reason(self) -> HoldReason | None:
        """Why the registry holds still; None in NORMAL."""
        return HoldReason.RECOVERING if self._cluster.is_recovering else None

    @property
    def is_complete(self) -> bool:
        """False while workers may still be missing from every list."""
        return not self._cluster.is_recovering

    @property
    def revision(self) -> ChangeRevision:
        return self._cluster.changes.revision

    @property
    def registration_count(self) -> int:
        """Registrations that this reign accepted."""
        return self._cluster.registration_count

    @property
    def derivation_count(self) -> int:
        """Replicas derived so far: what the work of this registry is measured by."""
        return self._cluster.derivation_count

    def deployment(self, name: DeploymentName) -> DeploymentView | None:
        """Return one deployment; None when nothing of that name is wanted or reported."""
        return self._cluster.compose(name)

    def deployments(self) -> list[DeploymentView]:
        """Return all deployments in the order of their names."""
        composed = (self._cluster.compose(name) for name in sorted(self._cluster.visible))
        return [view for view in composed if view is not None]

    def workers(self, now: float) -> list[WorkerView]:
        """Return all workers in the order of their ids, silent ones included."""
        cluster = self._cluster
        views = [
            worker_view(
                worker,
                now,
                judged_at=judged_at(cluster, worker.worker_id),
                probed_at=probed_at(cluster, worker),
            )
            for worker in cluster.workers.values()
        ]
        waits_s = None if cluster.hold_until is None else max(0.0, cluster.hold_until - now)
        views += [
            awaited_view(worker_id, now - cluster.started_at, waits_s=waits_s)
            for worker_id in cluster.awaited
        ]
        return sorted(views, key=lambda view: view.worker_id)

    def failures(self, deployment: DeploymentName | None = None, limit: int = 100) -> list[Failure]:
        """Return recorded failures, newest first."""
        return self._cluster.failures.newest(deployment, limit)

    def changes_since(self, revision: ChangeRevision) -> list[PublishChange]:
        """Return what changed after `revision`, in order, the last change of each name only.

        Raises:
            Refused: REVISION_GONE: another reign's, or too old: list, then watch again.
        """
        return self._cluster.changes.since(revision)

    def events_since(
        self, revision: ChangeRevision, deployment: DeploymentName | None = None
    ) -> list[PublishEvent]:
        """Return what happened after `revision`, in order; to one deployment, or at all.

        Raises:
            Refused: REVISION_GONE: another reign's, or too old: list, then watch again.
        """
        return self._cluster.changes.events_since(revision, deployment)

    def newest_events(
        self, limit: int, deployment: DeploymentName | None = None
    ) -> list[PublishEvent]:
        """Return the newest events that are kept, in order, at most `limit` (from 1)."""
        return self._cluster.changes.newest_events(deployment, limit)

    def next_action_in_s(self, view: ReplicaView, now: float) -> float | None:
        """Return in how many seconds a replica's next action happens; None: not by the clock."""
        at = next_action_at(self._cluster, view)
        return None if at is None else max(0.0, at - now)

    def plan(self, spec: DeploymentSpec, now: float) -> Plan:
        """Return what a creation of a checked spec would do at this moment."""
        return plan_deployment(self._cluster, spec, now)

    def creation_of(self, name: DeploymentName) -> CreationView:
        """Return how far a creation is; of an unknown name nothing starts and nothing failed."""
        cluster = self._cluster
        running = cluster.operations.of_deployment(name)
        starting = {operation.start.replica.index for operation in running}
        desired = cluster.desired.get(name)
        failures = [
            self._failure_of(view)
            for view in cluster.replicas(name)
            if desired is not None
            and view.key.index < desired.spec.replicas
            and view.key.index not in starting
            and view.state is not ReplicaState.READY
        ]
        return CreationView(tuple(sorted(starting)), tuple(failures))

    def _failure_of(self, view: ReplicaView) -> ReplicaFailure:
        note = self._cluster.notes.get(view.key)
        if note is not None and view.reason.startswith(note.message):
            return ReplicaFailure(
                view.key.index, note.worker_id, note.message, note.failure, note.rollback
            )
        worker_id = view.shards[0].worker_id if view.shards else WorkerId("")
        return ReplicaFailure(view.key.index, worker_id, view.reason)

    def target_of(self, worker_id: WorkerId) -> AgentTarget | None:
        """Return which life of a worker commands go to now; None when it has not registered."""
        worker = self._cluster.workers.get(worker_id)
        return worker.target if worker is not None else None
