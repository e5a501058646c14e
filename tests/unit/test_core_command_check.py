"""What a command to an agent may say: both sides of every limit, and every problem at once."""

from __future__ import annotations

from typing import Any

import pytest

from stagekeeper.core.command_check import (
    asked_problems,
    cancel_problems,
    peer_problems,
    plan_problems,
    stop_problems,
)
from stagekeeper.core.ids import Epoch, Generation
from stagekeeper.core.model import MemoryNeed, ModelInfo, OperationPlan, Peer, StageStart
from tests.plain import SlotKey
from tests.worlds import stage_spec

REIGN = Epoch(5, "five")


def start(stage_id: int = 0, **changes: Any) -> Any:
    fields: dict[str, Any] = {"spec": stage_spec(f"s{stage_id}"), **changes}
    return StageStart(stage_id, **fields)  # type: ignore[arg-type]


def plan(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "operation_id": "op",
        "deployment": "m",
        "replica_index": 0,
        "generation": Generation(REIGN, 1),
        "worker_id": "w",
        "stages": (start(0), start(1)),
        "stage_count": 2,
        "entry_stage_id": 0,
        "spec_revision": 1,
        **changes,
    }
    return OperationPlan(**fields)


def on_cards(cards: tuple[int, ...], ids: tuple[str, ...]) -> Any:
    spec = stage_spec("s0", devices=cards, memory=MemoryNeed(0.1))
    return plan(stages=(start(spec=spec, device_ids=ids),))


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (plan(), ""),
        (plan(operation_id="🦙" * 128), ""),
        (plan(operation_id=""), "operation_id"),
        (plan(operation_id="x" * 129), "operation_id"),
        (plan(operation_id="a\0b"), "operation_id"),
        (plan(deployment="a/b"), "deployment"),
        (plan(replica_index=99_999), ""),
        (plan(replica_index=100_000), "replica_index"),
        (plan(spec_revision=2**63), "spec_revision"),
        (plan(generation=Generation(REIGN, 0)), "generation"),
        (plan(generation=Generation(REIGN, 2**63 - 1)), ""),
        (plan(generation=Generation(REIGN, 2**63)), "generation"),
        (plan(generation=Generation(Epoch(4, "zzz"), 9)), ""),
        (plan(generation=Generation(Epoch(6, ""), 1)), "generation"),
        (plan(generation=Generation(Epoch(5, "fiver"), 1)), "generation"),
        (plan(stages=()), "stages"),
        (plan(stages=(start(1), start(0))), "stages"),
        (plan(stages=(start(0), start(0))), "stages"),
        (plan(stage_count=65), "stage_count"),
        (plan(entry_stage_id=2), "entry_stage_id"),
        (plan(stages=(start(2),)), "stages[0].stage_id"),
        (plan(model=ModelInfo("x" * 256)), "model.name"),
        (plan(stages=(start(spec=stage_spec("")),)), "stages[0].spec.name"),
        (plan(stages=(start(spec=stage_spec(args_json="[")),)), "stages[0].spec.args_json"),
        (plan(stages=(start(shard_index=1),)), "stages[0].shard_index"),
        (plan(stages=(start(shard_index=1, shard_count=2),)), ""),
        (plan(stages=(start(shard_index=999, shard_count=1_000),)), ""),
        (plan(stages=(start(shard_count=0),)), "stages[0].shard_count"),
        (plan(stages=(start(shard_count=1_001),)), "stages[0].shard_count"),
        (plan(stages=(start(restart_ages_s=(0.0, 31_536_000.0)),)), ""),
        (plan(stages=(start(restart_ages_s=(float("nan"),)),)), "stages[0].restart_ages_s"),
        (plan(stages=(start(restart_ages_s=(-1.0,)),)), "stages[0].restart_ages_s"),
        (on_cards((0, 1), ("a", "b")), ""),
        (on_cards((0, 1), ("a",)), "stages[0].device_ids"),
        (on_cards((0, 1), ("a", "a")), "stages[0].device_ids"),
        (on_cards((0,), ("",)), "stages[0].device_ids"),
    ],
)
def test_a_plan_is_judged_on_both_sides_of_every_edge(made, path) -> None:
    assert [it.path for it in plan_problems(made, REIGN)] == ([path] if path else [])


