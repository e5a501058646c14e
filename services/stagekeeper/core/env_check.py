"""What the environment of a process that an agent starts may hold, whoever asks for it.

Decided here: which names and values a process can be started with. Not decided here: what the agent
sets itself for which kind of process (`taken`).

Invariant: no variable that begins with `STAGEKEEPER_` comes from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from stagekeeper.core.errors import FieldProblem
from stagekeeper.core.field_check import (
    count_problem,
    length_problem,
    named,
    size_problem,
    twice_problem,
)
from stagekeeper.core.limits import (
    LARGEST_ENV_BYTES,
    LARGEST_ENV_VALUE_BYTES,
    LONGEST_TEXT,
    MOST_ENV,
)
from stagekeeper.core.names import cut

RESERVED_ENV = "STAGEKEEPER_"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def env_problems(
    path: str, env: Sequence[tuple[str, str]], *, taken: Mapping[str, str]
) -> Iterator[FieldProblem]:
    """Say what is wrong with variables for a process.

    Args:
        path: the field that has them.
        taken: names that the agent sets itself → what is said to whoever names one.
    """
    names = [name for name, _ in env]
    yield from named([(path, count_problem(len(names), MOST_ENV) or twice_problem(names))])
    total_bytes = 0
    for name, value in env[:MOST_ENV]:
        value_bytes = len(value.encode("utf-8", "replace"))
        total_bytes += len(name) + value_bytes
        where = f"{path}[{cut(name, LONGEST_TEXT)}]"
        yield from named(
            [
                (where, size_problem(value_bytes, LARGEST_ENV_VALUE_BYTES)),
                (where, length_problem(name)),
                (where, _name_problem(name, taken)),
                (where, "its value contains a NUL character" if "\0" in value else ""),
            ]
        )
    yield from named([(path, size_problem(total_bytes, LARGEST_ENV_BYTES))])


def _name_problem(name: str, taken: Mapping[str, str]) -> str:
    if not _NAME.match(name):
        return "is no variable's name: letters, digits and _, not a digit first"
    if name.startswith(RESERVED_ENV):
        return f"names that begin with {RESERVED_ENV} are set by the agent"
    return taken.get(name, "")
