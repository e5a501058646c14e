"""Where replicas go: their workers, and there a real card for each card of the replica.

Decided here: which workers and which cards, by the same sum that admission uses (`planner`) over
what runs, starts and stops there. A replica has as many workers as the most shards that a stage of
it has; the k-th takes the k-th shards, and the card numbers stand for its own cards. Not decided
here: which replicas start (`plan`), and whether the memory really is free (the agent looks again,
at RESERVE).

Invariant: what was placed is in the sums; where a replica found no place, the sums are those of the
worker that came closest, and there is a `Shortage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagekeeper.core.counted import counted
from stagekeeper.core.ids import DeploymentName, DeviceId, ReplicaIndex, StageId, WorkerId
from stagekeeper.core.model import DeploymentSpec, Device, MemoryNeed
from stagekeeper.core.planner import DeviceSum, Holding, admission_report

NO_DEVICE = DeviceId("")


@dataclass(frozen=True, slots=True)
class NewTerm:
    """What one stage of a replica to be started adds to the sum of one card."""

    replica_index: ReplicaIndex
    stage_id: StageId
    need: MemoryNeed
    memory_bytes: int
    shard_index: int = 0


@dataclass(slots=True)
class Account:
    """What is held of one real card, by whoever sees it: two agents may see the same one.

    `terms` are what placement has added; `held_bytes` counts holdings and terms.
    """

    holdings: list[Holding] = field(default_factory=list)
    terms: list[NewTerm] = field(default_factory=list)
    held_bytes: int = 0

    def hold(self, holding: Holding) -> None:
        self.holdings.append(holding)
        self.held_bytes += holding.memory_bytes

    def add(self, term: NewTerm) -> None:
        self.terms.append(term)
        self.held_bytes += term.memory_bytes

    def take_back(self, term: NewTerm) -> None:
        self.terms.remove(term)
        self.held_bytes -= term.memory_bytes


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

    `replica_count` counts the replicas of this deployment that lie or start there; `sick` are cards
    that it could use, were they well.
    """

    worker_id: WorkerId
    cards: Sequence[Card]
    replica_count: int = 0
    sick: Sequence[Device] = ()

    @property
    def free_bytes(self) -> int:
        return sum(card.free_bytes for card in self.cards)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one part of a replica goes: the worker, and the real card for each card number."""

    worker_id: WorkerId
    devices: Mapping[int, DeviceId]


@dataclass(frozen=True, slots=True)
class CardSum:
    """What is wanted of one real card: stages of new replicas in order, then what is held."""

    worker_id: WorkerId
    device: Device
    terms: tuple[NewTerm, ...]
    holdings: tuple[Holding, ...]

    @property
    def held_bytes(self) -> int:
        return sum(holding.memory_bytes for holding in self.holdings)

    @property
    def need_bytes(self) -> int:
        return self.held_bytes + sum(term.memory_bytes for term in self.terms)

    @property
    def is_over(self) -> bool:
        return bool(self.terms) and self.need_bytes > self.device.total_bytes

    def admission(
        self, name: DeploymentName, index: ReplicaIndex, shard_index: int = 0
    ) -> DeviceSum:
        """Do admission's sum for one part of a replica: what found a place before it is held."""
        device_id = self.device.device_id
        own: dict[StageId, tuple[tuple[DeviceId, ...], MemoryNeed]] = {}
        before: list[Holding] = []
        for it in self.terms:
            if (it.replica_index, it.shard_index) == (index, shard_index):
                own[it.stage_id] = ((device_id,), it.need)
            else:
                shard = f" shard {it.shard_index}" if it.shard_index else ""
                holder = f"{name} replica {it.replica_index} stage {it.stage_id}{shard}"
                before.append(Holding(device_id, holder, it.memory_bytes))
        totals = {device_id: self.device.total_bytes}
        return admission_report(own, totals, [*self.holdings, *before]).devices[0]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a replica found no place: what is wrong with the worker that came closest.

    `refusals` are (card, what is wrong with it) pairs; the card is empty where it is about no
    single one. `shard_index` is of the part that found none; `offer_count` counts the workers that
    were left for it.
    """

    replica_index: ReplicaIndex
    worker_id: WorkerId
    offer_count: int
    refusals: tuple[tuple[DeviceId, str], ...]
    shard_index: int = 0


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the replicas go, and the sum for each card that one of them would lie on.

    `places` has a place for each part of a replica, in shard order, each on a worker of its own.
    With a `shortage`, `places` has those that found a place before it, and `sums` has all cards
    of the worker that came closest besides.
    """

    places: Mapping[ReplicaIndex, tuple[Place, ...]]
    sums: tuple[CardSum, ...] = ()
    shortage: Shortage | None = None


