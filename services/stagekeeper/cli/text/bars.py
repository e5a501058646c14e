"""Bars: how much of a card is held, would be new, and is free, in one line of cells.

Decided here: how bytes become cells. Whatever is there has at least one cell, so that nothing that
is held looks free. Invariant: the cells of a bar are exactly as many as it was asked to have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Part(Enum):
    """What a piece of a bar stands for: its cell, and rich's style for it."""

    HELD = ("▓", "cyan")
    NEW = ("█", "green")
    FREE = ("░", "dim")
    OVER = ("█", "bold red")
    LIMIT = ("┃", "bold red")

    def __init__(self, cell: str, style: str) -> None:
        self.cell = cell
        self.style = style


LEGEND: Final = (Part.HELD, Part.NEW, Part.FREE)


@dataclass(frozen=True, slots=True)
class Piece:
    """So many cells of one part."""

    part: Part
    cells: int


def bar(held_bytes: int, new_bytes: int, total_bytes: int, width: int) -> list[Piece]:
    """Draw what is wanted of a card, with at least 4 cells.

    Where it is more than there is, the bar is as long as what is wanted, and the card's end is
    marked in it: what is beyond that is OVER.
    """
    need_bytes = held_bytes + new_bytes
    if need_bytes > total_bytes:
        inside = min(max(round(total_bytes / need_bytes * (width - 1)), 1), width - 2)
        held = _cells(min(held_bytes, total_bytes), total_bytes, inside)
        pieces = [
            Piece(Part.HELD, held),
            Piece(Part.NEW, inside - held),
            Piece(Part.LIMIT, 1),
            Piece(Part.OVER, width - 1 - inside),
        ]
    else:
        free = 1 if need_bytes < total_bytes else 0
        held = min(_cells(held_bytes, total_bytes, width), width - free - (1 if new_bytes else 0))
        new = min(_cells(new_bytes, total_bytes, width), width - free - held)
        pieces = [
            Piece(Part.HELD, held),
            Piece(Part.NEW, new),
            Piece(Part.FREE, width - held - new),
        ]
    return [piece for piece in pieces if piece.cells]


def _cells(part_bytes: int, total_bytes: int, width: int) -> int:
    if part_bytes == 0 or total_bytes == 0:
        return 0
    return max(round(part_bytes / total_bytes * width), 1)
