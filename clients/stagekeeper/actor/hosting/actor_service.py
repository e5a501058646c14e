"""`ActorService` as gRPC serves it: check, convert, call, convert.

Decided here: nothing but who may ask. Invariant: a request that is refused has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import grpc

from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.hosting.connect import (
    Context,
    ProcIdentity,
    is_token,
    refuse,
    refuse_fields,
)
from stagekeeper.actor.hosting.house import House
from stagekeeper.actor.hosting.message_check import (
    Problem,
    mesh_problems,
    respawn_problems,
    spawn_problems,
    stop_problems,
)
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.v1.actor_service_pb2_grpc import ActorServiceServicer
from stagekeeper.wire.actor_limits import (
    LARGEST_PEER_REQUEST_BYTES,
    LARGEST_SPAWN_BYTES,
    MOST_ACTORS,
)


class OwnedPlaces(Protocol):
    """A mesh that this process owns, as others ask about it."""

    async def places(self, ranks: Sequence[int] = ()) -> list[pb.RankPlace]:
        """Return where its ranks are, once each is up or has failed.

        Args:
            ranks: only of these; returns once one of them is, with those that are.
        """
        ...

    async def replace_ended(self, instance_ids: list[str], *, kills: bool = False) -> None:
        """Put new processes in the places of these; of a mesh of processes only.

        Args:
            kills: those that live are killed first.
        """
        ...


class Meshes(Protocol):
    """The meshes that this process owns."""

    def owned(self, mesh_id: str) -> OwnedPlaces | None: ...

    async def end_in(self, mesh_id: str, ended_id: str) -> MeshFailure | None:
        """Return how an actor or a process ended; waits a moment for the news of it.

        Raises:
            LookupError: there is no such mesh.
        """
        ...


class ActorService(ActorServiceServicer):
    """Serves the actors of one process, and answers for the meshes that it owns."""

    def __init__(self, proc: ProcIdentity, house: House, meshes: Meshes) -> None:
        self._proc = proc
        self._house = house
        self._meshes = meshes

    async def SpawnActor(
        self, request: pb.SpawnActorRequest, context: Context
    ) -> pb.SpawnActorResponse:
        await self._check(request, context, spawn_problems(request), LARGEST_SPAWN_BYTES)
        code = grpc.StatusCode
        if self._house.is_closing:
            await refuse(context, code.UNAVAILABLE, "DRAINING", "this process is ending")
        why = self._house.refusal_of(request.entrypoint)
        if why:
            await refuse(context, code.PERMISSION_DENIED, "NOT_ALLOWED", why)
        session = self._house.known_session(request.session_id)
        if session is None:
            await refuse(
                context,
                code.NOT_FOUND,
                "SESSION_UNKNOWN",
                "no connection says this session_id: connect first, then spawn",
            )
            raise AssertionError("refuse returned")
        if self._house.actor_count >= MOST_ACTORS and not self._house.knows(request.actor_id):
            await refuse(
                context,
                code.RESOURCE_EXHAUSTED,
                "ADMISSION_REFUSED",
                f"this process has {MOST_ACTORS} actors, and takes no more: use another one",
            )
        failure = await self._house.spawn(request, session)
        response = pb.SpawnActorResponse()
        if failure is not None:
            response.failure.CopyFrom(failure_to_proto(failure))
        return response

    async def StopActor(
        self, request: pb.StopActorRequest, context: Context
    ) -> pb.StopActorResponse:
        await self._check(request, context, stop_problems(request))
        return await self._house.stop(request)

    async def GetMesh(self, request: pb.GetMeshRequest, context: Context) -> pb.GetMeshResponse:
        if not request.ended_id:
            mesh = await self._mesh(request, context, mesh_problems(request))
            return pb.GetMeshResponse(places=await mesh.places(request.ranks))
        await self._check(request, context, mesh_problems(request))
        try:
            end = await self._meshes.end_in(request.mesh_id, request.ended_id)
        except LookupError:
            await _refuse_unknown(request.mesh_id, context)
        return pb.GetMeshResponse(end=None if end is None else failure_to_proto(end))

    async def RespawnProcs(
        self, request: pb.RespawnProcsRequest, context: Context
    ) -> pb.RespawnProcsResponse:
        mesh = await self._mesh(request, context, respawn_problems(request))
        await mesh.replace_ended(list(request.instance_ids), kills=request.kill)
        return pb.RespawnProcsResponse(places=await mesh.places())

    async def _check(
        self,
        request: Any,
        context: Context,
        problems: Sequence[Problem],
        largest_bytes: int = LARGEST_PEER_REQUEST_BYTES,
    ) -> None:
        code = grpc.StatusCode
        if not is_token(request.token, self._proc.token):
            await refuse(
                context,
                code.UNAUTHENTICATED,
                "BAD_TOKEN",
                "token: is not that of the actor tree that this process belongs to",
            )
        if (size := request.ByteSize()) > largest_bytes:
            what = f"the request has {size} bytes, at most {largest_bytes} are taken"
            await refuse(context, code.INVALID_ARGUMENT, "TOO_LARGE", what)
        if problems:
            await refuse_fields(context, problems)
        if getattr(request, "instance_id", self._proc.instance_id) != self._proc.instance_id:
            await refuse(
                context,
                code.ABORTED,
                "STALE_ROUTE",
                f"this is process {self._proc.instance_id}, not {request.instance_id:.64}",
            )

    async def _mesh(
        self, request: Any, context: Context, problems: Sequence[Problem]
    ) -> OwnedPlaces:
        await self._check(request, context, problems)
        mesh = self._meshes.owned(request.mesh_id)
        if mesh is None:
            await _refuse_unknown(request.mesh_id, context)
        return mesh


async def _refuse_unknown(mesh_id: str, context: Context) -> NoReturn:
    await refuse(
        context,
        grpc.StatusCode.NOT_FOUND,
        "MESH_UNKNOWN",
        f"this process owns no mesh {mesh_id:.64}: it was stopped, or never here",
    )
    raise AssertionError("refuse returned")
