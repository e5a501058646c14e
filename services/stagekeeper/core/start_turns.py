"""Which starts wait for others: those that have stages of several shards on a common card.

The shards of a stage may wait for each other while they load. If two such stages each got a part of
their cards first, both would wait for the rest for ever. So of the starts that have such stages on
a common card the oldest goes first, and the others begin when all of it is up or it is given up:
the order is that of their generations, which the next reign knows too.

Not decided here: the order inside one start (`start_run`), and that stages which have all of their
shards on one worker take turns on its cards (its agent sees to that; they wait for nobody else).

Invariant: of the starts that may still have a stage coming up, no two that are handed out have
stages of several shards on a common card.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagekeeper.core.ids import DeviceId, WorkerId
from stagekeeper.core.model import ReplicaStart
from stagekeeper.core.operations import Operation, OperationBook


def start_ahead(book: OperationBook, operation: Operation) -> Operation | None:
    """Return the oldest start that an operation has to let go first; None when it may begin.

    One that is decided has all of its stages up, and of one that is cancelled nothing comes up any
    more.
    """
    cards = gang_cards(operation.start)
    if not cards:
        return None
    generation = operation.start.generation
    for other in _sharing_workers(book, operation.start):
        if other.start.generation >= generation:
            return None
        if not (
            other.is_decided or other.is_cancelled or cards.isdisjoint(gang_cards(other.start))
        ):
            return other
    return None


def gang_cards(start: ReplicaStart) -> frozenset[tuple[WorkerId, DeviceId]]:
    """Return the cards of those stages of a start that have shards on several workers."""
    return frozenset(
        (part.worker_id, device_id)
        for part in start.parts
        for stage in part.stages
        if stage.shard_count > 1
        for device_id in stage.device_ids
    )


def _sharing_workers(book: OperationBook, start: ReplicaStart) -> Iterable[Operation]:
    """Return the starts that have a worker in common with this one, itself too, oldest first."""
    found = {
        it.operation_id: it for worker_id in start.worker_ids for it in book.of_worker(worker_id)
    }
    return sorted(found.values(), key=lambda it: it.start.generation)
