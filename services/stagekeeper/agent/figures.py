"""What of a slice may change without a registration: progress, and memory as it is measured.

A heartbeat carries a digest of the slice without these. Whether a stage is BUSY counts, for how
long does not. Decided here also: when what was told of memory is so far from what is measured that
it is worth a registration. Invariant: where nothing changes, nothing is told again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from stagekeeper.core.model import NO_PROGRESS, Device, ShardRecord, WorkerReport

_LEAST_BYTES: Final = 16 * 2**20
_LEAST_SHARE: Final = 0.1

MemoryFigures = Mapping[tuple[object, ...], int | None]
"""Of each shard, each of its claims and each device: its bytes, None where they are not known."""


def shard_without_figures(shard: ShardRecord) -> ShardRecord:
    return replace(
        shard,
        progress=NO_PROGRESS,
        memory_bytes=None,
        restart_ages_s=(),
        predicted_memory=None,
        measured_memory=None,
        busy_for_s=None if shard.busy_for_s is None else 0.0,
        devices=tuple(replace(claim, used_bytes=None) for claim in shard.devices),
    )


def device_without_figures(device: Device) -> Device:
    return replace(device, used_bytes=None, foreign=())


def memory_figures(report: WorkerReport) -> MemoryFigures:
    found: dict[tuple[object, ...], int | None] = {}
    for shard in report.shards:
        found[shard.slot, shard.instance_id] = shard.memory_bytes
        for claim in shard.devices:
            found[shard.slot, shard.instance_id, claim.device_id] = claim.used_bytes
    for device in report.devices:
        found[(device.device_id,)] = device.used_bytes
    return found


def are_worth_telling(told: MemoryFigures, now: MemoryFigures) -> bool:
    """Whether some figure has become known or unknown, or moved by more than people overlook.

    What came or went since is another slice, and told as that.
    """
    return any(_moved(told[it], now[it]) for it in told.keys() & now.keys())


def _moved(told: int | None, now: int | None) -> bool:
    if told is None or now is None:
        return told is not now
    return abs(now - told) > max(_LEAST_BYTES, int(_LEAST_SHARE * told))
