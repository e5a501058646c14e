"""Which cards are sick, by the errors that they told.

Decided here: how far each error reaches among the cards that are there, and what is said of it. A
sick card stays so for as long as this agent lives: nothing that a driver says would prove that it
is well again, so whoever has reset it starts the agent anew. Not decided here: what an error means
(`xid_table`), what is done about a sick card (`card_faults`, `ledger`).

Invariant: of a card's errors the first that made it sick is told, and does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from stagekeeper.agent.cards.devices import CardFault
from stagekeeper.agent.cards.nvml_calls import NvmlCard
from stagekeeper.agent.cards.nvml_events import XidEvent
from stagekeeper.agent.cards.xid_table import Reach, XidKind, is_listed, xid_kind
from stagekeeper.core.ids import DeviceId

_log = structlog.get_logger(__name__)

_CURE: Final = {
    Reach.DEVICE: (
        "reset it (nvidia-smi --gpu-reset) or start its machine again, then start this agent anew"
    ),
    Reach.HOST: "start the machine again",
}


class CardHealth:
    """What the NVIDIA cards of one agent told of themselves, since it was started."""

    def __init__(self) -> None:
        self._sick: dict[str, str] = {}
        self._host_reason = ""

    def reason(self, uuid: str) -> str:
        """Say why a card is sick; empty where it is not."""
        return self._sick.get(uuid) or self._host_reason

    def take_in(
        self, event: XidEvent, cards: Sequence[NvmlCard], pid: int | None = None
    ) -> CardFault | None:
        """Note an error; return it where it is one program's.

        Args:
            cards: those that this agent uses; an error of another one is told to nobody, unless it
                is the machine's.
            pid: of the program that met it, where that is known.
        """
        kind = xid_kind(event.xid)
        hit = _hit(event, cards)
        if not hit and kind.reach is not Reach.HOST:
            return None
        names = ", ".join(hit) or event.gpu_uuid
        text = f"XID {event.xid} ({kind.what}) of card {names}"
        tell = _log.warning if kind.reach is not Reach.IGNORE else _log.info
        tell(
            "a card told an error",
            xid=event.xid,
            what=kind.what,
            reach=str(kind.reach),
            listed=is_listed(event.xid),
            cards=names,
            pid=pid,
        )
        if kind.reach is Reach.DEVICE:
            for uuid in hit:
                self._sick.setdefault(uuid, f"XID {event.xid} ({kind.what}): {_cure(kind)}")
        elif kind.reach is Reach.HOST:
            told = f"XID {event.xid} ({kind.what}) of card {event.gpu_uuid}: {_cure(kind)}"
            self._host_reason = self._host_reason or told
        if kind.reach is not Reach.STAGE:
            return None
        return CardFault(tuple(map(DeviceId, hit)), text, pid)


def _cure(kind: XidKind) -> str:
    return f"nothing new goes there; {_CURE[kind.reach]}"


def _hit(event: XidEvent, cards: Iterable[NvmlCard]) -> list[str]:
    """Return the card, or the instance that is named, or all of them where none is."""
    parts = [card for card in cards if card.gpu_uuid == event.gpu_uuid]
    if event.gpu_instance is not None:
        named = [card for card in parts if card.gpu_instance == event.gpu_instance]
        known = all(card.gpu_instance is not None for card in parts)
        # An instance that this agent does not use is nobody's here.
        parts = named if known else parts
    return [card.uuid for card in parts]
