"""Failures of meshes to the protocol's message and back.

Decided here: how a failure that is too large is cut. What fits travels as it is; what does not
loses text, and of its causes those in the middle: the root and what it led to last stay. Not
decided here: what a failure means. Invariant: no failure makes a message larger than MOST_BYTES,
and any message becomes a failure, whatever release it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from stagekeeper.actor.error_text import CUT, beginning, end, sendable
from stagekeeper.actor.failure import ExitInfo, FailureKind, Hop, MeshFailure
from stagekeeper.v1 import types_pb2 as pb2

MOST_BYTES: Final = 262_144
"""Of a failure with all of its causes, as a message."""

_LEAST_ID_BYTES: Final = 256
"""An id is compared, so it is the last to be cut."""

_LATEST_S: Final = 253_402_300_800
"""The end of the year 9999, and of what a Timestamp may say."""

_MOST_RANKS: Final = 2_048
"""Of one failure; they fit with the few causes that are always kept."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What one try allows."""

    text_bytes: int
    traceback_bytes: int
    line_bytes: int
    line_count: int
    hop_count: int
    cause_count: int

    def less(self) -> _Room | None:
        if self is _LEAST:
            return None
        if self.text_bytes <= 128:
            return _LEAST
        return _Room(
            self.text_bytes // 2,
            self.traceback_bytes // 2,
            self.line_bytes // 2,
            max(4, self.line_count // 2),
            max(4, self.hop_count // 2),
            max(2, self.cause_count // 2),
        )


_LARGEST: Final = _Room(32_768, 131_072, 8_192, 64, 256, 256)
_LEAST: Final = _Room(64, 64, 0, 0, 4, 2)


def failure_to_proto(failure: MeshFailure) -> pb2.Failure:
    """Convert a failure; all of it that fits into MOST_BYTES. The owner's mesh does not travel."""
    room: _Room | None = _LARGEST
    while room is not None:
        message = _to_proto(failure, room)
        if message.ByteSize() <= MOST_BYTES:
            return message
        room = room.less()
    raise AssertionError("the least of a failure is larger than the most")


def failure_from_proto(message: pb2.Failure) -> MeshFailure:
    """Convert a failure; a kind of a later release becomes UNSPECIFIED.

    One of a deployed stage has the mesh name `deployment/stage` and its shard as its rank.
    """
    origin = message.origin
    name, ranks = origin.mesh_name, tuple(origin.ranks)
    if not name and origin.deployment:
        name, ranks = f"{origin.deployment}/{origin.stage_name}", (origin.shard_index,)
    return MeshFailure(
        id=message.failure_id,
        kind=_KIND_OF.get(message.kind, FailureKind.UNSPECIFIED),
        mesh_name=name,
        mesh_id=origin.mesh_id,
        ranks=ranks,
        incarnations=tuple(origin.incarnations),
        instance_id=origin.instance_id,
        message=message.message,
        exit=_exit_from_proto(message.exit) if message.HasField("exit") else None,
        detected_by=message.detected_by,
        detect_time=_seconds(message.detect_time) if message.HasField("detect_time") else None,
        endpoint=origin.endpoint,
        sender=origin.sender,
        pid=origin.pid,
        path=tuple([Hop(hop.owner, hop.decision) for hop in message.path]),
        causes=tuple([failure_from_proto(cause) for cause in message.causes]),
        remote_traceback=message.remote_traceback,
        last_log_lines=tuple(message.last_log_lines),
        restarts_tried=message.restarts_tried,
    )


def _to_proto(failure: MeshFailure, room: _Room) -> pb2.Failure:
    causes = failure.causes
    if len(causes) > room.cause_count:
        causes = (causes[0], *causes[len(causes) - room.cause_count + 1 :])
    message = _one_to_proto(failure, room)
    size = message.ByteSize()
    for cause in causes:  # flat: none has causes of its own
        below = _one_to_proto(cause, room)
        message.causes.append(below)
        size += below.ByteSize()
        if size > MOST_BYTES:
            break  # it will not do; the rest would be work for nothing
    return message


def _one_to_proto(failure: MeshFailure, room: _Room) -> pb2.Failure:
    def cut(text: str) -> str:
        return beginning(sendable(text), room.text_bytes)

    def cut_id(text: str) -> str:
        return beginning(sendable(text), max(room.text_bytes, _LEAST_ID_BYTES))

    lines = failure.last_log_lines[max(0, len(failure.last_log_lines) - room.line_count) :]
    message = pb2.Failure(
        failure_id=cut_id(failure.id),
        kind=_NUMBER_OF[failure.kind],
        origin=pb2.FailureOrigin(
            instance_id=cut_id(failure.instance_id),
            pid=failure.pid,
            mesh_name=cut(failure.mesh_name),
            mesh_id=cut_id(failure.mesh_id),
            incarnations=failure.incarnations[:_MOST_RANKS],
            ranks=failure.ranks[:_MOST_RANKS],
            endpoint=cut(failure.endpoint),
            sender=cut(failure.sender),
        ),
        message=cut(failure.message),
        exit=None if failure.exit is None else _exit_to_proto(failure.exit),
        detected_by=cut(failure.detected_by),
        detect_time=_timestamp(failure.detect_time),
        last_log_lines=[beginning(sendable(line), room.line_bytes) for line in lines],
        remote_traceback=end(sendable(failure.remote_traceback), room.traceback_bytes),
        restarts_tried=failure.restarts_tried,
    )
    for hop in _some_hops(failure.path, room.hop_count):
        message.path.append(pb2.FailureHop(owner=cut(hop.owner), decision=cut(hop.decision)))
    return message


def _some_hops(path: Sequence[Hop], most: int) -> Sequence[Hop]:
    """Leave out hops of the middle, where there are more, and say how many."""
    if len(path) <= most:
        return path
    first, last = path[: most // 2], path[len(path) - (most - most // 2 - 1) :]
    return [*first, Hop(CUT, f"{len(path) - len(first) - len(last)} owners left out"), *last]


def _exit_to_proto(end: ExitInfo) -> pb2.ExitInfo:
    return pb2.ExitInfo(
        code=end.code, signal=end.signal, out_of_memory=end.out_of_memory, asked=end.asked
    )


def _exit_from_proto(message: pb2.ExitInfo) -> ExitInfo:
    return ExitInfo(
        code=message.code if message.HasField("code") else None,
        signal=message.signal if message.HasField("signal") else None,
        out_of_memory=message.out_of_memory,
        asked=message.asked,
    )


def _timestamp(seconds: float | None) -> Timestamp | None:
    if seconds is None or not 0 <= seconds < _LATEST_S:
        return None
    whole, rest = divmod(seconds, 1)
    return Timestamp(seconds=int(whole), nanos=min(int(rest * 1e9), 999_999_999))


def _seconds(stamp: Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9


_NUMBER_OF: Final = {
    kind: pb2.FailureKind.Value(f"FAILURE_KIND_{kind.value}") for kind in FailureKind
}
_KIND_OF: Final[dict[int, FailureKind]] = {number: kind for kind, number in _NUMBER_OF.items()}
