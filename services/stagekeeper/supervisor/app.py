"""One supervisor, put together and taken apart.

Decided here: the order. Lock, store and epoch come first; the stable endpoint opens last, when all
behind it answers. At the end streams are told first, since a server waits for those that are open.

Invariant: whatever was opened is closed, also when a start fails half-way.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog

from stagekeeper.core.commands import AgentTarget
from stagekeeper.core.ids import NO_EPOCH, ClusterName, Epoch, WorkerId
from stagekeeper.core.registry import Registry
from stagekeeper.runtime.clock import Clock, SystemClock
from stagekeeper.runtime.private_folder import make_state_folder
from stagekeeper.runtime.server import Server, split_address
from stagekeeper.runtime.tasks import TaskOwner
from stagekeeper.supervisor.agent_calls import AgentCalls
from stagekeeper.supervisor.agent_channels import AgentChannels
from stagekeeper.supervisor.creation import Creations
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.deployment_service import DeploymentServicer
from stagekeeper.supervisor.discovery_service import DiscoveryServicer
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.executor import Executor
from stagekeeper.supervisor.predecessor import check_endpoint_is_free
from stagekeeper.supervisor.progress_hub import ProgressHub
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.state_lock import StateLock
from stagekeeper.supervisor.store import MemoryStore, SqliteStore, Store, Stored, StoreFailed
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

    Attributes:
        endpoint: the stable address with its real port, once started.
        worker_address: where SupervisorService is, as agents are told it, once started.
        epoch: the reign that it began with, once started; a worker may have shown a higher one.
        failed: done with an exception when the supervisor cannot go on and must be stopped.
    """

    def __init__(self, settings: SupervisorSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._opened = AsyncExitStack()
        self.endpoint = ""
        self.worker_address = ""
        self.epoch = NO_EPOCH
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Open the store, begin a reign and serve.

        Raises:
            StateDirTaken: another supervisor owns the state directory.
            FolderIsOpen: others can look into the state directory.
            StoreFailed: the store cannot be used.
            AddressTaken: somebody else serves one of the addresses.
        """
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise

    async def stop(self) -> None:
        """End streams and calls, then close everything. A second call changes nothing."""
        await self._opened.aclose()

    async def _start(self) -> None:
        settings = self._settings
        await check_endpoint_is_free(settings.endpoint)
        store = self._open_store(settings.state_dir)
        stored = store.load()
        epoch = Epoch(stored.epoch.number + 1, os.urandom(16).hex())
        store.seize(epoch)
        self.epoch = epoch
        registry = self._registry(store, stored, epoch)
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
        engine = Engine(
            registry, store, self._clock, carry_out=executor.carry_out, on_failed=self._fail
        )
        self._opened.callback(engine.end)
        self._opened.push_async_callback(executor.stop)
        tasks = TaskOwner("supervisor")
        self._opened.push_async_callback(tasks.stop)
        _ = tasks.start("ticks", tick_for_ever(self._clock, settings.tick_interval_s, engine.tick))
        await self._serve(engine, progress, is_durable=store.is_durable)
        _log.info(
            "a reign began",
            cluster=settings.cluster,
            epoch=str(epoch),
            endpoint=self.endpoint,
            workers=self.worker_address,
            deployments=len(stored.desired),
            awaited_workers=len(stored.roster),
        )

    def _open_store(self, state_dir: Path | None) -> Store:
        if state_dir is None:
            return MemoryStore()
        make_state_folder(state_dir)
        lock = StateLock(state_dir)
        self._opened.callback(lock.release)
        numbers = self._settings.registry
        store = SqliteStore(
            state_dir,
            failure_limit=numbers.failure_limit,
            tombstone_limit=numbers.tombstone_limit,
        )
        self._opened.callback(store.close)
        return store

    def _registry(self, store: Store, stored: Stored, epoch: Epoch) -> Registry:
        return Registry(
            cluster=ClusterName(self._settings.cluster),
            epoch=epoch,
            settings=self._settings.registry,
            desired=stored.desired,
            tombstones=stored.tombstones,
            roster=stored.roster,
            failures=stored.failures,
            durable=store.is_durable,
            now=self._clock.monotonic(),
            is_new=stored.is_new,
        )

    async def _serve(self, engine: Engine, progress: ProgressHub, *, is_durable: bool) -> None:
        """Open the worker-facing address, then the stable endpoint that names it."""
        cluster, messages = ClusterName(self._settings.cluster), DeploymentMessages()
        workers = SupervisorServicer(cluster, engine)
        # The address is known once the server listens, and the server has its servicers before.
        discovery = DiscoveryServicer(cluster, engine.registry, lambda: self.worker_address)
        deployments = DeploymentServicer(
            engine,
            Creations(engine, progress, messages, self._clock, is_durable=is_durable),
            Watchers(engine, messages, self._clock, bookmark_s=self._settings.bookmark_s),
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

    def _fail(self, error: StoreFailed) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


async def run(
    settings: SupervisorSettings,
    *,
    stop: asyncio.Event,
    ready: Callable[[Supervisor], None],
    clock: Clock | None = None,
) -> None:
    """Run one supervisor until `stop` is set.

    Args:
        settings: checked already.
        stop: set by whoever runs this, on SIGTERM for one.
        ready: called once with the supervisor when everything answers.
        clock: time, handed in.

    Raises:
        StateDirTaken, AddressTaken: it could not start beside another one.
        StoreFailed: it could not start, or could not go on: what it promises cannot be kept.
    """
    gc.freeze()  # what was imported stays: no collection has to look through it again
    # A registration makes hundreds of values that stay; looking for cycles among them after every
    # 700 is a tenth of the time in which a cluster comes back.
    gc.set_threshold(20_000, 20, 20)
    supervisor = Supervisor(settings, clock)
    await supervisor.start()
    stopping = asyncio.create_task(stop.wait(), name="supervisor/stop")
    try:
        ready(supervisor)
        ends: set[asyncio.Future[Any]] = {stopping, supervisor.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            supervisor.failed.result()
    finally:
        stopping.cancel()
        await supervisor.stop()


def _advertised(advertise: str, listening: str) -> str:
    """Say the worker-facing address as agents are told it; port 0 stands for the real one."""
    if not advertise:
        return listening
    host, _, port = advertise.rpartition(":")
    return f"{host}:{split_address(listening)[1]}" if port == "0" else advertise
