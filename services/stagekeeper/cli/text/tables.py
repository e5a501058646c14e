"""Tables: fitted and coloured in a terminal, plain lines in a pipe.

Decided here: how rows are laid out, and which words get a colour. A row is one line in a pipe,
however long, so that `grep` and `awk` see it whole. In a terminal the last cell gives way.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from stagekeeper.cli.text.lines import visible

if TYPE_CHECKING:
    from rich.text import Text

_GOOD: Final = frozenset({"READY", "ALIVE", "NORMAL", "COMMITTED"})
_MOVING: Final = frozenset(
    {
        "ADOPTING",
        "CREATING",
        "DELETING",
        "DRAINING",
        "PENDING",
        "STARTING",
        "STOPPING",
        "SUSPECT",
        "UNCOMMITTED",
    }
)
_BAD: Final = frozenset(
    {
        "CONFLICT",
        "DEGRADED",
        "FAILED",
        "GONE",
        "LOST",
        "PARTIAL",
        "SICK",
        "STALLED",
        "SUPERSEDED",
        "UNREACHABLE",
    }
)


_GAP: Final = "  "
_BELOW: Final = "    "
_NARROW: Final = 36
"""A column that is narrower is hard to read a sentence in."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; every row has as many cells as the header.

    Cells are one line, but for the last, which may have several.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_STATE: Final = re.compile(rf"\b(?:{'|'.join(sorted(_GOOD | _MOVING | _BAD | {'HOLD'}))})\b")


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
        _write_to_terminal(table, out)
    else:
        for line in plain_lines(table):
            print(line, file=out)


def write_page(headlines: Sequence[str], tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Write what is to be said first, the tables, and what a person should know besides."""
    for line in headlines:
        print(visible(line))
    for table in tables:
        print()
        write_table(table)
    if notes:
        print()
    for note in notes:
        print(f"note: {visible(note)}")


def plain_lines(table: Table) -> list[str]:
    """Lay a table out in columns of plain text; an empty cell shows as `-`."""
    rows = [table.header, *(tuple(_one_line(cell) or "-" for cell in row) for row in table.rows)]
    widths = _widths(rows)
    return [_GAP.join(_padded(row, widths)).rstrip() for row in rows]


def terminal_lines(table: Table, columns: int) -> list[str]:
    """Lay a table out for a terminal of so many columns.

    Names are never cut: the last cell, which may be long, is wrapped in its own column, or below
    its row where that would be narrow.
    """
    rows = [tuple(map(visible, row)) for row in table.rows]
    widths = _widths([table.header, *rows])[:-1]
    indent = sum(widths) + len(_GAP) * len(widths)
    is_below = columns - indent < _NARROW
    if is_below:
        indent = len(_BELOW)
    lines = [_GAP.join(_padded(table.header, widths)).rstrip()]
    for row in rows:
        head = _GAP.join(_padded(row[:-1], widths))
        rest = [part for text in row[-1].splitlines() for part in _wrapped(text, columns - indent)]
        if is_below or not rest:
            lines += [head.rstrip(), *(_BELOW + part for part in rest)]
        else:
            lines.append(head + _GAP + rest[0])
            lines += [" " * indent + part for part in rest[1:]]
    return lines


def _write_to_terminal(table: Table, out: IO[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out)
    header, *lines = terminal_lines(table, console.width)
    console.print(Text(header, style="bold"), soft_wrap=True)
    for line in lines:
        console.print(styled(line), soft_wrap=True)


def styled(line: str) -> Text:
    """Colour the states in a line."""
    from rich.text import Text

    text = Text(line)
    for word in _STATE.finditer(line):
        text.stylize(style_of(word[0]), *word.span())
    return text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, _NARROW), break_long_words=False)


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Fill the cells that have a width; a last one without keeps its own."""
    return [cell.ljust(widths[n]) if n < len(widths) else cell for n, cell in enumerate(row)]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]


def _one_line(text: str) -> str:
    return visible("; ".join(" ".join(line.split()) for line in text.splitlines()))


def as_rows(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in rows)
