"""A cluster that the tests of a module use one after another, each as if it were alone.

A supervisor and an agent cost as much as many a test does with them. Decided here: what a test
finds (all of it alive and started plainly, nothing deployed, no file of another test), and that
what does not come to this state is thrown away. Not for tests that count what happened before:
registrations, incarnations, events, lines of logs. Failures of a name outlive its deletion.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stagekeeper.client import StagekeeperError
from tests.harness.cluster import DEVICES, Cluster
from tests.harness.processes import Program

_STATE = ("s", "a", "l")
_CLEARED_WITHIN_S = 30.0


class StandingCluster(Cluster):
    """Used as a `Cluster`; `stand` before a test, `clear` after it."""

    def __init__(self, workers: Sequence[str]) -> None:
        super().__init__()
        self._workers = workers
        self._plain: set[Program] = set()
        """What was started as every test may find it."""

    async def stand(self) -> None:
        """Start what does not run, or runs for one test alone."""
        if not self._is_plain(self.supervisor):
            await self.restart_supervisor()
        missing = [it for it in self._workers if not self._is_plain(self.agents.get(it))]
        await asyncio.gather(*(self.restart_agent(it) for it in missing))
        async with self.client() as client:
            await self.workers_alive(len(self._workers), client)

    async def clear(self) -> None:
        """Delete what a test has deployed, and its files; begin anew if that cannot be done."""
        try:
            async with asyncio.timeout(_CLEARED_WITHIN_S):
                await self._delete_all()
        except (AssertionError, OSError, TimeoutError, StagekeeperError):
            await self._begin_anew()
        for path in self.directory.iterdir():
            if path.name not in _STATE and path.suffix != ".log":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    async def restart_supervisor(self, *, env: dict[str, str] | None = None) -> Program:
        """Let another supervisor follow, whatever has become of the one before."""
        if self.supervisor is not None:
            self.supervisor.kill()
        return await self.start_supervisor(env=env)

    async def restart_agent(self, worker_id: str, *, env: dict[str, str] | None = None) -> Program:
        """As `restart_supervisor`, for an agent."""
        if worker_id in self.agents:
            self.agents[worker_id].kill()
        return await self.start_agent(worker_id, env=env)

    async def start_supervisor(
        self, *flags: str, env: dict[str, str] | None = None, ready: bool = True
    ) -> Program:
        program = await super().start_supervisor(*flags, env=env, ready=ready)
        if not flags and not env:
            self._plain.add(program)
        return program

    async def start_agent(
        self,
        worker_id: str = "node-1",
        *flags: str,
        devices: Sequence[str] = DEVICES,
        env: dict[str, str] | None = None,
        ready: bool = True,
    ) -> Program:
        program = await super().start_agent(
            worker_id, *flags, devices=devices, env=env, ready=ready
        )
        if not flags and not env and devices == DEVICES:
            self._plain.add(program)
        return program

    def _is_plain(self, program: Program | None) -> bool:
        return program is not None and program.is_running and program in self._plain

    async def _delete_all(self) -> None:
        # What is down would be waited for, and a sweep is quicker.
        assert self.supervisor is not None and self.supervisor.is_running
        async with self.client() as client:
            names = [it.name for it in (await client.list()).deployments]
            assert not names or all(it.is_running for it in self.agents.values())
            await asyncio.gather(*(client.delete(name) for name in names))
        await self.no_stage_left()

    async def _begin_anew(self) -> None:
        await self.sweep()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.directory)
        self.directory = Path(tempfile.mkdtemp(prefix="sk-"))
        self.endpoint = "127.0.0.1:0"
        self.supervisor = None
        self.agents.clear()
