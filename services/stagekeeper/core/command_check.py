"""What a command to an agent may say, checked whole: every wrong field at once.

Decided here: what is wrong in a command itself. Not decided here: whom it is from (the agent's
authority), what its slots have seen, and whether there is room (`agent.reservation`).

Invariant: what passed can be written to the agent's disk, and reported without being refused. A
generation above the reign that commands is none that it has minted: believed, it would close its
slot for every reign to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagekeeper.core.errors import FieldProblem
from stagekeeper.core.field_check import (
    ages_problem,
    count_problem,
    id_problem,
    named,
    range_problem,
    seconds_problem,
)
from stagekeeper.core.ids import Epoch, Generation, OperationId, SlotKey, StageId
from stagekeeper.core.limits import (
    LARGEST_NUMBER,
    LONGEST_OPERATION_ID,
    MOST_PEERS,
    MOST_REPORTED_REPLICAS,
    MOST_REPORTED_STAGES,
    MOST_SHARDS_OF_STAGE,
    MOST_STAGES,
)
from stagekeeper.core.model import OperationPlan, Peer, StageStart
from stagekeeper.core.names import name_problem, shown
from stagekeeper.core.spec_check import model_problems, stage_problems


def plan_problems(plan: OperationPlan, reign: Epoch) -> list[FieldProblem]:
    """Say what is wrong with the plan of an operation that `reign` commands."""
    found = [
        ("operation_id", id_problem(plan.operation_id, LONGEST_OPERATION_ID)),
        ("deployment", name_problem(plan.deployment)),
        ("replica_index", range_problem(plan.replica_index, 0, MOST_REPORTED_REPLICAS - 1)),
        ("spec_revision", range_problem(plan.spec_revision, 0, LARGEST_NUMBER)),
        ("generation", _generation_problem(plan.generation, reign, lowest=1)),
        ("stage_count", range_problem(plan.stage_count, 1, MOST_STAGES)),
        ("stages", _order_problem(plan.stages)),
    ]
    if plan.entry_stage_id >= max(1, plan.stage_count):
        found.append(("entry_stage_id", f"{plan.entry_stage_id} is not below stage_count"))
    problems = [*named(found), *model_problems("model", plan.model)]
    for index, start in enumerate(plan.stages[:MOST_STAGES]):
        problems += _start_problems(f"stages[{index}]", start, plan.stage_count)
    return problems


def asked_problems(plan: OperationPlan, stage_ids: Sequence[StageId]) -> Iterator[FieldProblem]:
    """Say which of the stages that are to be started now are none of the plan's."""
    planned = {start.stage_id for start in plan.stages}
    for index, stage_id in enumerate(stage_ids[: MOST_STAGES + 1]):
        if stage_id not in planned:
            yield FieldProblem(f"start_stage_ids[{index}]", f"{stage_id} is not among `stages`")


def peer_problems(plan: OperationPlan, peers: Sequence[Peer]) -> Iterator[FieldProblem]:
    """Say what is wrong with the shards that lie on other workers."""
    if problem := count_problem(len(peers), MOST_PEERS):
        yield FieldProblem("peers", problem)
        return
    places = {(start.stage_id, start.shard_index) for start in plan.stages}
    for index, peer in enumerate(peers):
        path, place = f"peers[{index}]", (peer.stage_id, peer.shard_index)
        found = [
            (f"{path}.stage_id", range_problem(peer.stage_id, 0, plan.stage_count - 1)),
            (f"{path}.stage_name", name_problem(peer.stage_name)),
            (f"{path}.shard_index", range_problem(peer.shard_index, 0, MOST_SHARDS_OF_STAGE - 1)),
            (f"{path}.instance_id", id_problem(peer.instance_id)),
            (f"{path}.url", id_problem(peer.url)),
            (path, "is there twice, or is one of `stages`" if place in places else ""),
        ]
        yield from named(found)
        places.add(place)


def cancel_problems(operation_id: OperationId) -> list[FieldProblem]:
    """Say what is wrong with the cancellation of an operation."""
    return list(named([("operation_id", id_problem(operation_id, LONGEST_OPERATION_ID))]))


def stop_problems(
    slot: SlotKey, up_to: Generation | None, budget_s: float | None, reign: Epoch
) -> list[FieldProblem]:
    """Say what is wrong with the stop of a slot that `reign` commands; None was not given."""
    ceiling = "is missing" if up_to is None else _generation_problem(up_to, reign, lowest=0)
    budget = "" if budget_s is None else seconds_problem(budget_s)
    return [
        *slot_problems(slot),
        *named([("up_to_generation", ceiling), ("budget_s", budget)]),
    ]


def slot_problems(slot: SlotKey) -> list[FieldProblem]:
    """Say what is wrong with the name of a slot."""
    found = [
        ("deployment", name_problem(slot.deployment)),
        ("replica_index", range_problem(slot.index, 0, MOST_REPORTED_REPLICAS - 1)),
        ("stage_id", range_problem(slot.stage_id, 0, MOST_REPORTED_STAGES - 1)),
    ]
    return list(named(found))


def _start_problems(path: str, start: StageStart, stage_count: int) -> Iterator[FieldProblem]:
    if start.stage_id >= stage_count:
        yield FieldProblem(
            f"{path}.stage_id", f"{start.stage_id} is not below stage_count {stage_count}"
        )
    yield from stage_problems(f"{path}.spec", start.spec)
    yield from named([(f"{path}.device_ids", _device_ids_problem(start))])
    count = range_problem(start.shard_count, 1, MOST_SHARDS_OF_STAGE)
    yield from named([(f"{path}.shard_count", count)])
    if not count and not 0 <= start.shard_index < start.shard_count:
        yield FieldProblem(
            f"{path}.shard_index",
            f"{start.shard_index} is not below shard_count {start.shard_count}",
        )
    yield from named([(f"{path}.restart_ages_s", ages_problem(start.restart_ages_s))])


def _device_ids_problem(start: StageStart) -> str:
    ids, cards = start.device_ids, start.spec.devices
    if len(ids) != len(cards):
        return f"has {len(ids)} devices for {len(cards)} cards"
    if len(set(ids)) != len(ids):
        return "names one device for two cards"
    return next((f"{shown(it)} {problem}" for it in ids if (problem := id_problem(it))), "")


def _order_problem(stages: Sequence[StageStart]) -> str:
    if not stages:
        return "are missing"
    ids = [start.stage_id for start in stages]
    if len(ids) <= MOST_STAGES and ids != sorted(set(ids)):
        return "are not ascending by stage_id, each once"
    return count_problem(len(ids), MOST_STAGES)


def _generation_problem(generation: Generation, reign: Epoch, *, lowest: int) -> str:
    if generation.n < lowest:
        return "is missing"
    if generation.n > LARGEST_NUMBER or generation.epoch > reign:
        return f"{generation} was not minted by {reign} or before it"
    return ""
