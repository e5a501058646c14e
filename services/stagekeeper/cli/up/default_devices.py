"""Which cards the agents of `up` have when nobody says.

Decided here: the NVIDIA cards, where there are some; each agent has them all, and the supervisor
counts what one reserves for the others too. Else two slices of RAM an agent, so that stages can be
spread as over two cards; three quarters of the RAM in all, since the rest of the machine wants to
live too.

Invariant: only a host that surely has no NVIDIA card, or shows none, gets slices. One whose driver
fails gets an agent that says so, instead of a deployment that silently runs on the CPU.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from stagekeeper.agent.cards.device_choice import ALL_GPUS, GpuChoice
from stagekeeper.agent.cards.nvml import NvmlDevices
from stagekeeper.agent.cards.visible_devices import VisibleDevices

SLICES_PER_AGENT: Final = 2
SHARE_OF_RAM: Final = 0.75
STEP_BYTES: Final = 256 * 2**20

_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_devices(agent_count: int, ram_bytes: int, *, has_gpus: bool) -> tuple[str, ...]:
    """Return the `--devices` of each of so many agents on a machine with so much RAM."""
    if has_gpus:
        return (ALL_GPUS,)
    share = int(ram_bytes * SHARE_OF_RAM) // (SLICES_PER_AGENT * agent_count)
    steps = max(1, share // STEP_BYTES)
    return tuple(f"cpu:{n}={steps * STEP_BYTES // 2**20}MiB" for n in range(SLICES_PER_AGENT))


def may_have_gpus(deadline_s: float = 3.0) -> bool:
    """Whether this machine has NVIDIA cards for us, or nobody can tell."""
    gpus = NvmlDevices(
        GpuChoice(),
        "",
        deadline_s=deadline_s,
        interval_s=deadline_s,
        visible=VisibleDevices.of(),
    )
    asyncio.run(gpus.look())
    reading = gpus.reading(())
    return bool(reading.cards or reading.unknown_reason)


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
