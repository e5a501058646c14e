"""Which starts wait for others: those that have stages of several shards on a common card.

The shards of a stage may wait for each other while they load. If two such stages each got a part of
their cards first, both would wait for the rest for ever. So of the starts that have such stages on
a common card the oldest goes first, and the others begin when all of it is up or it is given up:
the order is that of their generations, which the next reign knows too.

Not decided here: the order inside one start (`start_run`), and that stages which have all of their
shards on one worker take turns on its cards (its agent sees to that; they wait for nobody else).

Invariant: of the starts that may still have a stage coming up, no two that are handed out have
stages of several shards on a common card, whichever agents name it.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.ids import DeviceId, WorkerId
from stagekeeper.core.model import ReplicaStart
from stagekeeper.core.operations import Operation

_CardKey = tuple[str, str]


def start_ahead(cluster: Cluster, operation: Operation) -> Operation | None:
    """Return the oldest start that an operation has to let go first; None when it may begin.

    One that is decided has all of its stages up, and of one that is cancelled nothing comes up any
    more.
    """
    cards = gang_cards(cluster, operation.start)
    if not cards:
        return None
    generation = operation.start.generation
    for other in cluster.operations.of_several_workers():
        if other.start.generation >= generation:
            return None
        if not (
            other.is_decided
            or other.is_cancelled
            or cards.isdisjoint(gang_cards(cluster, other.start))
        ):
            return other
    return None


def start_before(cluster: Cluster, operation: Operation) -> Operation | None:
    """Return the oldest start that an agent has begun before this one on a card of both; or None.

    For people: an agent starts stages one after another on a card, and says nothing of one that it
    has not begun.
    """
    start = operation.start
    for part in start.parts:
        cards = _cards_of(start, part.worker_id)
        for other in cluster.operations.of_worker(part.worker_id) if cards else ():
            if other.start.generation >= start.generation:
                break
            is_over = other.is_decided or other.is_cancelled or not other.is_running
            if not is_over and not cards.isdisjoint(_cards_of(other.start, part.worker_id)):
                return other
    return None


def _cards_of(start: ReplicaStart, worker_id: WorkerId) -> frozenset[DeviceId]:
    stages = start.part_of(worker_id).stages
    return frozenset(device_id for stage in stages for device_id in stage.device_ids)


def gang_cards(cluster: Cluster, start: ReplicaStart) -> frozenset[_CardKey]:
    """Return the cards of those stages of a start that have shards on several workers.

    Two agents of a host see one card: it is the same one where both name its lock domain.
    """
    return frozenset(_card_keys(cluster, start))


def _card_keys(cluster: Cluster, start: ReplicaStart) -> Iterator[_CardKey]:
    for part in start.parts:
        wanted = {
            device_id
            for stage in part.stages
            if stage.shard_count > 1
            for device_id in stage.device_ids
        }
        domains = _domains(cluster, part.worker_id) if wanted else {}
        for device_id in wanted:
            yield domains.get(device_id) or (part.worker_id, device_id)


def _domains(cluster: Cluster, worker_id: WorkerId) -> dict[DeviceId, _CardKey]:
    worker = cluster.workers.get(worker_id)
    devices = () if worker is None else worker.checked.devices
    return {it.device_id: ("", it.lock_domain_id) for it in devices if it.lock_domain_id}
