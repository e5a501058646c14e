"""Requests for processes for actors: sound ones, every edge, and all that is wrong at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagekeeper.core.ids import InstanceId
from stagekeeper.core.limits import LARGEST_ENV_BYTES, LONGEST_ID, MOST_PROCS
from stagekeeper.core.procs import ProcsWanted, wanted_problems
from stagekeeper.wire.entrypoint_patterns import is_allowed, is_entrypoint


def ids(count: int) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(f"{number:032x}") for number in range(count))


SOUND = ProcsWanted(procs_id="p", token="t" * LONGEST_ID, instance_ids=ids(2), lease_s=3.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instance_ids": ids(MOST_PROCS)},
        {"instance_ids": (), "ends": True},
        {"lease_s": 3_600.0},
        {"lease_s": 5e-324},
        {"instance_ids": (InstanceId("01234567-89ab-cdef-0123-456789abcdef"),)},
        {"env": (("CUDA_VISIBLE_DEVICES", "0"), ("MINE", ""))},
        {"procs_id": "p" * LONGEST_ID, "name": "n" * LONGEST_ID, "owner": "o" * LONGEST_ID},
    ],
)
def test_sound_request_has_no_problem(fields: dict[str, Any]) -> None:
    assert wanted_problems(replace(SOUND, **fields)) == []


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"procs_id": ""}, "procs_id"),
        ({"procs_id": "p" * (LONGEST_ID + 1)}, "procs_id"),
        ({"token": ""}, "token"),
        ({"token": "t" * (LONGEST_ID + 1)}, "token"),
        ({"token": "a\nb"}, "token"),
        ({"instance_ids": ()}, "instance_ids"),
        ({"instance_ids": ids(MOST_PROCS + 1)}, "instance_ids"),
        ({"instance_ids": ids(1) * 2}, "instance_ids"),
        ({"instance_ids": (InstanceId("../x"),)}, "instance_ids[0]"),
        ({"instance_ids": (InstanceId("a" * 32 + "\n"),)}, "instance_ids[0]"),
        ({"instance_ids": (InstanceId("A" * 32),)}, "instance_ids[0]"),
        ({"incarnation": 2**63}, "incarnation"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"lease_s": 3_600.1}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"end_budget_s": -1.0}, "end_budget_s"),
        ({"name": "n" * (LONGEST_ID + 1)}, "name"),
        ({"owner": "a\nb"}, "owner"),
        ({"env": (("STAGEKEEPER_TREE", "x"),)}, "environment[STAGEKEEPER_TREE]"),
        ({"env": (("PYTHONPATH", "x"),)}, "environment[PYTHONPATH]"),
        ({"env": (("1A", "x"),)}, "environment[1A]"),
        (
            {"env": tuple((f"A{number}", "x" * 60_000) for number in range(9))},
            "environment",
        ),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], path: str) -> None:
    assert [it.path for it in wanted_problems(replace(SOUND, **fields))] == [path]


def test_all_wrong_fields_are_named_at_once_and_no_token_is_shown() -> None:
    wrong = ProcsWanted(procs_id="", token="secret\n", instance_ids=(), lease_s=-1.0, name="\n")

    found = wanted_problems(wrong)

    assert [it.path for it in found] == ["procs_id", "token", "instance_ids", "lease_s", "name"]
    assert "secret" not in repr(found) + repr(wrong)
    assert LARGEST_ENV_BYTES < 9 * 60_000


@pytest.mark.parametrize(
    ("patterns", "entrypoint", "allowed"),
    [
        (["*"], "a.b:C", True),
        (["a.*"], "a.b:C.D", True),
        (["a.b:C"], "a.b:C", True),
        (["a.b.C"], "a.b:C", True),
        (["b.*", "a.b:*"], "a.b:C", True),
        (["a.b:C"], "a.b:CC", False),
        (["A.*"], "a.b:C", False),
        ([], "a.b:C", False),
    ],
)
def test_class_is_allowed_by_any_pattern_that_has_it(patterns, entrypoint, allowed) -> None:
    assert is_entrypoint(entrypoint)
    assert is_allowed(entrypoint, patterns) is allowed
