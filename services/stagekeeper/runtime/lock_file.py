"""Files of record locks in a folder into which every user of the host may write.

Decided here: how such a file is opened, and what is believed of it. A POSIX record lock belongs to
a process: the kernel frees it when its holder ends or closes *any* descriptor of the file, and a
child does not inherit it. So whoever locks a file opens it once and keeps it open. It is never
unlinked: two processes could then each lock a file of that name.

Invariant: no symbolic link is followed, and modes are set on nothing that was there before.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Final

# struct flock of Linux on 64 bits: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi")


def open_lock_file(path: Path) -> int:
    """Open the file of a lock for reading and writing; make it, for every user, if it is not there.

    Raises:
        OSError: it cannot be made or opened, or is no regular file.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        # Without O_CREAT, which the kernel refuses for another user's file in a sticky folder.
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PermissionError(f"{path} is no regular file") from None
        return descriptor
    # Others of this host must be able to open it too, whatever the umask says.
    os.fchmod(descriptor, 0o666)
    return descriptor


def is_still_there(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one that others find at its path."""
    own = os.fstat(descriptor)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (own.st_ino, own.st_dev) == (there.st_ino, there.st_dev)


def holder_pid(descriptor: int, start: int = 0, length: int = 0) -> int | None:
    """Return who keeps this process from locking these bytes alone; of several one, it does not
    matter which.

    Returns:
        The holder's pid; 0 for one whose pid means nothing here (another container's); None when
        nobody else holds any of them.
    """
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else max(0, pid)
