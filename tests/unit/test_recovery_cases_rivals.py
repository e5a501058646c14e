"""recovery-R28 on virtual time: two agents of one worker id, one supervisor, many disturbances.

Both run the session as it is, against the registry as it is; only the wire between them is the
test's. Each has its own state directory and host lock, so that neither knows of the other. They
must never take turns: after each disturbance one of them owns the worker, and goes on owning it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.agent.authority import Authority
from stagekeeper.agent.connection import AuthorityEnded
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.session import Session
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.transport import CallFailed
from stagekeeper.agent.worker_slice import WorkerSlice
from stagekeeper.core.commands import HeartbeatAnswered, RegistrationAccepted
from stagekeeper.core.errors import Refused
from stagekeeper.core.events import HeartbeatReceived, Ticked, WorkerRegistered
from stagekeeper.core.ids import ClusterName, Epoch, HostId, WorkerId
from stagekeeper.core.model import WorkerReport
from stagekeeper.core.registry import Registry, RegistrySettings
from stagekeeper.runtime.convert import epoch_to_proto, report_from_proto
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import supervisor_service_pb2 as pb
from tests.fakes.virtual_clock import VirtualClock

SETTINGS = RegistrySettings()
QUIET_S = 3 * SETTINGS.lease_s
"""Longer than a lease and every wait of a session: whatever can happen by itself has happened."""


class Supervisor:
    """A registry behind a wire; `restart` forgets all but the number of the reign."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.reign = 0
        self.owners: list[tuple[int, str]] = []
        self.restart()

    def restart(self) -> None:
        self.reign += 1
        self.registry = Registry(
            cluster=ClusterName("default"),
            epoch=Epoch(self.reign, "s"),
            settings=SETTINGS,
            durable=True,
            now=self.clock.monotonic(),
        )

    def apply(self, event: Any) -> Any:
        try:
            commands = self.registry.apply(event, now=self.clock.monotonic())
        except Refused as refused:
            raise CallFailed(
                refused.message,
                reason=refused.reason.value,
                metadata=dict(refused.metadata),
                retry_after_s=refused.retry_after_s or 0.0,
            ) from None
        self._note_owner()
        return commands[0] if commands else None

    def _note_owner(self) -> None:
        for it in self.registry.workers(self.clock.monotonic()):
            owner = it.incarnation, it.agent_address
            if not self.owners or self.owners[-1] != owner:
                self.owners.append(owner)

    async def tick(self) -> None:
        while True:
            await self.clock.sleep(1.0)
            self.apply(Ticked())


class Wire:
    """One agent's `Transport` to the supervisor of the moment, with a plug to pull."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.is_cut = False

    def check(self) -> None:
        if self.is_cut:
            raise CallFailed("no route to host")

    async def find_supervisor(self, timeout_s: float) -> discovery_pb2.GetSupervisorResponse:
        self.check()
        return discovery_pb2.GetSupervisorResponse(
            cluster="default",
            epoch=epoch_to_proto(self.supervisor.registry.epoch),
            worker_address=f"reign:{self.supervisor.reign}",
        )

    def connect(self, address: str) -> Link:
        return Link(self, address)


class Link:
    """A connection to one reign; it breaks when that is over."""

    def __init__(self, wire: Wire, address: str) -> None:
        self._wire = wire
        self._address = address

    def _check(self) -> None:
        self._wire.check()
        if self._address != f"reign:{self._wire.supervisor.reign}":
            raise CallFailed("connection reset")

    async def register(
        self, request: pb.RegisterWorkerRequest, timeout_s: float
    ) -> pb.RegisterWorkerResponse:
        self._check()
        report, _, _ = report_from_proto(request)
        answer: RegistrationAccepted = self._wire.supervisor.apply(
            WorkerRegistered(report, request.digest)
        )
        return pb.RegisterWorkerResponse(
            epoch=epoch_to_proto(answer.epoch), next_heartbeat_s=answer.next_heartbeat_s
        )

    async def heartbeat(
        self, request: pb.HeartbeatRequest, timeout_s: float
    ) -> pb.HeartbeatResponse:
        self._check()
        answer: HeartbeatAnswered = self._wire.supervisor.apply(
            HeartbeatReceived(
                WorkerId(request.worker_id), request.incarnation, request.revision, request.digest
            )
        )
        return pb.HeartbeatResponse(
            verdict=pb.HeartbeatVerdict.Value(f"HEARTBEAT_VERDICT_{answer.verdict}"),
            epoch=epoch_to_proto(answer.epoch),
            next_heartbeat_s=answer.next_heartbeat_s,
        )

    async def report_failure(
        self, request: pb.ReportFailureRequest, timeout_s: float
    ) -> pb.ReportFailureResponse:
        raise AssertionError("nothing fails here")

    async def close(self) -> None:
        pass


class Agent:
    """One agent's session over its lives, each of which begins with `start`."""

    def __init__(self, name: str, folder: Path, supervisor: Supervisor, port: int) -> None:
        self.wire = Wire(supervisor)
        self._clock = supervisor.clock
        self._folder = folder / name
        self._folder.mkdir()
        self._ports = iter(range(port, port + 1_000))
        self.task: asyncio.Task[None] | None = None
        self.address = ""

    def start(self) -> None:
        self.identity = AgentIdentity.next_life(
            self._folder / "identity.json", WorkerId("w"), recorded_incarnation=0
        )
        self.address = f"127.0.0.1:{next(self._ports)}"
        self.authority = Authority(ClusterName("default"), self.identity)
        self.slice = WorkerSlice("default", self._report)
        session = Session(
            AgentSettings(worker_id=WorkerId("w"), state_dir=self._folder, lock_dir=self._folder),
            self.identity,
            self.authority,
            self.slice,
            self,
            transport=self.wire,
            clock=self._clock,
            random=random.Random(self.address).random,
        )
        self.task = asyncio.create_task(session.run())

    @property
    def has_ended(self) -> bool:
        """Whether it was told that it has no say any more."""
        assert self.task is not None
        if not self.task.done():
            return False
        assert isinstance(self.task.exception(), AuthorityEnded), self.task
        return True

    async def stop(self) -> None:
        if self.task is not None and not self.has_ended:
            self.task.cancel()
            await asyncio.wait({self.task})

    def _report(self) -> WorkerReport:
        return WorkerReport(
            worker_id=WorkerId("w"),
            host_id=HostId("one"),
            incarnation=self.identity.incarnation,
            revision=0,
            agent_address=self.address,
            highest_epoch=self.identity.highest_epoch,
        )

    def settle(self, failure_ids: object, operation_ids: object) -> None:
        pass

    def unsettled_failures(self) -> tuple[()]:
        return ()


