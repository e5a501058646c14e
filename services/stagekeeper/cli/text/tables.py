"""Tables: rich ones in a terminal, aligned plain lines in a pipe.

Decided here: how rows are laid out, and which words get a colour. A row is one line in a pipe,
however long, so that `grep` and `awk` see it whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final

_GOOD: Final = frozenset({"READY", "ALIVE", "NORMAL"})
_MOVING: Final = frozenset(
    {"ADOPTING", "CREATING", "DELETING", "DRAINING", "PENDING", "STARTING", "STOPPING", "SUSPECT"}
)
_BAD: Final = frozenset(
    {"CONFLICT", "FAILED", "LOST", "PARTIAL", "DEGRADED", "STALLED", "SUPERSEDED", "UNREACHABLE"}
)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; every row has as many cells as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def style_of(word: str) -> str:
    """Return rich's style for a state, looking at its first word; empty for anything else."""
    head = word.partition(" ")[0].partition("(")[0]
    if head in _GOOD:
        return "green"
    if head in _MOVING or head == "HOLD":
        return "yellow"
    return "bold red" if head in _BAD else ""


def write_table(table: Table, file: IO[str] | None = None) -> None:
    """Write one table to `file` (stdout when none is given), as suits what that is."""
    out = file or sys.stdout
    if out.isatty():
        _write_rich(table, out)
    else:
        for line in plain_lines(table):
            print(line, file=out)


def plain_lines(table: Table) -> list[str]:
    """Lay a table out in columns of plain text; an empty cell shows as `-`."""
    rows = [table.header, *(tuple(_one_line(cell) or "-" for cell in row) for row in table.rows)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(table.header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [table.title, *lines] if table.title else lines


def _one_line(text: str) -> str:
    return "; ".join(" ".join(line.split()) for line in text.splitlines())


def _write_rich(table: Table, out: IO[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        title=table.title or None,
        title_justify="left",
    )
    last = len(table.header) - 1
    for n, name in enumerate(table.header):
        # Only the last column may be long; the others are names, which are no use when cut.
        drawn.add_column(name, no_wrap=n != last, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=style_of(cell)) for cell in row))
    Console(file=out).print(drawn)


def as_rows(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in rows)
