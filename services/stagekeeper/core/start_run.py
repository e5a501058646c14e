"""The start of one replica over its workers: what may be asked of whom now, and when it is over.

Decided here: the order of reservations and starts across workers, and what a failure asks for.
Stages that share a card start one after another. Where all of such a group lies on one worker, its
agent sees to that; a group that spans workers is stepped from here, one stage at a time, since two
gangs that each got half of their cards would wait for each other for ever. Not decided here: how an
order is carried out, and whether a start that is whole is committed (the registry).

Invariant: nothing starts before everybody has reserved, nor after the first failure; then every
worker that may hold something is asked to undo it exactly once, when what is in flight has ended by
itself. Only the other shards of a stage that failed are undone at once: they may be waiting for it
in a collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stagekeeper.core.ids import StageId, WorkerId


@dataclass(frozen=True, slots=True)
class Reserve:
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class StartStages:
    """Start these stages of the replica on this worker; their shards elsewhere start too."""

    worker_id: WorkerId
    stage_ids: tuple[StageId, ...]


@dataclass(frozen=True, slots=True)
class Undo:
    """Have a worker undo all that it did for this start.

    `is_urgent`: what is in flight there is ended too, instead of waited for.
    """

    worker_id: WorkerId
    is_urgent: bool


Step: TypeAlias = Reserve | StartStages
Order: TypeAlias = Step | Undo


class StartRun:
    """One start, from nothing to STARTED everywhere, or to nothing again.

    Whoever carries it out asks for `next_orders` after every word that came in, and tells how each
    order ended, once.

    Args:
        parts: worker → the stages of the replica that have a shard there.
        groups: the stages that share a card, ascending inside (`planner.init_groups`).
    """

    def __init__(
        self,
        parts: Mapping[WorkerId, Collection[StageId]],
        groups: Iterable[Sequence[StageId]],
    ) -> None:
        self._parts = {worker_id: tuple(stage_ids) for worker_id, stage_ids in parts.items()}
        self._tracks = _tracks(parts, groups)
        self._position = [0] * len(self._tracks)
        self._orders: list[Order] = []
        self._in_flight: set[Step] = set()
        self._unreserved = set(parts)
        self._holders: set[WorkerId] = set()
        self._asked_to_undo: set[WorkerId] = set()
        self._undoing: set[WorkerId] = set()
        self._has_failed = False
        self._order([Reserve(worker_id) for worker_id in sorted(parts)])

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    @property
    def is_over(self) -> bool:
        """Whether every order was answered and no other will come."""
        return not (self._orders or self._in_flight or self._undoing)

    @property
    def is_started(self) -> bool:
        """Whether all stages are up on all workers."""
        return self.is_over and not self._has_failed

    def next_orders(self) -> list[Order]:
        """Return what is to be asked now and was not before."""
        orders, self._orders = self._orders, []
        return orders

    # How orders ended.

    def reserved(self, order: Reserve) -> None:
        self._land(order)
        self._holders.add(order.worker_id)
        self._unreserved.discard(order.worker_id)
        if self._has_failed:
            self._undo_the_rest()
        elif not self._unreserved:
            for number in range(len(self._tracks)):
                self._begin_step(number)

    def started(self, order: StartStages) -> None:
        self._land(order)
        if self._has_failed:
            self._undo_the_rest()
        else:
            self._advance(order)

    def failed(self, order: Step, *, is_clean: bool) -> None:
        """Note that an order came to nothing.

        Args:
            is_clean: the worker said that it has undone everything itself, or never began.
        """
        self._land(order)
        self._fail()
        if is_clean:
            self._holders.discard(order.worker_id)
        else:
            self._holders.add(order.worker_id)
        if isinstance(order, StartStages):
            for worker_id in self._starting_too(order.stage_ids):
                self._undo(worker_id, is_urgent=True)
        self._undo_the_rest()

    def part_lost(self, worker_id: WorkerId) -> None:
        """Note that a worker undoes its part by itself, though nothing was in flight there.

        Shards of its stages that start elsewhere may be waiting for it, and are undone at once.
        """
        self._fail()
        self._holders.add(worker_id)
        for other_id in self._starting_too(self._parts[worker_id]):
            self._undo(other_id, is_urgent=True)
        self._undo_the_rest()

    def undone(self, worker_id: WorkerId) -> None:
        """Note that a worker has undone everything, or that nobody can ask it any more."""
        self._undoing.remove(worker_id)

    def give_up(self) -> None:
        """Undo everything at once: nobody wants this start any longer."""
        self._fail()
        for worker_id in sorted(self._holders.union(it.worker_id for it in self._in_flight)):
            self._undo(worker_id, is_urgent=True)

    # How.

    def _order(self, steps: Collection[Step]) -> None:
        self._orders += steps
        self._in_flight.update(steps)

    def _land(self, order: Step) -> None:
        if order not in self._in_flight:
            raise RuntimeError(f"{order} is not in flight")
        self._in_flight.remove(order)

    def _begin_step(self, number: int) -> None:
        position = self._position[number]
        if position < len(self._tracks[number]):
            self._order(self._tracks[number][position])

    def _advance(self, order: StartStages) -> None:
        """Go on to the next stage of a group once every shard of this one is up."""
        for number, track in enumerate(self._tracks):
            position = self._position[number]
            if position < len(track) and order in track[position]:
                if self._in_flight.isdisjoint(track[position]):
                    self._position[number] += 1
                    self._begin_step(number)
                return

    def _fail(self) -> None:
        """Start nothing more: what was not handed out yet never will be."""
        self._has_failed = True
        kept: list[Order] = []
        for order in self._orders:
            if isinstance(order, Undo):
                kept.append(order)
            else:
                self._in_flight.discard(order)
        self._orders = kept

    def _starting_too(self, stage_ids: Sequence[StageId]) -> list[WorkerId]:
        """Return the workers where shards of these stages are in flight."""
        return sorted(
            {
                order.worker_id
                for order in self._in_flight
                if isinstance(order, StartStages) and not set(stage_ids).isdisjoint(order.stage_ids)
            }
        )

    def _undo_the_rest(self) -> None:
        """After a failure, once nothing is in flight any more, have all that came up undone."""
        if not self._in_flight:
            for worker_id in sorted(self._holders):
                self._undo(worker_id, is_urgent=False)

    def _undo(self, worker_id: WorkerId, *, is_urgent: bool) -> None:
        if worker_id not in self._asked_to_undo:
            self._asked_to_undo.add(worker_id)
            self._undoing.add(worker_id)
            self._orders.append(Undo(worker_id, is_urgent))


def _tracks(
    parts: Mapping[WorkerId, Collection[StageId]], groups: Iterable[Sequence[StageId]]
) -> list[list[tuple[StartStages, ...]]]:
    """Return what runs side by side: for each, the steps that follow one another.

    A group on one worker is left to its agent; all of those on a worker are one step.
    """
    workers_of: dict[StageId, list[WorkerId]] = {}
    for worker_id in sorted(parts):
        for stage_id in parts[worker_id]:
            workers_of.setdefault(stage_id, []).append(worker_id)
    local: dict[WorkerId, list[StageId]] = {}
    tracks: list[list[tuple[StartStages, ...]]] = []
    for group in groups:
        workers = {worker_id for stage_id in group for worker_id in workers_of[stage_id]}
        if len(workers) == 1:
            local.setdefault(workers.pop(), []).extend(group)
            continue
        tracks.append(
            [
                tuple(StartStages(worker_id, (stage_id,)) for worker_id in workers_of[stage_id])
                for stage_id in group
            ]
        )
    for worker_id, stage_ids in sorted(local.items()):
        tracks.append([(StartStages(worker_id, tuple(sorted(stage_ids))),)])
    return tracks
