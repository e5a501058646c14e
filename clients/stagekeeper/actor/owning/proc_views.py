"""Processes as others than their owner see them, and parts of a mesh of processes.

Decided here: nothing; the owner is asked. Invariant: what is said of an end is what the owner was
told of it, as long as the owner can be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.failure_wire import failure_from_proto
from stagekeeper.actor.owning.mesh_owner import MeshOwner
from stagekeeper.actor.owning.proc_places import ProcFailed, ProcPlaces
from stagekeeper.actor.place import Place, place_from_proto

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program


class ProcReference:
    """A mesh of processes that another process owns: asked there.

    Args:
        owner: the process that owns it.
    """

    def __init__(self, program: Program, mesh_id: str, name: str, size: int, owner: Place) -> None:
        self.mesh_id = mesh_id
        self.mesh_name = name
        self.owner = owner
        self._asked = MeshOwner(program, mesh_id, name, owner)
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_stopping(self) -> bool:
        return False  # only its owner knows: who spawns is told by `place`

    def instance_id_of(self, rank: int) -> str:
        return ""

    async def place(self, rank: int) -> Place:
        (found,) = await self._asked.places([rank])
        if found.HasField("failure"):
            raise ProcFailed(failure_from_proto(found.failure))
        if not found.address:
            raise MeshStopped(f"{self.mesh_name} was stopped: nothing is spawned there")
        return place_from_proto(found)

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        try:
            return await self._asked.end_of(ended_id)
        except MeshStopped:
            return None

    async def kill(self, instance_id: str) -> None:
        """Have its owner kill it, and put a new one in its place."""
        await self._asked.respawn_procs([instance_id], kills=True)

    async def replace_ended(self, instance_ids: list[str]) -> None:
        await self._asked.respawn_procs(instance_ids, kills=False)


class ProcSlice:
    """Some processes of a mesh, numbered from 0."""

    def __init__(self, procs: ProcPlaces, indexes: tuple[int, ...]) -> None:
        self._procs = procs
        self._indexes = indexes

    @property
    def size(self) -> int:
        return len(self._indexes)

    @property
    def mesh_name(self) -> str:
        return self._procs.mesh_name

    def whole(self) -> tuple[ProcPlaces, tuple[int, ...]]:
        """Return the processes that it is a part of, and which of them."""
        if isinstance(self._procs, ProcSlice):
            procs, indexes = self._procs.whole()
            return procs, tuple(indexes[index] for index in self._indexes)
        return self._procs, self._indexes

    @property
    def is_stopping(self) -> bool:
        return self._procs.is_stopping

    def instance_id_of(self, rank: int) -> str:
        return self._procs.instance_id_of(self._indexes[rank])

    async def place(self, rank: int) -> Place:
        return await self._procs.place(self._indexes[rank])

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        return await self._procs.end_of(ended_id)

    async def kill(self, instance_id: str) -> None:
        await self._procs.kill(instance_id)

    async def replace_ended(self, instance_ids: list[str]) -> None:
        await self._procs.replace_ended(instance_ids)
