"""A description drawn: wrapped and coloured in a terminal, whole lines in a pipe.

Decided here: how it looks. Invariant: a pipe loses nothing that a terminal shows.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import IO, Final

from stagekeeper.cli.text import events as event_text
from stagekeeper.cli.text.describe import UNBROKEN, Block, Said
from stagekeeper.cli.text.lines import visible
from stagekeeper.cli.text.tables import plain_lines, styled, terminal_lines
from stagekeeper.v1 import deployment_service_pb2 as pb2

_INDENT: Final = "  "


def write_description(
    blocks: Sequence[Block],
    events: Sequence[pb2.Event],
    now: float,
    file: IO[str] | None = None,
) -> None:
    """Write all blocks, and the last events, to `file` (stdout when none is given)."""
    out = file or sys.stdout
    if not out.isatty():
        for line in description_lines(blocks, events, now, None):
            print(line, file=out)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out)
    for line in description_lines(blocks, events, now, console.width):
        is_quoted = line.lstrip().startswith("|")
        console.print(Text(line, style="dim") if is_quoted else styled(line), soft_wrap=True)


def description_lines(
    blocks: Sequence[Block], events: Sequence[pb2.Event], now: float, columns: int | None
) -> list[str]:
    """Lay a description out for a terminal of so many columns; None for a pipe."""
    lines: list[str] = []
    for block in blocks:
        lines += [*([""] if lines else []), *_block_lines(block, columns)]
    if events:
        lines += ["", "last events"]
    for event in events:
        told = (
            [event_text.plain_line(event)]
            if columns is None
            else event_text.terminal_lines(event, now, columns - len(_INDENT))
        )
        lines += [_INDENT + line for line in told]
    return [visible(line.replace(UNBROKEN, " ")) for line in lines]


def _block_lines(block: Block, columns: int | None) -> list[str]:
    lines = [block.headline]
    for said in block.said:
        lines += _said_lines(said, columns)
    if block.table is not None:
        table = block.table
        drawn = (
            plain_lines(table) if columns is None else terminal_lines(table, columns - len(_INDENT))
        )
        lines += [_INDENT + line for line in drawn]
    return lines + [_INDENT + line for line in block.quoted]


def _said_lines(said: Said, columns: int | None) -> list[str]:
    head = f"{_INDENT}{said.label + ':':<5} "
    text = said.text.replace("\n", " ")
    if columns is None:
        return [head + text]
    first, *rest = textwrap.wrap(text, max(columns - len(head), 20), break_long_words=False) or [""]
    return [head + first, *(" " * len(head) + line for line in rest)]
