"""What is used of the cards around the end of a stage, read when it matters and not when it is due.

Decided here: when the memory of processes that are gone counts as back (no card lists them any
more), and how long that is waited for. A slice of RAM is used by live processes alone, so there it
is back with their end. Not decided here: what is done when it does not come back.

Invariant: every wait is bounded. What cannot be told is None, and is not waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from stagekeeper.agent.cards.inventory import Inventory
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import DeviceId
from stagekeeper.host.process import resident_bytes
from stagekeeper.runtime.clock import Clock

_LOOK_AGAIN_S: Final = 0.1


class CardMemory:
    """Reads the cards of one agent.

    Args:
        wait_s: how long the memory of ended processes is waited for; 0 is not at all.
        look_s: how long a reading may take.
    """

    def __init__(self, inventory: Inventory, clock: Clock, *, wait_s: float, look_s: float) -> None:
        self._inventory = inventory
        self._clock = clock
        self._wait_s = wait_s
        self._look_s = look_s

    async def used_bytes(
        self, device_ids: Collection[DeviceId], stages: Iterable[StageProcess]
    ) -> int | None:
        """Return what anybody uses on these cards now, all of them together.

        None without cards, and where that is unknown of one of them.
        """
        if not device_ids:
            return None
        held = list(stages)
        if self._inventory.driven(device_ids):
            await self._inventory.look_again(self._look_s)
        for stage in held:
            if stage.handle is not None and stage.holds_processes:
                stage.update(memory_bytes=resident_bytes(stage.handle.pid))
        used = {it.device_id: it.used_bytes for it in self._inventory.report(held).devices}
        found = [used.get(device_id) for device_id in device_ids]
        return sum(it or 0 for it in found) if None not in found else None

    def pids_of(self, stage: StageProcess) -> frozenset[int]:
        """Return which processes of a stage are on its cards: some may end unseen before others."""
        return self._inventory.listed_of(stage)

    async def returns(self, stage: StageProcess, pids: Collection[int]) -> str:
        """Wait until no card of a stage lists these processes, which are gone.

        Returns:
            Nothing when that is so, or cannot be told; else what is still listed.
        """
        device_ids = self._inventory.driven([claim.device_id for claim in stage.shard.devices])
        if not device_ids or not pids:
            return ""
        until = self._clock.monotonic() + self._wait_s
        while True:
            await self._inventory.look_again(self._look_s)
            listed = self._inventory.listed_on(device_ids)
            left = {it: sorted(listed[it].intersection(pids)) for it in device_ids}
            if not any(left.values()):
                return ""
            left_s = until - self._clock.monotonic()
            if left_s <= 0:
                return "; ".join(
                    f"device {device_id} still counts the memory of {', '.join(map(str, there))} "
                    f"{self._wait_s:g} s after their end"
                    for device_id, there in left.items()
                    if there
                )
            await self._clock.sleep(min(_LOOK_AGAIN_S, left_s))
