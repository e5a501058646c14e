"""Failures in the making: of a rank by itself or by its process, and of an owner by what it owns.

Invariant: this alone of the actors' side reads the wall clock, and only for people to read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from stagekeeper.actor.error_text import author_traceback, one_line
from stagekeeper.actor.failure import FailureKind, Hop, MeshFailure
from stagekeeper.actor.identity import ActorIdentity

_WAS_STOPPING: Final = "was stopping"


def seen_now() -> float:
    """Return the `detect_time` of a failure that is seen now, for display."""
    return time.time()


def failure_of(
    identity: ActorIdentity, kind: FailureKind, message: str, **more: Any
) -> MeshFailure:
    """Make a failure of one rank, as this process sees it now."""
    return MeshFailure.at(identity.origin, kind, message=message, detect_time=seen_now(), **more)


def failure_from(
    identity: ActorIdentity, kind: FailureKind, error: BaseException, what: str, **more: Any
) -> MeshFailure:
    """Make a failure of one rank of what its code raised.

    Args:
        what: happened, for people; what the error says comes after it.
    """
    message = f"{what}: {one_line(error)}"
    return failure_of(identity, kind, message, remote_traceback=author_traceback(error), **more)


def as_of_rank(
    failure: MeshFailure, *, mesh_name: str, mesh_id: str, rank: int, incarnation: int
) -> MeshFailure:
    """Say of one rank what happened to its process; the id stays that of the process's end."""
    return replace(
        failure, mesh_name=mesh_name, mesh_id=mesh_id, ranks=(rank,), incarnations=(incarnation,)
    )


def cut_off(identity: ActorIdentity, failures: Sequence[MeshFailure]) -> MeshFailure:
    """Make what goes on from an owner that ends, of what nobody handled or what ends brought.

    What is the owner's own goes on as it is, and so does a lone cleanup error from below.
    """
    first = failures[0]
    if len(failures) == 1 and first.instance_id == identity.actor_id:
        return first
    is_cleanup = all(failure.kind is FailureKind.CLEANUP_RAISED for failure in failures)
    if is_cleanup and len(failures) == 1:
        return first.with_hop(identity.name, _WAS_STOPPING)
    kind = FailureKind.CLEANUP_RAISED if is_cleanup else FailureKind.UNHANDLED
    return from_below(identity, kind, failures, _WAS_STOPPING)


def from_below(
    identity: ActorIdentity,
    kind: FailureKind,
    failures: Sequence[MeshFailure],
    decision: str,
    error: BaseException | None = None,
) -> MeshFailure:
    """Make the failure of an owner that did not handle those of its meshes.

    Args:
        identity: the owner.
        failures: what it did not handle, the first one first; at least one.
        decision: what it did instead, for the path.
        error: what its `__supervise__` raised, if it did.
    """
    first = failures[0]
    mine = failure_of(
        identity,
        kind,
        f"{identity.name} {decision}",
        detected_by="__supervise__",
        remote_traceback="" if error is None else author_traceback(error),
    )
    return replace(mine, path=(*first.path, Hop(identity.name, decision)), causes=tuple(failures))
