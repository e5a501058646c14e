"""What the owner of an actor is told of it, by the actor while it lives and in its stead later.

Invariant: news names the rank as its owner knows it, so that it finds its mesh.
"""

from __future__ import annotations

from typing import Protocol

from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.hosting.answers import died_error
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.v1 import stage_service_pb2 as pb


class Owner(Protocol):
    """Whom an actor belongs to, seen from here: the connection of its owner's process."""

    def push_failure(self, news: pb.RankFailed) -> None: ...


def tell(owner: Owner, identity: ActorIdentity, failure: MeshFailure) -> None:
    """Tell the owner's process of a failure of one rank."""
    owner.push_failure(
        pb.RankFailed(
            mesh_id=identity.mesh_id,
            rank=identity.rank,
            actor_id=identity.actor_id,
            failure=failure_to_proto(failure),
        )
    )


def tell_undelivered(
    owner: Owner, identity: ActorIdentity, message: Message | pb.CallFrame, why: str
) -> None:
    """Tell of a message that nobody waits for, and that was not run."""
    what = f"{message.endpoint} from {message.sender} was not run: {why}"
    failure = failure_of(
        identity,
        FailureKind.UNDELIVERABLE,
        what,
        endpoint=message.endpoint,
        sender=message.sender,
    )
    tell(owner, identity, failure)


def refuse_as_failed(
    owner: Owner, identity: ActorIdentity, failure: MeshFailure, message: Message
) -> None:
    """Answer a call with the failure that ended the actor; tell the owner of a cast."""
    message.refuse(died_error(identity.name, failure))
    if message.is_cast:
        tell_undelivered(owner, identity, message, f"{identity.name} has failed")
