"""What of a slice may change without a registration: progress, and memory as it is measured.

A heartbeat carries a digest of the slice without these. Whether a stage is BUSY counts, for how
long does not.
"""

from __future__ import annotations

from dataclasses import replace

from stagekeeper.core.model import NO_PROGRESS, Device, ShardRecord


def shard_without_figures(shard: ShardRecord) -> ShardRecord:
    return replace(
        shard,
        progress=NO_PROGRESS,
        memory_bytes=None,
        restart_ages_s=(),
        busy_for_s=None if shard.busy_for_s is None else 0.0,
        devices=tuple(replace(claim, used_bytes=None) for claim in shard.devices),
    )


def device_without_figures(device: Device) -> Device:
    return replace(device, used_bytes=None, foreign=())
