"""Whether a plan may be reserved here: what it says, what its slots have seen, what is free.

Decided here: the refusals of RESERVE, each with what to do. Nothing is changed by asking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from stagekeeper.agent.entrypoints import Entrypoints
from stagekeeper.agent.ledger import Ledger
from stagekeeper.agent.operation_store import OperationStore
from stagekeeper.agent.stages import Stages
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.ids import OperationId, SlotKey
from stagekeeper.core.model import OperationPlan, StageStart

LONGEST_ID: Final = 128


def slots_of(plan: OperationPlan) -> Iterator[tuple[StageStart, SlotKey]]:
    for start in plan.stages:
        yield start, SlotKey(plan.deployment, plan.replica_index, start.stage_id)


class Admission:
    """The checks of one agent, in the order in which they are worth knowing."""

    def __init__(
        self, store: OperationStore, stages: Stages, ledger: Ledger, entrypoints: Entrypoints
    ) -> None:
        self._store = store
        self._stages = stages
        self._ledger = ledger
        self._entrypoints = entrypoints

    def check_plan(self, plan: OperationPlan) -> None:
        """Refuse what cannot be started here, whatever is free.

        Raises:
            Refused: BAD_FIELD, STALE_GENERATION, REPLICA_DRAINING.
        """
        problems = [*_plan_problems(plan), *self._stage_problems(plan)]
        if problems:
            raise bad_fields(problems, f"operation {plan.operation_id}")
        self._check_generations(plan)
        self._check_slots_are_free(plan)

    def check_memory(self, plan: OperationPlan, *, without: Collection[OperationId]) -> None:
        """Refuse what does not fit beside all that is booked by others than `without`.

        Raises:
            Refused: UNKNOWN_DEVICE, ADMISSION_REFUSED, BAD_FIELD.
        """
        self._ledger.admit(plan.stages, without=without)

    def _stage_problems(self, plan: OperationPlan) -> Iterator[FieldProblem]:
        for index, start in enumerate(plan.stages):
            path = f"stages[{index}]"
            if not start.spec.name:
                yield FieldProblem(f"{path}.spec.name", "is missing")
            for problem in self._entrypoints.problems(start.spec.entrypoint):
                yield FieldProblem(f"{path}.spec.entrypoint", problem)
            if len(start.device_ids) != len(start.spec.devices):
                count = len(start.spec.devices)
                yield FieldProblem(
                    f"{path}.device_ids", f"has {len(start.device_ids)} devices for {count} cards"
                )
            if (start.shard_index, start.shard_count) != (0, 1):
                yield FieldProblem(f"{path}.shard_count", "above 1 is not built yet")

    def _check_generations(self, plan: OperationPlan) -> None:
        for start, slot in slots_of(plan):
            highest = self._store.highest_generation(slot)
            if highest is not None and plan.generation <= highest:
                raise Refused(
                    Reason.STALE_GENERATION,
                    f"stage {start.spec.name} of {plan.replica} has seen generation {highest} "
                    f"here, and {plan.generation} is not above it: mint a higher one",
                    metadata={"highest_generation": str(highest)},
                )

    def _check_slots_are_free(self, plan: OperationPlan) -> None:
        for _, slot in slots_of(plan):
            for stage in self._stages.of_slot(slot):
                if stage.holds_processes:
                    raise Refused(
                        Reason.REPLICA_DRAINING,
                        f"{stage} of generation {stage.shard.generation} is {stage.state} and "
                        "still has processes: stop it first",
                    )


def _plan_problems(plan: OperationPlan) -> Iterator[FieldProblem]:
    if not 1 <= len(plan.operation_id) <= LONGEST_ID:
        yield FieldProblem("operation_id", f"is not 1 to {LONGEST_ID} characters")
    if not plan.deployment:
        yield FieldProblem("deployment", "is missing")
    if plan.generation.n == 0:
        yield FieldProblem("generation", "is missing")
    stage_ids = [start.stage_id for start in plan.stages]
    if not stage_ids:
        yield FieldProblem("stages", "are missing")
    elif stage_ids != sorted(set(stage_ids)):
        yield FieldProblem("stages", "are not ascending by stage_id, each once")
