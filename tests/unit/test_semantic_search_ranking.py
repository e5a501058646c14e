"""How candidates are ordered: by meaning, and by the rare words shared with the question."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.semantic_search.ranking import Candidate, WordWeights

TEXTS = ["the cat sat", "the dog sat", "the dog ran", "the nonlocal statement"]


def _candidate(id: str, score: float, passage: str = "") -> Candidate:
    return Candidate(id=id, topic="topic", title="Title", passage=passage, score=score)


def test_text_with_all_words_of_the_question_overlaps_fully_and_one_with_none_not_at_all() -> None:
    weights = WordWeights(TEXTS)
    assert weights.overlap("dog sat", "the dog sat there") == pytest.approx(1.0)
    assert weights.overlap("dog sat", "nothing of it") == 0.0


def test_rare_word_weighs_more_than_a_common_one() -> None:
    weights = WordWeights(TEXTS)
    assert weights.overlap("the nonlocal", "nonlocal") > weights.overlap("the nonlocal", "the") > 0


def test_words_that_no_text_holds_count_for_nothing() -> None:
    weights = WordWeights(TEXTS)
    assert weights.overlap("walrus dog", "dog") == pytest.approx(1.0)
    assert weights.overlap("walrus", "walrus") == 0.0


def test_plural_and_case_are_folded() -> None:
    weights = WordWeights(["an exception is raised", "a class"])
    assert weights.overlap("Exceptions", "the exception") == pytest.approx(1.0)
    assert weights.overlap("class", "clas") == 0.0


def test_shared_word_lifts_a_candidate_over_a_nearer_one() -> None:
    weights = WordWeights(TEXTS)
    near, holds_it = _candidate("a", 0.5, "scopes"), _candidate("b", 0.45, "nonlocal")
    by_meaning = weights.rank("nonlocal", [near, holds_it], word_weight=0.0)
    blended = weights.rank("nonlocal", [near, holds_it], word_weight=0.2)
    assert [found.id for found in by_meaning] == ["a", "b"]
    assert [found.id for found in blended] == ["b", "a"]
    assert blended[0].score == pytest.approx(0.8 * 0.45 + 0.2)


def test_equal_scores_are_ordered_by_id() -> None:
    ranked = WordWeights(TEXTS).rank(
        "cat", [_candidate("b", 0.5), _candidate("a", 0.5)], word_weight=0.2
    )
    assert [found.id for found in ranked] == ["a", "b"]


@given(
    st.lists(st.text("ab ", max_size=12), max_size=6),
    st.text("ab ", max_size=12),
    st.text("ab ", max_size=12),
)
def test_overlap_is_always_from_0_to_1(texts: list[str], question: str, text: str) -> None:
    assert 0 <= WordWeights(texts).overlap(question, text) <= 1 + 1e-9
