"""Stage `ranker`, where a question comes in: it asks `encoder`, then `index`, then orders.

Decided here: how many candidates are asked for. Not decided here: how they are ordered (ranking).
Invariant: this stage holds no model and imports no torch; it is small and is up at once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stagekeeper.actor import endpoint
from stagekeeper.stage import Stage

from .passages import python_reference
from .ranking import Candidate, WordWeights


class Ranker(Stage):
    """Answers questions with passages.

    Args:
        word_weight: 0 to 1, what the words of the question count against its meaning.
        candidates_per_answer: passages asked of the index for each one that is returned.
    """

    def __init__(self, word_weight: float = 0.2, candidates_per_answer: int = 4) -> None:
        if not 0 <= word_weight <= 1:
            raise ValueError(f"word_weight must be from 0 to 1, not {word_weight}")
        if candidates_per_answer < 1:
            raise ValueError(
                f"candidates_per_answer must be at least 1, not {candidates_per_answer}"
            )
        self._word_weight = word_weight
        self._candidates_per_answer = candidates_per_answer
        self._words = WordWeights([])

    def load(self) -> None:
        self._words = WordWeights(passage.reading for passage in python_reference())

    @endpoint(idempotent=True)
    async def search(self, question: str, k: int = 3) -> list[dict[str, Any]]:
        """Return the `k` passages that answer `question` best, the best first.

        Returns:
            For each passage its id, topic, title, text (`passage`) and `score`, at most 1.

        Raises:
            ValueError: `question` is empty, or `k` is below 1.
        """
        if not question.strip():
            raise ValueError("the question is empty")
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        vectors = await self.siblings["encoder"].encode.call_one([question])
        found = await self.siblings["index"].nearest.call_one(
            vectors[0], k * self._candidates_per_answer
        )
        candidates = [Candidate(**passage) for passage in found]
        ranked = self._words.rank(question, candidates, word_weight=self._word_weight)
        return [asdict(candidate) for candidate in ranked[:k]]
