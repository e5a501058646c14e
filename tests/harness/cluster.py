"""A whole cluster on this machine: real processes and gRPC, OS-given ports, nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType

from stagekeeper.client import Client
from stagekeeper.v1 import deployment_service_pb2 as deployments
from stagekeeper.v1 import types_pb2
from tests.harness.processes import Program, processes_naming, start_ticks
from tests.harness.waiting import wait_for

STAGES = Path(__file__).parent.parent / "stages"
DEVICES = ("cpu:0=1GiB", "cpu:1=1GiB")
HEARTBEAT_S = 0.5


class Cluster:
    """One supervisor and its agents as processes; used as `async with Cluster() as cluster`.

    Every process, stages included, names the cluster's own directory, and is swept at the end.
    """

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sk-"))
        self.heartbeat_s = heartbeat_s
        self.endpoint = "127.0.0.1:0"
        self.supervisor: Program | None = None
        self.agents: dict[str, Program] = {}
        self._env = {
            name: value for name, value in os.environ.items() if not name.startswith("STAGEKEEPER_")
        }

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.sweep()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def sweep(self) -> None:
        """SIGKILL every process of this cluster and wait until none is left."""
        for program in (self.supervisor, *self.agents.values()):
            if program is not None:
                program.kill()
        await wait_for(self._sweep_once, "every process of the cluster is gone")

    def _sweep_once(self) -> bool:
        left = processes_naming(str(self.directory))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not left

    async def start_supervisor(
        self, *flags: str, env: dict[str, str] | None = None, ready: bool = True
    ) -> Program:
        """Start the supervisor, at the same endpoint as before if there was one."""
        self.supervisor = Program(
            "supervisor",
            [
                "supervisor",
                f"--endpoint={self.endpoint}",
                f"--state-dir={self.directory / 's'}",
                f"--heartbeat-s={self.heartbeat_s}",
                *flags,
            ],
            self.directory / "supervisor.log",
            {**self._env, **(env or {})},
        )
        if ready:
            found = await self.supervisor.line(r"supervisor ready: endpoint=(\S+) workers=(\S+)")
            self.endpoint = found[1]
        return self.supervisor

    async def start_agent(
        self,
        worker_id: str = "node-1",
        *flags: str,
        devices: Sequence[str] = DEVICES,
        env: dict[str, str] | None = None,
        ready: bool = True,
    ) -> Program:
        """Start an agent, with the state that an earlier one of this worker id left."""
        agent = Program(
            worker_id,
            [
                "agent",
                f"--endpoint={self.endpoint}",
                f"--worker-id={worker_id}",
                f"--state-dir={self.directory / 'a'}",
                f"--lock-dir={self.directory / 'l'}",
                f"--pythonpath={STAGES}",
                *(f"--devices={device}" for device in devices),
                *flags,
            ],
            self.directory / f"{worker_id}.log",
            {**self._env, **(env or {})},
        )
        self.agents[worker_id] = agent
        if ready:
            await agent.line(r"agent ready: ")
            if self.supervisor is not None and self.supervisor.is_running:
                await agent.line(r"registered")
        return agent

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with Client(self.endpoint) as client:
            yield client

    async def workers_alive(self, count: int, client: Client) -> None:
        async def look() -> bool:
            listed = (await client.workers()).workers
            return sum(w.state == types_pb2.WORKER_STATE_ALIVE for w in listed) >= count

        await wait_for(look, f"{count} workers are ALIVE")

    async def all_ready(self, name: str, replicas: int, client: Client) -> deployments.Deployment:
        """Wait until so many replicas of a deployment are READY; return the deployment."""

        async def look() -> deployments.Deployment | None:
            found = await client.get(name)
            ready = [r for r in found.replicas if r.state == types_pb2.REPLICA_STATE_READY]
            return found if len(ready) == replicas else None

        deployment: deployments.Deployment = await wait_for(
            look, f"{name} is READY {replicas} times"
        )
        return deployment

    async def no_stage_left(self) -> None:
        await wait_for(lambda: not self.stage_processes(), "no stage process is left")

    def stage_processes(self) -> dict[int, int]:
        """Return the live stage processes of the cluster: pid → start ticks."""
        return {
            pid: ticks
            for pid, command in processes_naming(str(self.directory)).items()
            if "stagekeeper.stage" in command and (ticks := start_ticks(pid)) is not None
        }
