"""Hosts and processes, as those who spawn on them hold them.

`this_host().spawn_procs(4).spawn("workers", Worker)` is all there is to it. Decided here: that
whoever spawns is the owner. Not decided here: how processes are started and watched (owning).
Invariant: to spawn never waits, so that an `__init__` can do it; whoever wants to know that all
is up awaits `ready()`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, TypeVar, cast

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.entrypoint import entrypoint_of
from stagekeeper.actor.errors import Died, MeshError, MeshStopped, NotOwner, NotSendable
from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.mesh import ActorMesh, check_is_owner
from stagekeeper.actor.owning.actor_mesh import ActorMeshControl
from stagekeeper.actor.owning.local_procs import LocalProcSource
from stagekeeper.actor.owning.proc_places import ProcFailed, ProcPlaces, ProcSource
from stagekeeper.actor.owning.proc_views import ProcReference, ProcSlice
from stagekeeper.actor.owning.procs import ProcMeshControl
from stagekeeper.actor.owning.scope import Scope, checked_budget_s, current_scope
from stagekeeper.actor.owning.spawn_plan import SpawnPlan
from stagekeeper.actor.owning.stop_report import StopReport
from stagekeeper.actor.place import Place
from stagekeeper.actor.program import Program, current_program
from stagekeeper.actor.selection import Index, selected_ranks
from stagekeeper.wire.actor_limits import LONGEST_PEER_WAIT_S, MOST_CONNECTION_CALLS
from stagekeeper.wire.payload import PayloadError, encode_arguments

_log = logging.getLogger("stagekeeper.actor")

P = ParamSpec("P")
SomeActor = TypeVar("SomeActor", bound=Actor)


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """How a mesh of actors is kept.

    Attributes:
        is_group: its ranks cannot go on without each other: a respawn replaces all of them.
        stall_after_s: a message that makes no progress for so long is a stall; 0 means never.
        max_in_flight: messages of one actor that may wait or run at once; 0 means 10,000.
    """

    is_group: bool = False
    stall_after_s: float = 0.0
    max_in_flight: int = 0


class ProcMesh:
    """Processes that actors can be spawned in.

    Attributes:
        size: how many.
        name: as its owner named it.
    """

    def __init__(
        self, program: Program, procs: ProcPlaces, options: SpawnOptions | None = None
    ) -> None:
        self._program = program
        self._procs = procs
        self._options = options or SpawnOptions()

    @property
    def size(self) -> int:
        return self._procs.size

    @property
    def name(self) -> str:
        return self._procs.mesh_name

    def __len__(self) -> int:
        return self._procs.size

    def __getitem__(self, index: Index) -> ProcMesh:
        """Select processes; those of the selection are numbered from 0."""
        indexes = selected_ranks(tuple(range(self.size)), index)
        return ProcMesh(self._program, ProcSlice(self._procs, indexes), self._options)

    def __repr__(self) -> str:
        return f"<processes {self.name} of {self.size}>"

    def options(
        self,
        *,
        is_group: bool | None = None,
        stall_after_s: float | None = None,
        max_in_flight: int | None = None,
    ) -> ProcMesh:
        """Return the same processes, on which meshes are spawned with these options.

        Raises:
            TypeError: a value is of another type.
            ValueError: a number makes no sense.
        """
        given = {
            "is_group": is_group,
            "stall_after_s": stall_after_s,
            "max_in_flight": max_in_flight,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        for name, value in changed.items():
            _check_option(name, value)
        return ProcMesh(self._program, self._procs, replace(self._options, **cast(Any, changed)))

    def spawn(
        self, name: str, cls: Callable[P, SomeActor], /, *args: P.args, **kwargs: P.kwargs
    ) -> SomeActor:
        """Spawn one actor in each process; return their mesh at once.

        What runs this code owns the mesh. An `__init__` that raises is a failure of its rank. For a
        checker the mesh has the type of its class; see `ActorMesh` for what it is.

        Raises:
            TypeError: the class takes no such arguments.
            EntrypointError: the class cannot be named for another process.
            NotSendable: an argument cannot travel; it is named.
            MeshStopped: the processes were stopped, or who spawns has ended, as in `__cleanup__`.
        """
        if self._procs.is_stopping:
            raise MeshStopped(f"{self.name} was stopped: nothing is spawned there")
        found = entrypoint_of(cls)
        actor_class = cast("type[Actor]", cls)
        signature = inspect.signature(cls)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:  # over there it would end the actor
            raise TypeError(
                f"{error}; {name} is made as {actor_class.__qualname__}{signature}"
            ) from None
        try:
            names = tuple(signature.parameters) if args else ()
            arguments = encode_arguments(args, kwargs, names=names)
        except PayloadError as error:
            place = error.place or "what is given"
            raise NotSendable(place, error.problem, target=f"{name}.__init__") from error
        plan = SpawnPlan(
            name=_checked_name(name),
            entrypoint=found.entrypoint,
            main_path=found.main_path,
            arguments=arguments,
            is_group=self._options.is_group,
            stall_after_s=self._options.stall_after_s,
            max_in_flight=self._options.max_in_flight,
        )
        program, scope = self._program, _owner()
        control = ActorMeshControl(program, scope, plan, self._procs)
        mesh = ActorMesh(
            program,
            control,
            tuple(range(self.size)),
            actor_class.__endpoints__,
            (plan.entrypoint, plan.main_path),
            actor_class.__qualname__,
        )
        control.mesh = mesh
        scope.add(control)
        program.adopt(control)
        program.on_loop(control.start)
        return cast(SomeActor, mesh)

    async def ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is up.

        Raises:
            MeshError: some did not come up.
            TimeoutError: not all are up in time; they go on coming up.
        """
        self._program.check_thread()
        failed: dict[int, Exception] = {}
        async with asyncio.timeout(timeout_s):
            for rank in range(self.size):
                try:
                    await self._procs.place(rank)
                except ProcFailed as error:
                    failed[rank] = Died(error.failure, rank=rank)
        if failed:
            raise MeshError(f"{self.name} did not come up whole", failed, {})

    async def stop(self, budget_s: float | None = None) -> StopReport:
        """End the processes, with all actors in them and all that they started.

        Raises:
            NotOwner: they belong to somebody else, or this is a slice.
            ValueError: `budget_s` is below 0.
        """
        if not isinstance(self._procs, ProcMeshControl):
            raise NotOwner(
                f"{self.name} is a slice, or belongs to another actor: its owner may stop it whole"
            )
        check_is_owner(self._program, self._procs.owner, self.name)
        return await self._procs.stop(checked_budget_s(budget_s))

    def reference(self) -> tuple[str, Place, tuple[int, ...], int]:
        """Return (mesh id, owner, places, size of the whole), for the codec.

        Raises:
            TypeError: it is the process itself, which only its own actors can spawn in.
        """
        procs, indexes = self._procs, tuple(range(self.size))
        if isinstance(procs, ProcSlice):
            procs, indexes = procs.whole()
        if isinstance(procs, ProcMeshControl):
            return procs.mesh_id, self._program.place, indexes, procs.size
        if isinstance(procs, ProcReference):
            return procs.mesh_id, procs.owner, indexes, procs.size
        raise TypeError("this_proc() does not travel: spawn in it, and send the mesh")

    @property
    def failures(self) -> Mapping[int, MeshFailure]:
        """The failures of the places whose process ended, by place; of one's own processes."""
        return self._procs.failures if isinstance(self._procs, ProcMeshControl) else {}


