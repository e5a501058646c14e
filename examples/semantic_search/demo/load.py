"""Callers that never pause, and what became of every one of their requests.

Decided here: what counts as failed: an error of any kind, and an answer that differs from the one
which the same question got before. Invariant: once the load has ended, every request that was sent
has been counted as answered or as failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

REQUEST_TIMEOUT_S: Final = 30.0
FAILURE_PAUSE_S: Final = 0.1
"""A caller whose request failed waits so long: failures are to be counted, not mass-produced."""

Ask = Callable[[str, float], Awaitable[Any]]
"""Puts one question, with a timeout in seconds, and returns the answer."""


class Load:
    """Used as `async with Load(…) as load`; the callers end with the `with`.

    Args:
        ask: puts one question.
        expected: each question and its right answer; they are asked in turn.
        callers: how many requests are under way at any time.

    Attributes:
        sent: requests that were begun.
        answered: requests that got the right answer.
        failures: what became of the others, a sentence each.
        slowest_s: the longest that a right answer took.
    """

    def __init__(self, ask: Ask, expected: Mapping[str, Any], *, callers: int) -> None:
        self._ask = ask
        self._expected = dict(expected)
        self.callers = callers
        self.sent = 0
        self.answered = 0
        self.failures: list[str] = []
        self.slowest_s = 0.0
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._call(number), name=f"caller {number}")
            for number in range(self.callers)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the callers: after their last answer, or at once when something went wrong."""
        self._is_ending = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    def __str__(self) -> str:
        return f"{self.sent:,} requests sent, {len(self.failures):,} failed"

    async def _call(self, number: int) -> None:
        questions = list(self._expected)
        while not self._is_ending:
            question = questions[number % len(questions)]
            number += 1
            self.sent += 1
            began = time.monotonic()
            try:
                answer = await self._ask(question, REQUEST_TIMEOUT_S)
            except Exception as error:
                self.failures.append(f"{question!r}: {type(error).__name__}: {error}")
                await asyncio.sleep(FAILURE_PAUSE_S)
                continue
            if answer != self._expected[question]:
                self.failures.append(f"{question!r} got another answer than before: {answer!r}")
                continue
            self.answered += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
