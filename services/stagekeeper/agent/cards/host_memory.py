"""Host memory as devices: `cpu:0=8GiB` is a slice of RAM that stands for a card.

Laptops and continuous integration use it. Nothing reserves the RAM; a slice is a number that
admission counts with, and what is used of it is the memory of the stage processes on it; of a stage
on several slices each carries an even part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stagekeeper.agent.cards.devices import CardProcess, CardReading, Reading
from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import Device

if TYPE_CHECKING:
    from stagekeeper.agent.stage_process import StageProcess

KIND: Final = "cpu"

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DEVICE: Final = re.compile(r"cpu:(\d{1,4})=(.+)")


def parse_size(text: str) -> int:
    """Read `8GiB`, `1.5 GB` or `4096` as bytes.

    Raises:
        ValueError: it is no size above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(float(match[1]) * unit) <= 0:
        raise ValueError(f"{text!r} is not a size like 8GiB")
    return int(float(match[1]) * unit)


def parse_devices(specs: Sequence[str], lock_domain: str) -> tuple[Device, ...]:
    """Read slices of RAM, ascending by number.

    Args:
        specs: each `cpu:N=SIZE`.
        lock_domain: prefix of the lock domains; slices of two agents never are one card.

    Raises:
        ValueError: naming every spec that is wrong, or that repeats a device.
    """
    problems: list[str] = []
    sizes: dict[int, int] = {}
    for spec in specs:
        match = _DEVICE.fullmatch(spec.strip())
        if match is None:
            problems.append(f"device {spec!r} is not of the form cpu:0=8GiB")
            continue
        number = int(match[1])
        try:
            size = parse_size(match[2])
        except ValueError as error:
            problems.append(f"device {spec!r}: {error}")
            continue
        if number in sizes:
            problems.append(f"device cpu:{number} is given twice")
        sizes[number] = size
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(
        Device(
            device_id=DeviceId(f"cpu:{number}"),
            kind=KIND,
            model="host memory",
            index=position,
            total_bytes=sizes[number],
            lock_domain_id=f"{lock_domain}/cpu:{number}",
        )
        for position, number in enumerate(sorted(sizes))
    )


class HostMemory:
    """The slices of one agent. They never change, so nobody has to look."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._devices = tuple(devices)

    async def look(self) -> None:
        """Nothing is read ahead: what is used is known from the stages themselves."""

    def reading(self, stages: Iterable[StageProcess]) -> Reading:
        on_slice: dict[DeviceId, list[CardProcess]] = {it.device_id: [] for it in self._devices}
        for stage in stages:
            slices = [it.device_id for it in stage.shard.devices if it.device_id in on_slice]
            for device_id in slices:  # the agent may have been started with others since
                memory_bytes = (stage.shard.memory_bytes or 0) // len(slices)
                on_slice[device_id].append(CardProcess(stage.shard.pid, memory_bytes))
        return Reading(
            tuple([_card(device, on_slice[device.device_id]) for device in self._devices])
        )


def _card(device: Device, processes: list[CardProcess]) -> CardReading:
    used_bytes = sum(it.used_bytes or 0 for it in processes)
    return CardReading(
        replace(device, used_bytes=used_bytes), tuple(sorted(processes, key=lambda it: it.pid))
    )
