"""What the stages of `shared_card_stages` wrote down about one card."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

Window = tuple[float, float]


def windows(card: Path, phase: str) -> list[Window]:
    """Return when each stage of a card was in a phase: one window a stage."""
    found = []
    for trace in card.glob("trace-*"):
        for name, began, ended in map(str.split, trace.read_text().splitlines()):
            if name == phase:
                found.append((float(began), float(ended)))
    return sorted(found)


def overlaps(first: list[Window], second: list[Window] | None = None) -> int:
    """Count the pairs of windows that overlap: within one list, or of one with the other."""
    pairs = combinations(first, 2) if second is None else ((a, b) for a in first for b in second)
    return sum(a[0] < b[1] and b[0] < a[1] for a, b in pairs)
