"""The three stages as plain objects: each alone, and together on a few topics of the reference."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from examples.semantic_search import index as index_module
from examples.semantic_search.encoder import Encoder
from examples.semantic_search.index import Index
from examples.semantic_search.minilm import DIMENSIONS, MiniLM, activation_bytes
from examples.semantic_search.passages import Passage, cut_topics
from examples.semantic_search.ranker import Ranker
from stagekeeper.stage import Stage, StageContext

WAIT_S = 30
TOPICS = ("assert", "break", "del", "global", "lambda", "nonlocal", "pass", "while", "yield")


class LocalEndpoint:
    """Stands in for an endpoint of a sibling; what the wire would do to values is not played."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class LocalSibling:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> LocalEndpoint:
        return LocalEndpoint(getattr(self._stage, name))


class CountingModel:
    """Notes the most calls that were inside at once; each leaves once `crowd` are in, or alone."""

    def __init__(self, crowd: int) -> None:
        self.most_at_once = 0
        self._at_once = 0
        self._crowd = crowd
        self._change = threading.Condition()

    def encode(self, texts: list[str], **_: Any) -> torch.Tensor:
        with self._change:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._change.notify_all()
            assert self._change.wait_for(lambda: self.most_at_once >= self._crowd, WAIT_S)
            self._at_once -= 1
        return torch.empty(len(texts), DIMENSIONS)


def _context(folder: Path) -> StageContext:
    return StageContext(
        deployment="semantic-search",
        replica_index=0,
        stage_id=0,
        stage_name="any",
        shard_index=0,
        shard_count=1,
        devices=(),
        budget_bytes=0,
        cache_dir=folder / "cache",
        run_dir=folder / "run",
    )


def _hosted(stage: Stage, folder: Path) -> Any:
    stage.context = _context(folder)
    return stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("semantic-search")


@pytest.fixture(scope="module")
def corpus() -> list[Passage]:
    return cut_topics({name: topics[name] for name in TOPICS})


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    stage: Encoder = _hosted(Encoder(batch_size=2), folder)
    stage.load()
    stage.measure()
    stage.allocate(0)
    stage.capture()
    return stage


@pytest.fixture
def small_corpus(corpus: list[Passage], monkeypatch: pytest.MonkeyPatch) -> list[Passage]:
    monkeypatch.setattr(index_module, "python_reference", lambda: corpus)
    return corpus


@pytest.fixture
def index(folder: Path, small_corpus: list[Passage]) -> Index:
    stage: Index = _hosted(Index(), folder)
    stage.load()
    return stage


@pytest.fixture
def ranker(encoder: Encoder, index: Index) -> Ranker:
    stage = Ranker()
    stage.siblings = {"encoder": LocalSibling(encoder), "index": LocalSibling(index)}
    stage.load()
    return stage


# --- encoder


def test_encoder_gives_one_row_of_384_a_text(encoder: Encoder) -> None:
    vectors = encoder.encode(["one", "two", "three"])
    assert (vectors.dtype, vectors.shape) == (torch.float32, (3, DIMENSIONS))


@pytest.mark.parametrize("texts", ["a lone string", [1, 2], None, {"texts": "a"}])
def test_encoder_refuses_what_is_not_a_list_of_strings(encoder: Encoder, texts: Any) -> None:
    with pytest.raises(TypeError, match="list of strings"):
        encoder.encode(texts)


@pytest.mark.parametrize(
    ("batches_left", "cores", "at_once"), [(0, 8, 1), (0.99, 8, 1), (2, 8, 3), (100, 2, 2)]
)
def test_encoder_runs_as_many_batches_at_once_as_budget_and_cores_allow(
    monkeypatch: pytest.MonkeyPatch, batches_left: float, cores: int, at_once: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    stage = Encoder(batch_size=4)
    model = CountingModel(crowd=at_once)
    monkeypatch.setattr(stage, "_model", model)
    stage.allocate(int(batches_left * activation_bytes(4)))
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(stage.encode, ["text"]) for _ in range(6)]:
            done.result(WAIT_S)
    assert model.most_at_once == at_once


