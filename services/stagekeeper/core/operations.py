"""The books about starts: those under way, and what became of those that failed.

Decided here: what is known of a start, and in which words a failed one is told. Not decided here:
how a start goes on (`starts`), which replicas start, and where (`wishes`, `placement`).

Invariant: a replica has at most one running operation; a note is a story for people and never
hides a replica that its reports show READY.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from stagekeeper.core.commands import AgentTarget, SavedOperation
from stagekeeper.core.ids import (
    NO_EPOCH,
    DeploymentName,
    Epoch,
    Generation,
    OperationId,
    ReplicaIndex,
    ReplicaKey,
    WorkerId,
)
from stagekeeper.core.model import (
    Failure,
    OperationRecord,
    Peer,
    ReplicaStart,
    RollbackRecord,
)

NO_GENERATION = Generation(NO_EPOCH, 0)

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """A replica that did not come up: where, why, and what its rollback did.

    `worker_id` is empty when none was chosen or known; `failure` is None when no stage failed.
    """

    replica_index: ReplicaIndex
    worker_id: WorkerId
    message: str
    failure: Failure | None = None
    rollback: tuple[RollbackRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class CreationView:
    """How far a deployment's creation is.

    `starting` ascends. `failures` has one entry for each wanted replica that is neither READY nor
    starting, ascending by index.
    """

    starting: tuple[ReplicaIndex, ...]
    failures: tuple[ReplicaFailure, ...]

    @property
    def is_settled(self) -> bool:
        return not self.starting


@dataclass(frozen=True, slots=True)
class FailureNote:
    """Why the last start of a replica failed. It counts until a higher generation is committed.

    `undoes_commit`: it counts although something of that very generation is committed: a part of
    the start was lost, and the rest is being stopped.
    """

    generation: Generation
    worker_id: WorkerId
    message: str
    failure: Failure | None = None
    rollback: tuple[RollbackRecord, ...] = ()
    undoes_commit: bool = False


@dataclass(slots=True)
class Operation:
    """A start on the books of this reign, one that an earlier reign began included.

    Attributes:
        start: its parts.
        targets: for each of its workers that has registered with this reign the life that it was in
            then.
        waits_for: another start that has to be over before this one is handed out; None: none has.
        behind: another start that its agent, as far as is known, lets go first on a card of both.
        is_running: it is being reserved and started, or joined where it is under way.
        started_at: since when all of its stages are up; None before.
        is_decided: it is committed, whatever comes: this is never taken back.
        peers: once decided, its shards, all workers'.
        committed: workers that have committed their part.
        committed_at: since when only a report is missing; None before.
        is_cancelled: its deployment was deleted.
        cancelled: workers that have nothing left of it to commit.
    """

    start: ReplicaStart
    targets: dict[WorkerId, AgentTarget] = field(default_factory=dict)
    waits_for: ReplicaKey | None = None
    behind: ReplicaKey | None = None
    is_running: bool = False
    started_at: float | None = None
    is_decided: bool = False
    peers: tuple[Peer, ...] = ()
    committed: set[WorkerId] = field(default_factory=set)
    committed_at: float | None = None
    is_cancelled: bool = False
    cancelled: set[WorkerId] = field(default_factory=set)

    @property
    def operation_id(self) -> OperationId:
        return self.start.operation_id

    @property
    def saved(self) -> SavedOperation:
        """What is written down of it."""
        return SavedOperation(self.start, self.is_decided, self.peers)

    @property
    def is_beyond_recall(self) -> bool:
        """Whether a worker may have committed its part while another one has yet to."""
        return self.is_decided and self.start.is_spanning


@dataclass(slots=True)
class OperationBook:
    """All operations of this reign, by id, by replica, by deployment and by worker; and the mint.

    `spanning` are those of several workers.
    `condemned` are starts that were decided and lost a part: what is committed of them is stopped.
    `waiting` are those that wait for another one, `behind` those that were handed out and may.
    """

    supervisor_id: str
    minted_count: int = 0
    by_id: dict[OperationId, Operation] = field(default_factory=dict)
    by_replica: dict[ReplicaKey, Operation] = field(default_factory=dict)
    by_deployment: dict[DeploymentName, set[OperationId]] = field(default_factory=dict)
    by_worker: dict[WorkerId, set[OperationId]] = field(default_factory=dict)
    spanning: dict[OperationId, None] = field(default_factory=dict)
    condemned: dict[OperationId, ReplicaStart] = field(default_factory=dict)
    waiting: dict[OperationId, None] = field(default_factory=dict)
    behind: dict[OperationId, None] = field(default_factory=dict)

    def mint(self, epoch: Epoch) -> tuple[OperationId, Generation]:
        """Return a fresh operation id and the generation that belongs to it."""
        self.minted_count += 1
        number = self.minted_count
        identity = f"{epoch.number}-{self.supervisor_id[:8]}-{number}"
        return OperationId(identity), Generation(epoch, number)

    def mint_above(self, number: int) -> None:
        """Mint only above `number` from here on: a worker holds something that was minted so."""
        self.minted_count = max(self.minted_count, number)

    def newest_generation(self, epoch: Epoch) -> Generation:
        """Return the newest generation of this reign; above all earlier ones when it has none."""
        return Generation(epoch, self.minted_count)

    def add(self, operation: Operation) -> None:
        start = operation.start
        self.by_id[start.operation_id] = operation
        self.by_replica[start.replica] = operation
        self.by_deployment.setdefault(start.replica.deployment, set()).add(start.operation_id)
        for worker_id in start.worker_ids:
            self.by_worker.setdefault(worker_id, set()).add(start.operation_id)
        if start.is_spanning:
            self.spanning[start.operation_id] = None

    def remove(self, operation: Operation) -> None:
        start = operation.start
        del self.by_id[start.operation_id]
        self.waiting.pop(start.operation_id, None)
        self.behind.pop(start.operation_id, None)
        self.spanning.pop(start.operation_id, None)
        del self.by_replica[start.replica]
        _drop(self.by_deployment, start.replica.deployment, start.operation_id)
        for worker_id in start.worker_ids:
            _drop(self.by_worker, worker_id, start.operation_id)

    def is_open(self, operation_id: OperationId) -> bool:
        """Whether a start may still become a replica."""
        return operation_id in self.by_id

    def of_deployment(self, name: DeploymentName) -> list[Operation]:
        return self._sorted(self.by_deployment.get(name, ()))

    def of_worker(self, worker_id: WorkerId) -> list[Operation]:
        return self._sorted(self.by_worker.get(worker_id, ()))

    def of_several_workers(self) -> list[Operation]:
        return self._sorted(self.spanning)

    def _sorted(self, ids: Iterable[OperationId]) -> list[Operation]:
        found = [self.by_id[operation_id] for operation_id in ids]
        return sorted(found, key=lambda operation: operation.start.generation)


def _drop(index: dict[Key, set[OperationId]], key: Key, operation_id: OperationId) -> None:
    index[key].discard(operation_id)
    if not index[key]:
        del index[key]


def failure_note(
    start: ReplicaStart,
    worker_id: WorkerId,
    record: OperationRecord | None,
    *,
    error: str = "",
    reason: str = "",
    others: Iterable[OperationRecord] = (),
) -> FailureNote:
    """Tell the story of a start that ended badly.

    Args:
        start: which one.
        worker_id: the worker whose part failed first.
        record: the last word of its agent; None when there is none.
        error: what was met instead.
        reason: the agent's refusal, if it was one.
        others: the last words of the other workers, for what their rollbacks did.
    """
    where = f"{start.replica} did not start on worker {worker_id}{_shard_of(start, worker_id)}"
    rollback = tuple(entry for other in others for entry in other.rollback)
    failure = None
    if record is None:
        why = f"{error or 'its agent gave no outcome'}{f' [{reason}]' if reason else ''}"
    else:
        rollback = record.rollback + rollback
        failure = record.failure
        why = failure.message if failure is not None else ""
        why = why or record.reason or error or f"its operation ended {record.state}"
    unclean = [entry for entry in rollback if not entry.cleaned]
    if unclean:
        left = ", ".join(
            f"stage {entry.stage_id}{_place_of(start, entry)} ({entry.error})" for entry in unclean
        )
        why += f"; the rollback left {left}"
    return FailureNote(start.generation, worker_id, f"{where}: {why}", failure, rollback)


def rollback_story(rollback: Iterable[RollbackRecord]) -> str:
    """Tell in a few words what a rollback did; empty when there was nothing to undo."""
    told = []
    for entry in rollback:
        stage = entry.stage_name or f"stage {entry.stage_id}"
        place = f" on {entry.worker_id}" if entry.worker_id else ""
        how = f"{entry.ending or 'gone'} in {entry.duration_s:.1f} s" if entry.cleaned else "LEFT"
        told.append(f"{stage}{place} ({how})")
    return f"; rolled back: {', '.join(told)}" if told else ""


def interruption_note(start: ReplicaStart, worker_id: WorkerId, why: str) -> FailureNote:
    """Tell the story of a start that nobody goes on with."""
    where = f"worker {worker_id}{_shard_of(start, worker_id)}"
    return FailureNote(
        start.generation, worker_id, interruption(start.replica, where, why), None, ()
    )


def record_note(record: OperationRecord, worker_id: WorkerId, why: str) -> FailureNote:
    """Tell the story of a start of which only one worker's record is left."""
    message = interruption(record.replica, f"worker {worker_id}", why)
    return FailureNote(record.generation, worker_id, message, record.failure, record.rollback)


def interruption(replica: ReplicaKey, where: str, why: str) -> str:
    return f"the start of {replica} on {where} was interrupted ({why}) and cancelled; deploy again"


def _place_of(start: ReplicaStart, entry: RollbackRecord) -> str:
    return f" on {entry.worker_id}" if start.is_spanning and entry.worker_id else ""


def _shard_of(start: ReplicaStart, worker_id: WorkerId) -> str:
    """Name the shards that a worker has of a start, where others have some too."""
    return f" (shard {start.worker_ids.index(worker_id)})" if start.is_spanning else ""
