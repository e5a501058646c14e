"""Which NVIDIA cards `CUDA_VISIBLE_DEVICES` of the agent shows, read as CUDA reads it.

Whoever starts an agent with it has given the rest of the machine to somebody else. So an agent uses
those cards, in that order, and no others. As CUDA has it: unset shows all; the list ends before the
first entry that is no card; a card that is there twice makes it empty; a number is a place in
CUDA's order, which is that of the PCI addresses only where `CUDA_DEVICE_ORDER` says so. Without it
CUDA puts the fastest card first, which it alone can tell, unless all cards are of one model.
Decided here: what each entry means. A card in MIG mode means all its instances.

Invariant: where it is not clear which card an entry means, the list is not known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagekeeper.agent.cards.nvml_calls import Listing, NvmlCard

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_ORDER: Final = "CUDA_DEVICE_ORDER"
_BY_ADDRESS: Final = "PCI_BUS_ID"
_NUMBER: Final = re.compile(r"\s*\+?(\d+)")


class Unclear(Exception):
    """It is not known which cards are meant; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Visible:
    """What an agent may use, in the order of the list; `note` says what was left out, and why."""

    cards: tuple[NvmlCard, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The variable as the agent was started with it; `value` is None where it is unset."""

    value: str | None = None
    is_by_address: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> VisibleDevices:
        return cls(environ.get(VARIABLE), environ.get(_ORDER) == _BY_ADDRESS)

    def among(self, listing: Listing) -> Visible:
        """Return what it shows of these cards.

        Raises:
            Unclear: a number is there, and the order, or a card before it, is not known.
        """
        if self.value is None:
            return Visible(listing.cards)
        cards: list[NvmlCard] = []
        for entry in (it.strip() for it in self.value.split(",")):
            found = self._entry(entry, listing)
            if not found:
                return Visible(tuple(cards), self._end(entry, listing) if entry else "")
            if any(it in cards for it in found):
                return Visible((), f"{self}: {entry} is there twice, so CUDA shows no card at all")
            cards += found
        return Visible(tuple(cards))

    def __str__(self) -> str:
        return f"{VARIABLE}={self.value} of this agent"

    def _entry(self, entry: str, listing: Listing) -> Sequence[NvmlCard]:
        if entry.startswith(("GPU-", "MIG-")):
            fitting = [card for card in listing.cards if card.answers_to(entry)]
            if entry.startswith("MIG-GPU-"):
                fitting = [card for card in listing.cards if card.old_mig_id == entry]
            of_one = {card.gpu_uuid for card in fitting}
            is_one = len(fitting) == 1 or (entry.startswith("GPU-") and len(of_one) == 1)
            return fitting if is_one else ()
        number = _NUMBER.match(entry)
        if number is None:
            return ()
        self._check_order(listing)
        return [card for card in listing.cards if card.place == int(number[1])]

    def _check_order(self, listing: Listing) -> None:
        if listing.problems:
            raise Unclear(
                f"{self} has numbers, and not every card can be counted: "
                f"{'; '.join(listing.problems)}"
            )
        if not self.is_by_address and len({_card_model(it) for it in listing.cards}) > 1:
            raise Unclear(
                f"{self} has numbers, which mean places in CUDA's own order, the fastest first, "
                f"and the cards are of several models: set {_ORDER}={_BY_ADDRESS} beside it, or "
                "name the cards by UUID"
            )

    def _end(self, entry: str, listing: Listing) -> str:
        there = ", ".join(card.uuid for card in listing.cards) or "none"
        return (
            f"{self} ends before {entry!r}, which is no card here or fits several, as CUDA reads "
            f"it; the driver lists {there}"
        )


def _card_model(card: NvmlCard) -> str:
    """Return the model of the whole card: an instance's name has its size behind it."""
    return card.model.partition(" MIG ")[0]
