"""A process that holds the phase lock of some cards when it is told to, and tells how it went.

A record lock belongs to a process, so each holder of a test is one. As a program it reads a word a
line (`alone PHASE`, `shared PHASE`, `enter PHASE`, `progress N`, `free`, `intact`, `fork`) and
writes a line for what became of it: `had TIME`, `freed TIME`, `failed WHY`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from stagekeeper.runtime import phase_lock
from stagekeeper.runtime.phase_lock import Hold, Mode, PhaseLock
from tests.harness.waiting import wait_for

MODES = {"alone": Mode.ALONE, "shared": Mode.SHARED}


class LockUser:
    """The process as a test holds it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    async def answer(self, word: str, *, within_s: float = 20.0) -> str:
        """Read the next line, which begins with `word`, and return the rest of it."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            line = (await self._process.stdout.readline()).decode().rstrip("\n")
        said, _, rest = line.partition(" ")
        assert said == word, f"{line!r} where {word!r} was expected"
        return rest

    async def holds(self, how: str, phase: str) -> float:
        """Have it take the lock; return when it had it, on the monotonic clock of the host."""
        self.say(how, phase)
        return float(await self.answer("had"))

    async def frees(self) -> float:
        self.say("free")
        return float(await self.answer("freed"))

    async def is_waiting(self) -> None:
        """Return once it waits for a lock in the kernel."""
        await waits_in_the_kernel(self.pid)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def waits_in_the_kernel(pid: int) -> None:
    """Return once a process waits for a record lock."""

    def look() -> bool:
        rows = map(str.split, Path("/proc/locks").read_text().splitlines())
        return any(row[1] == "->" and row[5] == str(pid) for row in rows)

    await wait_for(look, f"process {pid} waits for a lock")


@asynccontextmanager
async def lock_user(
    lock_dir: Path, stage: str, *domains: str, limit_s: float = 60.0
) -> AsyncIterator[LockUser]:
    """Start the process; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.harness.lock_user", str(lock_dir), stage, str(limit_s)),
        *domains,
        stdin=PIPE,
        stdout=PIPE,
    )
    user = LockUser(process)
    try:
        await user.answer("up")
        yield user
    finally:
        await user.kill()


async def _serve(lock_dir: Path, stage: str, limit_s: float, domains: Sequence[str]) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    lock = PhaseLock(lock_dir, domains, stage, limit_s=limit_s)
    hold: Hold | None = None
    _tell("up")
    async with AsyncExitStack() as held:
        while line := (await reader.readline()).decode().split():
            word, *rest = line
            if word in MODES:
                try:
                    hold = await held.enter_async_context(lock.held(MODES[word], rest[0]))
                except Exception as error:
                    _tell("failed", type(error).__name__, error)
                else:
                    _tell("had", time.monotonic())
            elif word == "free":
                freed_at = time.monotonic()  # before it is: whoever is next has it later
                await held.aclose()
                _tell("freed", freed_at)
            elif word == "fork":
                _fork()
            elif hold is not None and word == "intact":
                try:
                    hold.check_intact()
                    _tell("intact")
                except phase_lock.LockUnusable as error:
                    _tell("failed", error)
            elif hold is not None and word == "enter":
                hold.entered(rest[0])
                _tell("entered")
            elif hold is not None and word == "progress":
                hold.progressed(int(rest[0]))
                _tell("progressed")


def _fork() -> None:
    """Leave a child behind that has every descriptor of this process, and outlives it."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        time.sleep(60.0)
        os._exit(0)
    _tell("forked", child)


def _tell(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
