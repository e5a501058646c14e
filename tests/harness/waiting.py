"""Waiting for conditions, never for time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02


async def wait_for(
    probe: Callable[[], T | Awaitable[T]], what: str, *, within_s: float = 30.0
) -> T:
    """Call `probe` until it returns something true, and return that.

    An exception from the probe counts as "not yet"; the last one is told when time is up.
    """
    deadline = time.monotonic() + within_s
    last: object = None
    while True:
        try:
            answer = probe()
            if inspect.isawaitable(answer):
                answer = await asyncio.wait_for(answer, max(0.1, deadline - time.monotonic()))
            if answer:
                return answer
            last = answer
        except Exception as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within_s} s: {what} (last: {last!r})")
        await asyncio.sleep(POLL_S)
