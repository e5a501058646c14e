"""What a spec may say: both sides of every limit, and every problem at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.model import MemoryNeed, ModelInfo
from stagekeeper.core.spec_check import check_spec, is_same_wish
from tests.plain import Placement
from tests.worlds import spec, stage_spec


def problems_of(made) -> list[tuple[str, str]]:
    try:
        check_spec(made)
    except Refused as refusal:
        assert refusal.reason is Reason.BAD_FIELD
        return [(it.path, it.problem) for it in refusal.problems]
    return []


def with_stage(**changes):
    return spec(stages=1) if not changes else replace(spec(), stages=(stage_spec(**changes),))


def nested(depth: int) -> str:
    """Arguments of so many containers inside each other."""
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def path_of(made) -> str:
    found = problems_of(made)
    return found[0][0] if found else ""


@pytest.mark.parametrize(
    "name", ["m", "x" * 63, "llama-2", "a-rep1", "x-rank0", "模型", "ünï", "a b", "👩‍🚀"]
)
def test_names_in_any_script_pass(name) -> None:
    assert problems_of(spec(name)) == []


@pytest.mark.parametrize(
    "name", ["", "x" * 64, "a/b", "a\nb", "a\0b", "a\u2028b", "\ud800", "\x7f"]
)
def test_names_that_are_none_are_refused(name) -> None:
    assert path_of(spec(name)) == "name"
    assert path_of(with_stage(name=name)) == "stages[0].name"


@pytest.mark.parametrize(("replicas", "passes"), [(0, False), (1, True), (1_000, True),
                                                  (1_001, False)])  # fmt: skip
def test_replicas_are_from_one_to_a_thousand(replicas, passes) -> None:
    assert (path_of(spec(replicas=replicas)) == "") is passes


@pytest.mark.parametrize(("stages", "passes"), [(0, False), (1, True), (64, True), (65, False)])
def test_stages_are_from_one_to_sixty_four(stages, passes) -> None:
    assert (path_of(spec(stages=stages)) == "") is passes


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"entrypoint": "models:Stage"}, ""),
        ({"entrypoint": "a.b.c:Outer.Inner"}, ""),
        ({"entrypoint": ""}, "stages[0].entrypoint"),
        ({"entrypoint": "models.Stage"}, "stages[0].entrypoint"),
        ({"entrypoint": "models:"}, "stages[0].entrypoint"),
        ({"entrypoint": "a..b:C"}, "stages[0].entrypoint"),
        ({"entrypoint": "a:b:c"}, "stages[0].entrypoint"),
        ({"entrypoint": "a/b:C"}, "stages[0].entrypoint"),
        ({"args_json": '{"a": [1, null]}'}, ""),
        ({"args_json": "[]"}, "stages[0].args_json"),
        ({"args_json": "3"}, "stages[0].args_json"),
        ({"args_json": ""}, "stages[0].args_json"),
        ({"args_json": "{"}, "stages[0].args_json"),
        ({"args_json": '{"a": NaN}'}, "stages[0].args_json"),
        ({"args_json": '{"a": Infinity}'}, "stages[0].args_json"),
        ({"args_json": '{"a": 1, "a": 2}'}, "stages[0].args_json"),
        ({"args_json": '{"a": ' + "[" * 100_000}, "stages[0].args_json"),
        ({"args_json": nested(100)}, ""),
        ({"args_json": nested(101)}, "stages[0].args_json"),
        ({"args_json": nested(50_000)}, "stages[0].args_json"),
        ({"args_json": '{"a": ' + "9" * 5_000 + "}"}, "stages[0].args_json"),
        ({"devices": (0,)}, "stages[0].memory"),
        ({"devices": (0, 0), "memory": MemoryNeed(0.5)}, "stages[0].devices"),
        ({"devices": (255,), "memory": MemoryNeed(0.5)}, ""),
        ({"devices": (256,), "memory": MemoryNeed(0.5)}, "stages[0].devices"),
        ({"devices": (-1,), "memory": MemoryNeed(0.5)}, "stages[0].devices"),
        ({"devices": tuple(range(64)), "memory": MemoryNeed(0.5)}, ""),
        ({"devices": tuple(range(65)), "memory": MemoryNeed(0.5)}, "stages[0].devices"),
        ({"memory": MemoryNeed()}, "stages[0].memory"),
        ({"memory": MemoryNeed(0.5, 5)}, "stages[0].memory"),
        ({"memory": MemoryNeed(1.0)}, ""),
        ({"memory": MemoryNeed(1e-9)}, ""),
        ({"memory": MemoryNeed(0.0)}, "stages[0].memory"),
        ({"memory": MemoryNeed(1.0000001)}, "stages[0].memory"),
        ({"memory": MemoryNeed(-0.1)}, "stages[0].memory"),
        ({"memory": MemoryNeed(float("nan"))}, "stages[0].memory"),
        ({"memory": MemoryNeed(float("inf"))}, "stages[0].memory"),
        ({"memory": MemoryNeed(bytes=1)}, ""),
        ({"memory": MemoryNeed(bytes=0)}, "stages[0].memory"),
        ({"memory": MemoryNeed(bytes=2**63)}, "stages[0].memory"),
        ({"memory": MemoryNeed(0.5, reserve_bytes=-1)}, "stages[0].memory.reserve_bytes"),
        ({"env": (("A_1", "x"), ("_b", ""))}, ""),
        ({"env": (("1A", "x"),)}, "stages[0].env[1A]"),
        ({"env": (("A=B", "x"),)}, "stages[0].env[A=B]"),
        ({"env": (("", "x"),)}, "stages[0].env[]"),
        ({"env": (("A\n", "x"),)}, "stages[0].env[A\n]"),
        ({"env": (("Ä", "x"),)}, "stages[0].env[Ä]"),
        ({"env": (("A", "x\0y"),)}, "stages[0].env[A]"),
        ({"env": (("A", "x"), ("A", "y"))}, "stages[0].env"),
        ({"env": (("STAGEKEEPER_INSTANCE_ID", "x"),)}, "stages[0].env[STAGEKEEPER_INSTANCE_ID]"),
        ({"env": (("CUDA_VISIBLE_DEVICES", "0"),)}, "stages[0].env[CUDA_VISIBLE_DEVICES]"),
        ({"env": (("CUDA_DEVICE_ORDER", "x"),)}, "stages[0].env[CUDA_DEVICE_ORDER]"),
        ({"env": (("CUDA_LAUNCH_BLOCKING", "1"),)}, ""),
        ({"start_timeout_s": 0.001}, ""),
        ({"start_timeout_s": 0.0}, "stages[0].start_timeout_s"),
        ({"stall_timeout_s": -1.0}, "stages[0].stall_timeout_s"),
        ({"stop_budget_s": float("inf")}, "stages[0].stop_budget_s"),
        ({"stop_budget_s": float("nan")}, "stages[0].stop_budget_s"),
        ({"stop_budget_s": 31_536_000.0}, ""),
        ({"stop_budget_s": 31_536_001.0}, "stages[0].stop_budget_s"),
        ({"env": (("A", "x" * 65_536),)}, ""),
        ({"env": (("A", "x" * 65_537),)}, "stages[0].env[A]"),
        ({"env": (("A", "é" * 32_769),)}, "stages[0].env[A]"),
        ({"env": (("A" * 256, "x"),)}, f"stages[0].env[{'A' * 253} …]"),
        ({"env": tuple((f"A{k}", "x" * 65_000) for k in range(9))}, "stages[0].env"),
        ({"env": tuple((f"A{k}", "") for k in range(1_001))}, "stages[0].env"),
        ({"max_in_flight": 1}, ""),
        ({"max_in_flight": 0}, "stages[0].max_in_flight"),
        ({"max_in_flight": 65_536}, ""),
        ({"max_in_flight": 65_537}, "stages[0].max_in_flight"),
        ({"shard_count": 0}, "stages[0].shard_count"),
    ],
)
def test_a_stages_field_is_judged_on_both_sides_of_its_edge(changes, path) -> None:
    assert path_of(with_stage(**changes)) == path


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"entry": "s0"}, ""),
        ({"entry": "nothing"}, "entry"),
        ({"model": ModelInfo("Qwen/Qwen3", "30B-A3B", ("chat", "audio"))}, ""),
        ({"model": ModelInfo("x" * 256)}, "model.name"),
        ({"model": ModelInfo(version="a\nb")}, "model.version"),
        ({"model": ModelInfo(abilities=("chat", "chat"))}, "model.abilities"),
        ({"model": ModelInfo(abilities=("",))}, "model.abilities[0]"),
        ({"model": ModelInfo(abilities=tuple(f"a{k}" for k in range(64)))}, ""),
        ({"model": ModelInfo(abilities=tuple(f"a{k}" for k in range(65)))}, "model.abilities"),
        ({"placement": Placement(workers=("w1", "w1"))}, "placement.workers"),
        ({"placement": Placement(workers=("a/b",))}, "placement.workers[0]"),
        ({"placement": Placement(device_pool=("",))}, "placement.device_pool[0]"),
        ({"placement": Placement(device_pool=("a", "a"))}, "placement.device_pool"),
        ({"placement": Placement(workers=tuple(f"w{k}" for k in range(1_001)))},
         "placement.workers"),
    ],
)  # fmt: skip
def test_a_field_of_the_whole_is_judged(changes, path) -> None:
    assert path_of(spec(**changes)) == path


def test_entry_that_is_no_stage_is_told_which_there_are() -> None:
    made = replace(spec(), entry="nobody", stages=tuple(map(stage_spec, ("one", "", "two", "a/b"))))

    assert dict(problems_of(made))["entry"] == (
        "no stage is called 'nobody'; there are 'one', 'two'"
    )


def test_stage_names_are_unique() -> None:
    made = replace(spec(), stages=(stage_spec("a"), stage_spec("b"), stage_spec("a")))

    assert problems_of(made) == [("stages[2].name", "'a' is the name of stage 0")]


def test_every_problem_is_named_at_once_with_its_path() -> None:
    made = spec(
        "a/b",
        replicas=0,
        entry="nobody",
        stages=2,
    )
    made = replace(
        made, stages=(stage_spec(entrypoint="x"), stage_spec("t", devices=(0,), max_in_flight=0))
    )

    with pytest.raises(Refused) as caught:
        check_spec(made)

    assert [it.path for it in caught.value.problems] == [
        "name",
        "replicas",
        "stages[0].entrypoint",
        "stages[1].memory",
        "stages[1].max_in_flight",
        "entry",
    ]
    assert all(it.path in caught.value.message for it in caught.value.problems)


@pytest.mark.parametrize(("count", "problem"), [(1, ""), (64, ""), (0, "0"), (65, "65")])
def test_a_stage_has_from_one_to_sixty_four_shards(count, problem) -> None:
    made = with_stage(shard_count=count)

    if not problem:
        check_spec(made)
    else:
        ((path, why),) = problems_of(made)
        assert path == "stages[0].shard_count"
        assert problem in why


@pytest.mark.parametrize(("workers", "passes"), [((), True), (("a",), False), (("a", "b"), True)])
def test_shards_want_as_many_workers_as_they_are(workers, passes) -> None:
    made = replace(with_stage(shard_count=2), placement=Placement(workers=workers))

    if passes:
        check_spec(made)
    else:
        ((path, why),) = problems_of(made)
        assert path == "placement.workers"
        assert "names 1 worker," in why
        assert "'s0' has 2 shards" in why


@pytest.mark.parametrize(("extra", "passes"), [(0, True), (1, False)])
def test_the_size_of_the_whole_is_limited(extra, passes) -> None:
    bare = with_stage(args_json='{"a": ""}')
    used = len("m") + len("s0") + len("models:Stage") + len('{"a": ""}')
    filled = '{"a": "' + "x" * (1_048_576 - used + extra) + '"}'
    made = replace(bare, stages=(replace(bare.stages[0], name="s0", args_json=filled),))

    if passes:
        check_spec(made)
    else:
        with pytest.raises(Refused) as caught:
            check_spec(made)
        assert caught.value.reason is Reason.TOO_LARGE


def test_numbers_in_arguments_keep_their_kind() -> None:
    one, other = with_stage(args_json='{"a": 3}'), with_stage(args_json='{"a": 3.0}')

    assert not is_same_wish(one, other)


def test_the_entry_may_be_named_or_not() -> None:
    assert is_same_wish(spec(stages=2), spec(stages=2, entry="s0"))
    assert not is_same_wish(spec(stages=2), spec(stages=2, entry="s1"))


def test_a_hundred_thousand_keys_are_looked_through_once() -> None:
    keys = ", ".join(f'"k{number}": 0' for number in range(60_000))

    assert path_of(with_stage(args_json="{" + keys + ', "k59999": 1}')) == "stages[0].args_json"
