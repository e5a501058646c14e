"""What one field may hold: the checks that specs, reports and commands are made of.

Each function says what is wrong in a few words, to stand behind the field's path; empty when it is
sound. Invariant: what is said is short, however long the value is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stagekeeper.core.errors import FieldProblem
from stagekeeper.core.limits import LONGEST_ID, LONGEST_SECONDS, MOST_RESTART_AGES
from stagekeeper.core.names import shown, text_problem


def named(found: Sequence[tuple[str, str]]) -> Iterator[FieldProblem]:
    """Yield the problems among (path, what is wrong) pairs."""
    for path, problem in found:
        if problem:
            yield FieldProblem(path, problem)


def id_problem(identity: str, longest: int = LONGEST_ID) -> str:
    """Say what is wrong with an id that somebody else minted; empty when it is sound."""
    if not identity:
        return "is empty"
    return length_problem(identity, longest) or text_problem(identity)


def length_problem(text: str, longest: int = LONGEST_ID) -> str:
    """Say that a text is too long; empty when it is not."""
    return f"has {len(text)} characters, at most {longest} are taken" if len(text) > longest else ""


def count_problem(count: int, most: int) -> str:
    """Say that there are too many of something; empty when there are not."""
    return f"has {count} entries, at most {most} are taken" if count > most else ""


def size_problem(size: int, largest: int) -> str:
    """Say that something has too many bytes; empty when it has not."""
    return "" if size <= largest else f"has {size} bytes, at most {largest} are taken"


def twice_problem(values: Sequence[object]) -> str:
    """Say which value is there twice; empty when each is there once."""
    if len(set(values)) == len(values):
        return ""
    twice = next(value for value in values if values.count(value) > 1)
    return f"{shown(twice) if isinstance(twice, str) else repr(twice)} is there twice"


def range_problem(number: int, lowest: int, highest: int) -> str:
    """Say that a number is out of range; empty when it is not."""
    return "" if lowest <= number <= highest else f"{number} is not from {lowest} to {highest}"


def seconds_problem(seconds: float, *, may_be_zero: bool = True) -> str:
    """Say what is wrong with a duration; empty when it is sound. nan and inf are none."""
    if math.isfinite(seconds) and 0 <= seconds <= LONGEST_SECONDS and (may_be_zero or seconds):
        return ""
    least = "from 0" if may_be_zero else "above 0 and"
    return f"{seconds!r} is not a number of seconds {least} to {LONGEST_SECONDS:g}"


def ages_problem(ages_s: Sequence[float]) -> str:
    """Say what is wrong with the ages of a slot's restarts; empty when they are sound."""
    if len(ages_s) > MOST_RESTART_AGES:
        return count_problem(len(ages_s), MOST_RESTART_AGES)
    return next(filter(None, map(seconds_problem, ages_s)), "")
