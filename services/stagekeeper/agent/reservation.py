"""Whether a plan may be reserved here: what it starts, what its slots have seen, what is free.

Decided here: the refusals of RESERVE, each with what to do. Not decided here: what is wrong in a
plan itself (`core.command_check`). Nothing is changed by asking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from stagekeeper.agent.cards.ledger import Ledger
from stagekeeper.agent.entrypoints import Entrypoints
from stagekeeper.agent.operation_store import OperationStore
from stagekeeper.agent.stages import Stages
from stagekeeper.core.errors import FieldProblem, Reason, Refused
from stagekeeper.core.ids import OperationId, SlotKey
from stagekeeper.core.model import OperationPlan, StageStart


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

    def problems(self, plan: OperationPlan) -> Iterator[FieldProblem]:
        """Yield what of a sound plan is wrong on this agent alone, whatever is free."""
        for index, start in enumerate(plan.stages):
            for field, problem in self._entrypoints.stage_problems(start.spec):
                yield FieldProblem(f"stages[{index}].spec.{field}", problem)

    def check_slots(self, plan: OperationPlan) -> None:
        """Refuse what is behind what its slots have seen, or in the way of what is in them.

        Raises:
            Refused: STALE_GENERATION, REPLICA_DRAINING.
        """
        self._check_generations(plan)
        self._check_slots_are_free(plan)

    def check_memory(self, plan: OperationPlan, *, without: Collection[OperationId]) -> None:
        """Refuse what does not fit beside all that is booked by others than `without`.

        Raises:
            Refused: UNKNOWN_DEVICE, ADMISSION_REFUSED, BAD_FIELD.
        """
        self._ledger.admit(plan.stages, without=without)

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
