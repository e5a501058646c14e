"""`stagekeeper …` as a command that ends, and `stagekeeper up` with a directory of its own."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.harness.cluster import DEVICES, STAGES
from tests.harness.loaded_verbs import run_loaded
from tests.harness.processes import Program, processes_naming, start_ticks
from tests.harness.waiting import wait_for


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


def own_environment() -> dict[str, str]:
    """Return this process's environment without what would reach another cluster."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("STAGEKEEPER_")
    }


_verbs_run: set[str] = set()
"""What has been run in a process of its own, loaded for it."""


async def command_line(*argv: str, endpoint: str = "", timeout_s: float = 60.0) -> Ended:
    """Run one command to its end, with no terminal anywhere.

    The first of each verb loads the command line by itself; the ones after it fork from a process
    that has loaded it (`loaded_verbs`).
    """
    env = own_environment()
    if endpoint:
        env["STAGEKEEPER_ENDPOINT"] = endpoint
    run = run_loaded if argv[0] in _verbs_run else _run
    _verbs_run.add(argv[0])
    try:
        code, out, err = await run(argv, env, timeout_s)
    except TimeoutError:
        raise AssertionError(f"{argv} did not end") from None
    return Ended(code, out.decode(), err.decode())


async def _run(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stagekeeper.cli",
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out, err


class Up:
    """A directory in which `stagekeeper up` is run, any number of times one after another."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sk-"))
        self.program: Program | None = None
        self.endpoint = "127.0.0.1:0"

    async def __aenter__(self) -> Up:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.program is not None:
            self.program.kill()
        await wait_for(self._sweep_once, "every process of the directory is gone")
        shutil.rmtree(self.directory, ignore_errors=True)

    def _sweep_once(self) -> bool:
        left = processes_naming(str(self.directory))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not left

    def spec(self, text: str, name: str = "spec.yaml") -> Path:
        """Write a spec file."""
        path = self.directory / name
        path.write_text(text)
        return path

    def start(
        self,
        *argv: str | Path,
        agents: int = 1,
        pythonpath: Sequence[Path] = (STAGES,),
        devices: Sequence[str] = DEVICES,
    ) -> Program:
        """Start `up` with these files and flags, with what an earlier one left."""
        self.program = Program(
            "up",
            [
                "up",
                *map(str, argv),
                f"--agents={agents}",
                f"--endpoint={self.endpoint}",
                f"--state-dir={self.directory / 's'}",
                f"--lock-dir={self.directory / 'l'}",
                *(f"--devices={device}" for device in devices),
                "--heartbeat-s=0.5",
                *(f"--pythonpath={folder}" for folder in pythonpath),
            ],
            self.directory / "up.log",
            own_environment(),
        )
        return self.program

    async def serving(
        self, *argv: str | Path, agents: int = 1, devices: Sequence[str] = DEVICES
    ) -> Program:
        """Start `up`, and wait until all that it was given serves."""
        program = self.start(*argv, agents=agents, devices=devices)
        self.endpoint = (await program.line(r"^up: endpoint (\S+);"))[1]
        return program

    async def child_pid(self, name: str, *, nth: int = 1) -> int:
        """Return the pid of a child's nth start, as `up` says it."""

        def look() -> int | None:
            assert self.program is not None
            found = re.findall(rf"^{name}: ready .*\(pid (\d+)\)", self.program.output, re.M)
            return int(found[nth - 1]) if len(found) >= nth else None

        return await wait_for(look, f"start {nth} of {name} is ready")

    def programs(self) -> dict[int, str]:
        """Return the live processes of this directory but `up` itself and stages."""
        own = self.program.pid if self.program is not None else 0
        return {
            pid: command
            for pid, command in processes_naming(str(self.directory)).items()
            if "stagekeeper.stage" not in command and pid != own
        }

    def stage_processes(self) -> dict[int, int]:
        """Return the live stage processes: pid → start ticks."""
        return {
            pid: ticks
            for pid, command in processes_naming(str(self.directory)).items()
            if "stagekeeper.stage" in command and (ticks := start_ticks(pid)) is not None
        }
