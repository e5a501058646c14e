"""The processes of `up`: one supervisor, then its agents, all children of this process.

Decided here: their command lines, the order in which they start and end, and their names. Not
decided here: when one is started again (`child`).

Invariant: every child is told whose child it is, and ends with this process; stages do not.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stagekeeper.cli.up.child import Child, ChildEvent
from stagekeeper.runtime.clock import Clock

AGENT_STOP_BUDGET_S: Final = 15.0
"""An agent undoes what is uncommitted before it ends."""

SUPERVISOR_STOP_BUDGET_S: Final = 5.0

# -P: what lies in the folder that `up` was called in must not stand in for our modules.
_PROGRAM: Final = (sys.executable, "-P", "-m", "stagekeeper.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """What the supervisor and the agents are started with.

    Attributes:
        endpoint: port 0 takes one from the system at the first start, and keeps it.
        devices: of each agent.
        allow: entrypoints that agents may start; empty allows every one.
        more: flags that all of them take, as they are.
    """

    endpoint: str
    state_dir: Path
    lock_dir: Path
    agents: tuple[str, ...]
    devices: tuple[str, ...] = ()
    pythonpath: tuple[Path, ...] = ()
    allow: tuple[str, ...] = ()
    heartbeat_s: float = 2.0
    more: tuple[str, ...] = ()

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"


class Plane:
    """The children; `start` them once, then `stop` or `kill` them."""

    def __init__(
        self, options: PlaneOptions, *, clock: Clock, on_event: Callable[[ChildEvent], None]
    ) -> None:
        self._options = options

        def child(name: str, argv: Callable[[], list[str]]) -> Child:
            return Child(name, argv, options.logs / f"{name}.log", clock, on_event)

        self.supervisor = child("supervisor", self._supervisor_argv)
        self.agents = [
            child(worker_id, functools.partial(self._agent_argv, worker_id))
            for worker_id in options.agents
        ]
        self._runs: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        """The stable endpoint: as asked for, and with its real port once it is known."""
        return self.supervisor.facts.get("endpoint", self._options.endpoint)

    async def start(self) -> None:
        """Start everything, and return when everything has been ready once.

        Raises:
            StartFailed: one of them never came up. The others run; stop them.
        """
        await self._start([self.supervisor])
        await self._start(self.agents)

    async def failed(self) -> None:
        """Wait until a child is given up, and raise what it failed with."""
        done, _ = await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        for run in done:
            run.result()

    async def stop(self) -> None:
        """End the agents, then the supervisor: it goes on hearing of them till the end."""
        await asyncio.gather(*(agent.stop(AGENT_STOP_BUDGET_S) for agent in self.agents))
        await self.supervisor.stop(SUPERVISOR_STOP_BUDGET_S)
        await self._ended()

    async def kill(self) -> None:
        """SIGKILL all of them, and reap them."""
        for child in (*self.agents, self.supervisor):
            child.kill()
        await self._ended()

    async def _start(self, children: list[Child]) -> None:
        runs = [asyncio.create_task(child.run(), name=f"up/{child.name}") for child in children]
        self._runs += runs
        all_ready = asyncio.gather(*(child.wait_ready() for child in children))
        waiting: set[asyncio.Future[Any]] = {all_ready, *runs}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for run in runs:
                if run.done():
                    run.result()
        finally:
            all_ready.cancel()

    async def _ended(self) -> None:
        # A start that was given up has been told already, by `start`.
        await asyncio.gather(*self._runs, return_exceptions=True)

    def _supervisor_argv(self) -> list[str]:
        return [
            *_PROGRAM,
            "supervisor",
            f"--endpoint={self.endpoint}",
            f"--state-dir={self._options.state_dir}",
            # Whoever runs `up` wants it to serve: one that only waits would look as if it hung.
            "--no-standby",
            *self._shared(),
            f"--heartbeat-s={self._options.heartbeat_s}",
        ]

    def _agent_argv(self, worker_id: str) -> list[str]:
        options = self._options
        return [
            *_PROGRAM,
            "agent",
            f"--endpoint={self.endpoint}",
            f"--worker-id={worker_id}",
            f"--state-dir={options.state_dir}",
            f"--lock-dir={options.lock_dir}",
            *(f"--devices={device}" for device in options.devices),
            *(f"--pythonpath={folder}" for folder in options.pythonpath),
            *(f"--allow={pattern}" for pattern in options.allow),
            *self._shared(),
        ]

    def _shared(self) -> list[str]:
        return [f"--die-with={os.getpid()}", *self._options.more]
