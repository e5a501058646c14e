"""Identities and times.

Wall-clock times are for display, so one that no calendar has becomes "unknown" and is not refused.
Invariant: a time that went through here once goes through again unchanged (to the microsecond).
"""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from stagekeeper.core.ids import ChangeRevision, Epoch, Generation
from stagekeeper.v1 import types_pb2 as pb2

# The years 1 to 9999, which is all that a Timestamp may hold.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799


def time_to_proto(wall_time: float) -> Timestamp:
    """Convert seconds since 1970, to the microsecond."""
    seconds, micros = divmod(round(wall_time * 1e6), 1_000_000)
    return Timestamp(seconds=seconds, nanos=micros * 1000)


def time_from_proto(message: Timestamp) -> float | None:
    """Return None for a time that no calendar has: times are for display, so nothing is refused."""
    if not _FIRST_SECOND <= message.seconds <= _LAST_SECOND or not 0 <= message.nanos < 10**9:
        return None
    return (message.seconds * 1_000_000 + message.nanos // 1_000) / 1e6


def epoch_to_proto(epoch: Epoch) -> pb2.Epoch:
    return pb2.Epoch(number=epoch.number, supervisor_id=epoch.supervisor_id)


def epoch_from_proto(message: pb2.Epoch) -> Epoch:
    return Epoch(message.number, message.supervisor_id)


def generation_to_proto(generation: Generation) -> pb2.Generation:
    epoch = generation.epoch
    return pb2.Generation(
        epoch=pb2.Epoch(number=epoch.number, supervisor_id=epoch.supervisor_id), n=generation.n
    )


def generation_from_proto(message: pb2.Generation) -> Generation:
    epoch = message.epoch
    return Generation(Epoch(epoch.number, epoch.supervisor_id), message.n)


def revision_to_proto(revision: ChangeRevision) -> pb2.ChangeRevision:
    return pb2.ChangeRevision(epoch=epoch_to_proto(revision.epoch), n=revision.n)


def revision_from_proto(message: pb2.ChangeRevision) -> ChangeRevision:
    return ChangeRevision(epoch_from_proto(message.epoch), message.n)
