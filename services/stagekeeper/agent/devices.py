"""The agent's cards: the list that admission counts with, and what is used of each.

Host memory is the one kind that this release knows. What is used of a slice is the memory of the
stage processes on it; of a stage on several slices each carries an even part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from stagekeeper.agent.ledger import Ledger
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import Device


class Inventory:
    """The cards of one agent. They do not change while it lives."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._devices = {device.device_id: device for device in devices}

    @property
    def by_id(self) -> Mapping[DeviceId, Device]:
        return self._devices

    def read(self, stages: Iterable[StageProcess], ledger: Ledger) -> tuple[Device, ...]:
        """Return the cards as they are now, in the order of their index."""
        used = dict.fromkeys(self._devices, 0)
        for stage in stages:
            claims = stage.shard.devices
            for claim in claims:
                if claim.device_id in used:  # the agent may have been started with others since
                    used[claim.device_id] += (stage.shard.memory_bytes or 0) // len(claims)
        return tuple(
            replace(
                device,
                used_bytes=used[device.device_id],
                reserved_bytes=ledger.reserved_bytes(device.device_id),
            )
            for device in sorted(self._devices.values(), key=lambda it: it.index)
        )
