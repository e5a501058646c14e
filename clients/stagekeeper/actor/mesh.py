"""`ActorMesh`: actors that were spawned together, as whoever calls them holds them.

A value that travels: in arguments and answers it becomes a reference to the same mesh. Decided
here: what a mesh offers beside the endpoints of its class. Invariant: a mesh can be called from
any process of its tree, and stopped by its owner alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagekeeper.actor.calling import EndpointRef, endpoint_of_mesh
from stagekeeper.actor.endpoint import Endpoint
from stagekeeper.actor.errors import Died, MeshError, MeshStopped, NotOwner
from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.owning.actor_mesh import ActorMeshControl
from stagekeeper.actor.owning.ranks import ActorRank, RankState
from stagekeeper.actor.owning.references import ReferenceKeeper
from stagekeeper.actor.owning.scope import Scope, checked_budget_s, current_scope
from stagekeeper.actor.owning.stop_report import StopReport
from stagekeeper.actor.place import Place
from stagekeeper.actor.selection import Index, selected_ranks
from stagekeeper.wire.payload import Tensors

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

Keeper = ActorMeshControl | ReferenceKeeper


def check_is_owner(program: Program, owner: Scope, name: str) -> None:
    """Check that the code that asks for a stop is of the mesh's owner.

    Raises:
        NotOwner: it is another's, or nobody's.
        RuntimeError: it runs in another thread than the loop's.
    """
    program.check_thread()
    asks = current_scope.get() or program.root_scope
    if asks is not owner:
        who = "nobody's code" if asks is None else asks.identity.name
        raise NotOwner(f"{name} belongs to {owner.identity.name}, which may stop it; this is {who}")


class RanksInView:
    """The ranks that the endpoints of one mesh object reach."""

    def __init__(self, keeper: Keeper, ranks: tuple[ActorRank, ...]) -> None:
        self._keeper = keeper
        self._ranks = ranks
        self.tensors: Tensors = "numpy"

    @property
    def name(self) -> str:
        return self._keeper.mesh_name

    @property
    def links(self) -> Sequence[ActorRank]:
        if self._keeper.is_stopping or self._ranks[0].state is RankState.STOPPED:
            raise MeshStopped(
                f"{self.name} was stopped: it takes no more messages", mesh_name=self.name
            )
        return self._ranks


class ActorMesh:
    """Actors of one class. Made by `ProcMesh.spawn`; its attributes are the endpoints of the class.

    Attributes:
        size: how many ranks this object stands for; a slice has fewer than the whole.
        ranks: their numbers in the whole mesh, ascending.
        name: as its owner named it.
    """

    def __init__(
        self,
        program: Program,
        keeper: Keeper,
        ranks: tuple[int, ...],
        endpoints: Mapping[str, Endpoint] | None,
        entrypoint: tuple[str, str],
        class_name: str,
    ) -> None:
        self._program = program
        self._keeper = keeper
        self._selected = ranks
        self._endpoints = endpoints
        self._entrypoint = entrypoint
        self._class_name = class_name
        self._view = RanksInView(keeper, tuple(keeper.ranks[rank] for rank in ranks))

    def __getattr__(self, name: str) -> EndpointRef[..., Any, Any]:
        if name.startswith("_"):  # before the attributes are there that the rest needs
            raise AttributeError(name)
        found = endpoint_of_mesh(name, self._view, self._endpoints, self._class_name)
        self.__dict__[name] = found  # the next look finds it without this method
        return found

    @property
    def name(self) -> str:
        return self._keeper.mesh_name

    @property
    def size(self) -> int:
        return len(self._selected)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._selected

    @property
    def failures(self) -> Mapping[int, MeshFailure]:
        """The failures of the ranks that have failed and are not back, by rank."""
        ranks = [self._keeper.ranks[rank] for rank in self._selected]
        return {rank.rank: rank.failure for rank in ranks if rank.failure is not None}

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, index: Index) -> ActorMesh:
        """Select ranks by number, slice or list; they keep their numbers."""
        selected = selected_ranks(self._selected, index)
        return ActorMesh(
            self._program,
            self._keeper,
            selected,
            self._endpoints,
            self._entrypoint,
            self._class_name,
        )

    def __repr__(self) -> str:
        return f"<mesh {self.name} of {self.size} {self._class_name}>"

    async def ready(self, timeout_s: float | None = None) -> None:
        """Return when every rank is up.

        Raises:
            MeshError: some rank failed; its owner is told as well.
            MeshStopped: it was stopped.
            TimeoutError: not all are up in time; they go on coming up.
        """
        self._program.check_thread()
        ranks = [self._keeper.ranks[rank] for rank in self._selected]
        async with asyncio.timeout(timeout_s):
            await self._keeper.settled(ranks)
        failed: dict[int, Exception] = {
            rank.rank: Died(rank.failure, rank=rank.rank)
            for rank in ranks
            if rank.failure is not None
        }
        if failed:
            raise MeshError(f"{self.name} did not come up whole", failed, {})
        if any(rank.state is RankState.STOPPED for rank in ranks):
            raise MeshStopped(f"{self.name} was stopped", mesh_name=self.name)

    async def places(self, timeout_s: float | None = None) -> Mapping[int, Place]:
        """Return where the ranks that are up are, by rank, once each is up or has failed."""
        self._program.check_thread()
        ranks = [self._keeper.ranks[rank] for rank in self._selected]
        async with asyncio.timeout(timeout_s):
            await self._keeper.settled(ranks)
        return {rank.rank: rank.place for rank in ranks if rank.place is not None}

    async def stop(self, budget_s: float | None = None) -> StopReport:
        """Stop the whole mesh: no new messages, those it has within the budget, then clean up.

        Raises:
            NotOwner: it belongs to somebody else, or this is a slice.
            ValueError: `budget_s` is below 0.
        """
        if not isinstance(self._keeper, ActorMeshControl):
            raise NotOwner(f"{self.name} belongs to an actor of another process, which may stop it")
        if len(self._selected) != len(self._keeper.ranks):
            raise NotOwner(f"this is a slice of {self.name}: only the whole mesh can be stopped")
        check_is_owner(self._program, self._keeper.owner, self.name)
        return await self._keeper.stop(checked_budget_s(budget_s))
