"""A network with one supervisor in it, for sessions that run on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from stagekeeper.agent.transport import CallFailed
from stagekeeper.core.ids import Epoch
from stagekeeper.runtime.convert import epoch_to_proto
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import supervisor_service_pb2 as pb
from tests.fakes.virtual_clock import VirtualClock

OK = pb.HEARTBEAT_VERDICT_OK


class SupervisorNetwork:
    """A `Transport`. Tests set what it answers, and read what was asked.

    Attributes:
        address: where the supervisor is now; a link to another address fails.
        is_up: False refuses every call.
        swallows: names of calls whose answers never come.
        holds: names of calls that wait for the future given, and then do what it says.
        calls: (name, address) of each call, in order.
        answers: name → function that may raise or replace the answer.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.cluster = "default"
        self.epoch = Epoch(1, "aaaa")
        self.address = "new:1"
        self.is_up = True
        self.pace_s = 2.0
        self.swallows: set[str] = set()
        self.holds: dict[str, asyncio.Future[None]] = {}
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.registrations: list[pb.RegisterWorkerRequest] = []
        self.heartbeats: list[pb.HeartbeatRequest] = []
        self.reports: list[pb.ReportFailureRequest] = []
        self.links: list[NetworkLink] = []

    @property
    def open_links(self) -> int:
        return sum(not link.is_closed for link in self.links)

    def named(self, name: str) -> list[str]:
        """The addresses to which calls of this name went."""
        return [address for called, address in self.calls if called == name]

    async def find_supervisor(self, timeout_s: float) -> discovery_pb2.GetSupervisorResponse:
        answer = discovery_pb2.GetSupervisorResponse(
            cluster=self.cluster, epoch=epoch_to_proto(self.epoch), worker_address=self.address
        )
        return await self.answer("find", "endpoint", None, answer, timeout_s)

    def connect(self, address: str) -> NetworkLink:
        self.links.append(NetworkLink(self, address))
        return self.links[-1]

    async def answer(
        self, name: str, address: str, request: Any, answer: Any, timeout_s: float
    ) -> Any:
        self.calls.append((name, address))
        if name in self.holds:
            await self.holds[name]
        if name in self.swallows:
            await self.clock.sleep(timeout_s)
            raise CallFailed("the deadline passed", code="DEADLINE_EXCEEDED")
        if not self.is_up or address not in ("endpoint", self.address):
            raise CallFailed("connection refused")
        if name in self.answers:
            return self.answers[name](request) or answer
        return answer


class NetworkLink:
    """A `SupervisorLink` to an address of the network."""

    def __init__(self, network: SupervisorNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self.is_closed = False

    async def register(
        self, request: pb.RegisterWorkerRequest, timeout_s: float
    ) -> pb.RegisterWorkerResponse:
        self._network.registrations.append(request)
        answer = pb.RegisterWorkerResponse(
            epoch=epoch_to_proto(self._network.epoch), next_heartbeat_s=self._network.pace_s
        )
        return await self._call("register", request, answer, timeout_s)

    async def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> Any:
        self._network.heartbeats.append(request)
        answer = pb.HeartbeatResponse(
            verdict=OK,
            epoch=epoch_to_proto(self._network.epoch),
            next_heartbeat_s=self._network.pace_s,
        )
        return await self._call("heartbeat", request, answer, timeout_s)

    async def report_failure(self, request: pb.ReportFailureRequest, timeout_s: float) -> Any:
        self._network.reports.append(request)
        answer = pb.ReportFailureResponse(settled=True)
        return await self._call("report", request, answer, timeout_s)

    async def close(self) -> None:
        self.is_closed = True

    async def _call(self, name: str, request: Any, answer: Any, timeout_s: float) -> Any:
        return await self._network.answer(name, self.address, request, answer, timeout_s)
