"""One agent per worker id and host: a lock file, held as long as the agent lives.

A POSIX record lock: the kernel frees it with its holder, and a process that the agent starts does
not inherit it. Closing any descriptor of the file in this process would drop it, so nothing else
opens the file. It is never unlinked: two agents could then each lock a file of that name.

Others of the host may write beside it. Invariant: no symbolic link is followed at the folder's name
or the file's, and modes are set on nothing that was there before.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Final, Self

from stagekeeper.agent.directory import file_name
from stagekeeper.core.ids import WorkerId
from stagekeeper.runtime.lock_file import holder_pid, is_still_there, open_lock_file

HOST_LOCK_DIR: Final = Path("/run/lock/stagekeeper")


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
        descriptor = open_lock_file(path)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = holder_pid(descriptor) or None
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


class TurnLock:
    """A lock that is taken again and again, for a moment each time, by processes of any user.

    Its file stays open meanwhile. It is for the turns of one thread: the kernel tells processes
    apart, and nothing else.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = what
        self._descriptor = -1

    def take(self) -> None:
        """Take the lock at once or not at all.

        Raises:
            LockHeld: naming the holder.
            OSError: the file can neither be made nor opened for writing.
        """
        while True:
            if self._descriptor < 0:
                self._descriptor = open_lock_file(self.path)
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._held() from error
            except PermissionError as error:  # what some file systems say instead
                raise self._held() from error
            if is_still_there(self._descriptor, self.path):
                return
            self.close()  # somebody removed it, and others lock the one that is there now

    def free(self) -> None:
        if self._descriptor >= 0:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file. A second call changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _held(self) -> LockHeld:
        pid = holder_pid(self._descriptor) or None
        by = f"by process {pid}" if pid else "by another process"
        return LockHeld(f"{self._what} is held {by} ({self.path})", pid)


def holder_of(path: Path) -> int | None:
    """Look who holds the lock of a file, without taking it.

    Never of a lock that this process holds: to look and to close again would drop it.

    Returns:
        The holder's pid; 0 for one whose pid cannot be told; None when nobody holds it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return holder_pid(descriptor)
    finally:
        os.close(descriptor)


def default_lock_dir() -> Path:
    """Choose the host's folder for locks, or this user's where that one cannot be had.

    Nothing is made here: whoever takes a lock makes the folder first.
    """
    return HOST_LOCK_DIR if _can_be_had(HOST_LOCK_DIR) else _user_lock_dir()


def make_lock_dir(path: Path) -> None:
    """Make the folder, open to every user of the host, as `/tmp` is.

    Raises:
        OSError: it cannot be made or written, or others could put something in its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
        is_new = True
    except FileExistsError:
        is_new = False
    if stat.S_ISLNK(path.lstat().st_mode):
        raise PermissionError(_refusal(path, "is a symbolic link"))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if problem := _problem(os.fstat(descriptor)):
            raise PermissionError(_refusal(path, problem))
        if is_new:
            os.fchmod(descriptor, 0o1777)
    finally:
        os.close(descriptor)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(_refusal(path, "cannot be written"))


def _can_be_had(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return os.access(path.parent, os.W_OK | os.X_OK)
    except OSError:
        return False
    return not _problem(status) and os.access(path, os.W_OK | os.X_OK)


def _problem(status: os.stat_result) -> str:
    """Say why locks in this folder would hold nobody; empty where they do."""
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid not in (0, os.getuid()):
        return f"belongs to user {status.st_uid}, who could replace the locks in it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        return "can be written by others and is not sticky"
    return ""


def _refusal(path: Path, problem: str) -> str:
    return (
        f"lock dir {path} {problem}: choose another --lock-dir, or have root make it "
        f"(install -d -m 1777 {path})"
    )


def _user_lock_dir() -> Path:
    if runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_dir) / "stagekeeper"
    return Path(f"/tmp/stagekeeper-{os.getuid()}")


def worker_lock_file(lock_dir: Path, worker_id: WorkerId) -> Path:
    """Return the file whose lock the agent of a worker id holds as long as it lives."""
    return lock_dir / f"worker-{file_name(worker_id)}.lock"


def take_worker_lock(lock_dir: Path, worker_id: WorkerId) -> FileLock:
    """Take the host-wide lock of a worker id.

    Raises:
        LockHeld: an agent of that worker id runs on this host; the message says what to do.
    """
    try:
        return FileLock.take(worker_lock_file(lock_dir, worker_id), f"worker id {worker_id!r}")
    except LockHeld as held:
        raise LockHeld(
            f"{held}: an agent of that worker id runs on this host. End it first, or give this "
            "one another --worker-id",
            held.holder_pid,
        ) from held
