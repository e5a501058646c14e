"""`python -m benchmarks [NAME …]`: run the benchmarks named, or all of them.

Exits 0 whatever the numbers are: speed is shown here, and tested nowhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping

from benchmarks import actors, init, phase_lock, recovery_load, registry, stage

BENCHMARKS: Mapping[str, Callable[[], Awaitable[None]]] = {
    "heartbeats": registry.heartbeats,
    "rebuild": registry.rebuild,
    "restart": registry.restart,
    "call": stage.call_round_trip,
    "idle-agent": stage.idle_agent,
    "recovery-load": recovery_load.recovery_load,
    "init": init.init,
    "grouping": init.grouping,
    "init-processes": init.processes,
    "actor-failures": actors.failures,
    "actor-calls": actors.actor_calls,
    "actor-spawns": actors.spawns,
    "phase-lock": phase_lock.phase_lock,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
        return 2
    for name in names or BENCHMARKS:
        asyncio.run(BENCHMARKS[name]())  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
