"""An agent as a pure model: what its disk holds, and what it does with a command.

It keeps the agent's half of the protocol of starts (`OPERATION_MOVES` is its table) without any
process: a stage is up when a test says so. A death loses nothing but what is in flight: what counts
is on its disk, as with the real one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from stagekeeper.core.errors import Reason
from stagekeeper.core.ids import Epoch, Generation, OperationId, SlotKey, StageId
from stagekeeper.core.model import OperationPlan, OperationRecord, Peer, ShardRecord
from stagekeeper.core.states import OPERATION_MOVES, OperationState, ShardState, check_move
from tests.worlds import record_of, started_shards

_S = OperationState
ENDED = (_S.COMMITTED, _S.ROLLED_BACK)
MAY_START = (_S.RESERVED, _S.STARTING)


class ModelRefused(Exception):
    """The model of an agent refuses a command."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ModelOperation:
    """An operation on a model's disk. `gone` are stages that were stopped after the commit."""

    plan: OperationPlan
    state: OperationState = _S.RESERVED
    asked: set[StageId] = field(default_factory=set)
    up: set[StageId] = field(default_factory=set)
    gone: set[StageId] = field(default_factory=set)
    peers: tuple[Peer, ...] = ()
    is_settled: bool = False

    def move(self, state: OperationState) -> None:
        self.state = check_move(OPERATION_MOVES, self.state, state, str(self.plan.operation_id))

    @property
    def record(self) -> OperationRecord:
        return replace(record_of(self.plan, self.state), up_stage_ids=tuple(sorted(self.up)))

    @property
    def living(self) -> set[StageId]:
        """Stages that have processes."""
        return set() if self.state is _S.ROLLED_BACK else self.asked - self.gone

    @property
    def claims(self) -> set[StageId]:
        """Stages whose memory is booked: from the reservation on, until they are gone."""
        if self.state is _S.ROLLED_BACK:
            return set()
        return {it.stage_id for it in self.plan.stages} - self.gone

    @property
    def shards(self) -> list[ShardRecord]:
        shards = []
        for record in started_shards(self.plan, committed=self.state is _S.COMMITTED):
            if record.stage_id in self.living:
                is_up = record.stage_id in self.up
                state = ShardState.READY if is_up else ShardState.STARTING
                shards.append(replace(record, state=state))
        return shards


class ModelAgent:
    """One agent: its disk, its life, and the reign that it is registered with."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.incarnation = 1
        self.revision = 0
        self.is_alive = True
        self.epoch: Epoch | None = None
        self.operations: dict[OperationId, ModelOperation] = {}
        self.highest: dict[SlotKey, Generation] = {}
        self.committed_ever: set[OperationId] = set()

    # Lives.

    def die(self) -> None:
        self.is_alive = False
        self.epoch = None

    def live_again(self) -> None:
        self.is_alive = True
        self.incarnation += 1
        self.revision = 0

    # Commands.

    def reserve(self, plan: OperationPlan) -> OperationRecord:
        known = self.operations.get(plan.operation_id)
        if known is not None:
            assert known.plan == plan, "one id, two plans"
            return known.record
        slots = [SlotKey(plan.deployment, plan.replica_index, it.stage_id) for it in plan.stages]
        for slot in slots:
            highest = self.highest.get(slot)
            if highest is not None and highest >= plan.generation:
                raise ModelRefused(Reason.STALE_GENERATION)
        for other in self.operations.values():
            if other.plan.replica == plan.replica and other.living:
                raise ModelRefused(Reason.REPLICA_DRAINING)
            if other.plan.replica == plan.replica and other.state not in ENDED:
                self.roll_back(other)
        for slot in slots:
            self.highest[slot] = plan.generation
        self.operations[plan.operation_id] = ModelOperation(plan)
        return self.operations[plan.operation_id].record

    def start(self, plan: OperationPlan, stage_ids: Iterable[StageId]) -> OperationRecord | None:
        """Ask for stages; None while they are under way."""
        operation = self._known(plan)
        asked = set(stage_ids)
        if operation.state in MAY_START:
            if operation.state is _S.RESERVED:
                operation.move(_S.STARTING)
            operation.asked |= asked
            if not asked <= operation.up:
                return None
        if operation.state is _S.ROLLING_BACK:
            return None
        return operation.record

    def commit(self, plan: OperationPlan, peers: tuple[Peer, ...]) -> OperationRecord:
        operation = self._known(plan)
        if operation.state in MAY_START:
            raise ModelRefused(Reason.BAD_FIELD)
        if operation.state is _S.STARTED:
            operation.peers = peers
            operation.move(_S.COMMITTED)
            self.committed_ever.add(plan.operation_id)
        return operation.record

    def cancel(self, plan_id: OperationId) -> OperationRecord | None:
        operation = self.operations.get(plan_id)
        if operation is None:
            return None
        if operation.state not in ENDED:
            self.roll_back(operation)
        return operation.record

    def stop(self, slot: SlotKey, up_to: Generation) -> None:
        known = self.highest.get(slot)
        self.highest[slot] = up_to if known is None else max(known, up_to)
        for operation in list(self.operations.values()):
            plan = operation.plan
            is_of_slot = plan.replica == slot.replica and plan.generation <= up_to
            if not is_of_slot or slot.stage_id not in {it.stage_id for it in plan.stages}:
                continue
            if operation.state is _S.COMMITTED:
                operation.gone.add(slot.stage_id)
            elif operation.state is not _S.ROLLED_BACK:
                self.roll_back(operation)

    def _known(self, plan: OperationPlan) -> ModelOperation:
        operation = self.operations.get(plan.operation_id)
        if operation is None:
            raise ModelRefused(Reason.BAD_FIELD)
        return operation

    # What happens by itself.

    def come_up(self, operation: ModelOperation, stage_id: StageId) -> None:
        operation.up.add(stage_id)
        if operation.up == {it.stage_id for it in operation.plan.stages}:
            operation.move(_S.STARTED)

    def roll_back(self, operation: ModelOperation, *, to_the_end: bool = True) -> None:
        """Undo an operation that is not committed: at once, or up to the middle."""
        assert operation.state is not _S.COMMITTED, "what is committed is never rolled back"
        if operation.state is not _S.ROLLING_BACK:
            operation.move(_S.ROLLING_BACK)
        if to_the_end:
            operation.move(_S.ROLLED_BACK)
            operation.up.clear()

    # What it says.

    def report(self) -> dict[str, Any]:
        """Return the fields of its next registration."""
        self.revision += 1
        return {
            "shards": [it for held in self.operations.values() for it in held.shards],
            "operations": tuple(it.record for it in self.operations.values() if not it.is_settled),
            "incarnation": self.incarnation,
            "revision": self.revision,
        }

    def settle(self, operation_ids: Iterable[OperationId]) -> None:
        for operation_id in operation_ids:
            operation = self.operations.get(operation_id)
            if operation is not None and operation.state in ENDED:
                operation.is_settled = True
        for operation_id, operation in list(self.operations.items()):
            if operation.is_settled and not operation.living:
                del self.operations[operation_id]
