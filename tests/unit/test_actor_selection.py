from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekeeper.actor.selection import selected_ranks

WHOLE = (0, 1, 2, 3)
PART = (2, 5, 7)


@pytest.mark.parametrize(
    ("ranks", "index", "selected"),
    [
        (WHOLE, 1, (1,)),
        (WHOLE, -1, (3,)),
        (WHOLE, slice(0, 2), (0, 1)),
        (WHOLE, slice(2, None), (2, 3)),
        (WHOLE, slice(2, 100), (2, 3)),
        (WHOLE, slice(None, None, 2), (0, 2)),
        (WHOLE, slice(None, None, -1), WHOLE),
        (WHOLE, [0, 3], (0, 3)),
        (WHOLE, [3, 0], (0, 3)),
        (WHOLE, (1, -1), (1, 3)),
        (WHOLE, frozenset({2, 1}), (1, 2)),
        (WHOLE, range(1, 3), (1, 2)),
        (WHOLE, (number for number in [2]), (2,)),
        (WHOLE, np.int64(2), (2,)),
        (WHOLE, np.array([1, 2]), (1, 2)),
        (PART, 0, (2,)),
        (PART, slice(1, None), (5, 7)),
        (PART, [-1, 0], (2, 7)),
    ],
)
def test_selection(ranks, index, selected):
    assert selected_ranks(ranks, index) == selected


@pytest.mark.parametrize(
    ("ranks", "index", "said"),
    [
        (WHOLE, 4, "^4 is out of range for a mesh of size 4$"),
        (WHOLE, -5, "^-5 is out of range for a mesh of size 4$"),
        (WHOLE, [0, 4], "^4 is out of range for a mesh of size 4$"),
        (WHOLE, [], "^an empty list selects none of a mesh of size 4$"),
        (WHOLE, slice(4, None), r"^\[4:\] selects none of a mesh of size 4$"),
        (WHOLE, slice(3, 1, 2), r"^\[3:1:2\] selects none of"),
        ((7,), 1, r"^1 is out of range for a mesh of size 1 \(rank 7\)$"),
        (PART, 3, r"^3 is out of range for a selection of size 3 \(ranks 2, 5, 7\)$"),
        (PART, 5, r"selections count from 0, so rank 5 is \[1\] here$"),
    ],
)
def test_selection_of_what_is_not_there_names_the_size(ranks, index, said):
    with pytest.raises(IndexError, match=said):
        selected_ranks(ranks, index)


def test_rank_named_twice_is_refused():
    with pytest.raises(ValueError, match=r"\[0, -4\] names a rank twice"):
        selected_ranks(WHOLE, [0, -4])


@pytest.mark.parametrize("index", ["0", 1.0, None, True, [True], ["a"], b"a"])
def test_what_is_no_number_is_refused(index):
    with pytest.raises(
        TypeError, match="selected by a number, a slice or a list of numbers, not by"
    ):
        selected_ranks(WHOLE, index)


@given(
    st.lists(st.integers(0, 50), min_size=1, unique=True).map(sorted),
    st.integers(-60, 60) | st.slices(60) | st.lists(st.integers(-60, 60), max_size=5),
)
def test_selections_agree_with_those_of_a_list(ranks, index):
    if isinstance(index, list):
        inside = [position for position in index if -len(ranks) <= position < len(ranks)]
        expected = sorted(ranks[position] for position in inside)
        if len(inside) < len(index) or len(set(expected)) < len(expected):
            expected = []
    elif isinstance(index, int):
        expected = [ranks[index]] if -len(ranks) <= index < len(ranks) else []
    else:
        expected = sorted(ranks[index])
    if not expected:
        with pytest.raises((IndexError, ValueError)):
            selected_ranks(ranks, index)
    else:
        assert selected_ranks(ranks, index) == tuple(expected)
