"""One process of an actor tree: what it serves, whom it is connected to, what it owns.

There is one per process: the program at the root, or a process that was spawned. Decided here:
how the parts know of each other, and how code in other threads reaches the loop. Not decided
here: what an end of the program means. Invariant: everything that runs here was started by
`start` and is ended by `close`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from stagekeeper.actor.connection.link import Link, beat_s_of
from stagekeeper.actor.connection.links import Links
from stagekeeper.actor.failing import seen_now
from stagekeeper.actor.failure import FailureKind, MeshFailure, failure_id
from stagekeeper.actor.failure_wire import failure_from_proto
from stagekeeper.actor.hosting.actor_service import ActorService
from stagekeeper.actor.hosting.connect import Connections, ConnectService
from stagekeeper.actor.hosting.house import House
from stagekeeper.actor.owning.known_ends import KnownEnds
from stagekeeper.actor.owning.references import ReferenceKeeper
from stagekeeper.actor.owning.scope import Scope
from stagekeeper.actor.owning.stop_report import StopReport
from stagekeeper.actor.place import Place
from stagekeeper.host.oom import OomWitness, RecentKills
from stagekeeper.host.server import Server
from stagekeeper.v1 import actor_service_pb2, stage_service_pb2
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.actor_service_pb2_grpc import add_ActorServiceServicer_to_server
from stagekeeper.v1.stage_service_pb2_grpc import add_StageServiceServicer_to_server
from stagekeeper.wire.entrypoint_patterns import is_allowed

_log = logging.getLogger("stagekeeper.actor")

DEFAULT_LEASE_S: Final = 3.0
_MOST_STOPPED: Final = 100
"""Meshes of processes that were stopped, and of whose ends others may still ask."""

_SERVICES: Final = (
    actor_service_pb2.DESCRIPTOR.services_by_name["ActorService"].full_name,
    stage_service_pb2.DESCRIPTOR.services_by_name["StageService"].full_name,
)


class AdoptedMesh(Protocol):
    """A mesh that this process answers for to others, of actors or of processes."""

    mesh_id: str
    mesh: Any

    async def end_of(self, ended_id: str) -> MeshFailure | None: ...

    async def places(self, ranks: Sequence[int] = ()) -> list[actor_service_pb2.RankPlace]: ...

    async def replace_ended(self, instance_ids: list[str], *, kills: bool = False) -> None: ...

    async def stop(self, budget_s: float) -> StopReport: ...


@runtime_checkable
class AdoptedActors(AdoptedMesh, Protocol):
    """A mesh of actors, which hears of its ranks besides."""

    def rank_failed(self, rank_number: int, actor_id: str, failure: MeshFailure) -> None: ...

    def process_failed(self, instance_id: str, end: MeshFailure) -> bool: ...

    def holds(self, instance_id: str) -> bool: ...


class Program:
    """The one of this process. For the loop's thread only, but for `on_loop` and `wait`.

    Args:
        instance_id: this process, as a start.
        tree_path: its place in the tree: the tree's id and the processes above, down to itself.
        token: the secret of the tree.
        boot_id: of this host.
        listen_host: where it listens; the port is the system's choice.
        allow: patterns of entrypoints (JSON list) that may be actors here; "" allows all.
    """

    def __init__(
        self,
        *,
        instance_id: str,
        tree_path: str,
        token: str,
        boot_id: str,
        listen_host: str = "127.0.0.1",
        lease_s: float = DEFAULT_LEASE_S,
        allow: str = "",
    ) -> None:
        self.instance_id = instance_id
        self.tree_path = tree_path
        self.token = token
        self.boot_id = boot_id
        self.listen_host = listen_host
        self.lease_s = lease_s
        self.address = ""
        self.root_scope: Scope | None = None
        """What belongs to the program itself; None in a process that was spawned."""
        self.before_child: Callable[[], None] = lambda: None
        """Called before each start of a child process."""
        self._allow: list[str] | None = json.loads(allow) if allow else None
        self.house = House(refuse_class=self._refuse_class)
        self.links = Links(
            hello_to=self._hello_to,
            lease_s=lease_s,
            on_failure=self.rank_failed,
            on_silence=self._silent,
            on_tick=self._look,
            comes_back_s=self._comes_back_s,
        )
        self._memory_kills: RecentKills | None = None
        self._meshes: dict[str, AdoptedMesh] = {}
        self._ends_of_stopped: OrderedDict[str, KnownEnds] = OrderedDict()
        self._references: WeakValueDictionary[str, ReferenceKeeper] = WeakValueDictionary()
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0

    @property
    def place(self) -> Place:
        """This process, as others reach it."""
        return Place(self.address, self.instance_id, os.getpid(), self.boot_id)

    def memory_kills(self) -> RecentKills:
        """Return what tells whether the kernel kills for memory; watched since the first call."""
        if self._memory_kills is None:
            self._memory_kills = RecentKills(OomWitness())
        return self._memory_kills

    def _look(self, now: float, stalled_s: float) -> None:
        if self._memory_kills is not None:
            self._memory_kills.look()
        self.house.look(now, stalled_s)

    async def start(self) -> str:
        """Listen and serve; return the address."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        connections = Connections(self, self.house)
        connect = ConnectService(connections)
        actors = ActorService(self, self.house, self)
        self._server = Server(
            f"{self.listen_host}:0",
            _SERVICES,
            [
                lambda server: add_StageServiceServicer_to_server(connect, server),
                lambda server: add_ActorServiceServicer_to_server(actors, server),
            ],
            ends_streams=[connections],
        )
        self.address = await self._server.start()
        self.links.start()
        return self.address

    async def close(self) -> None:
        """End every connection, and stop listening. Actors and meshes have ended."""
        await self.links.close()
        if self._server is not None:
            await self._server.stop(0.2)

    # --- from other threads

    def check_thread(self) -> None:
        """Check that the code that asks runs on the loop: its futures are of no other one.

        Raises:
            RuntimeError: it runs in another thread, on a loop of its own for instance.
        """
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                "a mesh is awaited on the event loop of its process, and this is another thread: "
                "say context().wait(…) in an actor's plain code, and not asyncio.run(…); "
                "asyncio.run_coroutine_threadsafe(…, loop) in threads that you started"
            )

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run `work` in the loop: at once from its own thread, as soon as can be from others."""
        assert self._loop is not None
        if threading.get_ident() == self._thread_id:
            work()
        else:
            self._loop.call_soon_threadsafe(work)

    def wait(self, awaitable: Any, timeout_s: float | None) -> Any:
        """Run an awaitable in the loop and return its result; from an actor's thread only."""
        assert self._loop is not None
        if threading.get_ident() == self._thread_id:
            raise RuntimeError(
                "this code runs on the event loop, which cannot wait for itself: use await"
            )

        async def run() -> Any:
            return await awaitable

        future: Future[Any] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    # --- meshes that it owns

    def adopt(self, mesh: AdoptedMesh) -> None:
        """Answer for a mesh from now on; from any thread."""
        self._meshes[mesh.mesh_id] = mesh

    async def end_meshes(self) -> None:
        """Have no more patience with any mesh, whoever owns it: stop all of them at once."""
        await asyncio.gather(*(mesh.stop(0.0) for mesh in list(self._meshes.values())))

    def forget(self, mesh_id: str, ends: KnownEnds | None = None) -> None:
        """The mesh was stopped; whoever asks how a process of it ended is told by `ends`."""
        self._meshes.pop(mesh_id, None)
        if ends is not None:
            self._ends_of_stopped[mesh_id] = ends
            if len(self._ends_of_stopped) > _MOST_STOPPED:
                self._ends_of_stopped.popitem(last=False)

    async def end_in(self, mesh_id: str, ended_id: str) -> MeshFailure | None:
        """Say how an actor or a process of a mesh ended, also of one that was stopped since.

        Raises:
            LookupError: this process owns no such mesh.
        """
        mesh = self._meshes.get(mesh_id)
        if mesh is not None:
            return await mesh.end_of(ended_id)
        return await self._ends_of_stopped[mesh_id].of(ended_id)

    def reference_keeper(self, mesh_id: str, name: str, size: int, owner: Place) -> ReferenceKeeper:
        """Return what keeps a mesh of another process up to date: one for all references to it."""
        keeper = self._references.get(mesh_id)
        if keeper is None:
            keeper = ReferenceKeeper(self, mesh_id, name, size, owner)
            self._references[mesh_id] = keeper
        return keeper

    def owned(self, mesh_id: str) -> AdoptedMesh | None:
        """Return a mesh that this process owns; None when it does not."""
        return self._meshes.get(mesh_id)

    def rank_failed(self, news: pb.RankFailed) -> None:
        """Hear of a rank of a mesh of this process."""
        mesh = self._meshes.get(news.mesh_id)
        if isinstance(mesh, AdoptedActors):
            mesh.rank_failed(news.rank, news.actor_id, failure_from_proto(news.failure))

    def holds_rank_in(self, instance_id: str) -> bool:
        """Return whether a mesh of actors of this process has a rank in a process."""
        return any(mesh.holds(instance_id) for mesh in self._actors())

    def unexplained_end(self, link: Link) -> MeshFailure:
        """Make the failure of a process that only its broken connection tells of."""
        place = link.place
        return MeshFailure(
            id=failure_id(place.instance_id, "end"),
            kind=FailureKind.GONE,
            mesh_name="",
            instance_id=place.instance_id,
            message=f"the connection to its process at {place.address} broke",
            detected_by="connection",
            detect_time=seen_now(),
            pid=place.pid,
        )

    def stalled(self, link: Link) -> MeshFailure:
        """Make the failure of a process that gives no sign of life, and is not known to be gone."""
        place = link.place
        return MeshFailure(
            id=failure_id(place.instance_id, FailureKind.STALLED, link.silences),
            kind=FailureKind.STALLED,
            mesh_name="",
            instance_id=place.instance_id,
            message=f"process {place.pid} gave no sign of life for {link.silent_s:.2f} s, and is "
            "not known to be gone",
            detected_by="beat",
            detect_time=seen_now(),
            pid=place.pid,
        )

    def _silent(self, link: Link) -> None:
        """Tell each mesh with a rank in a process that is stalled from now on."""
        failure = self.stalled(link)
        for mesh in self._actors():
            mesh.process_failed(link.place.instance_id, failure)

    def _actors(self) -> list[AdoptedActors]:
        """Return the meshes of actors as they are now: other threads adopt more."""
        return [it for it in list(self._meshes.values()) if isinstance(it, AdoptedActors)]

    # --- who may

    def _hello_to(self, place: Place) -> pb.Hello:
        return pb.Hello(
            token="" if place.is_stage else self.token,
            instance_id=self.instance_id,
            peer_instance_id=place.instance_id,
            session_id=self.instance_id,
            lease_s=self.lease_s,
            beat_s=beat_s_of(self.lease_s),
            boot_id=self.boot_id,
        )

    def _comes_back_s(self, place: Place) -> float:
        """Say how long a connection may be broken; on one host that is the end of one of them."""
        is_elsewhere = bool(place.boot_id) and place.boot_id != self.boot_id
        return self.lease_s if is_elsewhere and not place.is_stage else 0.0

    def _refuse_class(self, entrypoint: str) -> str:
        if self._allow is None or is_allowed(entrypoint, self._allow):
            return ""
        return f"{entrypoint} is not allowed here: the agent's --allow has {self._allow}"


_current: Program | None = None
_claiming: Final = threading.Lock()


def current_program() -> Program:
    """Return the program of this process.

    Raises:
        RuntimeError: there is none: no tree has a root here.
    """
    if _current is None:
        raise RuntimeError(
            "no actor tree has its root in this process: wrap the code in "
            "`async with stagekeeper.actor.root():`"
        )
    return _current


def set_current_program(program: Program | None) -> None:
    """Make `program` the one of this process, or None."""
    global _current
    _current = program


def claim_process(program: Program) -> None:
    """Make `program` the one of this process, which has none.

    Raises:
        RuntimeError: it has one.
    """
    global _current
    with _claiming:
        if _current is not None:
            raise RuntimeError(
                "this process has a place in an actor tree already: there is one root, and actors "
                "spawn with this_host() and this_proc()"
            )
        _current = program
