from __future__ import annotations

import pytest

from stagekeeper.actor.value_mesh import ValueMesh


def test_answers_are_read_by_rank_in_order_of_rank():
    mesh = ValueMesh({3: "c", 1: "a"})
    assert mesh[1] == "a"
    assert mesh[3] == "c"
    assert list(mesh) == [1, 3]
    assert list(mesh.values()) == ["a", "c"]
    assert list(mesh.items()) == [(1, "a"), (3, "c")]
    assert len(mesh) == 2
    assert 1 in mesh and 2 not in mesh
    assert mesh.get(2) is None


def test_rank_without_an_answer_is_an_error_that_lists_those_with_one():
    with pytest.raises(KeyError, match="no answer of rank 0; there are answers of: 1, 3"):
        ValueMesh({3: "c", 1: "a"})[0]


def test_equality_is_that_of_ranks_and_values():
    assert ValueMesh({0: 1, 1: 2}) == ValueMesh({1: 2, 0: 1})
    assert ValueMesh({0: 1, 1: 2}) == {0: 1, 1: 2}
    assert ValueMesh({0: 1}) != ValueMesh({1: 1})
    assert ValueMesh({0: 1}) != object()


def test_it_never_changes():
    values = {0: 1}
    mesh = ValueMesh(values)
    values[0] = 2
    assert mesh[0] == 1
    with pytest.raises(TypeError):
        mesh[0] = 2  # type: ignore[index]
    with pytest.raises(AttributeError):
        mesh.more = 1  # type: ignore[attr-defined]


def test_it_shows_its_values_and_of_many_the_first():
    assert repr(ValueMesh({0: "a", 2: "b"})) == "ValueMesh(0: 'a', 2: 'b')"
    assert repr(ValueMesh(dict.fromkeys(range(100), 1))) == (
        "ValueMesh(0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, … 100 ranks in all)"
    )
    assert repr(ValueMesh(dict.fromkeys(range(8), 1))).endswith("7: 1)")
