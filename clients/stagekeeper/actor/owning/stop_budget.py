"""How long a stop may take, also when whoever asked for it asks again with less.

Invariant: a stop is never given more time than it had, and what waits for it is told of less at
once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


class StopBudget:
    """The time that one stop has. For the loop's thread only."""

    def __init__(self, budget_s: float) -> None:
        self._end_at = time.monotonic() + budget_s
        self._is_less = asyncio.Event()

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_at - time.monotonic())

    def shorten(self, budget_s: float) -> None:
        """Have the stop be over within `budget_s` from now, unless it is to be sooner."""
        end_at = time.monotonic() + budget_s
        if end_at < self._end_at:
            self._end_at = end_at
            self._is_less.set()
            self._is_less = asyncio.Event()

    async def spend(self, ask: Callable[[float], Awaitable[Value]]) -> Value:
        """Ask for something within what is left, and once more each time when that becomes less.

        Args:
            ask: is given what is left; a later one joins what those before it began.

        Returns:
            The first answer; of those that come together that of the first asked, which has all
            that there is to say.
        """
        asked: list[asyncio.Task[Value]] = []
        try:
            while True:
                asked.append(asyncio.create_task(_run(ask, self.left_s)))
                is_less = asyncio.create_task(self._is_less.wait())
                try:
                    ways: set[asyncio.Task[Any]] = {*asked, is_less}
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    is_less.cancel()
                for answer in asked:
                    if answer.done():
                        return answer.result()
        finally:
            for work in asked:
                work.cancel()
            await asyncio.wait(asked)


async def _run(ask: Callable[[float], Awaitable[Value]], left_s: float) -> Value:
    return await ask(left_s)