# --- index


def test_index_finds_a_passage_by_its_own_vector(
    index: Index, corpus: list[Passage], encoder: Encoder
) -> None:
    (vector,) = encoder.encode([corpus[3].reading])
    first, second = index.nearest(vector, k=2)
    assert first["id"] == corpus[3].id
    assert first["passage"] == corpus[3].text
    assert first["score"] == pytest.approx(1.0, abs=1e-5)
    assert float(second["score"]) < float(first["score"])


def test_index_takes_a_vector_as_list_or_tensor(index: Index, encoder: Encoder) -> None:
    (vector,) = encoder.encode(["jump out of a loop"])
    assert index.nearest(vector.tolist(), k=3) == index.nearest(vector, k=3)


def test_index_returns_all_when_more_are_asked_for(index: Index, corpus: list[Passage]) -> None:
    assert len(index.nearest([1.0] + [0.0] * 383, k=10_000)) == len(corpus)


def test_index_refuses_a_vector_of_another_length_and_no_passages(index: Index) -> None:
    with pytest.raises(ValueError, match=r"\(3,\), not \(384,\)"):
        index.nearest([1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="at least 1"):
        index.nearest([1.0] + [0.0] * 383, k=0)


def test_second_index_on_the_same_cache_encodes_nothing(
    index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> MiniLM:
        raise AssertionError("the cache should have been enough")

    monkeypatch.setattr(index_module, "MiniLM", refuse)
    again: Index = _hosted(Index(), folder)
    again.load()
    vector = [1.0] + [0.0] * 383
    assert again.nearest(vector) == index.nearest(vector)


def test_another_corpus_gets_vectors_of_its_own(
    index: Index, corpus: list[Passage], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "python_reference", lambda: list(reversed(corpus)))
    other: Index = _hosted(Index(), folder)
    other.load()
    vector = [1.0] + [0.0] * 383
    assert [found["id"] for found in other.nearest(vector)] == [
        found["id"] for found in index.nearest(vector)
    ]


def test_cache_dir_of_the_spec_is_used(small_corpus: list[Passage], tmp_path: Path) -> None:
    stage: Index = _hosted(Index(cache_dir=str(tmp_path / "mine")), tmp_path)
    stage.load()
    assert list((tmp_path / "mine").glob("*.safetensors"))
    assert not (tmp_path / "cache").exists()


def test_build_reports_every_step_up_to_the_last(
    small_corpus: list[Passage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage: Index = _hosted(Index(), tmp_path)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(stage, "progress", lambda done, total, note: seen.append((done, total)))
    stage.load()
    total = len(small_corpus)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- ranker


@pytest.mark.parametrize(
    ("question", "topic"),
    [
        ("How do I write a small function without a name?", "lambda"),
        ("How do I leave a loop early?", "break"),
        ("How do I rebind a variable of the enclosing function?", "nonlocal"),
        ("a statement that does nothing", "pass"),
    ],
)
async def test_question_is_answered_by_the_topic_it_is_about(
    ranker: Ranker, question: str, topic: str
) -> None:
    answers = await ranker.search(question, k=3)
    assert answers[0]["topic"] == topic
    assert len(answers) == 3
    assert set(answers[0]) == {"id", "topic", "title", "passage", "score"}


@pytest.mark.parametrize(("question", "k"), [("  ", 3), ("what?", 0)])
async def test_ranker_refuses_an_empty_question_and_no_answers(
    ranker: Ranker, question: str, k: int
) -> None:
    with pytest.raises(ValueError, match=r"empty|at least 1"):
        await ranker.search(question, k)


@pytest.mark.parametrize(
    "arguments", [{"word_weight": 1.5}, {"word_weight": -0.1}, {"candidates_per_answer": 0}]
)
def test_ranker_refuses_settings_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Ranker(**arguments)
