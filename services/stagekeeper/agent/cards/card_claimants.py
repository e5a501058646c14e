"""Who has something of a card: the claims of all agents of the host, joined with what was measured.

Decided here: how each is named, in refusals and in reports. Not decided here: the sums
(`card_use`), and whose claims there are (`ledger`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stagekeeper.agent.cards.card_owners import seen_on_card
from stagekeeper.agent.cards.card_use import CardClaim, CardUse, bounded, card_use
from stagekeeper.agent.cards.devices import CardReading
from stagekeeper.agent.cards.host_claims import OtherClaims, StageClaim
from stagekeeper.core.ids import ClusterName, DeviceId, WorkerId
from stagekeeper.core.model import ForeignHolder
from stagekeeper.core.planner import Holding

_MOST_FOREIGN: Final = 8
"""Holders of a card that are reported one by one."""

OWN: Final = WorkerId("")


@dataclass(frozen=True, slots=True)
class Claimant:
    """A stage, and what it claims of one card, which may be nothing.

    A stage may use a card that it has not claimed: then it counts with what it uses.

    Attributes:
        worker_id: whose it is; `OWN` for this agent.
        is_of_cluster: its agent belongs to this agent's cluster.
    """

    claim: StageClaim
    reserved_bytes: int
    worker_id: WorkerId = OWN
    is_of_cluster: bool = True

    @property
    def holder(self) -> str:
        if self.worker_id == OWN:
            return self.claim.holder
        of = "" if self.is_of_cluster else " of another cluster"
        return f"{self.claim.holder} (worker {self.worker_id}{of})"


def claimants_of(
    others: Iterable[OtherClaims], lock_domain_id: str, cluster: ClusterName
) -> Iterator[Claimant]:
    """Yield what the stages of other agents claim of a card."""
    for other in others:
        worker_id, is_of_cluster = WorkerId(other.file.worker_id), other.file.cluster == cluster
        for claim in other.claims:
            yield Claimant(claim, claim.on_card(lock_domain_id), worker_id, is_of_cluster)


def holdings(
    device_id: DeviceId, claimants: Sequence[Claimant], reading: CardReading | None
) -> Iterator[Holding]:
    """Yield what counts on a card, as admission adds it up.

    Args:
        reading: who uses what; without one the claims alone count.
    """
    use = _use(claimants, reading)
    for it, counted_bytes in zip(claimants, use.claim_bytes, strict=True):
        is_beyond = counted_bytes > it.reserved_bytes
        aside = f" (reserved {it.reserved_bytes}, uses more)" if is_beyond else ""
        if counted_bytes:
            yield Holding(device_id, f"{it.holder}{aside}", counted_bytes)
    for stranger in use.foreign:
        yield Holding(device_id, str(stranger), stranger.memory_bytes)


def foreign_holders(
    claimants: Sequence[Claimant],
    reading: CardReading | None,
    total_bytes: int,
    own_id: WorkerId,
) -> tuple[ForeignHolder, ...]:
    """Return what counts on a card beside what this agent reserved, the largest first."""
    use = _use(claimants, reading)
    found = list(use.foreign)
    for it, counted_bytes in zip(claimants, use.claim_bytes, strict=True):
        pid = it.claim.pid
        if it.worker_id != OWN:
            worker_id = it.worker_id if it.is_of_cluster else OWN
            found.append(ForeignHolder(pid, it.holder, counted_bytes, worker_id))
        else:
            name = f"{it.holder}, beyond the {it.reserved_bytes} that it reserved"
            beyond_bytes = counted_bytes - it.reserved_bytes
            found.append(ForeignHolder(pid, name, beyond_bytes, own_id))
    found = [replace(it, memory_bytes=min(it.memory_bytes, total_bytes)) for it in found]
    return bounded([it for it in found if it.memory_bytes], _MOST_FOREIGN)


def _use(claimants: Sequence[Claimant], reading: CardReading | None) -> CardUse:
    claims = [CardClaim(it.reserved_bytes, it.claim.process is not None) for it in claimants]
    if reading is None:
        return card_use(claims, 0, ())
    seen = None
    if reading.processes is not None:
        seen = seen_on_card(reading.processes, [it.claim for it in claimants])
    return card_use(claims, reading.device.used_bytes, seen)
