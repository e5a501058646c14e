"""Stage `encoder`: texts in, vectors out.

Decided here: how many batches may be under way at once, from what the budget leaves. Not decided
here: the model's arithmetic (minilm). Invariant: whatever the number of callers, no more batches
run at once than were allowed for in ALLOCATE; the other callers wait in line.
"""

from __future__ import annotations

import os
import threading

import torch

from stagekeeper.actor import endpoint
from stagekeeper.stage import TorchStage

from .minilm import MAX_TOKENS, MiniLM, activation_bytes


class Encoder(TorchStage):
    """all-MiniLM-L6-v2 on this stage's first card.

    Args:
        batch_size: texts that go through the model together.
    """

    def __init__(self, batch_size: int = 8) -> None:
        self._batch_size = batch_size
        self._turns = threading.Semaphore(1)
        self._model: MiniLM | None = None

    def load(self) -> None:
        self.progress(0, 1, "loading the weights")
        self._model = MiniLM(device=self.device)
        self.progress(1, 1, "weights loaded")

    def measure(self) -> None:
        self.encode(["token " * MAX_TOKENS] * self._batch_size)

    def allocate(self, budget_bytes: int) -> None:
        """Turn what the peak of one batch left over into turns for more; one is always there.

        More batches at once than cores only wait for each other.
        """
        more = budget_bytes // activation_bytes(self._batch_size)
        cores = len(os.sched_getaffinity(0))
        self._turns = threading.Semaphore(max(1, min(1 + more, cores)))

    def capture(self) -> None:
        """Run a short text: what libraries set up at their first use is not the first caller's."""
        self.encode(["warm"])

    @endpoint(idempotent=True)
    def encode(self, texts: list[str]) -> torch.Tensor:
        """Return texts × 384, float32, in the order of `texts`; each row has length 1.

        In JSON the rows come as lists. Of each text the first 256 word pieces count.

        Raises:
            TypeError: `texts` is not a list of strings.
        """
        _check_texts(texts)
        if self._model is None:
            raise RuntimeError("the encoder has not been loaded")
        with self._turns:
            return self._model.encode(
                texts,
                batch_size=self._batch_size,
                on_batch=lambda done, total: self.progress(done, total, "texts encoded"),
            )


def _check_texts(texts: object) -> None:
    """Refuse what callers may send all the same; a lone string would be taken letter by letter."""
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"texts must be a list of strings, not {texts!r:.80}")