def test_every_problem_of_a_plan_is_named_at_once() -> None:
    made = plan(operation_id="", deployment="", stages=(start(7, restart_ages_s=(-1.0,)),))

    assert [it.path for it in plan_problems(made, REIGN)] == [
        "operation_id",
        "deployment",
        "stages[0].stage_id",
        "stages[0].restart_ages_s",
    ]


@pytest.mark.parametrize(
    ("slot", "up_to", "budget_s", "path"),
    [
        (SlotKey("m", 0, 0), Generation(REIGN, 0), None, ""),
        (SlotKey("m", 99_999, 999), Generation(REIGN, 5), 0.0, ""),
        (SlotKey("", 0, 0), Generation(REIGN, 5), 0.0, "deployment"),
        (SlotKey("m", 100_000, 0), Generation(REIGN, 5), 0.0, "replica_index"),
        (SlotKey("m", 0, 1_000), Generation(REIGN, 5), 0.0, "stage_id"),
        (SlotKey("m", 0, 0), None, 0.0, "up_to_generation"),
        (SlotKey("m", 0, 0), Generation(Epoch(6, ""), 5), 0.0, "up_to_generation"),
        (SlotKey("m", 0, 0), Generation(REIGN, 5), -1.0, "budget_s"),
        (SlotKey("m", 0, 0), Generation(REIGN, 5), float("nan"), "budget_s"),
        (SlotKey("m", 0, 0), Generation(REIGN, 5), float("inf"), "budget_s"),
    ],
)
def test_a_stop_is_judged_on_both_sides_of_every_edge(slot, up_to, budget_s, path) -> None:
    found = [it.path for it in stop_problems(slot, up_to, budget_s, REIGN)]

    assert found == ([path] if path else [])


@pytest.mark.parametrize(
    ("operation_id", "is_sound"), [("x", True), ("", False), ("x" * 129, False)]
)
def test_a_cancellation_names_an_operation(operation_id, is_sound) -> None:
    assert (cancel_problems(operation_id) == []) is is_sound


@pytest.mark.parametrize(
    ("asked", "paths"),
    [
        ((), []),
        ((1, 0, 1), []),
        ((0, 2), ["start_stage_ids[1]"]),
        ((7, 2), ["start_stage_ids[0]", "start_stage_ids[1]"]),
    ],
)
def test_stages_to_start_are_some_of_the_plans(asked, paths) -> None:
    assert [it.path for it in asked_problems(plan(), asked)] == paths


def peer(stage_id: int = 0, shard_index: int = 1, **changes: Any) -> Any:
    fields = {"stage_name": "s", "instance_id": "i", "url": "10.0.0.1:1", **changes}
    return Peer(stage_id=stage_id, shard_index=shard_index, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peers", "path"),
    [
        ([], ""),
        ([peer(0), peer(1), peer(0, 999)], ""),
        ([peer(2)], "peers[0].stage_id"),
        ([peer(0, 1_000)], "peers[0].shard_index"),
        ([peer(stage_name="")], "peers[0].stage_name"),
        ([peer(instance_id="")], "peers[0].instance_id"),
        ([peer(url="x" * 256)], "peers[0].url"),
        ([peer(0), peer(0)], "peers[1]"),
        ([peer(0, 0)], "peers[0]"),  # it lies here
        ([peer(0, index) for index in range(1, 1_000)] * 5, "peers"),
    ],
)
def test_peers_are_judged_on_both_sides_of_every_edge(peers, path) -> None:
    assert [it.path for it in peer_problems(plan(), peers)] == ([path] if path else [])
