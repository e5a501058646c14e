"""Order candidates by what they mean and by which words of the question they hold.

Decided here: how rare a word is, how the two scores are blended. Not decided here: where candidates
come from. Invariant: with weight 0 the order is the one of the cosines alone.

An encoder of whole sentences blurs terms: asked for "multiple inheritance order" it puts the syntax
of class definitions first, and the passage that describes the order third. Words that few passages
hold tell such apart; they are weighed by inverse document frequency (Spärck Jones 1972, "A
statistical interpretation of term specificity and its application in retrieval").
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A passage that may answer, and how close its meaning is."""

    id: str
    topic: str
    title: str
    passage: str
    score: float
    """Cosine, -1 to 1; from `WordWeights.rank`, the blend of it with the overlap of words."""


class WordWeights:
    """How much each word of a corpus tells; does not change once made."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts: Counter[str] = Counter()
        self._texts = 0
        for text in texts:
            counts.update(_words(text))
            self._texts += 1
        self._weights = {word: self._weight(count) for word, count in counts.items()}

    def _weight(self, count: int) -> float:
        """Inverse document frequency, smoothed so that it is positive for 0 to all texts."""
        return math.log((self._texts + 1) / (count + 0.5))

    def overlap(self, question: str, text: str) -> float:
        """Return the part of the question's words that `text` holds, by weight: 0 to 1.

        A word that no text holds counts nowhere: no candidate could have it.
        """
        asked = {word for word in _words(question) if word in self._weights}
        whole = sum(self._weights[word] for word in sorted(asked))
        held = sum(self._weights[word] for word in sorted(asked & _words(text)))
        return held / whole if whole else 0.0

    def rank(
        self, question: str, candidates: Sequence[Candidate], *, word_weight: float
    ) -> list[Candidate]:
        """Return the candidates, best first, with blended scores; equal ones in order of id."""
        ranked = [
            replace(
                found,
                score=(1 - word_weight) * found.score
                + word_weight * self.overlap(question, f"{found.title} {found.passage}"),
            )
            for found in candidates
        ]
        return sorted(ranked, key=lambda found: (-found.score, found.id))


def _words(text: str) -> set[str]:
    """Return the words, folded: "Exceptions" and "exception" are one."""
    return {_fold(word) for word in _WORD.findall(text.lower())}


def _fold(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
