"""Agents for tests: in this process, or as one that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stagekeeper.agent.app import Agent, run
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.core.ids import WorkerId
from stagekeeper.runtime.launch import INSTANCE_ENV, LOG_FILE
from tests.harness.processes import processes_naming
from tests.harness.waiting import wait_for

STAGES = Path(__file__).parent.parent / "stages"
ROOT = Path(__file__).parent.parent.parent
DEVICES = ("cpu:0=1GiB", "cpu:1=1GiB")


class AgentHome:
    """The directory of one agent, over all of its lives; sweeps every process that names it."""

    def __init__(self, endpoint: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="sk-"))
        self.endpoint = endpoint

    def settings(self, **changes: Any) -> AgentSettings:
        fields: dict[str, Any] = {
            "worker_id": WorkerId("w"),
            "endpoint": self.endpoint,
            "state_dir": self.path / "s",
            "lock_dir": self.path / "l",
            "devices": DEVICES,
            "pythonpath": (STAGES,),
            **changes,
        }
        return AgentSettings(**fields)

    @property
    def processes(self) -> dict[int, str]:
        """The live processes of this home's stages, their children too: pid → command line."""
        found = processes_naming(str(self.path / "s" / "agents"))
        return {pid: command for pid, command in found.items() if _is_of_a_stage(pid)}

    def spoken(self) -> set[int]:
        """The pids of the stage processes that live and have written a line: they were let go."""
        found = set()
        for path in self.path.glob("s/agents/*/stages/*/record.json"):
            pid = json.loads(path.read_bytes())["pid"]
            if pid in self.processes and (path.parent / LOG_FILE).stat().st_size:
                found.add(pid)
        return found

    async def nothing_runs(self) -> None:
        await wait_for(lambda: not self.processes, "no process of a stage is left")

    async def sweep(self) -> None:
        def look() -> bool:
            left = processes_naming(str(self.path))
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return not left

        await wait_for(look, "every process of the agent's home is gone")
        shutil.rmtree(self.path, ignore_errors=True)


def _is_of_a_stage(pid: int) -> bool:
    try:
        return f"{INSTANCE_ENV}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@asynccontextmanager
async def home_at(endpoint: str) -> AsyncIterator[AgentHome]:
    home = AgentHome(endpoint)
    try:
        yield home
    finally:
        await home.sweep()


@asynccontextmanager
async def agent_in(home: AgentHome, **changes: Any) -> AsyncIterator[Agent]:
    """An agent in this process, ended in order; checks that it leaves no task."""
    before = asyncio.all_tasks()
    agent = Agent(home.settings(**changes))
    await agent.start()
    try:
        await asyncio.wait_for(agent.registered.wait(), 20)
        yield agent
    finally:
        await agent.stop()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    ours = [task for task in left if "agent" in task.get_name()]
    assert not ours, "the agent left a task behind"


class AgentProcess:
    """An agent as a process of its own."""

    def __init__(self, home: AgentHome, process: asyncio.subprocess.Process) -> None:
        self.home = home
        self.process = process

    @classmethod
    async def start(
        cls, home: AgentHome, *, env: Mapping[str, str] | None = None, **changes: Any
    ) -> AgentProcess:
        fields = {"state_dir": str(home.path / "s"), "lock_dir": str(home.path / "l"), **changes}
        with (home.path / "agent.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.fakes.agent_program",
                json.dumps({"endpoint": home.endpoint, **fields}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
            )
        return cls(home, process)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def kill(self) -> None:
        """SIGKILL, and reap."""
        self.process.kill()
        await self.process.wait()

    async def ended(self, within_s: float = 30.0) -> int:
        return await asyncio.wait_for(self.process.wait(), within_s)

    async def end(self) -> None:
        """SIGTERM, and wait."""
        self.process.terminate()
        assert await self.ended() == 0


def main() -> None:
    """Be an agent with the settings given as JSON; SIGTERM ends it in order."""
    fields = json.loads(sys.argv[1])
    fields["state_dir"], fields["lock_dir"] = Path(fields["state_dir"]), Path(fields["lock_dir"])
    settings = AgentSettings(
        **{"worker_id": WorkerId("w"), "devices": DEVICES, "pythonpath": (STAGES,), **fields}
    )

    async def serve() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await run(settings, stop=stop, ready=lambda agent: None)

    asyncio.run(serve())
