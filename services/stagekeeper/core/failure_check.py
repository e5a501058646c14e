"""What a failure may say, checked whole: every wrong field at once.

Decided here: what is wrong in a failure itself. Its size as a whole is looked at before it is
converted (`runtime.convert`). Invariant: a failure that passed fits into every message that may
carry it, at any depth that protobuf still reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagekeeper.core.errors import FieldProblem
from stagekeeper.core.field_check import (
    count_problem,
    id_problem,
    length_problem,
    named,
)
from stagekeeper.core.limits import (
    DEEPEST_CAUSES,
    LONGEST_FAILURE_LINE,
    LONGEST_ID,
    LONGEST_MESSAGE,
    LONGEST_TEXT,
    LONGEST_TRACEBACK,
    MOST_CAUSES,
    MOST_HOPS,
    MOST_LOG_LINES,
)
from stagekeeper.core.model import Failure


def failure_problems(failure: Failure, path: str = "") -> list[FieldProblem]:
    """Say what is wrong with a failure and its causes; `path` is where it stands."""
    below = f"{path}." if path else ""
    depth = _depth(failure)
    if depth > DEEPEST_CAUSES:
        problem = f"are nested {depth} deep, at most {DEEPEST_CAUSES} are taken"
        return [FieldProblem(f"{below}causes", problem)]
    count = _cause_count(failure)
    if count > MOST_CAUSES:
        return [FieldProblem(f"{below}causes", count_problem(count, MOST_CAUSES))]
    return list(_problems(failure, below))


def _problems(failure: Failure, below: str) -> Iterator[FieldProblem]:
    origin, lines = failure.origin, failure.last_log_lines
    longest_line = max(map(len, lines), default=0)
    line = f"has a line of {longest_line} characters, at most {LONGEST_FAILURE_LINE} are taken"
    found = [
        ("failure_id", id_problem(failure.failure_id)),
        ("origin.worker_id", length_problem(origin.worker_id)),
        ("origin.deployment", length_problem(origin.deployment)),
        ("origin.stage_name", length_problem(origin.stage_name)),
        ("origin.instance_id", length_problem(origin.instance_id)),
        ("message", length_problem(failure.message, LONGEST_MESSAGE)),
        ("detected_by", length_problem(failure.detected_by, LONGEST_TEXT)),
        ("last_log_lines", count_problem(len(lines), MOST_LOG_LINES)),
        ("last_log_lines", line if longest_line > LONGEST_FAILURE_LINE else ""),
        ("remote_traceback", length_problem(failure.remote_traceback, LONGEST_TRACEBACK)),
        ("path", count_problem(len(failure.path), MOST_HOPS)),
    ]
    generation = origin.generation
    if generation is not None and len(generation.epoch.supervisor_id) > LONGEST_ID:
        problem = length_problem(generation.epoch.supervisor_id)
        found.append(("origin.generation.epoch.supervisor_id", problem))
    for index, (owner, decision) in enumerate(failure.path[:MOST_HOPS]):
        found.append((f"path[{index}].owner", length_problem(owner)))
        found.append((f"path[{index}].decision", length_problem(decision)))
    yield from named([(f"{below}{field}", problem) for field, problem in found])
    for index, cause in enumerate(failure.causes):
        yield from _problems(cause, f"{below}causes[{index}].")


def _depth(failure: Failure) -> int:
    """Count the failures on the longest way down; itself is none."""
    depth, level = 0, failure.causes
    while level:
        depth += 1
        level = tuple([below for cause in level for below in cause.causes])
    return depth


def _cause_count(failure: Failure) -> int:
    return sum(1 + _cause_count(cause) for cause in failure.causes)
