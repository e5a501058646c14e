"""Supervisors for tests: real ones, in this process or as one of their own, on OS-given ports."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from stagekeeper.core.settings import RegistrySettings
from stagekeeper.supervisor.app import Supervisor
from stagekeeper.supervisor.lifetime import run
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.v1 import (
    deployment_service_pb2,
    deployment_service_pb2_grpc,
    types_pb2,
)
from tests.fakes.hand_worker import channel_to

QUICK = {
    "heartbeat_s": 0.5,
    "lease_s": 30.0,
    "lost_s": 60.0,
    "recovery_window_s": 30.0,
    "retry_s": 0.05,
    "report_wait_s": 30.0,
}
"""Beats come often, and nothing is given up while a slow machine runs a test."""


class Reigns:
    """A cluster's supervisors, one after another, in this process, at one endpoint.

    Args:
        state_dir: kept from one to the next; None keeps nothing.
        registry: changes to the numbers that decisions are made by.
        changes: to the settings.
    """

    def __init__(
        self,
        state_dir: Path | None,
        *,
        registry: dict[str, float] | None = None,
        **changes: object,
    ) -> None:
        numbers: dict[str, float] = {**QUICK, **(registry or {})}
        self._fields: dict[str, object] = {
            "endpoint": "127.0.0.1:0",
            "state_dir": state_dir,
            "registry": RegistrySettings(**numbers),  # type: ignore[arg-type]
            "bookmark_s": 0.2,
            "tick_s": 0.05,
            **changes,
        }
        self.supervisor: Supervisor | None = None
        self.endpoint = ""

    async def start(self, **changes: object) -> Supervisor:
        """Begin a reign; from the second on at the endpoint of the first."""
        self._fields.update(changes)
        settings = SupervisorSettings(**self._fields)  # type: ignore[arg-type]
        self.supervisor = Supervisor(settings)
        await self.supervisor.start()
        self.endpoint = self.supervisor.endpoint
        self._fields["endpoint"] = self.endpoint
        return self.supervisor

    async def stop(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.stop()
            self.supervisor = None

    async def restart(self, **changes: object) -> Supervisor:
        await self.stop()
        return await self.start(**changes)


@asynccontextmanager
async def reigns(state_dir: Path | None, **changes: object) -> AsyncIterator[Reigns]:
    """Run a supervisor, and end whatever runs then."""
    them = Reigns(state_dir, **changes)  # type: ignore[arg-type]
    await them.start()
    try:
        yield them
    finally:
        await them.stop()


class SupervisorProcess:
    """A supervisor as a process, for tests that kill it."""

    def __init__(self, state_dir: Path, endpoint: str = "127.0.0.1:0") -> None:
        self._state_dir = state_dir
        self.endpoint = endpoint
        self.worker_address = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.fakes.supervisors",
            str(self._state_dir),
            self.endpoint,
            stdout=PIPE,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 30)
        self.endpoint, self.worker_address = line.decode().split()

    async def kill(self) -> None:
        """SIGKILL it, if it runs, and wait until it is gone."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def list_deployments(endpoint: str) -> deployment_service_pb2.ListDeploymentsResponse:
    async with channel_to(endpoint) as channel:
        return await deployment_service_pb2_grpc.DeploymentServiceStub(channel).ListDeployments(
            deployment_service_pb2.ListDeploymentsRequest(), timeout=10
        )


async def list_workers(endpoint: str) -> deployment_service_pb2.ListWorkersResponse:
    async with channel_to(endpoint) as channel:
        return await deployment_service_pb2_grpc.DeploymentServiceStub(channel).ListWorkers(
            deployment_service_pb2.ListWorkersRequest(), timeout=10
        )


async def get_deployment(endpoint: str, name: str) -> deployment_service_pb2.Deployment:
    async with channel_to(endpoint) as channel:
        answer = await deployment_service_pb2_grpc.DeploymentServiceStub(channel).GetDeployment(
            deployment_service_pb2.GetDeploymentRequest(name=name), timeout=10
        )
    return answer.deployment


def timeless(deployment: deployment_service_pb2.Deployment) -> deployment_service_pb2.Deployment:
    """Leave out since when anything is so: another reign did not see it begin."""
    copy = deployment_service_pb2.Deployment()
    copy.CopyFrom(deployment)
    copy.ClearField("state_time")
    for replica in copy.replicas:
        replica.ClearField("state_time")
    return copy


def spec(name: str = "m", *, replicas: int = 1, stages: int = 2) -> types_pb2.DeploymentSpec:
    """Build a spec whose stages take a quarter of one card each."""
    return types_pb2.DeploymentSpec(
        name=name,
        replicas=replicas,
        stages=[
            types_pb2.StageSpec(
                name=f"stage-{index}",
                entrypoint="models:Stage",
                devices=[index % 2],
                memory=types_pb2.MemoryNeed(utilization=0.25),
            )
            for index in range(stages)
        ],
    )


async def _serve(state_dir: str, endpoint: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = SupervisorSettings(
        endpoint=endpoint,
        state_dir=Path(state_dir),
        registry=RegistrySettings(**QUICK),  # type: ignore[arg-type]
        tick_s=0.05,
    )
    await run(
        settings,
        stop=asyncio.Event(),
        ready=lambda it: print(it.endpoint, it.worker_address, flush=True),
    )


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
