"""Operations of this reign, and what became of starts that failed.

Decided here: when an operation is over, and which failure of a replica is shown. Not decided here:
which replicas start, and where (`wishes`, `placement`).

Invariant: a replica has at most one running operation; a note is a story for people and never
hides a replica that its reports show READY.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from stagekeeper.core.commands import AgentTarget
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
from stagekeeper.core.model import Failure, OperationPlan, OperationRecord, RollbackRecord

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
    """Why the last start of a replica failed. It counts until a higher generation is committed."""

    generation: Generation
    worker_id: WorkerId
    message: str
    failure: Failure | None = None
    rollback: tuple[RollbackRecord, ...] = ()


@dataclass(slots=True)
class Operation:
    """A start that this reign runs. `committed_at` is set when only the report is still missing."""

    plan: OperationPlan
    target: AgentTarget
    committed_at: float | None = None
    is_cancelled: bool = False


@dataclass(slots=True)
class OperationBook:
    """All operations of this reign, by id, by replica and by deployment; and the mint."""

    supervisor_id: str
    minted_count: int = 0
    by_id: dict[OperationId, Operation] = field(default_factory=dict)
    by_replica: dict[ReplicaKey, Operation] = field(default_factory=dict)
    by_deployment: dict[DeploymentName, set[OperationId]] = field(default_factory=dict)
    by_worker: dict[WorkerId, set[OperationId]] = field(default_factory=dict)

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
        plan = operation.plan
        self.by_id[plan.operation_id] = operation
        self.by_replica[plan.replica] = operation
        self.by_deployment.setdefault(plan.deployment, set()).add(plan.operation_id)
        self.by_worker.setdefault(plan.worker_id, set()).add(plan.operation_id)

    def remove(self, operation: Operation) -> None:
        plan = operation.plan
        del self.by_id[plan.operation_id]
        del self.by_replica[plan.replica]
        _drop(self.by_deployment, plan.deployment, plan.operation_id)
        _drop(self.by_worker, plan.worker_id, plan.operation_id)

    def of_deployment(self, name: DeploymentName) -> list[Operation]:
        return self._sorted(self.by_deployment.get(name, ()))

    def of_worker(self, worker_id: WorkerId) -> list[Operation]:
        return self._sorted(self.by_worker.get(worker_id, ()))

    def _sorted(self, ids: Iterable[OperationId]) -> list[Operation]:
        found = [self.by_id[operation_id] for operation_id in ids]
        return sorted(found, key=lambda operation: operation.plan.generation)


def _drop(index: dict[Key, set[OperationId]], key: Key, operation_id: OperationId) -> None:
    index[key].discard(operation_id)
    if not index[key]:
        del index[key]


def failure_note(
    plan: OperationPlan, record: OperationRecord | None, error: str, reason: str
) -> FailureNote:
    """Tell the story of a start that ended badly, from the agent's record or from what was met."""
    where = f"{plan.replica} did not start on worker {plan.worker_id}"
    if record is None:
        why = f"{error or 'its agent gave no outcome'}{f' [{reason}]' if reason else ''}"
        return FailureNote(plan.generation, plan.worker_id, f"{where}: {why}")
    why = record.failure.message if record.failure is not None else ""
    why = why or record.reason or error or f"its operation ended {record.state}"
    unclean = [entry for entry in record.rollback if not entry.cleaned]
    if unclean:
        left = ", ".join(f"stage {entry.stage_id} ({entry.error})" for entry in unclean)
        why += f"; the rollback left {left}"
    return FailureNote(
        plan.generation, plan.worker_id, f"{where}: {why}", record.failure, record.rollback
    )


def interruption_note(
    start: OperationRecord | OperationPlan, worker_id: WorkerId, why: str
) -> FailureNote:
    """Tell the story of a start that nobody runs any more; a mere plan has no end to tell."""
    message = (
        f"the start of {start.replica} on worker {worker_id} was interrupted ({why}) and "
        "cancelled; deploy again"
    )
    if isinstance(start, OperationPlan):
        return FailureNote(start.generation, worker_id, message)
    return FailureNote(start.generation, worker_id, message, start.failure, start.rollback)
