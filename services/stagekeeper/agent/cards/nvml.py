"""NVIDIA cards, as NVML tells of them.

Decided here: which cards an agent uses, and when their list is known. A card's identity is its
UUID, never its place in the list, which moves. Not decided here: what NVML is asked (`nvml_calls`),
what a call that hangs is (`call_thread`), which cards the environment shows (`visible_devices`),
which are sick (`card_health`), what follows from a list that is not known (`ledger`).

Invariant: "no cards" is said only when NVML is not installed, its driver is not loaded, or it says
so itself, or `CUDA_VISIBLE_DEVICES` hides them all, and nobody asked for cards. Whatever else goes
wrong is an unknown list, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from stagekeeper.agent.cards.call_thread import CallOverdue, CallThread
from stagekeeper.agent.cards.card_health import CardHealth
from stagekeeper.agent.cards.device_choice import GpuChoice
from stagekeeper.agent.cards.devices import CardFault, CardReading, Reading
from stagekeeper.agent.cards.kernel_log import KernelLog
from stagekeeper.agent.cards.nvml_calls import Listing, NvmlAbsent, NvmlCalls, NvmlCard, NvmlFailed
from stagekeeper.agent.cards.visible_devices import Unclear, VisibleDevices
from stagekeeper.agent.cards.xid_table import Reach, xid_kind
from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import Device

if TYPE_CHECKING:
    from stagekeeper.agent.stage_process import StageProcess

_log = structlog.get_logger(__name__)

KIND: Final = "cuda"

_ABSENT_INTERVAL_S: Final = 60.0
"""A host without NVIDIA cards seldom gets some, and asking it may start a program of the driver."""


class _Unknown(Exception):
    """The list is not known; the text says why."""


class NvmlDevices:
    """The NVIDIA cards that one agent was given.

    Args:
        lock_domain: prefix of the lock domains: the host's, since all agents of a host see the
            same cards.
        deadline_s: for each call of NVML.
        interval_s: between two readings.
        visible: the cards that this agent was left; None is all of them.
        kernel_log: names the process that met an error; None names nobody.

    Attributes:
        on_fault: called with each error that one program met.
        on_sick: called when a card has become sick.
    """

    def __init__(
        self,
        choice: GpuChoice,
        lock_domain: str,
        *,
        deadline_s: float,
        interval_s: float,
        visible: VisibleDevices | None = None,
        kernel_log: KernelLog | None = None,
    ) -> None:
        self._visible = visible or VisibleDevices()
        self._kernel_log = kernel_log
        self._choice = choice
        self._lock_domain = lock_domain
        self._deadline_s = deadline_s
        self._interval_s = interval_s
        self._thread = CallThread("nvml", self._work, deadline_s=deadline_s)
        self._calls = NvmlCalls(self._thread.call)
        self._wants_list = False
        self._is_looking = False
        self._used: tuple[NvmlCard, ...] = ()
        self._health = CardHealth()
        self._note = ""
        self._reading = Reading(unknown_reason="NVML has not answered yet")
        self.on_fault: Callable[[CardFault], None] = lambda fault: None
        self.on_sick: Callable[[], None] = lambda: None

    @property
    def notes(self) -> tuple[str, ...]:
        """What its operator should know of which cards are used."""
        return (self._note,) if self._note else ()

    async def look(self) -> float:
        is_absent = False
        self._is_looking = True
        try:
            listing = await self._listing()
            self._used = tuple(self._chosen(listing))
            self._reading = Reading(self._cards(self._used))
        except CallOverdue as overdue:
            self._is_unknown(f"{overdue.call} has not returned within {self._deadline_s:g} s")
        except NvmlAbsent as absent:
            is_absent = not self._choice.is_asked_for
            if is_absent:
                self._reading = Reading()
            else:
                self._is_unknown(str(absent))
        except (NvmlFailed, Unclear, _Unknown) as failure:
            self._is_unknown(str(failure))
        except Exception as error:  # an answer that makes no sense must not end the agent
            self._is_unknown(f"NVML's answer could not be read: {type(error).__name__}: {error}")
        finally:
            self._is_looking = False
        await self._hear()
        return max(self._interval_s, _ABSENT_INTERVAL_S) if is_absent else self._interval_s

    def reading(self, stages: Iterable[StageProcess]) -> Reading:
        cards = self._reading.cards
        if any(map(self._sickness, cards)):
            return replace(self._reading, cards=tuple(map(self._with_health, cards)))
        return self._reading

    async def listen(self) -> None:
        """Ask the cards for errors, and for nothing else; a look does as well. Never raises."""
        # Without cards nobody tells.
        if not self._used or self._is_looking:
            return
        try:
            await self._thread.run()
        except Exception as error:  # the next look meets it too, and says what follows from it
            _log.debug("the cards could not be asked for errors", error=repr(error))
        await self._hear()

    async def _hear(self) -> None:
        """Take in the errors that were told, and tell those whom they concern."""
        before = [self._health.reason(card.uuid) for card in self._used]
        for event in self._calls.events.fetch():
            pid = None
            if self._kernel_log is not None and xid_kind(event.xid).reach is Reach.STAGE:
                log = self._kernel_log
                pid = await asyncio.to_thread(log.pid_of, event.pci_bus_id, event.xid)
            fault = self._health.take_in(event, self._used, pid)
            if fault is not None:
                self.on_fault(fault)
        if before != [self._health.reason(card.uuid) for card in self._used]:
            self.on_sick()

    def _sickness(self, card: CardReading) -> str:
        return self._health.reason(card.device.device_id)

    def _with_health(self, card: CardReading) -> CardReading:
        return replace(card, device=replace(card.device, sick_reason=self._sickness(card)))

    async def _listing(self) -> Listing:
        self._wants_list = True
        while True:
            listing = await self._thread.run()
            if listing is not None:  # else it was an errand that had begun before
                return listing

    def _work(self) -> Listing | None:
        """Do what is wanted, on the thread of the calls."""
        if not self._wants_list:
            self._calls.take_events()
            return None
        self._wants_list = False
        return self._calls.list()

    def _chosen(self, listing: Listing) -> Sequence[NvmlCard]:
        shown = self._visible.among(listing)
        self._note = shown.note
        if self._visible.value is None:
            return chosen(listing, self._choice)
        seen = replace(listing, cards=shown.cards, problems=())
        hidden = [card.uuid for card in listing.cards if card not in shown.cards]
        try:
            return chosen(seen, self._choice)
        except _Unknown as unknown:
            aside = f"; it does not show {', '.join(hidden)}" if hidden else ""
            problems = f"; {'; '.join(listing.problems)}" if listing.problems else ""
            raise _Unknown(f"{unknown} ({self._visible}{aside}{problems})") from None

    def _is_unknown(self, reason: str) -> None:
        self._reading = Reading(tuple(map(_as_last_read, self._reading.cards)), reason)

    def _cards(self, cards: Iterable[NvmlCard]) -> tuple[CardReading, ...]:
        return tuple(
            CardReading(
                Device(
                    device_id=DeviceId(card.uuid),
                    kind=KIND,
                    model=card.model,
                    index=index,
                    total_bytes=card.total_bytes,
                    used_bytes=card.used_bytes,
                    lock_domain_id=f"{self._lock_domain}/{card.uuid}",
                ),
                card.processes,
                card.problem,
            )
            for index, card in enumerate(cards)
        )


def chosen(listing: Listing, choice: GpuChoice) -> Sequence[NvmlCard]:
    """Return the cards that `choice` means, in the order of the list.

    A card that cannot be identified makes the list unknown, unless every name fits another one: so
    a host can be used whose one card is lost, by naming the others.

    Raises:
        _Unknown: a name fits no card, or several; or the list is not whole.
    """
    if not choice.names:
        if listing.problems:
            raise _Unknown(
                f"{'; '.join(listing.problems)} (to go on without it, name the other cards: "
                "--devices GPU-…)"
            )
        if choice.is_asked_for and not listing.cards:
            raise _Unknown("NVML lists no card, and --devices asks for some")
        return listing.cards
    wanted: set[str] = set()
    problems: list[str] = []
    for name in choice.names:
        fitting = [card for card in listing.cards if card.answers_to(name)]
        is_one_gpu = len({card.gpu_uuid for card in fitting if card.gpu_uuid.startswith(name)}) == 1
        if len(fitting) == 1 or is_one_gpu:
            wanted.update(card.uuid for card in fitting)
        elif fitting:
            uuids = ", ".join(card.uuid for card in fitting)
            problems.append(f"--devices {name} fits several cards, say more of it: {uuids}")
        else:
            there = ", ".join(card.uuid for card in listing.cards) or "none"
            problems.append(f"--devices {name} fits no card; NVML lists {there}")
    if problems:
        raise _Unknown("; ".join((*problems, *listing.problems)))
    return [card for card in listing.cards if card.uuid in wanted]


def _as_last_read(card: CardReading) -> CardReading:
    return replace(card, device=replace(card.device, used_bytes=None), processes=None)
