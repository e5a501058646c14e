"""`ValueMesh`: what a call to several ranks answered, by rank.

Decided here: what callers may do with the answers. Invariant: one value per rank that was called,
in ascending order of rank, and it never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

Value = TypeVar("Value", covariant=True)

_MOST_SHOWN = 8


class ValueMesh(Mapping[int, Value]):
    """The answers of several ranks: a read-only mapping of rank to value, in order of rank.

    Ranks keep the numbers that they have in the whole mesh: what `workers[2:4]` answered is read as
    `answers[2]` and `answers[3]`. As with any mapping, iteration yields the ranks; `values()` has
    the answers alone. Equal to any mapping with the same ranks and values.

    Args:
        values: by rank; copied.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, Value]) -> None:
        self._values = {rank: values[rank] for rank in sorted(values)}

    def __getitem__(self, rank: int) -> Value:
        try:
            return self._values[rank]
        except KeyError:
            ranks = ", ".join(map(str, self._values))
            raise KeyError(f"no answer of rank {rank!r}; there are answers of: {ranks}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, rank: object) -> bool:
        return rank in self._values

    def __repr__(self) -> str:
        shown = [f"{rank}: {value!r:.200}" for rank, value in self._values.items()]
        if len(shown) > _MOST_SHOWN:
            shown[_MOST_SHOWN - 1 :] = [f"… {len(shown)} ranks in all"]
        return f"ValueMesh({', '.join(shown)})"
