"""`stagekeeper up` as a child of the demo: started, listened to, ended, and swept up after.

Decided here: how its children are found: by the lines in which `up` announces each of them, which
are the same in a terminal and in a pipe, and checked against /proc before a signal is sent. In a
terminal `up` gets one of its own, so that it draws its progress there and only the demo writes.

Invariant: only processes that are children of our `up`, or that name our own temporary folder, are
ever signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import pty
import re
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from .screen import Screen
from .waiting import POLL_S, DemoFailed

END_S: Final = 60.0
"""For an orderly end: `up` deletes what it deployed, within the stages' stop budgets."""

KILL_S: Final = 15.0

_READY: Final = re.compile(r"^(?P<name>[\w.-]+): ready (?:at \S+ )?\(pid (?P<pid>\d+)\)")
_SERVING: Final = re.compile(r"^up: endpoint (?P<endpoint>\S+);")
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class Up:
    """One `stagekeeper up …`, in a session of its own: a Ctrl-C in the terminal is the demo's.

    Args:
        words: what follows `stagekeeper up`.
        directory: a temporary folder that the words name, so that what is left can be found.

    Attributes:
        children: the pid of each child that serves, by name; the latest that was announced.
        endpoint: the stable endpoint; empty until everything is deployed.
    """

    def __init__(self, words: Sequence[str], directory: Path, screen: Screen) -> None:
        self.words = tuple(words)
        self._directory = directory
        self._screen = screen
        self.children: dict[str, int] = {}
        self.endpoint = ""
        self._process: asyncio.subprocess.Process | None = None
        self._output = -1
        self._line = b""
        self._signals_sent = 0

    async def start(self) -> None:
        self._output, theirs = _open_terminal() if self._screen.is_terminal else os.pipe()
        try:
            # -P: what lies in the folder that the demo is called in must not hide a module.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "stagekeeper.cli", "up", *self.words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_ending_with(os.getpid()),
            )
        finally:
            os.close(theirs)
        os.set_blocking(self._output, False)
        asyncio.get_running_loop().add_reader(self._output, self._read)

    # --- what it says

    def check_running(self) -> None:
        """Raise DemoFailed when `up` has ended: it is not to end before it is asked."""
        code = None if self._process is None else self._process.returncode
        if code is not None:
            raise DemoFailed(f"`stagekeeper up` ended with exit code {code}; its words are above")

    def _read(self) -> bool:
        """Take what there is; return whether there was anything."""
        try:
            data = os.read(self._output, 65_536)
        except BlockingIOError:
            return False
        except OSError as error:  # how a terminal says that its last writer is gone
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self._stop_reading()
            return False
        *lines, self._line = (self._line + data).replace(b"\r", b"\n").split(b"\n")
        texts = [_ESCAPES.sub("", line.decode(errors="replace")).rstrip() for line in lines]
        # While it draws, every byte counts; from then on it only speaks in lines.
        if self.endpoint:
            self._screen.quote([text for text in texts if text])
        else:
            self._screen.pass_on(data)
        for text in texts:
            self._heard(text)
        return True

    def _heard(self, line: str) -> None:
        if found := _READY.match(line):
            self.children[found["name"]] = int(found["pid"])
        elif found := _SERVING.match(line):
            self.endpoint = found["endpoint"]

    def _stop_reading(self) -> None:
        if self._output >= 0:
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            self._output = -1

    # --- its children

    def kill_children(self, names: Sequence[str]) -> dict[str, int]:
        """Send SIGKILL to children by name; return their pids.

        Raises:
            DemoFailed: one of them is no child of our `up`; nothing was sent then.
        """
        victims = {name: self._child(name) for name in names}
        for victim in victims.values():
            victim.kill()
        return {name: victim.pid for name, victim in victims.items()}

    def _child(self, name: str) -> psutil.Process:
        assert self._process is not None
        pid = self.children.get(name)
        try:
            if pid is not None:
                process = psutil.Process(pid)
                if process.ppid() == self._process.pid:
                    return process
        except psutil.NoSuchProcess:
            pass
        raise DemoFailed(f"{name} (pid {pid or 'unknown'}) does not run as a child of `up`")

    # --- its end

    def ask_to_end(self) -> None:
        """Ask for the orderly end; a second time kills everything at once. Returns at once."""
        if self._process is not None and self._process.returncode is None:
            self._signals_sent += 1
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> list[str]:
        """End `up` and all that it started, and remove nothing but processes.

        Returns:
            What did not go as it should, a sentence each.
        """
        complaints = []
        was_running = self._process is not None and self._process.returncode is None
        if self._process is not None and was_running:
            if not self._signals_sent:
                self.ask_to_end()
            if not await self._ended(END_S):
                complaints.append(f"`stagekeeper up` did not end within {END_S:.0f} s")
                self.ask_to_end()
                if not await self._ended(KILL_S):
                    self._process.kill()
                    await self._ended(KILL_S)
        while self._output >= 0 and self._read():
            pass
        self._stop_reading()
        if self._signals_sent > 1:  # whoever is killed may be a moment in going
            await self._gone()
        left = self._left()
        if left and was_running:
            names = ", ".join(f"{pid} ({name})" for pid, name in left.items())
            complaints.append(f"the end is to leave nothing behind, and it left: {names}")
        if left and not await self._gone(is_killing=True):
            complaints.append(f"these do not even end by SIGKILL: {', '.join(map(str, left))}")
        return complaints

    async def _ended(self, within_s: float) -> bool:
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), within_s)
        except TimeoutError:
            return False
        return True

    async def _gone(self, *, is_killing: bool = False) -> bool:
        """Wait until nothing of ours runs any more; return whether that came."""
        for _ in range(int(KILL_S / POLL_S)):
            left = self._left()
            if not left:
                return True
            for pid in left if is_killing else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        return False

    def _left(self) -> dict[int, str]:
        """Return the live processes of ours that name our folder, by pid, with what they are."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                is_ours = any(word.startswith("stagekeeper.") for word in words)
                if is_ours and any(str(self._directory) in word for word in words):
                    found[process.pid] = " ".join(words[1:5])
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def _open_terminal() -> tuple[int, int]:
    """Open a terminal as large as ours; what is written to its far end is read here as it is."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # our own terminal will make \r\n of \n
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    size = shutil.get_terminal_size()
    termios.tcsetwinsize(theirs, (size.lines, size.columns))
    return ours, theirs


def _environment() -> Mapping[str, str]:
    """Return ours, without what would lead `up` or its stages to another Stagekeeper."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STAGEKEEPER")}


def _ending_with(parent_pid: int) -> Callable[[], None]:
    """Make what a child runs to be asked to end when this process is gone, however it ended."""

    def arm() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return arm
