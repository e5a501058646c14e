"""A plan drawn: a bar for each card in a terminal, rows in a pipe.

Decided here: how it looks. Invariant: a pipe loses nothing that a terminal shows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Final

from stagekeeper.cli.text.amounts import size
from stagekeeper.cli.text.bars import LEGEND, bar
from stagekeeper.cli.text.plan import CardText, Entry, PlanText, sum_table
from stagekeeper.cli.text.tables import Table, write_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WIDEST_BAR: Final = 60
_INDENT: Final = "  "
_PERCENT: Final = len(" 1000 %")
_MOST_ALIKE: Final = 6
"""Of one card in a terminal: of more that are held, or new, the smallest are summed up."""

_STYLES: Final = {"held": "cyan", "new": "green", "free": "dim", "over": "bold red"}


def write_plan(text: PlanText, file: IO[str] | None = None) -> None:
    """Write a plan to `file` (stdout when none is given), as suits what that is."""
    out = file or sys.stdout
    is_terminal = out.isatty()
    _write_head(text, out, is_terminal=is_terminal)
    for table in text.tables:
        _write(table, out)
    if text.cards and is_terminal:
        _write_cards(text.cards, out)
    elif text.cards:
        _write(sum_table(text.cards), out)
    if text.refusals.rows:
        _write(text.refusals, out)


def _write_head(text: PlanText, out: IO[str], *, is_terminal: bool) -> None:
    lines = (text.headline, *text.facts)
    if not is_terminal:
        for line in lines:
            print(line, file=out)
        return
    from rich.text import Text

    console = _console(out)
    is_refused = bool(text.refusals.rows)
    console.print(Text(lines[0], style="bold red" if is_refused else "bold green"))
    for line in lines[1:]:
        console.print(Text(line))


def _write(table: Table, out: IO[str]) -> None:
    print(file=out)
    write_table(table, out)


def _write_cards(cards: Sequence[CardText], out: IO[str]) -> None:
    from rich.text import Text

    console = _console(out)
    console.print()
    head = Text("CARDS", style="bold")
    for part in LEGEND:
        head.append(_INDENT).append(part.cell, part.style)
        head.append(f" {part.name.lower()}", "not bold")
    console.print(head, soft_wrap=True)
    for card in cards:
        model = f", {card.model}" if card.model else ""
        console.print(
            Text(f"{card.worker_id} {card.device_id}: {size(card.total_bytes)}{model}"),
            soft_wrap=True,
        )
        console.print(_bar_line(card, console.width), soft_wrap=True)
        for line in _entry_lines(card):
            console.print(line, soft_wrap=True)


def _bar_line(card: CardText, columns: int) -> Text:
    from rich.text import Text

    width = max(min(columns - len(_INDENT) - _PERCENT, _WIDEST_BAR), 4)
    need_bytes = card.held_bytes + card.new_bytes
    line = Text(_INDENT)
    for piece in bar(card.held_bytes, card.new_bytes, card.total_bytes, width):
        line.append(piece.part.cell * piece.cells, piece.part.style)
    return line.append(f" {100 * need_bytes / card.total_bytes:.0f} %")


def _entry_lines(card: CardText) -> list[Text]:
    from rich.text import Text

    entries = _summed_up(card.entries)
    widest = max(len(size(entry.memory_bytes)) for entry in entries)
    lines = []
    for entry in entries:
        line = Text(_INDENT)
        line.append(entry.what.ljust(4), _STYLES[entry.what])
        line.append(f"{_INDENT}{size(entry.memory_bytes):>{widest}}{_INDENT}{entry.note}")
        lines.append(line)
    return lines


def _summed_up(entries: Sequence[Entry]) -> list[Entry]:
    kept: list[Entry] = []
    for what in _STYLES:
        alike = [entry for entry in entries if entry.what == what]
        if len(alike) > _MOST_ALIKE:
            alike.sort(key=lambda entry: -entry.memory_bytes)
            rest = alike[_MOST_ALIKE - 1 :]
            rest_bytes = sum(entry.memory_bytes for entry in rest)
            alike[_MOST_ALIKE - 1 :] = [Entry(what, rest_bytes, f"{len(rest)} others")]
        kept += alike
    return kept


def _console(out: IO[str]) -> Console:
    from rich.console import Console

    return Console(file=out, highlight=False)
