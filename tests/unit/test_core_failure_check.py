"""What a failure may say: both sides of every limit, at every depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagekeeper.core.failure_check import failure_problems
from tests.plain import Failure, FailureOrigin


def failure(name: str) -> Any:
    return Failure(name, "EXITED", FailureOrigin("w", "m", 0, 0, "s0", 0, "i"), "it ended")


def paths(made: Any) -> list[str]:
    return [it.path for it in failure_problems(made, "failure")]


def chain(depth: int) -> Any:
    """A failure with so many causes, each of the one before it."""
    made = failure("f")
    for number in range(depth):
        made = replace(failure(f"f{number}"), causes=(made,))
    return made


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, ""),
        ({"failure_id": ""}, "failure_id"),
        ({"failure_id": "a\nb"}, "failure_id"),
        ({"message": "x" * 8_192}, ""),
        ({"message": "x" * 8_193}, "message"),
        ({"last_log_lines": ("x" * 2_000,) * 20}, ""),
        ({"last_log_lines": ("x",) * 21}, "last_log_lines"),
        ({"last_log_lines": ("x" * 2_001,)}, "last_log_lines"),
        ({"remote_traceback": "x" * 65_537}, "remote_traceback"),
        ({"detected_by": "x" * 256}, "detected_by"),
        ({"path": (("x", "y"),) * 65}, "path"),
        ({"path": (("x", "y" * 256),)}, "path[0].decision"),
    ],
)
def test_a_field_is_judged_on_both_sides_of_its_edge(changes, path) -> None:
    made = replace(failure("f"), **changes)

    assert paths(made) == ([f"failure.{path}"] if path else [])
    below = [f"failure.causes[0].{path}"] if path else []
    assert paths(replace(failure("g"), causes=(made,))) == below


@pytest.mark.parametrize(("depth", "found"), [(16, []), (17, ["failure.causes"])])
def test_causes_are_nested_sixteen_deep_at_most(depth, found) -> None:
    assert paths(chain(depth)) == found


@pytest.mark.parametrize(("count", "found"), [(64, []), (65, ["failure.causes"])])
def test_causes_are_sixty_four_at_most(count, found) -> None:
    causes = tuple(failure(f"c{number}") for number in range(count))

    assert paths(replace(failure("f"), causes=causes)) == found


def test_every_problem_is_named_at_once() -> None:
    made = replace(failure(""), message="x" * 9_000, causes=(failure(""),))

    assert paths(made) == ["failure.failure_id", "failure.message", "failure.causes[0].failure_id"]
