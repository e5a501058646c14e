"""Tells the registry that time goes by, and by how much the supervisor itself stood still.

A tick that comes late means that nothing else was handled in time either: the stall is told, so
that no worker is blamed for it. Invariant: ticks are told in order, and never two for one interval.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)

STALL_WORTH_TELLING_S = 0.1
STALL_WORTH_LOGGING_S = 1.0


async def tick_for_ever(clock: Clock, interval_s: float, tick: Callable[[float], None]) -> None:
    """Call `tick(stalled_s)` every `interval_s` until cancelled."""
    due = clock.monotonic() + interval_s
    while True:
        await clock.sleep(max(0.0, due - clock.monotonic()))
        now = clock.monotonic()
        late_s = now - due
        due = now + interval_s  # before the tick: what it stalls is told by the next one
        if late_s >= STALL_WORTH_LOGGING_S:
            _log.warning("this supervisor stood still; every deadline is extended", by_s=late_s)
        tick(late_s if late_s >= STALL_WORTH_TELLING_S else 0.0)
