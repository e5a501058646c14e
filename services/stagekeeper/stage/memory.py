"""How much memory a stage has of its cards: one small interface, and its form for host memory.

Not decided here: what a stage may have, and what follows when it has more (phases). A meter
measures this process alone. It is honest about its limits: what it cannot see it does not guess.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, runtime_checkable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs: the peak resident set becomes the present one


class MemoryMeter(Protocol):
    """Measures this process on one card; with several cards, on the one that has most."""

    def used_bytes(self) -> int:
        """Return what is in use now."""
        ...

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that was in use since `reset_peak`."""
        ...


@runtime_checkable
class HoldsMemory(MemoryMeter, Protocol):
    """A meter that also knows what this process keeps from others without using it."""

    def held_bytes(self) -> int:
        """Return what is in use now, and what is kept to be used again."""
        ...


class HostMemoryMeter:
    """Resident memory of this process above what it had when the meter was made.

    The interpreter and the libraries that were there by then are not charged to the model. Pages of
    mapped files (weights that are read in place) are, once touched, although processes share them.
    Memory of child processes is not seen.
    """

    def __init__(self) -> None:
        self._baseline_bytes = resident_bytes()
        self._sees_peaks = False

    def used_bytes(self) -> int:
        return max(0, resident_bytes() - self._baseline_bytes)

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
            self._sees_peaks = True
        except OSError:
            # Some sandboxes lack it. The peak of the whole life would charge a load's temporary
            # copies to the largest batch, so what is in use at the end has to do.
            self._sees_peaks = False

    def peak_bytes(self) -> int:
        if not self._sees_peaks:
            return self.used_bytes()
        return max(self.used_bytes(), _peak_resident_bytes() - self._baseline_bytes)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _peak_resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
