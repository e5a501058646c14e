"""When it is worth a registration that others hold more or less of a card than they did.

What strangers hold is a figure: it moves all the time. So it is told anew only when it has moved by
something that could change a plan, and not at every look; meanwhile what is told stays what it was,
and the id of a plan with it. Invariant: admission never counts with what was told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from stagekeeper.core.ids import DeviceId, WorkerId
from stagekeeper.core.model import ForeignHolder
from stagekeeper.runtime.clock import Clock

_Found = Mapping[DeviceId, tuple[ForeignHolder, ...]]

_LEAST_BYTES: Final = 64 * 2**20
_LEAST_SHARE: Final = 0.01
_PAUSE_S: Final = 3.0


class ForeignFigures:
    """What one agent tells of whoever holds memory of its cards beside its own stages."""

    def __init__(self, own_id: WorkerId, clock: Clock) -> None:
        self._own_id = own_id
        self._clock = clock
        self._told: dict[DeviceId, tuple[ForeignHolder, ...]] = {}
        self._told_at = float("-inf")

    def take_in(self, found: _Found, totals: Mapping[DeviceId, int]) -> bool:
        """Take in what a look found; return whether it is to be told now.

        The stages of other workers are left to those who report them.
        """
        strangers = {device_id: self._without_others(it) for device_id, it in found.items()}
        now = self._clock.monotonic()
        if now - self._told_at < _PAUSE_S or not any(
            _differ(self._told.get(device_id, ()), holders, totals.get(device_id, 0))
            for device_id, holders in strangers.items()
        ):
            return False
        self._told, self._told_at = strangers, now
        return True

    def of(self, device_id: DeviceId, found: _Found) -> tuple[ForeignHolder, ...]:
        """Return what is told of a card: strangers as last told, other workers' stages as found."""
        others = [it for it in found.get(device_id, ()) if not self._is_told(it)]
        return (*self._told.get(device_id, ()), *others)

    def _without_others(self, holders: Iterable[ForeignHolder]) -> tuple[ForeignHolder, ...]:
        return tuple(it for it in holders if self._is_told(it))

    def _is_told(self, holder: ForeignHolder) -> bool:
        return holder.worker_id in ("", self._own_id)


def _differ(
    before: Iterable[ForeignHolder], now: Iterable[ForeignHolder], total_bytes: int
) -> bool:
    least_bytes = max(_LEAST_BYTES, int(_LEAST_SHARE * total_bytes))
    then, since = _by_holder(before), _by_holder(now)
    return any(
        abs(since.get(it, 0) - then.get(it, 0)) > least_bytes for it in then.keys() | since.keys()
    )


def _by_holder(holders: Iterable[ForeignHolder]) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for it in holders:
        # What a stage uses beyond its claim has the claim in its name, and that does not move.
        found[it.pid, it.name] = found.get((it.pid, it.name), 0) + it.memory_bytes
    return found
