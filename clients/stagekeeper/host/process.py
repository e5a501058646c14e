"""Processes of this host: who one is, when it ends, and how to signal it and no other.

A pid alone names nobody for long, so a process is a pid with the ticks at which it started, and is
held by a pidfd. Decided here: how a process is told apart, found and signalled. Not decided here:
which one deserves what. Works the same for children and for processes of others; only the exit of a
child can be known.

Invariant: a signal goes through a pidfd whose process had the expected start ticks *after* the
pidfd was opened; a number that was reused meanwhile is never hit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from stagekeeper.host import proc_table

HOST_BOOT_ENV: Final = "STAGEKEEPER_HOST_BOOT"

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process for ever: its pid, and its start in clock ticks since the host booted."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a child ended: an exit code, or the signal that ended it; neither when nobody knows."""

    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What `/proc/PID/stat` says; `is_dead` for one that only waits to be reaped."""

    identity: ProcessIdentity
    is_dead: bool
    session: int
    resident_pages: int


def boot_id() -> str:
    """Return what tells this boot of the host from every other: ticks count from its start."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def host_boot_id() -> str:
    """Return what tells this host, since it booted, from every other: `boot_id` as a rule.

    Machines that were resumed from one snapshot have the same one; there the environment says
    another, the same to all programs of a host.
    """
    return os.environ.get(HOST_BOOT_ENV) or boot_id()


def read_stat(pid: int) -> ProcessStat | None:
    """Return None when no such process exists."""
    fields = proc_table.stat_fields(pid)
    if fields is None:
        return None
    return ProcessStat(
        identity=ProcessIdentity(pid, proc_table.start_ticks_of(fields)),
        is_dead=proc_table.is_dead(fields),
        session=proc_table.session_of(fields),
        resident_pages=proc_table.resident_pages_of(fields),
    )


def identity_of(pid: int) -> ProcessIdentity | None:
    """Return who holds a pid now; None when nobody living does."""
    stat = read_stat(pid)
    return None if stat is None or stat.is_dead else stat.identity


def is_alive(process: ProcessIdentity) -> bool:
    """Return whether this very process lives; one that was not reaped yet does not."""
    return identity_of(process.pid) == process


def real_user(pid: int) -> int | None:
    """Return whose process it is, by its real user id; None when that cannot be read."""
    try:
        for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def environment_holds(pid: int, name: str, value: str) -> bool | None:
    """Return whether the process was started with this variable; None when that is not known."""
    # Empty while it executes another program; that says nothing of what it was started with.
    environment = proc_table.environment(pid)
    return f"{name}={value}".encode() in environment if environment else None


def catches_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal; False where nobody tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def environment_value(pid: int, name: str) -> str | None:
    """Return with what value of a variable a process was started; None without, or unreadable."""
    prefix = f"{name}=".encode()
    for variable in proc_table.environment(pid) or ():
        if variable.startswith(prefix):
            return variable.removeprefix(prefix).decode(errors="replace")
    return None


def find_members(name: str, value: str, *, session: int | None = None) -> list[ProcessIdentity]:
    """Find the living processes that carry a variable in their environment, or are in a session.

    Args:
        session: 0 and None look at the environment alone. Pass a session only while its number is
            surely still its own: while its leader lives, is not reaped yet, or was seen to end
            just now.
    """
    found = []
    for stat in _living_others():
        in_session = bool(session) and stat.session == session
        if in_session or environment_holds(stat.identity.pid, name, value):
            found.append(stat.identity)
    return found


def members_by(name: str) -> dict[str, list[ProcessIdentity]]:
    """Find, with one look, the living processes that carry a variable in their environment.

    Returns:
        Its value → the processes with that value, the one that started first before the others.
    """
    found: dict[str, list[ProcessIdentity]] = {}
    for stat in sorted(_living_others(), key=lambda it: it.identity.start_ticks):
        value = environment_value(stat.identity.pid, name)
        if value is not None:
            found.setdefault(value, []).append(stat.identity)
    return found


