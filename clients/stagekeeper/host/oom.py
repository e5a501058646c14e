"""Whether the kernel killed for memory: evidence for a SIGKILL that nobody of ours sent.

The kernel counts its kills per control group, and for the whole host. Whoever watches processes
reads the counters now and then, and at a death: a kill counts for the death that follows within
that time, or, with `RecentKills`, for every death of the next moments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
_RECENT_S: Final = 2.0
"""How long the kernel may take to end a process that it killed: it gives back much memory first."""


class OomWitness:
    """Remembers how often the kernel had killed for memory when it was last looked at."""

    def __init__(self, proc: Path = _PROC, cgroup_root: Path = _CGROUP_ROOT) -> None:
        self._counter = _counter_file(proc, cgroup_root)
        self._last = self._read()

    def look(self) -> bool:
        """Return whether the kernel has killed for memory since the last look."""
        last, self._last = self._last, self._read()
        return last is not None and self._last is not None and self._last > last

    def _read(self) -> int | None:
        try:
            lines = self._counter.read_text().splitlines()
        except OSError:
            return None
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        value = counts.get("oom_kill", "")
        return int(value) if value.isdigit() else None


class RecentKills:
    """Knows whether the kernel killed for memory a moment ago. `look` is called now and then."""

    def __init__(self, witness: OomWitness, now: Callable[[], float] = time.monotonic) -> None:
        self._witness = witness
        self._now = now
        self._seen_at = -math.inf

    def look(self) -> None:
        """Read the counters."""
        if self._witness.look():
            self._seen_at = self._now()

    def is_one(self) -> bool:
        """Return whether a death that is seen now may be such a kill."""
        self.look()
        return self._now() - self._seen_at <= _RECENT_S


def _counter_file(proc: Path, cgroup_root: Path) -> Path:
    """Choose the counter that is about our own processes, and the host's where there is none."""
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            candidate = cgroup_root / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            candidate = cgroup_root / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if candidate.is_file():
            return candidate
    return proc / "vmstat"
