"""Whether the kernel killed for memory: evidence for a SIGKILL that nobody of ours sent.

The kernel counts its kills per control group, and for the whole host. Whoever watches processes
reads the counters now and then, and at a death: a kill counts for the death that follows within
that time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")


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
