"""Draw the state tables of `stagekeeper.core.states` as docs/states.md.

`python tools/draw_states.py` writes the file; a test fails when it is stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from stagekeeper.core.states import OPERATION_MOVES, SHARD_MOVES, WORKER_MOVES

TARGET = Path(__file__).parents[1] / "docs" / "states.md"

INTRODUCTION = """\
# States

Drawn from the tables in `services/stagekeeper/core/states.py` by `python tools/draw_states.py`. A
move that is not drawn is refused with its story. Replicas and deployments have no moves of their
own: their states are derived anew from what workers report and what is wanted.
"""

TABLES: tuple[tuple[str, str, Mapping[Any, frozenset[Any]]], ...] = (
    ("A shard, as its agent moves it", "PENDING", SHARD_MOVES),
    ("An operation, on one worker", "RESERVED", OPERATION_MOVES),
    ("A worker, as the supervisor hears of it", "ALIVE", WORKER_MOVES),
)


def diagram(first: str, moves: Mapping[StrEnum, frozenset[StrEnum]]) -> str:
    """Return a Mermaid diagram; states without any move, in or out, are left out."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for state, following in moves.items():
        lines += [f"    {state} --> {target}" for target in sorted(following)]
        if not following and any(state in targets for targets in moves.values()):
            lines.append(f"    {state} --> [*]")
    return "\n".join([*lines, "```"])


def document() -> str:
    parts = [INTRODUCTION]
    parts += [f"## {title}\n\n{diagram(first, moves)}\n" for title, first, moves in TABLES]
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(document())