NOTHING_PLACED = Placing({})

_Needs = Mapping[int, Sequence[tuple[StageId, MemoryNeed]]]
"""Card number of the replica → what each stage on it (stage id, need) wants of it."""

_Preference = Callable[[Card], tuple[int, int]]


def _emptiest_first(card: Card) -> tuple[int, int]:
    return -card.free_bytes, card.device.index


def _fullest_first(card: Card) -> tuple[int, int]:
    return card.free_bytes, card.device.index


def place_replicas(
    spec: DeploymentSpec, indexes: Sequence[ReplicaIndex], offers: Callable[[], Sequence[Offer]]
) -> Placing:
    """Find a place for each of `indexes`.

    Replicas are spread: over the workers that have the fewest of this deployment, then over those
    with the most room, then by id; over the emptiest cards. Where that fails, they are packed onto
    the fullest cards that still hold them. Neither is an optimum: that would be bin packing.

    Args:
        spec: what a replica needs.
        indexes: the replicas to place, ascending.
        offers: builds the candidates afresh, at least as many as a replica has workers; what is
            placed is written into their accounts.
    """
    needs = [_needs(spec, shard_index) for shard_index in range(spec.worker_count)]
    placing = NOTHING_PLACED
    for prefer in (_emptiest_first, _fullest_first):
        candidates = offers()
        placed: dict[ReplicaIndex, tuple[Place, ...]] = {}
        missing: _Missing | None = None
        for index in indexes:
            found = _place_one(index, needs, candidates, prefer)
            if isinstance(found, _Missing):
                missing = found
                break
            placed[index] = found
        if missing is None:
            return Placing(placed, _sums(candidates, placed.values()))
        placing = _short_of_room(spec, missing, needs[missing.shard_index], candidates, placed)
    return placing


@dataclass(frozen=True, slots=True)
class _Missing:
    """A part of a replica that found no place among `left`, the workers that have none of it.

    `written` is what its other parts have put into accounts: two agents may see one card.
    """

    index: ReplicaIndex
    shard_index: int
    left: Sequence[Offer]
    written: Sequence[tuple[Account, NewTerm]]


def _needs(spec: DeploymentSpec, shard_index: int) -> _Needs:
    needs: dict[int, list[tuple[StageId, MemoryNeed]]] = {}
    for stage_id, stage in enumerate(spec.stages):
        for number in stage.devices if stage.shard_count > shard_index else ():
            needs.setdefault(number, []).append((StageId(stage_id), stage.memory or MemoryNeed()))
    return dict(sorted(needs.items()))


def _terms(
    index: ReplicaIndex,
    shard_index: int,
    wanted: Iterable[tuple[StageId, MemoryNeed]],
    card: Card,
) -> list[NewTerm]:
    total_bytes = card.device.total_bytes
    return [
        NewTerm(index, stage_id, need, need.on_card(total_bytes), shard_index)
        for stage_id, need in wanted
    ]


def _place_one(
    index: ReplicaIndex,
    needs: Sequence[_Needs],
    offers: Sequence[Offer],
    prefer: _Preference,
) -> tuple[Place, ...] | _Missing:
    """Place one replica, and write it into the accounts of its cards.

    The first part goes first: it wants all that the later ones want and more, so that whatever
    worker takes it could take any other part, and none is lost to it by choosing badly.
    """
    left = sorted(offers, key=lambda it: (it.replica_count, -it.free_bytes, it.worker_id))
    places: list[Place] = []
    written: list[tuple[Account, NewTerm]] = []
    for shard_index, wanted in enumerate(needs):
        found = _first_fit(wanted, left, prefer)
        if found is None:
            return _Missing(index, shard_index, left, written)
        offer, chosen = found
        left.remove(offer)
        for number, card in chosen.items():
            for term in _terms(index, shard_index, wanted[number], card):
                card.account.add(term)
                written.append((card.account, term))
        devices = {number: card.device.device_id for number, card in chosen.items()}
        places.append(Place(offer.worker_id, devices))
    mine = {place.worker_id for place in places}
    for offer in offers:
        offer.replica_count += offer.worker_id in mine
    return tuple(places)


