"""Waiting for conditions, never for time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.02
LONGEST_POLL_S = 0.1
"""Probes are questions to programs that share the processor, so long waits ask less often."""


class GiveUp(Exception):
    """Raised by a probe: what is waited for cannot come any more."""


async def wait_for(probe: Callable[[], Any], what: str, *, within_s: float = 60.0) -> Any:
    """Call `probe` until it returns something true, and return that.

    A probe may be a coroutine function. An exception counts as "not yet"; the last one is told
    when time is up.
    """
    began = time.monotonic()
    deadline = began + within_s
    last: Any
    while True:
        try:
            last = probe()
            if isinstance(last, Awaitable):
                last = await asyncio.wait_for(last, max(0.1, deadline - time.monotonic()))
            if last:
                return last
        except GiveUp:
            raise
        except Exception as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within_s} s: {what} (last: {last!r})")
        waited_s = time.monotonic() - began
        await asyncio.sleep(min(LONGEST_POLL_S, POLL_S + waited_s / 20))
