"""Where replicas go: one worker for each, and a real card for each card of the replica.

Decided here: which worker and which cards, by the same sum that admission uses (`planner`) over
what runs, starts and stops there. Not decided here: which replicas start (`wishes`), and whether
the memory really is free (the agent looks again, at RESERVE).

Invariant: all replicas of a request find their place, or none is placed and the refusal shows the
sum for each card of the worker that came closest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeviceId, ReplicaIndex, WorkerId
from stagekeeper.core.model import DeploymentSpec, Device, MemoryNeed
from stagekeeper.core.planner import Holding, admission_report

CARDS_SHOWN = 8


@dataclass(slots=True)
class Account:
    """What is held of one real card, by whoever sees it: two agents may see the same one."""

    holdings: list[Holding] = field(default_factory=list)
    held_bytes: int = 0

    def hold(self, holding: Holding) -> None:
        self.holdings.append(holding)
        self.held_bytes += holding.memory_bytes


@dataclass(frozen=True, slots=True)
class Card:
    """A card of one worker, and its account."""

    device: Device
    account: Account

    @property
    def free_bytes(self) -> int:
        return self.device.total_bytes - self.account.held_bytes


@dataclass(slots=True)
class Offer:
    """A worker that may take replicas. `cards` are those that the deployment may use.

    `replica_count` counts the replicas of this deployment that lie or start there.
    """

    worker_id: WorkerId
    cards: Sequence[Card]
    replica_count: int = 0

    @property
    def free_bytes(self) -> int:
        return sum(card.free_bytes for card in self.cards)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica goes: its worker, and the real card for each card number of the spec."""

    worker_id: WorkerId
    devices: Mapping[int, DeviceId]


_Needs = Mapping[int, Sequence[tuple[int, MemoryNeed]]]
"""Card number of the replica → what each stage on it (stage id, need) wants of it."""

_Preference = Callable[[Card], tuple[int, int]]


def _emptiest_first(card: Card) -> tuple[int, int]:
    return -card.free_bytes, card.device.index


def _fullest_first(card: Card) -> tuple[int, int]:
    return card.free_bytes, card.device.index


def place_replicas(
    spec: DeploymentSpec, indexes: Sequence[ReplicaIndex], offers: Callable[[], Sequence[Offer]]
) -> dict[ReplicaIndex, Place]:
    """Find a place for each of `indexes`.

    Replicas are spread: over the workers that have the fewest of this deployment, then over those
    with the most room, then by id; over the emptiest cards. Where that fails, they are packed onto
    the fullest cards that still hold them. Neither is an optimum: that would be bin packing.

    Args:
        spec: what a replica needs.
        indexes: the replicas to place, ascending.
        offers: builds the candidates afresh; what is placed is written into their accounts.

    Raises:
        Refused: ADMISSION_REFUSED.
    """
    needs = _needs(spec)
    for prefer in (_emptiest_first, _fullest_first):
        places: dict[ReplicaIndex, Place] = {}
        candidates = offers()
        for index in indexes:
            place = _place_one(spec, index, needs, candidates, prefer)
            if place is None:
                break
            places[index] = place
        if len(places) == len(indexes):
            return places
    candidates = offers()
    missing = next(
        (it for it in indexes if _place_one(spec, it, needs, candidates, _fullest_first) is None),
        indexes[-1],
    )
    raise _refusal(spec, missing, len(indexes), needs, candidates)


def _needs(spec: DeploymentSpec) -> _Needs:
    needs: dict[int, list[tuple[int, MemoryNeed]]] = {}
    for stage_id, stage in enumerate(spec.stages):
        for number in stage.devices:
            needs.setdefault(number, []).append((stage_id, stage.memory or MemoryNeed()))
    return dict(sorted(needs.items()))


def _place_one(
    spec: DeploymentSpec,
    index: ReplicaIndex,
    needs: _Needs,
    offers: Sequence[Offer],
    prefer: _Preference,
) -> Place | None:
    """Place one replica, and write it into the accounts of its cards."""
    ranked = sorted(offers, key=lambda it: (it.replica_count, -it.free_bytes, it.worker_id))
    for offer in ranked:
        chosen = _match(needs, sorted(offer.cards, key=prefer))
        if chosen is None:
            continue
        offer.replica_count += 1
        for number, card in chosen.items():
            for stage_id, need in needs[number]:
                holder = f"{spec.name} replica {index} stage {stage_id}"
                memory_bytes = need.on_card(card.device.total_bytes)
                card.account.hold(Holding(card.device.device_id, holder, memory_bytes))
        devices = {number: card.device.device_id for number, card in chosen.items()}
        return Place(offer.worker_id, devices)
    return None


def _match(needs: _Needs, cards: Sequence[Card]) -> dict[int, Card] | None:
    """Give each card number a real card of its own that holds it; None when there is no way.

    Augmenting paths (Kuhn, 1955): a number takes the first free card that holds it, or else the
    card of another number that can move on.
    """
    if len(needs) > len(cards):
        return None
    fitting = {
        number: [place for place, card in enumerate(cards) if _holds(card, wanted)]
        for number, wanted in needs.items()
    }
    holder: dict[int, int] = {}

    def settle(number: int, tried: set[int]) -> bool:
        for place in fitting[number]:
            if place not in holder:
                holder[place] = number
                return True
        for place in fitting[number]:
            if place not in tried:
                tried.add(place)
                if settle(holder[place], tried):
                    holder[place] = number
                    return True
        return False

    for number in needs:
        if not settle(number, set()):
            return None
    return {number: cards[place] for place, number in sorted(holder.items(), key=lambda it: it[1])}


def _holds(card: Card, wanted: Iterable[tuple[int, MemoryNeed]]) -> bool:
    """Do admission's sum: each product truncated before it is added; equality is admitted."""
    total_bytes = card.device.total_bytes
    need_bytes = sum(need.on_card(total_bytes) for _, need in wanted)
    return card.account.held_bytes + need_bytes <= total_bytes


def _refusal(
    spec: DeploymentSpec,
    missing: ReplicaIndex,
    count: int,
    needs: _Needs,
    offers: Sequence[Offer],
) -> Refused:
    """Show the arithmetic for the worker that came closest."""
    best = max(offers, key=lambda it: (min(len(it.cards), len(needs)), it.free_bytes))
    what = f"{spec.name} replica {missing}"
    if count > 1:
        what += f" (of {count} to start; nothing is started)"
    if len(best.cards) < len(needs):
        why = f"it needs {len(needs)} cards, and {best.worker_id} has {len(best.cards)} for it"
    else:
        why = "; ".join(_sums(needs, best)) or "its cards cannot be matched with those there"
    return Refused(
        Reason.ADMISSION_REFUSED,
        f"no room for {what} on any of {len(offers)} workers; closest is {best.worker_id}: {why}",
        metadata={"worker_id": best.worker_id},
    )


def _sums(needs: _Needs, offer: Offer) -> list[str]:
    """Do the sums with the neediest number on the emptiest card, and so on down."""
    cards = sorted(offer.cards, key=_emptiest_first)
    typical_bytes = max(card.device.total_bytes for card in cards)
    numbers = sorted(
        needs, key=lambda number: -sum(need.on_card(typical_bytes) for _, need in needs[number])
    )
    lines = []
    for number, card in zip(numbers, cards, strict=False):
        device = card.device
        report = admission_report(
            {stage_id: ((device.device_id,), need) for stage_id, need in needs[number]},
            {device.device_id: device.total_bytes},
            card.account.holdings,
        )
        lines += report.refusals
    return lines[:CARDS_SHOWN]
