"""The lock of a state directory: at most one supervisor owns it.

The kernel frees it with its holder, so a killed supervisor leaves nothing to clean up. Invariant:
the file is never unlinked; whoever holds the lock of the name holds the directory.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class StateDirTaken(OSError):
    """Another supervisor owns the state directory."""


class StateLock:
    """Holds the lock of a state directory from construction until `release`.

    `flock` and not `lockf`: a POSIX record lock would not keep two supervisors of one process
    apart, and is dropped when anybody in the process closes the file. Nothing here forks, which is
    what `flock` has to fear.

    Raises:
        StateDirTaken: naming the owner's pid.
    """

    def __init__(self, state_dir: Path) -> None:
        path = state_dir / "supervisor.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise StateDirTaken(
                f"{state_dir} is in use by another supervisor (pid {holder}): end that one, or use "
                "another --state-dir"
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the directory up. A second call changes nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
