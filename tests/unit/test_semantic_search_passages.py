"""How the reference is cut: the same everywhere, at headings and paragraphs, each text once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from examples.semantic_search.passages import (
    MAX_TOKENS,
    corpus_digest,
    cut_topics,
    python_reference,
)

ROOT = Path(__file__).parents[2]
HEADING = "Lambdas\n*******\n\n"


def _paragraph(word: str, count: int) -> str:
    return " ".join([word] * count)


def test_reference_is_cut_alike_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from examples.semantic_search.passages import *; print(corpus_digest(python_reference()))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {corpus_digest(python_reference())}


def test_order_of_the_topics_does_not_matter() -> None:
    topics = {"b": HEADING + "one", "a": "One\n***\n\ntwo", "c": HEADING + "one"}
    assert cut_topics(topics) == cut_topics(dict(reversed(topics.items())))


def test_reference_has_ids_titles_and_texts_without_repeats() -> None:
    passages = python_reference()
    assert len(passages) > 300
    assert len({passage.id for passage in passages}) == len(passages)
    assert len({(passage.title, passage.text) for passage in passages}) == len(passages)
    assert all(passage.title and passage.text.strip() for passage in passages)


def test_no_word_of_a_topic_is_lost() -> None:
    from pydoc_data.topics import topics

    for name in ("compound", "lambda", "operator-summary"):
        alone = cut_topics({name: topics[name]})
        found = " ".join(f"{p.title} {p.text}" for p in alone).split()
        assert set(topics[name].split()) - set(found) <= _underlines(topics[name])


def test_paragraphs_are_joined_up_to_the_limit_and_not_over_it() -> None:
    half = _paragraph("a", MAX_TOKENS // 2)
    rest = _paragraph("b", MAX_TOKENS - MAX_TOKENS // 2)
    fits = cut_topics({"lambda": f"{HEADING}{half}\n\n{rest}"})
    over = cut_topics({"lambda": f"{HEADING}{half}\n\n{rest} b"})
    assert [p.text for p in fits] == [f"{half}\n\n{rest}"]
    assert [p.text for p in over] == [half, f"{rest} b"]


def test_short_rest_of_a_section_joins_the_passage_before_it() -> None:
    full = _paragraph("a", MAX_TOKENS)
    (passage,) = cut_topics({"lambda": f"{HEADING}{full}\n\nand so on"})
    assert passage.text == f"{full}\n\nand so on"


def test_paragraph_over_the_limit_is_cut_between_lines() -> None:
    first, second = _paragraph("a", MAX_TOKENS - 1), _paragraph("b", MAX_TOKENS - 1)
    passages = cut_topics({"lambda": f"{HEADING}{first}\n{second}"})
    assert [p.text for p in passages] == [first, second]


def test_heading_starts_a_passage_and_names_it() -> None:
    text = f"{HEADING}above\n\n\nMore of them\n============\n\nbelow"
    assert [(p.title, p.text) for p in cut_topics({"lambda": text})] == [
        ("Lambdas", "above"),
        ("More of them", "below"),
    ]


def test_text_in_two_topics_is_kept_under_the_shorter_one() -> None:
    section = f"{HEADING}the same words"
    passages = cut_topics({"all": f"Everything\n**********\n\nfirst\n\n{section}", "one": section})
    assert [(p.topic, p.text) for p in passages] == [("all", "first"), ("one", "the same words")]


def test_id_survives_an_edit_elsewhere_in_the_topic() -> None:
    full = _paragraph("a", MAX_TOKENS)
    before = cut_topics({"lambda": f"{HEADING}{full}\n\n{full} last"})
    after = cut_topics({"lambda": f"{HEADING}{full} new\n\n{full} last"})
    assert before[0].id != after[0].id
    assert before[-1].id == after[-1].id


def test_reading_is_one_line_without_table_rules() -> None:
    (passage,) = cut_topics({"lambda": f"{HEADING}+----+----+\n| a  | b  |\n+====+====+"})
    assert passage.reading == "Lambdas. | a | b |"


@given(st.dictionaries(st.text("abc", min_size=1), st.text("ab *=-\n\t.", max_size=400)))
def test_any_topics_are_cut_into_passages_that_say_something(topics: dict[str, str]) -> None:
    passages = cut_topics(topics)
    assert all(passage.text.strip() for passage in passages)
    assert [p.topic for p in passages] == sorted(p.topic for p in passages)


def _underlines(text: str) -> set[str]:
    return {word for word in text.split() if len(set(word)) == 1}
