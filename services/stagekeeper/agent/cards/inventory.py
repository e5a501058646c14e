"""The cards of one agent: all kinds together, read again and again, for admission and reports.

Decided here: when a change of the cards is another slice: which there are, how large they are, and
whether that is known; what is used of them is a figure. Not decided here: how a kind is read
(`nvml`, `host_memory`), what is admitted (`ledger`), whose what is used is (`card_claimants`).

Invariant: the ledger counts with what the last look found, from that look on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import structlog

from stagekeeper.agent.cards import host_memory
from stagekeeper.agent.cards.card_owners import is_of_stage
from stagekeeper.agent.cards.devices import CardReading, DeviceSource
from stagekeeper.agent.cards.foreign_figures import ForeignFigures
from stagekeeper.agent.cards.ledger import Ledger
from stagekeeper.agent.figures import device_without_figures
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import DeviceId, WorkerId
from stagekeeper.core.model import Device
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class InventoryReport:
    """The cards in the order of their index; as they were last read where `unknown_reason` says why
    they could not be read since."""

    devices: tuple[Device, ...]
    unknown_reason: str = ""


class Inventory:
    """The cards of one agent, which change while it lives.

    Args:
        sources: one for each kind; the cards of the first come first.
        ledger: told of every change.

    Attributes:
        on_change: called when what is reported of the cards is another thing now.
    """

    def __init__(
        self,
        sources: Sequence[DeviceSource],
        ledger: Ledger,
        clock: Clock,
        worker_id: WorkerId = WorkerId(""),
    ) -> None:
        self._sources = sources
        self._foreign = ForeignFigures(worker_id, clock)
        self._ledger = ledger
        self._clock = clock
        self._by_id: dict[DeviceId, Device] = {}
        self._known: tuple[tuple[Device, ...], str] | None = None
        self._unread = set(range(len(sources)))
        self._is_read = asyncio.Event()
        self._followed: dict[int, _Followed] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._take_in()

    @property
    def by_id(self) -> Mapping[DeviceId, Device]:
        """The cards as they were last read; what is got here once changes with them."""
        return MappingProxyType(self._by_id)

    def driven(self, device_ids: Iterable[DeviceId]) -> list[DeviceId]:
        """Return those of these cards of which a driver keeps the books, and so has to be asked."""
        cards = self._by_id
        return [it for it in device_ids if it in cards and cards[it].kind != host_memory.KIND]

    def follow(self, owner: TaskOwner) -> None:
        """Read every kind now, and again and again, in tasks of `owner`."""
        for place, source in enumerate(self._sources):
            _ = owner.start(f"devices {place}", self._follow(place, source))

    async def read_once(self, within_s: float) -> None:
        """Return when every kind has been read once, or could not be, or when time is up."""
        try:
            async with asyncio.timeout(within_s):
                await self._is_read.wait()
        except TimeoutError:
            _log.warning("the devices are still being read; this agent goes on without them")

    def report(self, stages: Iterable[StageProcess]) -> InventoryReport:
        """Return the cards as they are now, with what is used and reserved of them."""
        cards, unknown_reason = self._read(tuple(stages))
        foreign = self._ledger.foreign()
        return InventoryReport(
            tuple(
                replace(
                    it.device,
                    reserved_bytes=self._ledger.reserved_bytes(it.device.device_id),
                    foreign=self._foreign.of(it.device.device_id, foreign),
                )
                for it in cards
            ),
            unknown_reason,
        )

    async def look_again(self, within_s: float) -> None:
        """Return when every kind was looked at anew from now on, or when time is up."""
        looks = [it.next_look() for it in self._followed.values()]
        if looks:
            _, pending = await asyncio.wait(looks, timeout=within_s)
            if pending:
                _log.info("the devices are not read in time; the last reading counts")

    def listed_on(self, device_ids: Iterable[DeviceId]) -> dict[DeviceId, frozenset[int]]:
        """Return the pids on each of these cards as last read; none where nobody can tell."""
        cards, _ = self._read(())
        listed = {
            card.device.device_id: frozenset(it.pid for it in card.processes or ())
            for card in cards
        }
        return {it: listed.get(it, frozenset()) for it in device_ids}

    def listed_of(self, stage: StageProcess) -> frozenset[int]:
        """Return the pids on a stage's cards that are its own, as last read."""
        listed = self.listed_on([claim.device_id for claim in stage.shard.devices])
        pids = frozenset[int]().union(*listed.values())
        return frozenset(pid for pid in pids if is_of_stage(pid, stage))

    def refresh(self) -> None:
        """Take in what is known of the cards by now, without reading them."""
        self._take_in()

    async def _follow(self, place: int, source: DeviceSource) -> None:
        followed = self._followed[place] = _Followed()
        try:
            wait_s: float | None = 0.0
            while wait_s is not None:
                followed.begins()
                wait_s = await source.look()
                self._take_in()
                self._unread.discard(place)
                if not self._unread:
                    self._is_read.set()
                followed.ends()
                if wait_s is not None:
                    await followed.wanted_or(self._clock.sleep(wait_s))
        finally:
            del self._followed[place]
            followed.begins()  # nobody looks any more, so nobody is to wait for it
            followed.ends()

    def _take_in(self) -> None:
        cards, unknown_reason = self._read(())
        devices = tuple(device_without_figures(card.device) for card in cards)
        self._by_id.clear()
        self._by_id.update({device.device_id: device for device in devices})
        problems = {card.device.device_id: card.problem for card in cards if card.problem}
        self._ledger.cards_are(
            devices, unknown_reason=unknown_reason, problems=problems, readings=cards
        )
        totals = {device.device_id: device.total_bytes for device in devices}
        is_worth_telling = self._foreign.take_in(self._ledger.foreign(), totals)
        if self._known == (devices, unknown_reason):
            if is_worth_telling:
                self.on_change()
            return
        if self._known is not None:
            tell = _log.warning if unknown_reason or problems else _log.info
            tell(
                "the devices are known anew",
                devices=", ".join(f"{it.device_id} ({it.total_bytes} bytes)" for it in devices),
                unknown=unknown_reason,
                unread=problems,
            )
        self._known = (devices, unknown_reason)
        self.on_change()

    def _read(self, stages: tuple[StageProcess, ...]) -> tuple[list[CardReading], str]:
        readings = [source.reading(stages) for source in self._sources]
        cards = [
            replace(card, device=replace(card.device, index=index))
            for index, card in enumerate(card for reading in readings for card in reading.cards)
        ]
        return cards, "; ".join(it.unknown_reason for it in readings if it.unknown_reason)


class _Followed:
    """Who waits for the looks at one kind of card."""

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self._next: list[asyncio.Future[None]] = []
        self._running: list[asyncio.Future[None]] = []

    def next_look(self) -> asyncio.Future[None]:
        """Have it looked at soon; what is returned is done when a look from now on has ended."""
        look: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next.append(look)
        self._wanted.set()
        return look

    def begins(self) -> None:
        self._wanted.clear()
        self._running, self._next = self._running + self._next, []

    def ends(self) -> None:
        ended, self._running = self._running, []
        for look in ended:
            if not look.done():
                look.set_result(None)

    async def wanted_or(self, pause: Coroutine[Any, Any, None]) -> None:
        """Wait for the end of the pause, or until a look is wanted before."""
        waits = [asyncio.ensure_future(pause), asyncio.ensure_future(self._wanted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
