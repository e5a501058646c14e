"""The demo tells the truth: it passes when every law holds, fails when one is broken, and leaves
nothing behind."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shutil
import signal
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import processes_naming
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
WITHIN_S = 150.0


class Demo:
    """A demo of small stages as a process; its temporary files are below `directory`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.output = ""

    @classmethod
    async def start(cls, directory: Path) -> Demo:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.small_demo"),
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(directory)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return cls(process, directory)

    async def says(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            async for line in self.process.stdout:
                self.output += line.decode()
                if found := re.search(pattern, line.decode()):
                    return found
        raise AssertionError(f"it never said {pattern!r}:\n{self.output}")

    async def ends(self) -> int:
        """Read to the end; return the exit code."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            self.output += (await self.process.stdout.read()).decode()
            return await self.process.wait()

    def processes(self) -> dict[int, str]:
        """Return what runs of this demo, but the demo itself: pid → command line."""
        running = processes_naming(str(self.directory))
        running.pop(self.process.pid, None)
        return running

    def stages(self) -> list[int]:
        return [pid for pid, words in self.processes().items() if "stagekeeper.stage " in words]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, for sockets lie below it. Whatever still runs there is swept at the end."""
    path = Path(tempfile.mkdtemp(prefix="sk-d-"))
    yield path
    for pid in processes_naming(str(path)):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.soak
async def test_two_demos_at_once_keep_every_law_and_leave_nothing(directory: Path) -> None:
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    demos = [await Demo.start(directory / "a"), await Demo.start(directory / "b")]

    codes = await asyncio.gather(*(demo.ends() for demo in demos))

    for demo, code in zip(demos, codes, strict=True):
        assert code == 0, demo.output
        assert "it said 'ping'" in demo.output
        assert re.search(r"requests +[\d,]+ sent +0 failed", demo.output), demo.output
        assert demo.output.count("the same process") == 2, demo.output
        assert demo.output.count("another process") == 3, demo.output
        assert "✘" not in demo.output
        assert demo.processes() == {}
        assert list(demo.directory.iterdir()) == []


async def test_demo_in_a_terminal_draws_and_ends_as_in_a_pipe(directory: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.e2e.small_demo"),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(directory), "TERM": "xterm"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    async with asyncio.timeout(WITHIN_S):
        output = await asyncio.to_thread(_read_all, ours)
        assert await process.wait() == 0, output
    os.close(ours)

    assert "\x1b[1A" in output  # lines were drawn anew, by `up` and by the demo itself
    assert "listed again after" in output and "✔ all answered" in output
    assert processes_naming(str(directory)) == {}


def _read_all(terminal: int) -> str:
    """Read until the terminal's last writer is gone, which is told as an error."""
    output = b""
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:
            data = b""
        if not data:
            return output.decode(errors="replace")
        output += data


async def test_demo_fails_and_names_the_law_when_a_stage_is_killed(directory: Path) -> None:
    demo = await Demo.start(directory)
    await demo.says("kill -9 of the supervisor")
    victim = demo.stages()[0]
    os.kill(victim, signal.SIGKILL)

    assert await demo.ends() == 1
    assert re.search(
        rf"BROKEN: only the supervisor and the agents may be killed, and stage \w+ of replica \d "
        rf"\(process {victim}\) has ended",
        demo.output,
    ), demo.output
    assert demo.processes() == {}
    logs = re.search(r"logs are kept in (\S+)", demo.output)
    assert logs and (Path(logs[1]) / "logs" / "supervisor.log").exists()


async def test_demo_fails_when_its_up_is_killed(directory: Path) -> None:
    demo = await Demo.start(directory)
    await demo.says("callers ask without a pause")
    (up,) = (pid for pid, words in demo.processes().items() if "stagekeeper.cli up" in words)
    os.kill(up, signal.SIGKILL)

    assert await demo.ends() == 1
    assert "`stagekeeper up` ended with exit code -9" in demo.output
    assert demo.processes() == {}


@pytest.mark.parametrize("moment", ["supervisor: ready", "STARTING", "kill -9 of all agents"])
async def test_ctrl_c_at_any_moment_leaves_nothing_behind(directory: Path, moment: str) -> None:
    demo = await Demo.start(directory)
    await demo.says(moment)
    demo.process.send_signal(signal.SIGINT)

    assert await demo.ends() == 130, demo.output
    assert "Nothing is left running" in demo.output
    assert demo.processes() == {}
    assert list(directory.iterdir()) == []


async def test_demo_that_is_killed_takes_everything_with_it(directory: Path) -> None:
    demo = await Demo.start(directory)
    await demo.says("callers ask without a pause")
    demo.process.kill()
    await demo.process.wait()

    await wait_for(lambda: not demo.processes(), "everything has ended", within_s=60.0)
