"""Stops, cancellations and commits that are wanted until a report shows that they are done.

Decided here: what was asked already, and when it may be asked again. Not decided here: what is
wanted (`reconcile`), and whether anything may be stopped now (never in HOLD).

Invariant: what is wanted is a level, replaced as a whole for a worker; one command for one slot
or operation of a worker is under way at most once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stagekeeper.core.commands import CancelOperation, CommitOperation, StopSlot
from stagekeeper.core.ids import OperationId, SlotKey, WorkerId

_Key = SlotKey | OperationId

PendingCommand = StopSlot | CancelOperation | CommitOperation
"""An operation is either committed or cancelled, so that its id is a key for both."""


@dataclass(slots=True)
class _Wanted:
    command: PendingCommand
    is_under_way: bool = False
    not_before: float = 0.0
    asked_count: int = 0


@dataclass(slots=True)
class PendingWork:
    """By worker: what is wanted of it."""

    _of: dict[WorkerId, dict[_Key, _Wanted]] = field(default_factory=dict)

    def want(self, worker_id: WorkerId, commands: Iterable[PendingCommand]) -> None:
        """Replace all that is wanted of one worker; what is under way for the same stays so."""
        old = self._of.pop(worker_id, {})
        new: dict[_Key, _Wanted] = {}
        for command in commands:
            key = command.slot if isinstance(command, StopSlot) else command.operation_id
            known = old.get(key)
            if known is None or not _is_same_work(known.command, command):
                known = _Wanted(command)
            new[key] = known
        if new:
            self._of[worker_id] = new

    def workers(self) -> list[WorkerId]:
        """Return the workers of whom anything is wanted."""
        return list(self._of)

    def take_due(self, worker_id: WorkerId, now: float) -> list[PendingCommand]:
        """Return what is to be asked of a worker now; it counts as under way from here on."""
        due = []
        for wanted in self._of.get(worker_id, {}).values():
            if not wanted.is_under_way and now >= wanted.not_before:
                wanted.is_under_way = True
                wanted.asked_count += 1
                due.append(wanted.command)
        return due

    def is_first(self, stop: StopSlot) -> bool:
        """Whether a stop that was just taken has not been asked for before."""
        wanted = self._of.get(stop.target.worker_id, {}).get(stop.slot)
        return wanted is not None and wanted.asked_count == 1

    def retry_at(self, worker_id: WorkerId, slot: SlotKey) -> float | None:
        """Return when a stop that was answered may be asked for again; None: it has not been."""
        wanted = self._of.get(worker_id, {}).get(slot)
        if wanted is None or wanted.is_under_way or not wanted.asked_count:
            return None
        return wanted.not_before

    def answered(self, worker_id: WorkerId, incarnation: int, key: _Key, not_before: float) -> None:
        """Note that a command ended, well or not; it is asked again only from `not_before` on.

        The late end of one that an earlier life of the worker was asked for says nothing of this
        life's.
        """
        wanted = self._of.get(worker_id, {}).get(key)
        if wanted is not None and wanted.command.target.incarnation == incarnation:
            wanted.is_under_way = False
            wanted.not_before = not_before


def _is_same_work(one: PendingCommand, other: PendingCommand) -> bool:
    """Whether the one, once done, is the other: asked of the same life, and as far up."""
    if type(one) is not type(other):
        return False
    if isinstance(one, StopSlot) and isinstance(other, StopSlot) and one.up_to != other.up_to:
        return False
    return one.target == other.target
