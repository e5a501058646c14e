"""One agent, put together and taken apart again.

The order of a start is a promise: locks, then this life's incarnation on disk, then everything
recorded is taken over, then the agent serves, and only then it registers. Decided here: that order,
and what an agent does about its own end. Invariant: `stop` leaves no task, no port, no lock, no
process for actors, and every stage that is in service.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import structlog

from stagekeeper.agent import agent_service
from stagekeeper.agent.adoption import Adoption
from stagekeeper.agent.agent_service import AgentService
from stagekeeper.agent.authority import Authority
from stagekeeper.agent.cards.card_memory import CardMemory
from stagekeeper.agent.cards.card_sources import CardSources
from stagekeeper.agent.cards.host_ledger import HostLedger, LedgerBusy, until_turn
from stagekeeper.agent.cards.inventory import Inventory
from stagekeeper.agent.cards.ledger import Ledger
from stagekeeper.agent.connection import AuthorityEnded
from stagekeeper.agent.damaged import DamagedRecords
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.ending import kill_processes
from stagekeeper.agent.entrypoints import Entrypoints
from stagekeeper.agent.failures import FailureSpool
from stagekeeper.agent.host_lock import FileLock, make_lock_dir, take_worker_lock
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.liveness import Liveness
from stagekeeper.agent.operation_start import OperationStart
from stagekeeper.agent.operation_store import OperationStore
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.ports import PortRange, Ports
from stagekeeper.agent.procs.actor_warden import ActorWarden
from stagekeeper.agent.procs.proc_sets import ProcSets
from stagekeeper.agent.procs.proc_starter import ProcStarter
from stagekeeper.agent.records import RecordStore
from stagekeeper.agent.reservation import Admission
from stagekeeper.agent.rollback import Rollback
from stagekeeper.agent.rounds import Rounds
from stagekeeper.agent.session import Session
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.spawning import Spawner
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.agent.stopping import Stopping
from stagekeeper.agent.surroundings import look_around
from stagekeeper.agent.transport import GrpcTransport, Transport
from stagekeeper.agent.worker_slice import WorkerSlice
from stagekeeper.core.ids import DeviceId, FailureId, OperationId
from stagekeeper.core.model import Failure, WorkerReport
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.server import Server
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock, SystemClock
from stagekeeper.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server

_log = structlog.get_logger(__name__)

_GOODBYE_S: Final = 10.0
"""What the end of an agent may take: for undoing what is not committed, and for stops under way."""
_FLUSH_S: Final = 1.0

_ACTORS_END_S: Final = 3.0
"""What actors may take for their own end when the agent ends."""

_LOOK_S: Final = 1.0
"""What a reading of the cards may take around the end of a stage; then the last one counts."""


class Agent:
    """One agent of one host.

    Args:
        transport: the network towards supervisors; by default gRPC to `settings.endpoint`.

    Attributes:
        registered: set once a supervisor has taken the first registration of this life.
        failed: gets the error that the agent cannot go on after.
        adopted_count: stages that an earlier life left and this one took over, once started.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        clock: Clock | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._transport = transport or GrpcTransport(settings.endpoint)
        self._owner = TaskOwner("agent", self._task_failed)
        self._locks: list[FileLock] = []
        self.adopted_count = 0
        self.registered = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        """Where others reach `AgentService`."""
        return self._address

    @property
    def identity(self) -> AgentIdentity:
        return self._identity

    async def start(self) -> None:
        """Take over what is there, serve, and begin to look for a supervisor.

        Raises:
            SettingsError: the settings cannot work.
            LockHeld: an agent of this worker id, or of this state directory, runs already.
            IdentityUnreadable, AddressTaken, OSError: it cannot run here.
        """
        settings = self._settings
        settings.check()
        self._directory = settings.directory
        self._directory.create()
        try:
            make_lock_dir(settings.lock_dir)
            self._locks.append(take_worker_lock(settings.lock_dir, settings.worker_id))
            self._locks.append(
                FileLock.take(self._directory.lock_file, f"state dir {self._directory.root}")
            )
            self._surroundings = await asyncio.to_thread(look_around)
            self._proc_starter = ProcStarter(settings)
            await self._proc_starter.sweep_left()
            self._warden = ActorWarden(self._proc_starter.life_place, self._owner)
            self._proc_starter.before_start = self._warden.watch
            await self._take_over()
            await self._serve()
        except BaseException:
            await self._let_go()
            raise
        self._session = Session(
            settings,
            self._identity,
            self._authority,
            self._slice,
            self,
            transport=self._transport,
            clock=self._clock,
            random=random.random,
            on_registered=self.registered.set,
            on_broken=self._task_failed,
        )
        _ = self._owner.start("rounds", self._rounds.run())
        self._session_task = self._owner.start("session", self._run_session())

    async def stop(self) -> None:
        """Undo what is not committed, end the actors, and let go of the stages, which go on."""
        self._authority.is_draining = True
        await asyncio.gather(self._undo_uncommitted(), self._procs.stop(_ACTORS_END_S))
        if not self._session_task.done():
            await self._session.flush(_FLUSH_S)
        self._session_task.cancel()
        await asyncio.wait({self._session_task})
        await self._warden.end()
        await self._server.stop(0.5)
        await self._let_go()

    # --- what the session asks for

    def settle(
        self, failure_ids: Iterable[FailureId], operation_ids: Iterable[OperationId]
    ) -> None:
        if self._spool.settle(failure_ids):
            self._slice.changed()
        self._operations.settle(operation_ids)

    def unsettled_failures(self) -> tuple[Failure, ...]:
        return self._spool.pending

    # --- the start

    async def _take_over(self) -> None:
        settings, directory = self._settings, self._directory
        records, store = RecordStore(directory), OperationStore(directory)
        found, operation_files = records.load(), store.load()
        self._identity = AgentIdentity.next_life(
            directory.identity_file,
            settings.worker_id,
            recorded_incarnation=max((it.incarnation for it in found), default=0),
        )
        self._authority = Authority(settings.cluster, self._identity)
        self._host_ledger = HostLedger(settings.lock_dir, settings.cluster, settings.worker_id)
        self._ledger = Ledger(host=self._host_ledger)
        await self._open_ledger()
        self._ports = self._make_ports()
        self._ledger.on_free = self._ports.free
        self._cards = CardSources(settings, self._identity.host_id)
        self._inventory = Inventory(self._cards.all, self._ledger, self._clock, settings.worker_id)
        self._slice = WorkerSlice(settings.cluster, self._report)
        self._inventory.on_change = self._slice.changed
        self._inventory.follow(self._owner)
        self._spool = FailureSpool(directory)
        self._spool.load()
        self._oom = OomWitness()
        self._records = records
        deaths = Deaths(settings.worker_id, self._spool, records, self._oom, self._clock)
        memory = CardMemory(
            self._inventory,
            self._clock,
            wait_s=settings.memory_wait_s,
            look_s=min(_LOOK_S, settings.device_deadline_s),
        )
        self._stages = Stages(
            records,
            self._ledger,
            deaths,
            self._owner,
            self._clock,
            self._slice.changed,
            memory,
            self._ports,
        )
        self._damaged = DamagedRecords(records.damaged, records.end_damaged, self._slice.changed)
        self._damaged.look()
        self._rounds = Rounds(
            self._stages,
            self._damaged,
            Liveness(
                self._owner,
                self._clock,
                busy_after_s=settings.busy_after_s,
                stall_after_s=settings.stall_after_s,
            ),
            self._oom,
            self._clock,
            busy_after_s=settings.busy_after_s,
            on_figures=self._slice.figures_are_read,
        )
        self._operations = self._make_operations(store, deaths)
        self._stopping = Stopping(self._stages, self._operations, self._owner)
        self._procs = ProcSets(
            settings.allow,
            self._identity.incarnation,
            self._proc_starter,
            self._owner,
            self._clock,
            self._oom,
        )
        deaths.on_failure = self._stage_failed
        self._cards.hear(self._stages, self._inventory, deaths, self._owner, self._clock)
        adoption = Adoption(self._stages, self._operations, store, deaths, self._stopping, records)
        adopted = await adoption.run(found, operation_files, wait_s=settings.adopt_wait_s)
        self._ledger.forget_inherited()
        await self._inventory.read_once(2 * settings.device_deadline_s)
        self._operations.go_on()  # which may need the cards
        self.adopted_count = adopted.held_count
        _log.info(
            "taken over",
            worker=settings.worker_id,
            incarnation=self._identity.incarnation,
            adopted=adopted.held_count,
            gone=adopted.gone_count,
            cleaned=adopted.cleaned_count,
            damaged=len(self._damaged),
        )

    async def _open_ledger(self) -> None:
        """Take over what an earlier life told the other agents of this host.

        Who cannot is no reason to leave stages unwatched: its word counts, and the next turn that
        is had, with the first reservation, makes up for it.
        """
        try:
            await until_turn(self._ledger.open)
        except LedgerBusy as busy:
            _log.error("the host's ledger is not to be had yet", why=busy.message)

    def _make_ports(self) -> Ports:
        settings = self._settings
        return Ports(
            settings.stage_host.strip("[]"),
            settings.lock_dir,
            PortRange.parse(settings.ports) if settings.ports else None,
            prefer=zlib.crc32(settings.worker_id.encode()),
        )

    def _make_operations(self, store: OperationStore, deaths: Deaths) -> Operations:
        settings = self._settings
        spawner = Spawner(
            settings,
            self._records,
            self._stages,
            self._ledger,
            self._inventory.by_id,
            self._identity,
            self._clock,
            self._ports,
        )
        entrypoints = Entrypoints(settings.allow, settings.pythonpath)
        rollback = Rollback(
            settings.worker_id,
            self._stages,
            self._ledger,
            self._owner,
            budget_s=settings.rollback_budget_s,
        )
        return Operations(
            store,
            self._stages,
            self._ledger,
            Admission(store, self._stages, self._ledger, entrypoints),
            OperationStart(
                spawner.spawn, self._stages, deaths, rollback, max_loads=settings.max_loads
            ),
            rollback,
            self._owner,
            lease_s=settings.operation_lease_s,
            on_change=self._slice.changed,
            ports=self._ports,
        )

    async def _serve(self) -> None:
        self._service = AgentService(
            self._settings.worker_id,
            self._authority,
            self._stages,
            self._operations,
            self._stopping,
            self._records,
            self._procs,
            lambda: self._inventory.report(self._stages),
            self._read_cards,
        )
        self._server = Server(
            self._settings.listen,
            [agent_service.SERVICE],
            [lambda server: add_AgentServiceServicer_to_server(self._service, server)],
            ends_streams=[self._service],
        )
        bound = await self._server.start()
        self._address = self._settings.advertised(bound)

    async def _run_session(self) -> None:
        try:
            await self._session.run()
        except AuthorityEnded as ended:
            _log.error(
                "this agent obeys nobody any more; its stages go on, and it can be ended",
                worker=self._settings.worker_id,
                why=str(ended),
            )

    # --- while it runs

    async def _read_cards(self, device_ids: Collection[DeviceId]) -> None:
        """Read these cards anew, where a driver has to be asked."""
        if self._inventory.driven(device_ids):
            await self._inventory.look_again(2 * self._settings.device_deadline_s)

    def _report(self) -> WorkerReport:
        inventory = self._inventory.report(self._stages)
        return WorkerReport(
            worker_id=self._settings.worker_id,
            host_id=self._identity.host_id,
            incarnation=self._identity.incarnation,
            revision=0,
            agent_address=self._address,
            hostname=self._identity.hostname,
            stages_outlive_agent=self._surroundings.stages_outlive_agent,
            outlive_reason=self._surroundings.reason,
            highest_epoch=self._identity.highest_epoch,
            devices=inventory.devices,
            inventory_unknown=bool(inventory.unknown_reason),
            inventory_reason=inventory.unknown_reason,
            shards=tuple(self._stages.shards()),
            operations=tuple(self._operations.records()),
            failures=self._spool.pending,
            notes=(
                *self._damaged.notes(),
                *self._ledger.notes,
                *self._cards.notes,
            ),
        )

    def _stage_failed(self, stage: StageProcess, failure: Failure) -> None:
        self._slice.changed()
        self._operations.stage_failed(stage, failure)

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Fail fast: the next agent takes everything over, and an unwatched stage helps nobody."""
        if not self.failed.done():
            self.failed.set_exception(error)
        _log.debug("a task failed", task=name, error=str(error))

    # --- the end

    async def _undo_uncommitted(self) -> None:
        undoing: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._operations.undo(it, "its agent was asked to end"))
            for it in self._operations.unended()
        ]
        ending: set[asyncio.Future[Any]] = {*undoing, *self._stopping.tasks}
        if not ending:
            return
        _, pending = await asyncio.wait(ending, timeout=_GOODBYE_S / 2)
        if pending:
            uncommitted = [it for it in self._stages if self._operations.holder_of(it) is not None]
            for stage in uncommitted:
                _ = self._owner.start(f"kill {stage.instance_id[:8]}", kill_processes(stage))
            await asyncio.wait(pending, timeout=_GOODBYE_S / 2)
        for task in undoing:
            task.cancel()

    async def _let_go(self) -> None:
        """Let go of tasks, processes and locks; the processes go on."""
        await self._owner.stop()
        if hasattr(self, "_stages"):
            await self._stages.let_go()
            self._host_ledger.close()
            self._ports.close()
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # it was told to whoever waits for it
        else:
            self.failed.cancel()


async def run(
    settings: AgentSettings,
    *,
    stop: asyncio.Event,
    ready: Callable[[Agent], None],
) -> None:
    """Run one agent until `stop` is set.

    Args:
        stop: set by whoever runs this, on SIGTERM for one.
        ready: called once with the agent, when all is taken over and a supervisor has taken the
            first registration: from then on it can be used.

    Raises:
        SupervisorNotFound: none was found within `max_wait_s`.
        SettingsError, LockHeld, IdentityUnreadable, AddressTaken: it could not start.
    """
    agent = Agent(settings)
    await agent.start()
    stopping = asyncio.create_task(stop.wait(), name="agent/asked to end")
    registered = asyncio.create_task(agent.registered.wait(), name="agent/registered")
    ends: set[asyncio.Future[Any]] = {stopping, agent.failed}
    try:
        await asyncio.wait({*ends, registered}, return_when=asyncio.FIRST_COMPLETED)
        if registered.done():
            ready(agent)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if agent.failed.done():
            agent.failed.result()
    finally:
        for task in (stopping, registered):
            task.cancel()
        await asyncio.wait({stopping, registered})
        await agent.stop()