def age_s(process: ProcessIdentity) -> float:
    """Return how long ago a process started; the time that the host slept counts."""
    started_s = process.start_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _living_others() -> Iterator[ProcessStat]:
    """Look at every living process of the host but this one."""
    for pid in proc_table.other_pids():
        stat = read_stat(pid)
        if stat is not None and not stat.is_dead:
            yield stat


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process and its descendants; None when it is gone."""
    stat = read_stat(pid)
    if stat is None or stat.is_dead:
        return None
    pages = stat.resident_pages
    pending = [pid]
    seen = {pid}
    while pending:
        for child in _children(pending.pop()):
            if child in seen:
                continue
            seen.add(child)
            pending.append(child)
            child_stat = read_stat(child)
            pages += child_stat.resident_pages if child_stat is not None else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def own_bytes(process: ProcessIdentity) -> int:
    """Return the resident memory of one process without its descendants; 0 when it is gone."""
    stat = read_stat(process.pid)
    if stat is None or stat.is_dead or stat.identity != process:
        return 0
    return stat.resident_pages * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[ProcessIdentity]:
    """Return the living processes that descend from one, as far as the kernel tells."""
    found: list[ProcessIdentity] = []
    pending, seen = [pid], {pid}
    while pending:
        for child in _children(pending.pop()):
            if child in seen:
                continue
            seen.add(child)
            pending.append(child)
            identity = identity_of(child)
            if identity is not None:
                found.append(identity)
    return found


def _children(pid: int) -> list[int]:
    """Return the children of every thread of a process, as far as the kernel tells."""
    children: list[int] = []
    try:
        for task in os.scandir(_PROC / str(pid) / "task"):
            children += map(int, Path(task.path, "children").read_bytes().split())
    except OSError:
        pass
    return children


class ProcessHandle:
    """A hold on one process: signals reach it alone, and its end is told by the kernel.

    Made by `open` and `spawn`. It never ends the process by itself; `close` lets go of it.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        pidfd: int,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.identity = identity
        self._pidfd = pidfd
        # Kept, since the module reaps a child whose Popen was forgotten, and its status with it.
        self._child = child
        self._exited = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._status: ExitStatus | None = None
        self._is_reaped = False

    @classmethod
    def open(cls, identity: ProcessIdentity) -> Self | None:
        """Take hold of a living process; None when it is gone, or its pid is another's by now."""
        try:
            pidfd = os.pidfd_open(identity.pid)
        except (ProcessLookupError, PermissionError):
            return None
        # Only now: whatever the pid means from here on, the pidfd means what the ticks say.
        if not is_alive(identity):
            os.close(pidfd)
            return None
        return cls(identity, pidfd)

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def pidfd(self) -> int:
        """The descriptor that the kernel makes readable when the process ends; lent, not given."""
        return self._pidfd

    @property
    def has_exited(self) -> bool:
        """Whether its end was seen by `wait`."""
        return self._exited.is_set()

    def send(self, number: signal.Signals) -> bool:
        """Signal the process; False when it is gone."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    async def wait(self) -> None:
        """Return when the process has ended (a child may still have to be reaped).

        Any number of callers may wait; each may be cancelled.
        """
        if self._loop is None and not self._exited.is_set():
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._pidfd, self._ended)
        await self._exited.wait()

    def exit_status(self) -> ExitStatus | None:
        """Return how a child ended; None for one that lives, and for other people's children."""
        if self._child is not None and self._status is None:
            self._look_at_end(os.WNOWAIT)
        return self._status

    def reap(self) -> ExitStatus | None:
        """Return the exit status and let the kernel forget the child. Repeats change nothing.

        Until this is called the pid of a child that ended, and its session, cannot become
        another's.
        """
        if self._child is not None and not self._is_reaped and self._look_at_end(0):
            self._is_reaped = True
            assert self._status is not None
            code, ended_by = self._status.code or 0, self._status.signal
            self._child.returncode = code if ended_by is None else -ended_by
        return self._status

    def close(self) -> None:
        """Let go of the process, which goes on. A second call changes nothing."""
        if self._pidfd < 0:
            return
        if self._loop is not None and not self._exited.is_set():
            self._loop.remove_reader(self._pidfd)
        if self._child is not None and not self._is_reaped:
            self._child.returncode = (
                0  # it is not ours to wait for any longer, and not an oversight
            )
        os.close(self._pidfd)
        self._pidfd = -1

    def _look_at_end(self, flags: int) -> bool:
        if self._pidfd < 0:
            return False
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | flags)
        except ChildProcessError:  # the program waits for any child, or ignores SIGCHLD
            self._status = self._status or ExitStatus()
            return True
        if result is None:
            return False
        is_exit = result.si_code == os.CLD_EXITED
        self._status = (
            ExitStatus(code=result.si_status) if is_exit else ExitStatus(signal=result.si_status)
        )
        return True

    def _ended(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._pidfd)
        self._exited.set()


class WaitingProcess:
    """A child that was spawned and waits on its start pipe. Dropping it lets the child exit."""

    def __init__(self, handle: ProcessHandle, start_pipe: int) -> None:
        self.handle = handle
        self._start_pipe = start_pipe

    def release(self, line: bytes) -> None:
        """Write the line that it waits for and close the pipe; harmless when it is gone already."""
        try:
            os.write(self._start_pipe, line)
        except BrokenPipeError:
            pass
        self.abandon()

    def abandon(self) -> None:
        """Close the pipe: without its line the child exits by itself."""
        if self._start_pipe >= 0:
            os.close(self._start_pipe)
            self._start_pipe = -1

    def take_pipe(self) -> int:
        """Return the descriptor of the open pipe, which is the caller's to close from now on."""
        start_pipe, self._start_pipe = self._start_pipe, -1
        return start_pipe


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log_path: Path | None,
    pass_fds: Sequence[int] = (),
) -> WaitingProcess:
    """Start a child in its own session, its stdin a start pipe, its output appended to a file.

    A file, since a pipe whose reader dies kills the writer; without one its output goes where ours
    goes. The child inherits `pass_fds` and nothing else, and no signal follows the death of the
    thread that spawned it, unless it asks for one.

    Raises:
        OSError: it could not be started; nothing was.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        with log_path.open("ab") if log_path is not None else nullcontext() as log:
            child = subprocess.Popen(
                list(argv),
                stdin=read_end,
                stdout=log,
                stderr=log,
                env=dict(env),
                cwd=cwd,
                close_fds=True,
                pass_fds=pass_fds,
                start_new_session=True,
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    try:
        # It is our child and was not reaped, so the pid is its own; it may have ended already.
        stat = read_stat(child.pid)
        if stat is None:
            raise OSError(f"/proc does not show the process {child.pid} that was just started")
        handle = ProcessHandle(stat.identity, os.pidfd_open(child.pid), child)
    except BaseException:
        # Nobody would own it. It waits for its line, so there is nothing that it could lose.
        os.close(write_end)
        child.kill()
        child.wait()
        raise
    return WaitingProcess(handle, write_end)
