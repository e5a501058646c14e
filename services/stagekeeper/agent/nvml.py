"""NVIDIA cards, as NVML tells of them.

Decided here: which cards an agent uses, and when their list is known. A card's identity is its
UUID, never its place in the list, which moves. Not decided here: what NVML is asked (`nvml_calls`),
what a call that hangs is (`call_thread`), what follows from a list that is not known (`ledger`).

Invariant: "no cards" is said only when NVML is not installed, its driver is not loaded, or it says
so itself, and nobody asked for cards. Whatever else goes wrong is an unknown list, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stagekeeper.agent.call_thread import CallOverdue, CallThread
from stagekeeper.agent.device_choice import GpuChoice
from stagekeeper.agent.devices import CardReading, Reading
from stagekeeper.agent.nvml_calls import Listing, NvmlAbsent, NvmlCalls, NvmlCard, NvmlFailed
from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import Device

if TYPE_CHECKING:
    from stagekeeper.agent.stage_process import StageProcess

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
    """

    def __init__(
        self,
        choice: GpuChoice,
        lock_domain: str,
        *,
        deadline_s: float,
        interval_s: float,
    ) -> None:
        self._choice = choice
        self._lock_domain = lock_domain
        self._deadline_s = deadline_s
        self._interval_s = interval_s
        self._thread = CallThread("nvml", self._list, deadline_s=deadline_s)
        self._calls = NvmlCalls(self._thread.call)
        self._reading = Reading(unknown_reason="NVML has not answered yet")

    async def look(self) -> float:
        is_absent = False
        try:
            self._reading = Reading(self._cards(chosen(await self._thread.run(), self._choice)))
        except CallOverdue as overdue:
            self._is_unknown(f"{overdue.call} has not returned within {self._deadline_s:g} s")
        except NvmlAbsent as absent:
            is_absent = not self._choice.is_asked_for
            if is_absent:
                self._reading = Reading()
            else:
                self._is_unknown(str(absent))
        except (NvmlFailed, _Unknown) as failure:
            self._is_unknown(str(failure))
        except Exception as error:  # an answer that makes no sense must not end the agent
            self._is_unknown(f"NVML's answer could not be read: {type(error).__name__}: {error}")
        return max(self._interval_s, _ABSENT_INTERVAL_S) if is_absent else self._interval_s

    def reading(self, stages: Iterable[StageProcess]) -> Reading:
        return self._reading

    def _list(self) -> Listing:
        return self._calls.list()

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
    """Return the cards that `choice` means, in the driver's order.

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
