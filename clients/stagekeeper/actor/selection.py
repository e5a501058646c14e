"""What `mesh[…]` means: which ranks of a mesh, or of a selection of one, are meant.

Decided here: the meaning of numbers, slices and lists of numbers. Invariant: a selection has at
least one rank, in ascending order, none of them twice; ranks keep the numbers that they have in the
whole mesh.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

Index = SupportsIndex | slice | Iterable[SupportsIndex]


def selected_ranks(ranks: Sequence[int], index: Index) -> tuple[int, ...]:
    """Return the ranks that `index` selects of `ranks`.

    Positions count from 0 within `ranks`, from the end where they are negative, as in any sequence:
    of a selection of the ranks 2 and 3, `[0]` is rank 2.

    Args:
        ranks: of the mesh or selection, ascending.
        index: one position; a slice, which is cut to what there is; or several positions, in any
            order.

    Raises:
        IndexError: there is no such position, or nothing is selected.
        TypeError: it is none of these.
        ValueError: a position is named twice.
    """
    if isinstance(index, slice):
        selected = sorted(ranks[index])
        if not selected:
            raise IndexError(f"{_text(index)} selects none of {_size(ranks)}")
        return tuple(selected)
    if isinstance(index, Iterable) and not isinstance(index, (str, bytes)):
        wanted = list(index)
        positions = [_position(ranks, one) for one in wanted]
        if not positions:
            raise IndexError(f"an empty list selects none of {_size(ranks)}")
        if len(set(positions)) < len(positions):
            raise ValueError(f"{wanted} names a rank twice")
        return tuple(ranks[position] for position in sorted(positions))
    return (ranks[_position(ranks, index)],)


def _position(ranks: Sequence[int], index: object) -> int:
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        raise TypeError(
            f"ranks are selected by a number, a slice or a list of numbers, not by {index!r:.80}"
        )
    position = operator.index(index)
    if not -len(ranks) <= position < len(ranks):
        raise IndexError(f"{position} is out of range for {_size(ranks)}{_hint(ranks, position)}")
    return position % len(ranks)


def _hint(ranks: Sequence[int], position: int) -> str:
    if position not in ranks:
        return ""
    return f": selections count from 0, so rank {position} is [{ranks.index(position)}] here"


def _size(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"a mesh of size 1 (rank {ranks[0]})"
    if tuple(ranks) == tuple(range(len(ranks))):
        return f"a mesh of size {len(ranks)}"
    return f"a selection of size {len(ranks)} (ranks {', '.join(map(str, ranks))})"


def _text(index: slice) -> str:
    parts = [index.start, index.stop] + ([] if index.step is None else [index.step])
    return f"[{':'.join('' if part is None else str(part) for part in parts)}]"
