"""The lock of a state directory: at most one supervisor owns it.

The kernel frees it with its holder, so a killed supervisor leaves nothing to clean up. Decided
here: which owner may be waited for. One of the same stable endpoint is starting or ending, or
reigns where the endpoint just cannot be reached: its place is inherited. One of another endpoint is
somebody's mistake.

Invariant: the file is never unlinked; whoever holds the lock of the name holds the directory.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from stagekeeper.supervisor.settings import has_port


class StateDirTaken(OSError):
    """Another supervisor owns the state directory; `may_pass` if its place may be waited for."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class StateLock:
    """Holds the lock of a state directory from construction until `release`.

    `flock` and not `lockf`: a POSIX record lock would not keep two supervisors of one process
    apart, and is dropped when anybody in the process closes the file. Nothing here forks, which is
    what `flock` has to fear.

    Args:
        state_dir: there already.
        endpoint: the stable one of this supervisor; empty, or with port 0, it is nobody else's.

    Raises:
        StateDirTaken: naming the owner's pid and endpoint.
    """

    def __init__(self, state_dir: Path, endpoint: str = "") -> None:
        path = state_dir / "supervisor.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder, _, rest = os.pread(self._file, 512, 0).decode(errors="replace").partition("\n")
            os.close(self._file)
            theirs = rest.partition("\n")[0]
            where = f", of endpoint {theirs}" if theirs else ""
            raise StateDirTaken(
                f"{state_dir} is in use by another supervisor (pid {holder or 'unknown'}{where}): "
                "end that one, or use another --state-dir",
                # Who has it and has written nothing yet took it this very moment.
                may_pass=bool(endpoint)
                and has_port(endpoint)
                and (theirs == endpoint or not holder),
            ) from error
        # In one write, and cut afterwards: whoever reads meanwhile finds an owner.
        written = os.pwrite(self._file, f"{os.getpid()}\n{endpoint}\n".encode(), 0)
        os.ftruncate(self._file, written)

    def release(self) -> None:
        """Give the directory up. A second call changes nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
