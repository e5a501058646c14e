"""A cluster whose parts reach each other through fault proxies.

Three ways run through a proxy each: users to the stable endpoint, agents to the stable endpoint,
and agents to the worker-facing service. The proxies stay while supervisors come and go, as load
balancers and routers do; what is done to them is the test's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType

import psutil

from stagekeeper.client import Client
from tests.fakes.tcp_proxy import TcpProxy
from tests.harness.cluster import DEVICES, HEARTBEAT_S, Cluster
from tests.harness.processes import Program
from tests.harness.waiting import wait_for


class WiredCluster(Cluster):
    """As `Cluster`; `users`, `looks` and `beats` are its three ways.

    Attributes:
        users: from clients to the stable endpoint.
        looks: from agents to the stable endpoint, where they look for their supervisor.
        beats: from agents to the worker-facing service, where they register and beat.
        workers_target: where the living supervisor really serves workers.
    """

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__(heartbeat_s=heartbeat_s)
        self.users = TcpProxy()
        self.looks = TcpProxy()
        self.beats = TcpProxy()
        self.workers_target = ""
        self._proxies = AsyncExitStack()

    async def __aenter__(self) -> WiredCluster:
        for proxy in (self.users, self.looks, self.beats):
            await self._proxies.enter_async_context(proxy)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        await self._proxies.aclose()

    async def start_supervisor(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        ready: bool = True,
        advertise: str = "",
    ) -> Program:
        """As `Cluster.start_supervisor`; the proxies lead to it from now on.

        Args:
            advertise: what agents are told instead of the proxy for heartbeats.
        """
        advertised = advertise or self.beats.url
        supervisor = await super().start_supervisor(
            f"--advertise={advertised}", *flags, env=env, ready=ready
        )
        if ready:
            self.workers_target = await self._workers_target(supervisor)
            self.beats.move(self.workers_target)
            for proxy in (self.users, self.looks):
                proxy.move(self.endpoint)
        return supervisor

    async def start_agent(
        self,
        worker_id: str = "node-1",
        *flags: str,
        devices: Sequence[str] = DEVICES,
        env: dict[str, str] | None = None,
        ready: bool = True,
    ) -> Program:
        flags = (f"--endpoint={self.looks.url}", *flags)
        return await super().start_agent(worker_id, *flags, devices=devices, env=env, ready=ready)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with Client(self.users.url) as client:
            yield client

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[Client]:
        """A client that goes through no proxy: it sees what is, whatever the wires do."""
        async with Client(self.endpoint) as client:
            yield client

    async def _workers_target(self, supervisor: Program) -> str:
        """Find the one port, beside the endpoint's, that a supervisor listens at."""
        public = int(self.endpoint.rpartition(":")[2])

        def look() -> list[int]:
            connections = psutil.Process(supervisor.pid).net_connections("tcp")
            listening = {it.laddr.port for it in connections if it.status == psutil.CONN_LISTEN}
            return sorted(listening - {public})

        (port,) = await wait_for(look, "the supervisor's port for workers")
        return f"127.0.0.1:{port}"
