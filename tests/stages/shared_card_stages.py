"""A stage that measures its card as a whole, as a driver shows it, on a slice of host memory.

What is used of the card is what all stages that joined it have taken since, each read from `/proc`:
real pages of real processes. So whatever a neighbour takes while this one measures is charged to
this one, unless nobody takes anything meanwhile.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from stagekeeper.actor import endpoint
from stagekeeper.stage import Stage

MIB = 2**20
CHUNK_MIB = 8


class CardMeter:
    """This stage's part of a card, of which only the sum over all stages can be read."""

    def __init__(self, card: Path) -> None:
        self._card = card
        self._own_base = _resident_bytes(os.getpid())
        (card / str(os.getpid())).write_text(str(self._own_base))
        self._card_base = self._top = self._own_then = 0

    def card_used_bytes(self) -> int:
        used = 0
        for member in self._card.iterdir():
            if member.name.isdigit() and (text := member.read_text()):
                used += max(0, _resident_bytes(int(member.name)) - int(text))
        return used

    def used_bytes(self) -> int:
        return max(0, _resident_bytes(os.getpid()) - self._own_base)

    def reset_peak(self) -> None:
        self._own_then = self.used_bytes()
        self._card_base = self._top = self.card_used_bytes()

    def look(self) -> None:
        self._top = max(self._top, self.card_used_bytes())

    def peak_bytes(self) -> int:
        return self._own_then + self._top - self._card_base


class OnCard(Stage):
    """Loads some MiB bit by bit, measures a batch, takes what is left, and says how much it was.

    Args:
        card: a folder; its stages are on one card.
        neighbours: stages beside it; `measure` waits `patience_s` for them to load.
        meets: they load side by side: one alone waits for the others, and fails.
    """

    def __init__(
        self,
        card: str,
        weights_mib: int = 96,
        batch_mib: int = 64,
        neighbours: int = 0,
        patience_s: float = 0.3,
        meets: bool = False,
    ) -> None:
        self._card = Path(card)
        self._weights_mib = weights_mib
        self._batch_mib = batch_mib
        self._neighbours = neighbours
        self._patience_s = patience_s
        self._meets = meets
        self._held: list[mmap.mmap] = []
        self._left_bytes = -1

    def load(self) -> None:
        self._meter = CardMeter(self._card)
        with self._noted("LOAD"):
            deadline = time.monotonic() + 60.0
            while self._meets and self._members() <= self._neighbours:
                assert time.monotonic() < deadline, "it loads alone"
                time.sleep(0.01)
            for done in range(0, self._weights_mib, CHUNK_MIB):
                self._held.append(_pages(CHUNK_MIB))
                self.progress(done, self._weights_mib)
                time.sleep(0.02)  # a neighbour that measures now sees what comes
        (self._card / f"loaded-{os.getpid()}").touch()

    def memory_meter(self) -> CardMeter:
        return self._meter

    def measure(self) -> None:
        with self._noted("MEASURE"):
            batch = _pages(self._batch_mib)
            deadline = time.monotonic() + self._patience_s
            while self._loaded() <= self._neighbours and time.monotonic() < deadline:
                time.sleep(0.01)
            self._meter.look()
            batch.close()

    def allocate(self, budget_bytes: int) -> None:
        self._left_bytes = budget_bytes
        with self._noted("ALLOCATE"):
            self._held.append(_pages(budget_bytes // MIB // 4))

    @endpoint
    def left(self) -> int:
        return self._left_bytes

    def _members(self) -> int:
        return sum(it.name.isdigit() for it in self._card.iterdir())

    def _loaded(self) -> int:
        return sum(it.name.startswith("loaded-") for it in self._card.iterdir())

    def _noted(self, phase: str) -> _Noted:
        return _Noted(self._card / f"trace-{os.getpid()}", phase)


class _Noted:
    """Writes down when a phase began and ended, on the host's monotonic clock."""

    def __init__(self, path: Path, phase: str) -> None:
        self._path, self._phase, self._began = path, phase, 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *raised: object) -> None:
        with self._path.open("a") as trace:
            trace.write(f"{self._phase} {self._began} {time.monotonic()}\n")


def _pages(size_mib: int) -> mmap.mmap:
    """Take pages of our own and touch each: an allocator might hand out ones that were there."""
    pages = mmap.mmap(-1, max(1, size_mib) * MIB)
    for offset in range(0, len(pages), mmap.PAGESIZE):
        pages[offset] = 1
    return pages


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
