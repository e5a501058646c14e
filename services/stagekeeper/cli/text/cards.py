"""The cards of all workers as one table: what is reserved, what is measured, and by whom.

Decided here: what is worth a column, and how an unknown figure is said: as `unknown`, never as
nothing. Not decided here: whose memory it is; agents tell that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagekeeper.cli.text.amounts import size
from stagekeeper.cli.text.tables import Table, as_rows
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Claim:
    """What one shard holds of one card."""

    deployment: str
    replica_index: int
    record: types.ShardRecord
    claim: types.DeviceClaim

    @property
    def name(self) -> str:
        record = self.record
        which = f"[{record.shard_index}]" if record.shard_count > 1 else ""
        return f"{self.deployment}/{self.replica_index}/{record.stage_name}{which}"


Claims = dict[tuple[str, str], list[Claim]]
"""By (worker id, device id), in the order of the deployments."""


def claims_by_card(deployments: Iterable[pb2.Deployment]) -> Claims:
    """Tell which stages claim each card, as their workers reported it."""
    found: Claims = {}
    for deployment in deployments:
        for replica in deployment.replicas:
            for shard in replica.shards:
                for claim in shard.record.devices:
                    key = (shard.worker_id, claim.device_id)
                    made = Claim(deployment.name, replica.replica_index, shard.record, claim)
                    found.setdefault(key, []).append(made)
    return found


def cards_table(workers: Iterable[pb2.Worker], deployments: Iterable[pb2.Deployment]) -> Table:
    """Make the table, with a row for each card of each worker."""
    claims = claims_by_card(deployments)
    rows = [
        _row(worker, device, claims.get((worker.worker_id, device.device_id), []))
        for worker in workers
        for device in worker.devices
    ]
    header = ("DEVICE", "WORKER", "TOTAL", "RESERVED", "USED", "FOREIGN", "BY WHOM")
    return Table(header, as_rows(rows))


def cards_summary(worker: pb2.Worker) -> str:
    """Say in one line what a worker has: the table has the rest."""
    count = len(worker.devices)
    said = f"{count} device{'' if count == 1 else 's'}" if count else "none"
    if sick := sum(bool(device.sick_reason) for device in worker.devices):
        said += f", {sick} sick"
    if not worker.inventory_unknown:
        return said
    why = worker.inventory_reason or "the list could not be read"
    return f"inventory unknown: {why}" + (f"; last read: {said}" if count else "")


def foreign_bytes(device: types.Device) -> int:
    return sum(holder.memory_bytes for holder in device.foreign)


def _row(worker: pb2.Worker, device: types.Device, claims: list[Claim]) -> tuple[str, ...]:
    return (
        device.device_id,
        worker.worker_id,
        size(device.total_bytes) if device.total_bytes else _UNKNOWN,
        size(device.reserved_bytes),
        size(device.used_bytes) if device.HasField("used_bytes") else _UNKNOWN,
        _foreign(worker, device),
        "\n".join(_by_whom(worker, device, claims)),
    )


def _foreign(worker: pb2.Worker, device: types.Device) -> str:
    # What nobody could measure may be anybody's: no holder was found is no "nobody holds it".
    if not device.foreign and (worker.inventory_unknown or not device.HasField("used_bytes")):
        return _UNKNOWN
    return size(foreign_bytes(device))


def _by_whom(worker: pb2.Worker, device: types.Device, claims: list[Claim]) -> Iterator[str]:
    if device.sick_reason:
        yield f"SICK: {device.sick_reason}"
    if worker.inventory_unknown:
        yield "as last read"
    elif not device.total_bytes:
        yield "its memory cannot be read, nothing new goes there"
    for it in claims:
        used = f", uses {size(it.claim.used_bytes)}" if it.claim.HasField("used_bytes") else ""
        yield f"{it.name}: {size(it.claim.reserved_bytes)}{used}"
    for holder in device.foreign:
        who = f"pid {holder.pid} ({holder.name})" if holder.pid else holder.name
        yield f"{who}: {size(holder.memory_bytes)}"
