"""One agent per worker id and host: a lock file, held as long as the agent lives.

A POSIX record lock: the kernel frees it with its holder, and a process that the agent starts does
not inherit it. Closing any descriptor of the file in this process would drop it, so nothing else
opens the file. It is never unlinked: two agents could then each lock a file of that name.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Final, Self

from stagekeeper.agent.directory import file_name
from stagekeeper.core.ids import WorkerId

# struct flock of Linux on 64 bits: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi")


class LockHeld(Exception):
    """Another process holds the lock; `holder_pid` is None where the kernel does not tell."""

    def __init__(self, message: str, holder_pid: int | None) -> None:
        super().__init__(message)
        self.holder_pid = holder_pid


class FileLock:
    """A lock that was taken; `release`, or the end of the process, frees it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, what: str) -> Self:
        """Take the lock at once or not at all.

        Args:
            what: says in the refusal what is held: "worker id node-1".

        Raises:
            LockHeld: naming the holder.
            OSError: the file can neither be made nor opened for writing.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                # Others of this host must be able to open it too, whatever the umask says.
                os.fchmod(descriptor, 0o666)
            except PermissionError:
                pass
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = _holder(descriptor)
                by = f"by process {pid}" if pid else "by another process"
                raise LockHeld(f"{what} is held {by} ({path})", pid) from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Free the lock. A second call changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _holder(descriptor: int) -> int | None:
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def default_lock_dir() -> Path:
    """Return the host's folder for locks, or this user's where that one cannot be written."""
    for candidate in (Path("/run/lock/stagekeeper"), _user_lock_dir()):
        try:
            make_lock_dir(candidate)
        except OSError:
            continue
        return candidate
    return _user_lock_dir()


def make_lock_dir(path: Path) -> None:
    """Make the folder, open to every user of the host, as `/tmp` is.

    Raises:
        OSError: it cannot be made or written.
    """
    path.mkdir(parents=True, exist_ok=True)
    if stat.S_IMODE(path.stat().st_mode) != 0o1777 and path.stat().st_uid == os.getuid():
        path.chmod(0o1777)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written")


def _user_lock_dir() -> Path:
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/stagekeeper-{os.getuid()}"
    return Path(runtime_dir) / "stagekeeper"


def take_worker_lock(lock_dir: Path, worker_id: WorkerId) -> FileLock:
    """Take the host-wide lock of a worker id.

    Raises:
        LockHeld: an agent of that worker id runs on this host; the message says what to do.
    """
    try:
        return FileLock.take(
            lock_dir / f"worker-{file_name(worker_id)}.lock", f"worker id {worker_id!r}"
        )
    except LockHeld as held:
        raise LockHeld(
            f"{held}: an agent of that worker id runs on this host. End it first, or give this "
            "one another --worker-id",
            held.holder_pid,
        ) from held
