"""One reign of a supervisor, put together and taken apart.

Decided here: the order. Lock, store and epoch come first; the stable endpoint opens last, when all
behind it answers. At the end streams are told first, since a server waits for those that are open.
Not decided here: when a reign may begin, and what comes after one (`lifetime`).

Invariant: whatever was opened is closed, also when a start fails half-way.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from stagekeeper.core.commands import AgentTarget, LookForReign, Work
from stagekeeper.core.ids import NO_EPOCH, ClusterName, Epoch, WorkerId
from stagekeeper.core.registry import Registry
from stagekeeper.host.server import Server, split_address
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock, SystemClock
from stagekeeper.runtime.private_folder import make_state_folder
from stagekeeper.supervisor.agent_calls import AgentCalls
from stagekeeper.supervisor.agent_channels import AgentChannels
from stagekeeper.supervisor.creation import Creations
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.deployment_service import DeploymentServicer
from stagekeeper.supervisor.discovery_service import DiscoveryServicer
from stagekeeper.supervisor.endpoint_look import Found, ask
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.executor import Executor
from stagekeeper.supervisor.predecessor import Turn, check_turn
from stagekeeper.supervisor.progress_hub import ProgressHub
from stagekeeper.supervisor.settings import SupervisorSettings, has_port
from stagekeeper.supervisor.state_lock import StateLock
from stagekeeper.supervisor.store import MemoryStore, SqliteStore, Store, Stored
from stagekeeper.supervisor.successor import Successor
from stagekeeper.supervisor.supervisor_service import SupervisorServicer
from stagekeeper.supervisor.ticker import tick_for_ever
from stagekeeper.supervisor.watchers import Watchers
from stagekeeper.v1 import deployment_service_pb2_grpc as deployment_grpc
from stagekeeper.v1 import discovery_service_pb2_grpc as discovery_grpc
from stagekeeper.v1 import supervisor_service_pb2_grpc as supervisor_grpc

_log = structlog.get_logger(__name__)

DISCOVERY = "stagekeeper.v1.DiscoveryService"
DEPLOYMENTS = "stagekeeper.v1.DeploymentService"
WORKERS = "stagekeeper.v1.SupervisorService"
STOP_GRACE_S = 0.5


class Supervisor:
    """One reign: `start` it, and `stop` it once.

    Args:
        settings: checked already.
        clock: time, handed in.
        turn: that a reign may begin now, from whoever looked; without, `start` looks itself.

    Attributes:
        endpoint: the stable address with its real port, once started.
        worker_address: where SupervisorService is, as agents are told it, once started.
        failed: done with an exception when the reign is over and the supervisor must be stopped:
            StoreFailed, or, where another reign took over, EpochLost or HigherReign.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        clock: Clock | None = None,
        *,
        turn: Turn | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._turn = turn
        self._opened = AsyncExitStack()
        self.endpoint = ""
        self.worker_address = ""
        self._engine: Engine | None = None
        self._executor: Executor | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def epoch(self) -> Epoch:
        """This reign, once started; a worker that obeyed a higher one raises it."""
        return NO_EPOCH if self._engine is None else self._engine.registry.epoch

    async def start(self) -> None:
        """Open the store, begin a reign and serve.

        Raises:
            StateDirTaken: another supervisor owns the state directory.
            FolderIsOpen: others can look into the state directory.
            StoreFailed: the store cannot be used; EpochLost: another one took it just now.
            AddressTaken: somebody else serves one of the addresses.
        """
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise

    async def stop(self) -> None:
        """End streams and calls, then close everything. A second call changes nothing."""
        if self._executor is not None and self.failed.done():
            await self._executor.stop()  # nothing more is said to agents in the name of this reign
        await self._opened.aclose()

    async def _start(self) -> None:
        settings = self._settings
        turn = self._turn or await check_turn(settings)
        store = self._open_store(settings.state_dir)
        stored = store.load()
        epoch = Epoch(max(stored.epoch, turn.above).number + 1, os.urandom(16).hex())
        store.seize(epoch)
        # Where somebody reigned before there are workers to wait for, though nothing is stored.
        registry = self._registry(store, stored, epoch, is_new=stored.is_new and turn.is_first)
        progress, channels = ProgressHub(), AgentChannels()

        def target_of(worker_id: WorkerId) -> AgentTarget | None:
            return registry.target_of(worker_id)

        calls = AgentCalls(
            ClusterName(settings.cluster),
            epoch_of=lambda: registry.epoch,
            target_of=target_of,
            channels=channels,
            clock=self._clock,
        )
        executor = Executor(settings, calls, progress, lambda event: engine.tell(event))

        def carry_out(work: Work) -> None:
            if isinstance(work, LookForReign):
                successor.look_at_once(work.above)
            else:
                executor.carry_out(work)

        engine = Engine(registry, store, self._clock, carry_out=carry_out, on_failed=self._fail)
        self._engine, self._executor = engine, executor
        successor = self._successor(engine)
        self._opened.callback(engine.end)
        self._opened.push_async_callback(executor.stop)
        tasks = TaskOwner("supervisor")
        self._opened.push_async_callback(tasks.stop)
        _ = tasks.start("ticks", tick_for_ever(self._clock, settings.tick_interval_s, engine.tick))
        await self._serve(engine, progress, is_durable=store.is_durable)
        _ = tasks.start("successor", successor.run())
        _log.info(
            "a reign began",
            cluster=settings.cluster,
            epoch=str(epoch),
            endpoint=self.endpoint,
            workers=self.worker_address,
            deployments=len(stored.desired),
            operations=len(stored.operations),
            awaited_workers=len(stored.roster),
        )

    def _open_store(self, state_dir: Path | None) -> Store:
        if state_dir is None:
            return MemoryStore()
        make_state_folder(state_dir)
        lock = StateLock(state_dir, self._settings.stable)
        self._opened.callback(lock.release)
        numbers = self._settings.registry
        store = SqliteStore(
            state_dir,
            failure_limit=numbers.failure_limit,
            tombstone_limit=numbers.tombstone_limit,
        )
        self._opened.callback(store.close)
        return store

    def _registry(self, store: Store, stored: Stored, epoch: Epoch, *, is_new: bool) -> Registry:
        return Registry(
            cluster=ClusterName(self._settings.cluster),
            epoch=epoch,
            settings=self._settings.registry,
            desired=stored.desired,
            tombstones=stored.tombstones,
            roster=stored.roster,
            failures=stored.failures,
            operations=stored.operations,
            durable=store.is_durable,
            now=self._clock.monotonic(),
            is_new=is_new,
        )

    def _successor(self, engine: Engine) -> Successor:
        settings = self._settings

        async def ask_endpoint() -> Found:
            # With port 0 the address is known once it is listened at, and nothing is asked before.
            stable = settings.stable if has_port(settings.stable) else self.endpoint
            return await ask(stable, settings.look_timeout_s)

        return Successor(
            settings.stable,
            settings.cluster,
            epoch_of=lambda: engine.registry.epoch,
            ask=ask_endpoint,
            look_s=settings.look_s,
            clock=self._clock,
            random=random.random,
            on_found=engine.step_down,
        )

    async def _serve(self, engine: Engine, progress: ProgressHub, *, is_durable: bool) -> None:
        """Open the worker-facing address, then the stable endpoint that names it."""
        cluster = ClusterName(self._settings.cluster)
        messages = DeploymentMessages(engine.registry, self._clock)
        workers = SupervisorServicer(cluster, engine)
        # The address is known once the server listens, and the server has its servicers before.
        discovery = DiscoveryServicer(cluster, engine.registry, lambda: self.worker_address)
        deployments = DeploymentServicer(
            engine,
            Creations(engine, progress, messages, self._clock, is_durable=is_durable),
            Watchers(
                engine,
                messages,
                self._clock,
                bookmark_s=self._settings.bookmark_s,
                slow_reader_s=self._settings.slow_reader_s,
            ),
            messages,
            self._clock,
            is_durable=is_durable,
        )
        worker_server = Server(
            self._settings.listen,
            [WORKERS, DISCOVERY],
            [
                lambda server: supervisor_grpc.add_SupervisorServiceServicer_to_server(
                    workers, server
                ),
                lambda server: discovery_grpc.add_DiscoveryServiceServicer_to_server(
                    discovery, server
                ),
            ],
        )
        listening = await worker_server.start()
        self._opened.push_async_callback(worker_server.stop, STOP_GRACE_S)
        self.worker_address = _advertised(self._settings.advertise, listening)
        public_server = Server(
            self._settings.endpoint,
            [DISCOVERY, DEPLOYMENTS],
            [
                lambda server: discovery_grpc.add_DiscoveryServiceServicer_to_server(
                    discovery, server
                ),
                lambda server: deployment_grpc.add_DeploymentServiceServicer_to_server(
                    deployments, server
                ),
            ],
            ends_streams=[deployments],
        )
        self.endpoint = await public_server.start()
        self._opened.push_async_callback(public_server.stop, STOP_GRACE_S)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def _advertised(advertise: str, listening: str) -> str:
    """Say the worker-facing address as agents are told it; port 0 stands for the real one."""
    if not advertise:
        return listening
    host, _, port = advertise.rpartition(":")
    return f"{host}:{split_address(listening)[1]}" if port == "0" else advertise
