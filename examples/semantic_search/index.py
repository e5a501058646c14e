"""Stage `index`: a vector in, the passages nearest to it out.

Decided here: what the cache's key is made of, and how the nearest are found (all of them compared:
550 rows are one small matrix product). Not decided here: the corpus (passages), the cache's rules
(vector_cache). Invariant: row i of the vectors belongs to passage i; the key holds a digest of the
passages, so that vectors of another corpus are never opened.

The vectors are made here, with a model of its own that is dropped afterwards, and not by the
sibling `encoder`: siblings answer once the whole replica is READY, and this stage is a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stagekeeper.actor import endpoint
from stagekeeper.stage import TorchStage

from .minilm import DIMENSIONS, MiniLM, weights_version
from .passages import Passage, corpus_digest, python_reference
from .vector_cache import Progress, VectorCache

_RECIPE = 1
"""Raised when the same text gets another vector by a change of this example's own code."""


class Index(TorchStage):
    """Every passage of the Python reference and its vector.

    Args:
        cache_dir: where the vectors are kept; by default in the worker's own cache, which its
            replicas share. Replicas of several workers on one machine share what is named here.
    """

    def __init__(self, cache_dir: str | None = None) -> None:
        self._cache_dir = cache_dir
        self._passages: Sequence[Passage] = ()
        self._vectors = torch.empty(0, DIMENSIONS)

    def load(self) -> None:
        """Map the vectors; build them first where nobody has: about half a minute on one core."""
        self._passages = python_reference()
        cache = VectorCache(
            self._cache_folder(),
            f"{weights_version()}-{_RECIPE}-{corpus_digest(self._passages)[:16]}",
            rows=len(self._passages),
            columns=DIMENSIONS,
        )
        self._vectors = cache.load_or_build(self._build, self.progress).to(self.device)
        self.progress(len(self._passages), len(self._passages), "passages indexed")

    def _cache_folder(self) -> Path:
        if self._cache_dir is not None:
            return Path(self._cache_dir).expanduser()
        return self.context.cache_dir / "semantic_search"

    def _build(self, progress: Progress) -> torch.Tensor:
        progress(0, len(self._passages), "encoding the passages")
        return MiniLM(device=self.device).encode(
            [passage.reading for passage in self._passages],
            on_batch=lambda done, total: progress(done, total, "encoding the passages"),
        )

    @endpoint(idempotent=True)
    def nearest(self, vector: Any, k: int = 10) -> list[dict[str, str | float]]:
        """Return the `k` passages nearest in meaning, the nearest first; all when there are fewer.

        Args:
            vector: 384 numbers, of length 1: a tensor or a list.
            k: at least 1.

        Returns:
            For each passage its id, topic, title, text (`passage`) and `score`, the cosine.

        Raises:
            ValueError: `vector` has another shape, or `k` is below 1.
        """
        question = torch.as_tensor(vector, dtype=torch.float32, device=self._vectors.device)
        if question.shape != (DIMENSIONS,):
            raise ValueError(f"vector has shape {tuple(question.shape)}, not ({DIMENSIONS},)")
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        scores, rows = (self._vectors @ question).topk(min(k, len(self._passages)))
        return [
            _found(self._passages[row], score)
            for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def _found(passage: Passage, score: float) -> dict[str, str | float]:
    return {
        "id": passage.id,
        "topic": passage.topic,
        "title": passage.title,
        "passage": passage.text,
        "score": score,
    }
