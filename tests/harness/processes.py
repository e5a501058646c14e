"""Child processes of a test, and a look at what is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness.waiting import GiveUp, wait_for


class Program:
    """One `stagekeeper …` process with its output in a file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._offset = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stagekeeper.cli", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What this start of the program wrote so far."""
        with self.log.open("rb") as file:
            file.seek(self._offset)
            return file.read().decode(errors="replace")

    async def line(self, pattern: str, *, within_s: float = 60.0) -> re.Match[str]:
        """Wait for a line that matches; fail at once when the program ends without one."""

        def look() -> re.Match[str] | None:
            is_running = self.is_running
            found = re.search(pattern, self.output, re.MULTILINE)
            if found is None and not is_running:
                raise ProgramEnded(f"{self.name} ended ({self.exit_code}):\n{self.output}")
            return found

        try:
            return await wait_for(look, f"{self.name} prints /{pattern}/", within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-4000:]}") from None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.send(signal.SIGKILL)
        self._process.wait(timeout=10)

    async def ended(self, *, within_s: float = 20.0) -> int:
        await wait_for(lambda: not self.is_running, f"{self.name} ends", within_s=within_s)
        assert self.exit_code is not None
        return self.exit_code


class ProgramEnded(GiveUp):
    """A program ended while something was expected of it."""


def processes_naming(text: str) -> dict[int, str]:
    """Return the live processes whose command line or environment names `text`, but this one."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (text in command or text in environment):
            found[int(entry.name)] = command
    return found


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks; None when it is gone. Tells pids apart."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None


@contextmanager
def a_stranger(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session that nobody of ours started; killed at the end."""
    stranger = subprocess.Popen(argv or ("sleep", "600"), start_new_session=True)
    try:
        yield stranger
    finally:
        stranger.kill()
        stranger.wait()


@contextmanager
def lock_held(path: Path) -> Iterator[int]:
    """Let another process hold the lock of a file, as an agent does; yields its pid."""
    hold = (
        "import pathlib, sys\n"
        "from stagekeeper.agent.host_lock import FileLock\n"
        "lock = FileLock.take(pathlib.Path(sys.argv[1]), 'it')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder.pid
        holder.communicate()
