"""A worker's whole slice, as it is registered.

An entry that cannot be converted is left out alone and told to the agent; the rest is kept. The
places of the entries in the message are kept beside the report, since refusals name them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import NO_EPOCH, HostId, WorkerId
from stagekeeper.core.model import RefusedEntry, ShardRecord, WorkerReport
from stagekeeper.runtime.convert.failures import (
    failure_from_proto,
    failure_to_proto,
    operation_from_proto,
    operation_to_proto,
)
from stagekeeper.runtime.convert.identities import epoch_from_proto, epoch_to_proto
from stagekeeper.runtime.convert.shards import (
    SharedParts,
    device_from_proto,
    device_to_proto,
    shard_from_proto,
    shard_to_proto,
)
from stagekeeper.v1 import supervisor_service_pb2 as supervisor_pb2


def report_to_proto(
    report: WorkerReport, *, cluster: str, digest: bytes
) -> supervisor_pb2.RegisterWorkerRequest:
    """Build the registration that puts `report`; `digest` is what heartbeats will carry."""
    return supervisor_pb2.RegisterWorkerRequest(
        cluster=cluster,
        worker_id=report.worker_id,
        host_id=report.host_id,
        hostname=report.hostname,
        incarnation=report.incarnation,
        revision=report.revision,
        agent_address=report.agent_address,
        stages_outlive_agent=report.stages_outlive_agent,
        outlive_reason=report.outlive_reason,
        highest_epoch=epoch_to_proto(report.highest_epoch),
        devices=[device_to_proto(device) for device in report.devices],
        inventory_unknown=report.inventory_unknown,
        inventory_reason=report.inventory_reason,
        replica_states=[shard_to_proto(shard) for shard in report.shards],
        operations=[operation_to_proto(operation) for operation in report.operations],
        failures=[failure_to_proto(failure) for failure in report.failures],
        notes=report.notes,
        digest=digest,
    )


M = TypeVar("M")
T = TypeVar("T")

_SHARDS_IN_A_ROW: Final = 100
"""Some milliseconds of work: what waits meanwhile, heartbeats among it, is served in between."""


class _Shards:
    """The shards of a slice as far as they are converted."""

    def __init__(self) -> None:
        self.kept: list[ShardRecord] = []
        self.places: list[int] = []
        self.refused: list[RefusedEntry] = []
        self._shared = SharedParts()

    def take(self, message: supervisor_pb2.RegisterWorkerRequest, begin: int, end: int) -> None:
        """Convert the entries from `begin` up to `end`."""
        for place, shard in enumerate(message.replica_states[begin:end], begin):
            try:
                self.kept.append(shard_from_proto(shard, self._shared))
            except Refused as refusal:
                self.refused.append(RefusedEntry(place, refusal.reason.value, refusal.message))
            else:
                self.places.append(place)


ConvertedReport = tuple[WorkerReport, list[RefusedEntry], list[int]]
"""The report; the entries of `replica_states` that were left out, with their places in the message;
and for each shard of the report its place in the message."""


def report_from_proto(message: supervisor_pb2.RegisterWorkerRequest) -> ConvertedReport:
    """Convert a registration, leaving out what cannot be converted.

    An operation or a failure that cannot be converted is left out without a word: there is no field
    to answer it in, the agent rolls back by itself what no reign joins, and it cuts its failures.
    """
    shards = _Shards()
    shards.take(message, 0, len(message.replica_states))
    return _report(message, shards)


async def report_from_proto_in_turns(
    message: supervisor_pb2.RegisterWorkerRequest,
) -> ConvertedReport:
    """Like `report_from_proto`; the event loop gets its turn between the pieces of a big slice."""
    shards = _Shards()
    count = len(message.replica_states)
    for begin in range(0, count, _SHARDS_IN_A_ROW):
        if begin:
            await asyncio.sleep(0)
        shards.take(message, begin, begin + _SHARDS_IN_A_ROW)
    return _report(message, shards)


def _report(message: supervisor_pb2.RegisterWorkerRequest, shards: _Shards) -> ConvertedReport:
    report = WorkerReport(
        worker_id=WorkerId(message.worker_id),
        host_id=HostId(message.host_id),
        incarnation=message.incarnation,
        revision=message.revision,
        agent_address=message.agent_address,
        hostname=message.hostname,
        stages_outlive_agent=message.stages_outlive_agent,
        outlive_reason=message.outlive_reason,
        highest_epoch=(
            epoch_from_proto(message.highest_epoch)
            if message.HasField("highest_epoch")
            else NO_EPOCH
        ),
        devices=tuple([device_from_proto(device) for device in message.devices]),
        inventory_unknown=message.inventory_unknown,
        inventory_reason=message.inventory_reason,
        shards=tuple(shards.kept),
        operations=tuple(_readable(operation_from_proto, message.operations)),
        failures=tuple(_readable(failure_from_proto, message.failures)),
        notes=tuple(message.notes),
    )
    return report, shards.refused, shards.places


def _readable(convert: Callable[[M], T], messages: Iterable[M]) -> Iterator[T]:
    for message in messages:
        try:
            yield convert(message)
        except Refused:
            continue
