"""Which slices of RAM stand for cards when nobody says.

Decided here: two slices an agent, so that stages can be spread as over two cards; three quarters of
the RAM in all, since the rest of the machine wants to live too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

SLICES_PER_AGENT: Final = 2
SHARE_OF_RAM: Final = 0.75
STEP_BYTES: Final = 256 * 2**20

_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_devices(agent_count: int, ram_bytes: int) -> tuple[str, ...]:
    """Return the `--devices` of each of so many agents on a machine with so much RAM."""
    share = int(ram_bytes * SHARE_OF_RAM) // (SLICES_PER_AGENT * agent_count)
    steps = max(1, share // STEP_BYTES)
    return tuple(f"cpu:{n}={steps * STEP_BYTES // 2**20}MiB" for n in range(SLICES_PER_AGENT))


def ram_bytes(limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Return the RAM that this process may use: the machine's, or its container's if less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in limits:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return total
