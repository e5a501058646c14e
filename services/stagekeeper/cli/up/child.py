"""One child process that is kept running: started, watched, and started again when it ends.

Decided here: when a child is started again and after how long, and when its start is given up.
Not decided here: what it runs, and how that is told to a user (`on_event`). A child announces on
stdout that it serves (`NAME ready: key=value …`); everything else it writes goes to its log.

Invariant: a child is restarted exactly when it ended without having been asked to, exit code 0 too.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stagekeeper.cli.exits import ExitCode
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.retry import Backoff

RESTART_BACKOFF: Final = Backoff(initial_s=0.2, factor=2.0, cap_s=5.0)
SETTLED_AFTER_S: Final = 10.0
"""A child that lived so long after it was ready had settled: its next end is a first one again."""

FIRST_START_GRACE_S: Final = 5.0
"""How long a first start may fail: the children of an `up` that was killed may still be ending, and
hold the port and the locks until they have."""

LARGEST_LOG_BYTES: Final = 10 * 2**20
HOPELESS: Final = frozenset({ExitCode.USAGE, ExitCode.BAD_SPEC, ExitCode.BUG})
"""Exit codes that another attempt will not change."""

# A refusal (exit code 1) stays one, unless it says that somebody has what the child wants: he may
# be about to end. There is no code of its own for that; a test holds the refusals to these words.
_HELD: Final = re.compile(r"is held by|is in use by|lives at|cannot listen at")
_REFUSAL: Final = "stagekeeper: "

_READY: Final = re.compile(r"^\S+ ready:(?P<facts>.*)$")
_TAIL_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class Ready:
    """The child serves. `facts` are those of its ready line; `is_first` before any restart."""

    name: str
    pid: int
    facts: Mapping[str, str]
    is_first: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The child ended unasked: how, and when it is started again."""

    name: str
    how: str
    restart_in_s: float
    was_ready: bool


ChildEvent = Ready | Ended


class StartFailed(Exception):
    """A child never came up. The message is its own last word."""

    def __init__(self, name: str, how: str, last_words: str, log: Path) -> None:
        super().__init__(f"{name} did not start ({how}): {last_words or 'it said nothing'}")
        self.log = log


@dataclass(slots=True)
class Child:
    """One process, restarted for as long as `run` runs.

    Attributes:
        name: for people, and the name of its log.
        argv: makes the command line of each start; it may depend on what was learned before.
        log: stderr is appended here.
        on_event: told of each readiness and each unasked end; must not raise.
    """

    name: str
    argv: Callable[[], Sequence[str]]
    log: Path
    clock: Clock
    on_event: Callable[[ChildEvent], None]
    backoff: Backoff = RESTART_BACKOFF
    first_start_grace_s: float = FIRST_START_GRACE_S
    facts: Mapping[str, str] = field(default_factory=dict, init=False)
    """Of the latest ready line."""

    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _first_ready: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ready_at: float | None = field(default=None, init=False)
    _log_offset: int = field(default=0, init=False)

    @property
    def pid(self) -> int | None:
        """The process of now; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def wait_ready(self) -> None:
        """Wait until the child has served once."""
        await self._first_ready.wait()

    async def run(self) -> None:
        """Keep the child running until `stop` was called and it has ended.

        Raises:
            StartFailed: it never served, and another attempt would not change that.
        """
        begun = self.clock.monotonic()
        failures = 0
        told = ""
        while not self._stopping.is_set():
            how, code = await self._run_once()
            if self._stopping.is_set():
                return
            was_ready = self._ready_at is not None
            if was_ready and self.clock.monotonic() - (self._ready_at or 0.0) >= SETTLED_AFTER_S:
                failures = 0
            if not self._first_ready.is_set():
                waited_s = self.clock.monotonic() - begun
                if self._is_hopeless(code) or waited_s >= self.first_start_grace_s:
                    raise StartFailed(
                        self.name, how, last_words(self.log, self._log_offset), self.log
                    )
            failures += 1
            wait_s = self.backoff.ceiling_s(failures)
            words = last_words(self.log, self._log_offset) if code > 0 else ""
            is_news, told = words != told, words
            why = f"{how}: {words}" if words and is_news else how
            self.on_event(Ended(self.name, why, wait_s, was_ready))
            await self._pause(wait_s)

    def _is_hopeless(self, code: int) -> bool:
        if code != ExitCode.FAILED:
            return code in HOPELESS
        refusal = last_refusal(self.log, self._log_offset)
        return bool(refusal) and not _HELD.search(refusal)

    async def stop(self, budget_s: float) -> bool:
        """Ask the child to end, kill it when the budget is over, and wait until it is gone.

        Returns:
            Whether it ended by itself.
        """
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), budget_s)
            return True
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()
            return False

    def kill(self) -> None:
        """SIGKILL it, and start it no more. Returns at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            try:
                process.send_signal(number)
            except ProcessLookupError:
                pass

    async def _pause(self, wait_s: float) -> None:
        sleep = asyncio.ensure_future(self.clock.sleep(wait_s))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((sleep, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in (sleep, stopping):
                waiter.cancel()

    async def _run_once(self) -> tuple[str, int]:
        """Run one process to its end; return how it ended, for people, and its code."""
        self._ready_at = None
        with open_log(self.log) as log:
            self._log_offset = os.fstat(log).st_size
            # A session of its own, since Ctrl-C in a terminal goes to the whole foreground group:
            # `up` deletes first and ends its children afterwards.
            self._process = process = await asyncio.create_subprocess_exec(
                *self.argv(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._heard(line.decode(errors="replace").rstrip(), process.pid)
            code = await process.wait()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            await process.wait()
            raise
        return describe_exit(code), code

    def _heard(self, line: str, pid: int) -> None:
        found = _READY.match(line)
        if found is None:
            return
        self.facts = parse_facts(found["facts"])
        self._ready_at = self.clock.monotonic()
        is_first = not self._first_ready.is_set()
        self._first_ready.set()
        self.on_event(Ready(self.name, pid, self.facts, is_first))


def parse_facts(text: str) -> dict[str, str]:
    """Read the `key=value` words of a ready line; a value reaches up to the next ` key=`."""
    found = re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", text)
    return dict(found)


def describe_exit(code: int) -> str:
    """Say how a process ended, given what its parent was told (negative: a signal's number)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def open_log(path: Path) -> _LogFile:
    """Open a child's log for appending; one that has grown large is set aside first."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        if path.stat().st_size > LARGEST_LOG_BYTES:
            path.replace(path.with_suffix(path.suffix + ".previous"))
    except FileNotFoundError:
        pass
    return _LogFile(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))


class _LogFile:
    """A descriptor that is closed at the end of a `with`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)


def last_refusal(log: Path, since: int = 0) -> str:
    """Return what a verb of ours said when it ended with an error; empty when it said nothing.

    Args:
        since: what stands before this offset is not its own.
    """
    for line in reversed(_last_lines(log, since)):
        if line.startswith(_REFUSAL):
            return line.removeprefix(_REFUSAL)
    return ""


def last_words(log: Path, since: int = 0) -> str:
    """Return the last line that a program wrote for people into its log, or its last line at all.

    Args:
        since: what stands before this offset is not its own.
    """
    lines = _last_lines(log, since)
    return last_refusal(log, since) or (lines[-1] if lines else "")


def _last_lines(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]
