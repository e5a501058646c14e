"""A wall clock of its own for a process, which a test moves while the process runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "fakes" / "moved_clock.c"


class MovedClock:
    """What to put into a process's environment, and the hand that moves the clock.

    Args:
        directory: gets the shim and the offset.
    """

    def __init__(self, directory: Path) -> None:
        self._library = directory / "moved_clock.so"
        self._offset = directory / "offset"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", self._library, SOURCE, "-ldl", "-lpthread"],
            check=True,
        )
        self.move_to(0)

    @property
    def env(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "SK_WALL_OFFSET": str(self._offset)}

    def move_to(self, offset_s: int) -> None:
        """Set the clock so many seconds before or behind the kernel's, at once."""
        new = self._offset.with_suffix(".new")
        new.write_text(str(offset_s))
        os.replace(new, self._offset)