def _first_fit(
    needs: _Needs, ranked: Iterable[Offer], prefer: _Preference
) -> tuple[Offer, dict[int, Card]] | None:
    for offer in ranked:
        chosen = _match(needs, sorted(offer.cards, key=prefer))
        if chosen is not None:
            return offer, chosen
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


def _holds(card: Card, wanted: Iterable[tuple[StageId, MemoryNeed]]) -> bool:
    """Do admission's sum: each product truncated before it is added; equality is admitted."""
    total_bytes = card.device.total_bytes
    need_bytes = sum(need.on_card(total_bytes) for _, need in wanted)
    return card.account.held_bytes + need_bytes <= total_bytes


def _sums(offers: Iterable[Offer], placed: Iterable[tuple[Place, ...]]) -> tuple[CardSum, ...]:
    """Return the sum of each card that one of `placed` is on, by worker and card."""
    used = {
        (place.worker_id, device_id)
        for places in placed
        for place in places
        for device_id in place.devices.values()
    }
    return _in_order(
        _card_sum(offer, card)
        for offer in offers
        for card in offer.cards
        if (offer.worker_id, card.device.device_id) in used
    )


def _card_sum(offer: Offer, card: Card, further: Iterable[NewTerm] = ()) -> CardSum:
    account = card.account
    terms = (*account.terms, *further)
    return CardSum(offer.worker_id, card.device, terms, tuple(account.holdings))


def _in_order(sums: Iterable[CardSum]) -> tuple[CardSum, ...]:
    return tuple(sorted(sums, key=lambda it: (it.worker_id, it.device.index, it.device.device_id)))


def _short_of_room(
    spec: DeploymentSpec,
    missing: _Missing,
    needs: _Needs,
    offers: Sequence[Offer],
    placed: Mapping[ReplicaIndex, tuple[Place, ...]],
) -> Placing:
    """Do the sums for the worker that came closest to taking what is missing."""
    left = missing.left
    best = max(left, key=lambda it: (min(len(it.cards), len(needs)), it.free_bytes))
    closest = _sums_for(missing, needs, best)
    if len(best.cards) < len(needs):
        cards = counted(len(needs), "card")
        why = f"it needs {cards}, and {best.worker_id} has {len(best.cards)} for it"
        refusals = [(NO_DEVICE, why)]
    else:
        refusals = [
            (
                it.device.device_id,
                it.admission(spec.name, missing.index, missing.shard_index).refusal(),
            )
            for it in closest
            if it.is_over
        ] or [(NO_DEVICE, "its cards cannot be matched with those there")]
    sick = [(it.device_id, f"device {it.device_id} is sick: {it.sick_reason}") for it in best.sick]
    refusals = sick + refusals
    for account, term in missing.written:
        account.take_back(term)
    others = [it for it in _sums(offers, placed.values()) if it.worker_id != best.worker_id]
    shortage = Shortage(
        missing.index, best.worker_id, len(left), tuple(refusals), missing.shard_index
    )
    return Placing(placed, _in_order([*closest, *others]), shortage)


def _sums_for(missing: _Missing, needs: _Needs, offer: Offer) -> list[CardSum]:
    """Do the sums with the neediest number on the emptiest card, and so on down; all its cards."""
    cards = sorted(offer.cards, key=_emptiest_first)
    typical_bytes = max((card.device.total_bytes for card in cards), default=0)
    wanted = sorted(
        needs.values(), key=lambda it: -sum(need.on_card(typical_bytes) for _, need in it)
    )
    return [
        _card_sum(
            offer,
            card,
            _terms(missing.index, missing.shard_index, wanted[rank], card)
            if rank < len(wanted)
            else (),
        )
        for rank, card in enumerate(cards)
    ]