class HostMesh:
    """Hosts that processes can be spawned on.

    Args:
        names: one per host, for people.
        make_source: makes what starts the processes of one set, given how many go on each host.
    """

    def __init__(
        self,
        program: Program,
        names: tuple[str, ...],
        make_source: Callable[[int, str], ProcSource],
    ) -> None:
        self._program = program
        self._names = names
        self._make_source = make_source

    @property
    def size(self) -> int:
        return len(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """One per host."""
        return self._names

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<hosts {', '.join(self._names)}>"

    def spawn_procs(self, count: int = 1, *, name: str = "procs") -> ProcMesh:
        """Start `count` processes on each host; return them at once, those of one host together.

        What runs this code owns them: they end with it.

        Raises:
            TypeError: `count` is no whole number.
            ValueError: `count` is below 1.
            MeshStopped: who spawns has ended, as in `__cleanup__`.
        """
        if type(count) is not int:  # True is none either
            raise TypeError(f"spawn_procs takes a number of processes, not {count!r:.80}")
        if count < 1:
            raise ValueError(f"spawn_procs takes at least 1 process, not {count}")
        program, scope = self._program, _owner()
        control = ProcMeshControl(
            program,
            scope,
            _checked_name(name),
            count * len(self._names),
            self._make_source(count, name),
        )
        mesh = ProcMesh(program, control)
        control.mesh = mesh
        scope.add(control)
        program.adopt(control)
        program.on_loop(control.start)
        return mesh


class _OwnProc:
    """This very process, as a place for actors."""

    mesh_name = "this_proc"
    size = 1
    is_stopping = False

    def __init__(self, program: Program) -> None:
        self._program = program

    def instance_id_of(self, rank: int) -> str:
        return self._program.instance_id

    async def place(self, rank: int) -> Place:
        return self._program.place

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        return None

    async def kill(self, instance_id: str) -> None:
        """Nobody ends its own process to be rid of an actor: what is stuck goes on there."""
        _log.warning("code of an actor that was let go of still runs in this very process")

    async def replace_ended(self, instance_ids: list[str]) -> None:
        """It is here, or nobody asks."""


def this_host() -> HostMesh:
    """Return the host of this process, to spawn processes on.

    Raises:
        RuntimeError: no actor tree has its root here.
    """
    program = current_program()
    return HostMesh(program, ("this host",), lambda count, name: LocalProcSource(program))


def this_proc() -> ProcMesh:
    """Return this process, to spawn actors in.

    Raises:
        RuntimeError: no actor tree has its root here.
    """
    program = current_program()
    return ProcMesh(program, _OwnProc(program))


def proc_reference(program: Program, mesh_id: str, name: str, size: int, owner: Place) -> ProcMesh:
    """Return processes that another process owns."""
    return ProcMesh(program, ProcReference(program, mesh_id, name, size, owner))


def _owner() -> Scope:
    scope = current_scope.get()
    if scope is None:
        scope = current_program().root_scope  # of a task that a test runner made, say
    if scope is None:
        raise RuntimeError(
            "nobody would own what is spawned here: spawn inside of `async with root():`, or in an "
            "actor's own code (threads and callbacks of other libraries are nobody's)"
        )
    return scope


_OPTIONS: Final[Mapping[str, tuple[tuple[type, ...], str, float]]] = {
    "is_group": ((bool,), "True or False", 1),
    "stall_after_s": ((int, float), "a number of seconds", LONGEST_PEER_WAIT_S),
    "max_in_flight": ((int,), "a whole number", MOST_CONNECTION_CALLS),
}
"""Of each option its types, what that is, and its largest value."""


def _check_option(name: str, value: Any) -> None:
    types, what, most = _OPTIONS[name]
    if type(value) not in types:  # True is no number
        raise TypeError(f"{name} is {what}, not {value!r:.80}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} is from 0 to {most:,.0f}, not {value}")


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a mesh's name is text, not {name!r:.80}")
    if not name or len(name) > 63 or not name.isprintable():
        raise ValueError(f"a mesh's name has 1 to 63 printable characters, not {name!r:.80}")
    return name
