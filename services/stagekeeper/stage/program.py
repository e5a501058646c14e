"""The program of a command stage: started, reaped, ended; with everything that it starts itself.

The stage process is the program's parent and the subreaper of all that descends from it: whoever
puts itself into a session of its own, clears its environment and is left by its parent becomes a
child of this process, and is found there. Decided here: how a program is started and how all of it
is ended: SIGTERM to the main process alone, SIGKILL to all. Not decided here: when.

Invariant: this module reaps every child of the process, and nobody else does.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stagekeeper.host.process import ExitStatus, ProcessHandle, descendants

_PR_SET_CHILD_SUBREAPER: Final = 36
_KILL_WAIT_S: Final = 5.0
"""What processes that got SIGKILL may take to be gone; a driver call can hold one for a while."""
_LOOK_S: Final = 0.01


class ProgramUnusable(Exception):
    """The program cannot serve; the message says why."""


class ProgramEnded(ProgramUnusable):
    """The program ended without having been asked to."""


class Program:
    """One run of a program. Used once, on the event loop of the main thread.

    Args:
        argv: the program's path, and its arguments.
        env: all of its environment.
        cwd: where it starts.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._argv = list(argv)
        self._env = dict(env)
        self._cwd = cwd
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._ended = asyncio.Event()
        self.status: ExitStatus | None = None
        """How it ended; None while it lives."""

    @property
    def name(self) -> str:
        return os.path.basename(self._argv[0])

    @property
    def pid(self) -> int:
        """Its main process; 0 before it was started."""
        return self._child.pid if self._child is not None else 0

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def start(self) -> None:
        """Start it: its output goes where that of this process goes, its input is empty.

        In the session of this process, and in a process group of its own: a signal that it sends
        to its group does not reach us.

        Raises:
            ProgramUnusable: it cannot be executed.
        """
        _become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        try:
            self._child = subprocess.Popen(
                self._argv,
                env=self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            raise ProgramUnusable(_why_not_executed(self._argv[0], error)) from error
        try:
            self._pidfd = os.pidfd_open(self._child.pid)
        except ProcessLookupError:
            pass  # it has ended, and was reaped by nobody else
        self._reap()

    async def ended(self) -> ExitStatus:
        """Wait for its end; return how it ended."""
        await self._ended.wait()
        assert self.status is not None
        return self.status

    async def ended_within(self, wait_s: float) -> bool:
        """Wait for its end for a while; return whether it came."""
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await self._ended.wait()
        except TimeoutError:
            pass
        return self.has_ended

    def check_alive(self) -> None:
        """Raise when it has ended.

        Raises:
            ProgramEnded: saying how.
        """
        if self.has_ended:
            raise ProgramEnded(f"{self.name} {self.how_it_ended()}")

    def how_it_ended(self) -> str:
        """Say how it ended: `exited with code 3`."""
        status = self.status
        if status is None:
            return "runs"
        if status.signal is None:
            return f"exited with code {status.code}"
        try:
            return f"was ended by {signal.Signals(status.signal).name}"
        except ValueError:  # a real-time signal
            return f"was ended by signal {status.signal}"

    async def end(self, kill_at: Callable[[], float]) -> bool:
        """End all of it; return whether SIGKILL was needed for anything.

        Args:
            kill_at: says when, on the monotonic clock; it may come nearer meanwhile.
        """
        if self._child is None:
            return False
        if not self.has_ended and self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        while not self.has_ended and (left_s := kill_at() - time.monotonic()) > 0:
            await self.ended_within(min(left_s, 0.1))
        return await self.kill()

    async def kill(self) -> bool:
        """SIGKILL everything that is left of it, until nothing is; return whether anything was."""
        until = time.monotonic() + _KILL_WAIT_S
        killed = False
        while left := descendants(os.getpid()):
            killed = True
            for identity in left:
                handle = ProcessHandle.open(identity)
                if handle is not None:
                    handle.send(signal.SIGKILL)
                    handle.close()
            if time.monotonic() > until:
                break  # the agent goes on with them, and says so
            await asyncio.sleep(_LOOK_S)
            self._reap()
        return killed

    def _reap(self) -> None:
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if result is None:
                return
            if self._child is not None and result.si_pid == self._child.pid:
                self._has_ended(result.si_code == os.CLD_EXITED, result.si_status)

    def _has_ended(self, is_exit: bool, number: int) -> None:
        assert self._child is not None
        self.status = ExitStatus(code=number) if is_exit else ExitStatus(signal=number)
        self._child.returncode = number if is_exit else -number
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._ended.set()


def _why_not_executed(path: str, error: OSError) -> str:
    what = f"{path} cannot be executed: {error.strerror}"
    if error.errno == errno.ENOEXEC:
        return f"{what}: it is no program for this machine, and no script with a #! line"
    if error.errno == errno.ENOENT and os.path.exists(path):
        return f"{what}, although it is there: what its #! line names, or its loader, is missing"
    return what


def end_like(status: ExitStatus) -> int:
    """End this process by the signal that ended the program; return the exit code otherwise.

    So the end of the stage process tells its agent all there is to tell of the program's.
    """
    if status.signal is None:
        return status.code or 0
    import faulthandler
    import resource

    faulthandler.disable()  # the program's end was no crash of ours
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if status.signal not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(status.signal, signal.SIG_DFL)
    os.kill(os.getpid(), status.signal)
    return 128 + status.signal  # a signal that ends nobody by default; no shell would say it better


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")
