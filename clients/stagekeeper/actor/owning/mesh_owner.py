"""Asking the owner of a mesh, in another process, where its ranks are and how they ended.

Decided here: which answer means that the mesh was stopped, and which that nobody is there to ask.
Invariant: whoever can be asked is not taken for gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import grpc

from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.failure_wire import failure_from_proto
from stagekeeper.actor.place import Place
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.wire.error_details import describe, released

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

_END_LIMIT_S: Final = 2.0
"""How long the owner may take to say how something ended that a caller has lost."""

_NOBODY_THERE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""What a call ends with when its connection does."""


class MeshOwner:
    """The owner of one mesh, asked from another process. For the loop's thread only.

    Args:
        place: the process that owns it.
    """

    def __init__(self, program: Program, mesh_id: str, mesh_name: str, place: Place) -> None:
        self.place = place
        self._program = program
        self._mesh_id = mesh_id
        self._mesh_name = mesh_name

    async def places(self, ranks: Sequence[int]) -> Sequence[pb.RankPlace]:
        """Return where those of these ranks are that are up or have failed, once one is or has.

        That takes as long as it takes.

        Raises:
            MeshStopped: the owner is there, and has no such mesh any more.
            ConnectionError: the owner is not there.
            grpc.RpcError: it refused for another reason.
        """
        request = pb.GetMeshRequest(token=self._program.token, mesh_id=self._mesh_id, ranks=ranks)
        return (await self._get(request, None)).places

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        """Return how an actor or a process ended; None when the owner does not know or answer.

        Raises:
            MeshStopped: the owner is there, and has no such mesh any more.
        """
        request = pb.GetMeshRequest(
            token=self._program.token, mesh_id=self._mesh_id, ended_id=ended_id
        )
        try:
            response = await self._get(request, _END_LIMIT_S)
        except (grpc.RpcError, ConnectionError):
            return None
        return failure_from_proto(response.end) if response.HasField("end") else None

    async def respawn_procs(self, instance_ids: list[str], *, kills: bool) -> None:
        """Have new processes in the places of these.

        Args:
            kills: those that live are killed first.

        Raises:
            ConnectionError: the owner is not there.
            grpc.RpcError: it refused.
        """
        link = self._program.links.to(self.place)
        await link.connected()
        await link.actors.RespawnProcs(
            pb.RespawnProcsRequest(
                token=self._program.token,
                mesh_id=self._mesh_id,
                instance_ids=instance_ids,
                kill=kills,
            )
        )

    async def _get(self, request: pb.GetMeshRequest, limit_s: float | None) -> pb.GetMeshResponse:
        link = self._program.links.to(self.place)
        await link.connected()
        try:
            response: pb.GetMeshResponse = await link.actors.GetMesh(request, timeout=limit_s)
        except grpc.RpcError as error:
            found = describe(error)
            if found.reason == "MESH_UNKNOWN":
                what = f"{self._mesh_name} was stopped: {found.message}"
                raise MeshStopped(what, mesh_name=self._mesh_name) from released(error)
            if error.code() in _NOBODY_THERE:
                raise ConnectionError(found.message) from released(error)
            raise
        return response
