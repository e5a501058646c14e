"""Which process met an error of a card, as the driver wrote it into the kernel's log.

NVML tells an error and its card, but not the process; the driver's line in the log does:
`NVRM: Xid (PCI:0000:01:00): 31, pid=4242, name=python, …`. Decided here: when that number means
anything, which is only in the first pid namespace. Who may not read the log (that takes a right on
most hosts) names nobody. Invariant: reading never waits.
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path
from typing import Final

_LOG: Final = Path("/dev/kmsg")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_FIRST_NAMESPACE_INODE: Final = 0xEFFFFFFC
"""The kernel's number of the pid namespace that it begins with (PROC_PID_INIT_INO)."""

_LINE: Final = re.compile(rb"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+),(?: pid=(\d+))?")
_RECORD_BYTES: Final = 8_192
_MOST_KEPT: Final = 64
_MOST_RECORDS: Final = 100_000

_Address = tuple[int, ...]


class KernelLog:
    """The lines of the driver since this was made. Used by one thread at a time."""

    def __init__(self, path: Path = _LOG, namespace: Path = _NAMESPACE) -> None:
        self._found: deque[tuple[_Address, int, int]] = deque(maxlen=_MOST_KEPT)
        self._file = -1
        if not _means_something(namespace):
            return
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self.close()

    @property
    def can_name(self) -> bool:
        """Whether a process can be named at all."""
        return self._file >= 0

    def pid_of(self, pci_bus_id: str, xid: int) -> int | None:
        """Return the process of the oldest such line that was not asked for yet."""
        self._read()
        wanted = _address(pci_bus_id)
        for line in self._found:
            if wanted and line[:2] == (wanted, xid):
                self._found.remove(line)
                return line[2]
        return None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> None:
        for _ in range(_MOST_RECORDS):
            if self._file < 0:
                return
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # the kernel has overwritten what was next; it goes on after the gap
            except OSError:
                self.close()
                return
            if not record:
                return
            for match in _LINE.finditer(record):
                if match[3]:
                    address = _address(match[1].decode())
                    self._found.append((address, int(match[2]), int(match[3])))


def _means_something(namespace: Path) -> bool:
    try:
        return namespace.stat().st_ino == _FIRST_NAMESPACE_INODE
    except OSError:
        return False


def _address(text: str) -> _Address:
    """Read `0000:01:00` as `00000000:01:00.0` is read; nothing for what is neither."""
    try:
        return tuple(int(part, 16) for part in text.partition(".")[0].split(":"))
    except ValueError:
        return ()
