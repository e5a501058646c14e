"""What other processes of a tree may say, checked whole: every wrong field at once.

Each function yields (path, what is wrong) pairs, none when all is sound. Decided here: what one
message or frame may hold. Not decided here: what becomes of one that may not (connect,
actor_service). Invariant: what is said of a field is short, however long its value is, and never
shows a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.actor_limits import (
    LARGEST_INCARNATION,
    LARGEST_TOLD_FAILURE_BYTES,
    LONGEST_ACTOR_CLASS,
    LONGEST_PEER_ID,
    LONGEST_PEER_LEASE_S,
    LONGEST_PEER_PATH,
    LONGEST_PEER_WAIT_S,
    MOST_CONNECTION_CALLS,
    MOST_MESH_RANKS,
    MOST_OWNERS,
    MOST_REPLACED_PROCS,
)

Problem = tuple[str, str]


def told(problems: Sequence[Problem]) -> str:
    """Say all of it in a sentence."""
    return "; ".join(f"{path}: {problem}" for path, problem in problems)


def hello_problems(hello: pb.Hello) -> list[Problem]:
    """Say what is wrong with the first frame of a connection, but for its token."""
    found = [
        ("instance_id", _length(hello.instance_id)),
        ("peer_instance_id", _length(hello.peer_instance_id)),
        ("session_id", _length(hello.session_id)),
        ("boot_id", _length(hello.boot_id)),
        ("lease_s", _lease(hello.lease_s)),
        ("beat_s", _seconds(hello.beat_s)),
    ]
    return list(_named(found, "frames[0].hello."))


def call_problems(call: pb.CallFrame, frame_id: int, *, is_taken: bool) -> list[Problem]:
    """Say what is wrong with a call.

    Args:
        is_taken: a call with this number is under way.
    """
    if _is_sound(call) and (call.is_cast or (frame_id and not is_taken)):
        return []  # as every call is; the rest is for those that are not
    found = [
        ("target_id", _length(call.target_id)),
        ("endpoint", _length(call.endpoint)),
        ("sender", _length(call.sender)),
        ("timeout_s", _seconds(call.timeout_s) if call.HasField("timeout_s") else ""),
        ("is_stream", "a message without an answer has no values" if _is_both(call) else ""),
    ]
    problems = list(_named(found, "call."))
    if not call.is_cast and not frame_id:
        problems.append(("frame_id", "is 0, and the call wants an answer"))
    if not call.is_cast and is_taken:
        problems.append(("frame_id", f"{frame_id} is that of a call under way"))
    return problems


def news_problems(news: pb.RankFailed) -> list[Problem]:
    """Say what is wrong with the news of a failure."""
    found = [
        ("mesh_id", _id(news.mesh_id)),
        ("actor_id", _length(news.actor_id)),
        ("failure", _failure(news)),
    ]
    return list(_named(found, "failure."))


def spawn_problems(request: actor_pb.SpawnActorRequest) -> list[Problem]:
    """Say what is wrong with a request for an actor."""
    owners = request.owner_path
    longest = max(map(len, owners), default=0)
    found = [
        ("session_id", _id(request.session_id)),
        ("actor_id", _id(request.actor_id)),
        ("entrypoint", _entrypoint(request.entrypoint)),
        ("main_path", _length(request.main_path, LONGEST_PEER_PATH)),
        ("mesh_id", _id(request.mesh_id)),
        ("mesh_name", _id(request.mesh_name)),
        ("rank", _rank(request)),
        ("size", _range(request.size, 1, MOST_MESH_RANKS)),
        ("owner_path", _count(len(owners), MOST_OWNERS)),
        ("owner_path", f"has a name of {longest} characters" if longest > LONGEST_PEER_ID else ""),
        ("incarnation", _range(request.incarnation, 0, LARGEST_INCARNATION)),
        ("stall_after_s", _seconds(request.stall_after_s)),
        ("max_in_flight", _range(request.max_in_flight, 0, MOST_CONNECTION_CALLS)),
    ]
    return list(_named(found))


def stop_problems(request: actor_pb.StopActorRequest) -> list[Problem]:
    """Say what is wrong with a request to end an actor."""
    found = [
        ("actor_id", _length(request.actor_id)),
        ("budget_s", _seconds(request.budget_s)),
        ("failure", _failure(request) if request.HasField("failure") else ""),
    ]
    return list(_named(found))


def mesh_problems(request: actor_pb.GetMeshRequest) -> list[Problem]:
    """Say what is wrong with a question after a mesh."""
    found = [
        ("mesh_id", _id(request.mesh_id)),
        ("ended_id", _length(request.ended_id)),
        ("ranks", _count(len(request.ranks), MOST_MESH_RANKS)),
    ]
    return list(_named(found))


def respawn_problems(request: actor_pb.RespawnProcsRequest) -> list[Problem]:
    """Say what is wrong with a request for new processes."""
    ids = request.instance_ids
    longest = max(map(len, ids), default=0)
    found = [
        ("mesh_id", _id(request.mesh_id)),
        ("instance_ids", _count(len(ids), MOST_REPLACED_PROCS)),
        ("instance_ids", f"has one of {longest} characters" if longest > LONGEST_PEER_ID else ""),
    ]
    return list(_named(found))


# --- one field


def _named(found: Sequence[Problem], below: str = "") -> Iterator[Problem]:
    return ((f"{below}{path}", problem) for path, problem in found if problem)


def _id(text: str) -> str:
    return _length(text) if text else "is missing"


def _length(text: str, longest: int = LONGEST_PEER_ID) -> str:
    return f"has {len(text)} characters, at most {longest} are taken" if len(text) > longest else ""


def _count(count: int, most: int) -> str:
    return f"has {count} entries, at most {most} are taken" if count > most else ""


def _range(number: int, lowest: int, highest: int) -> str:
    return "" if lowest <= number <= highest else f"{number} is not from {lowest} to {highest}"


def _seconds(seconds: float) -> str:
    if math.isfinite(seconds) and 0 <= seconds <= LONGEST_PEER_WAIT_S:
        return ""
    return f"{seconds!r} is not a number of seconds from 0 to {LONGEST_PEER_WAIT_S:g}"


def _lease(lease_s: float) -> str:
    # nan compares false with everything, and so it is refused here.
    if 0 < lease_s <= LONGEST_PEER_LEASE_S:
        return ""
    return f"{lease_s!r} is not a number of seconds above 0 and to {LONGEST_PEER_LEASE_S:g}"


def _entrypoint(entrypoint: str) -> str:
    module, separator, qualname = entrypoint[: LONGEST_ACTOR_CLASS + 1].partition(":")
    if not separator or not module or not qualname:
        return _length(entrypoint, LONGEST_ACTOR_CLASS) or "is not of the form module:Class"
    return _length(entrypoint, LONGEST_ACTOR_CLASS)


def _rank(request: actor_pb.SpawnActorRequest) -> str:
    if request.rank < request.size:
        return ""
    return f"{request.rank} is no rank of a mesh of {request.size}"


def _is_sound(call: pb.CallFrame) -> bool:
    return (
        len(call.target_id) <= LONGEST_PEER_ID
        and len(call.endpoint) <= LONGEST_PEER_ID
        and len(call.sender) <= LONGEST_PEER_ID
        and not _is_both(call)
        and not (call.HasField("timeout_s") and _seconds(call.timeout_s))
    )


def _is_both(call: pb.CallFrame) -> bool:
    return call.is_cast and call.is_stream


def _failure(message: pb.RankFailed | actor_pb.StopActorRequest) -> str:
    if not message.HasField("failure"):
        return "is missing"
    size = message.failure.ByteSize()
    if size <= LARGEST_TOLD_FAILURE_BYTES:
        return ""
    return f"has {size} bytes, at most {LARGEST_TOLD_FAILURE_BYTES} are taken"