class World:
    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.supervisor = Supervisor(self.clock)
        self.a = Agent("a", folder, self.supervisor, 10_000)
        self.b = Agent("b", folder, self.supervisor, 20_000)
        self.ticks = asyncio.create_task(self.supervisor.tick())

    @property
    def owner(self) -> tuple[int, str]:
        return self.supervisor.owners[-1]

    async def goes_on(self, seconds: float = QUIET_S) -> None:
        await self.clock.advance(seconds)

    async def nothing_moves(self) -> None:
        """See one owner keep the worker for a long time."""
        await self.goes_on()
        count = len(self.supervisor.owners)
        await self.goes_on(4 * QUIET_S)
        assert self.supervisor.owners[count:] == [], "the agents take turns"

    async def stop(self) -> None:
        for agent in (self.a, self.b):
            await agent.stop()
        self.ticks.cancel()
        await asyncio.wait({self.ticks})


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.stop()


async def test_recovery_R28_equal_incarnations_do_not_take_turns(world: World) -> None:
    """Each counts from 1 in its own directory, and each holds the lock that it knows of."""
    world.a.start()
    await world.goes_on(1.0)
    world.b.start()
    assert world.a.identity.incarnation == world.b.identity.incarnation == 1

    await world.nothing_moves()

    assert world.owner == (1, world.a.address)
    assert world.supervisor.owners == [world.owner]
    assert world.b.identity.incarnation == 1, "it does not rise above one that lives"
    assert world.b.authority.reign is None


async def test_agent_that_is_refused_does_not_outdo_the_living_one_by_being_started_again(
    world: World,
) -> None:
    """Two containers of one host name, say, of which the second is always restarted."""
    world.a.start()
    await world.goes_on(1.0)
    world.b.start()
    for _ in range(3):
        await world.goes_on(1.0)
        await world.b.stop()
        world.b.start()
    await world.goes_on(1.0)

    assert world.supervisor.owners == [(1, world.a.address)]
    assert not world.a.has_ended


@pytest.mark.parametrize("newer_first", [False, True])
async def test_recovery_R28_higher_incarnation_owns_and_the_lower_has_no_say(
    world: World, newer_first: bool
) -> None:
    world.b.start()  # its first life, which nobody hears of
    await world.b.stop()
    for agent in (world.b, world.a) if newer_first else (world.a, world.b):
        agent.start()
        await world.goes_on(1.0)

    await world.nothing_moves()

    assert world.owner == (2, world.b.address)
    assert world.a.authority.reign is None
    assert world.a.has_ended is not newer_first


async def test_recovery_R28_waiting_agent_takes_over_when_the_other_ones_lease_is_over(
    world: World,
) -> None:
    world.a.start()
    await world.goes_on(1.0)
    world.b.start()
    await world.goes_on()

    world.a.wire.is_cut = True
    await world.nothing_moves()
    assert world.owner == (2, world.b.address)

    world.a.wire.is_cut = False
    await world.nothing_moves()
    assert world.owner == (2, world.b.address), "one that comes back waits in its turn"


# Fifty disturbances in the short run, three hundred in the long one.
@pytest.mark.parametrize(
    "seed", [pytest.param(it, marks=pytest.mark.soak if it > 1 else ()) for it in range(12)]
)
async def test_recovery_R28_agents_settle_after_every_disturbance(world: World, seed: int) -> None:
    chance = random.Random(seed)
    agents = [world.a, world.b]
    for agent in agents:
        agent.start()
    for _ in range(25):
        agent = chance.choice(agents)
        what = chance.choice(("restart supervisor", "restart agent", "cut", "mend"))
        if what == "restart supervisor":
            world.supervisor.restart()
        elif what == "restart agent":
            await agent.stop()
            agent.start()
        else:
            agent.wire.is_cut = what == "cut"
        await world.goes_on(chance.choice((0.5, 5.0, 15.0, 90.0)))
        before = len(world.supervisor.owners)
        await world.goes_on()
        # Who was cut is followed by who was not, once; nobody else changes places by himself.
        assert len(world.supervisor.owners) - before <= 1, (what, world.supervisor.owners)

    for agent in agents:
        agent.wire.is_cut = False
        if agent.has_ended:
            agent.start()
    await world.nothing_moves()
    owner = next(it for it in agents if (it.identity.incarnation, it.address) == world.owner)
    (shown,) = world.supervisor.registry.workers(world.clock.monotonic())
    assert shown.state == "ALIVE"
    assert owner.authority.reign == world.supervisor.registry.epoch
    other = world.a if owner is world.b else world.b
    assert other.has_ended or other.identity.incarnation <= owner.identity.incarnation
