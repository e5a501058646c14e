"""From an error on the wire to what the caller raises (`hosting.answers` has the other half)."""

from __future__ import annotations

from stagekeeper.actor.errors import Died, MeshStopped
from stagekeeper.actor.failure_wire import failure_from_proto
from stagekeeper.actor.remote_exception import exception_from_proto
from stagekeeper.client.errors import BadRequest, Bug, NoRoom, NotFound, StagekeeperError
from stagekeeper.v1 import stage_service_pb2 as pb

_BY_REASON: dict[str, type[StagekeeperError]] = {
    "ENDPOINT_UNKNOWN": NotFound,
    "ACTOR_UNKNOWN": NotFound,
    "TOO_MANY_CALLS": NoRoom,
}


def error_of_answer(error: pb.CallError, mesh_name: str, rank: int) -> Exception:
    """Make the exception that a call to this rank ends with."""
    if error.HasField("exception"):
        return exception_from_proto(error.exception)
    if error.HasField("failure"):
        return Died(failure_from_proto(error.failure), rank=rank)
    if error.reason == "ACTOR_STOPPED":
        return MeshStopped(
            error.message,
            mesh_name=mesh_name,
            rank=rank,
            had_begun=error.metadata.get("had_begun") == "true",
        )
    if error.reason in ("BAD_FIELD", "TOO_LARGE"):
        return BadRequest(error.message, reason=error.reason, metadata=error.metadata)
    return _BY_REASON.get(error.reason, Bug)(
        error.message, reason=error.reason, metadata=error.metadata, never_ran=True
    )
