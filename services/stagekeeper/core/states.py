"""The states of Stagekeeper and the moves between them, as tables.

A move that is not in its table is a bug in the caller, or a lie from outside; `check_move` refuses
it with its story. The diagrams of the documentation are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)


class ShardState(StrEnum):
    PENDING = "PENDING"
    ADOPTING = "ADOPTING"
    STARTING = "STARTING"
    READY = "READY"
    STALLED = "STALLED"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    CONFLICT = "CONFLICT"


class Phase(StrEnum):
    LOAD = "LOAD"
    MEASURE = "MEASURE"
    ALLOCATE = "ALLOCATE"
    CAPTURE = "CAPTURE"


class ReplicaState(StrEnum):
    PENDING = "PENDING"
    STARTING = "STARTING"
    PARTIAL = "PARTIAL"
    READY = "READY"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


class DeploymentState(StrEnum):
    CREATING = "CREATING"
    READY = "READY"
    DEGRADED = "DEGRADED"
    UPDATING = "UPDATING"
    DELETING = "DELETING"
    FAILED = "FAILED"


class WorkerState(StrEnum):
    ALIVE = "ALIVE"
    SUSPECT = "SUSPECT"
    UNREACHABLE = "UNREACHABLE"
    LOST = "LOST"
    DRAINING = "DRAINING"
    SUPERSEDED = "SUPERSEDED"


class OperationState(StrEnum):
    RESERVED = "RESERVED"
    STARTING = "STARTING"
    STARTED = "STARTED"
    COMMITTED = "COMMITTED"
    ROLLING_BACK = "ROLLING_BACK"
    ROLLED_BACK = "ROLLED_BACK"
    INTERRUPTED = "INTERRUPTED"


class RollbackEnding(StrEnum):
    """How a stage ended in a rollback."""

    WAS_GONE = "WAS_GONE"
    """It had ended already."""
    ASKED = "ASKED"
    """It was asked to, and did within its budget."""
    KILLED = "KILLED"
    """SIGKILL was needed."""


class Mode(StrEnum):
    NORMAL = "NORMAL"
    HOLD = "HOLD"


class Timer(StrEnum):
    """What the clock brings about by itself; when that is, is worked out when somebody looks."""

    RECOVERY = "RECOVERY"
    """The supervisor holds still no longer."""
    SILENCE = "SILENCE"
    """A silent worker is judged again."""
    REPORT = "REPORT"
    """A committed start that its worker does not report is given up on."""
    RETRY = "RETRY"
    """A stop that was answered, and is not done, is asked for again."""


class HoldReason(StrEnum):
    RECOVERING = "RECOVERING"
    MASS_OUTAGE = "MASS_OUTAGE"
    OPERATOR = "OPERATOR"


_S = ShardState
SHARD_MOVES: Mapping[ShardState, frozenset[ShardState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.STOPPED, _S.FAILED}),
    _S.ADOPTING: frozenset({_S.STARTING, _S.READY, _S.STALLED, _S.STOPPING, _S.FAILED}),
    _S.STARTING: frozenset({_S.READY, _S.STALLED, _S.STOPPING, _S.FAILED}),
    _S.READY: frozenset({_S.STALLED, _S.DRAINING, _S.STOPPING, _S.FAILED}),
    _S.STALLED: frozenset({_S.STARTING, _S.READY, _S.STOPPING, _S.FAILED}),
    _S.DRAINING: frozenset({_S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.STOPPING: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset(),
    _S.FAILED: frozenset({_S.STOPPING, _S.STOPPED}),
    _S.CONFLICT: frozenset(),
}
"""What an agent may do with a shard. CONFLICT is derived by the supervisor, never entered here."""

_O = OperationState
OPERATION_MOVES: Mapping[OperationState, frozenset[OperationState]] = {
    _O.RESERVED: frozenset({_O.STARTING, _O.ROLLING_BACK, _O.ROLLED_BACK, _O.INTERRUPTED}),
    _O.STARTING: frozenset({_O.STARTED, _O.ROLLING_BACK, _O.INTERRUPTED}),
    _O.STARTED: frozenset({_O.COMMITTED, _O.ROLLING_BACK, _O.INTERRUPTED}),
    _O.COMMITTED: frozenset(),
    _O.ROLLING_BACK: frozenset({_O.ROLLED_BACK, _O.INTERRUPTED}),
    _O.ROLLED_BACK: frozenset(),
    _O.INTERRUPTED: frozenset({_O.ROLLING_BACK, _O.ROLLED_BACK}),
}

_W = WorkerState
WORKER_MOVES: Mapping[WorkerState, frozenset[WorkerState]] = {
    _W.ALIVE: frozenset({_W.SUSPECT, _W.DRAINING, _W.SUPERSEDED}),
    _W.SUSPECT: frozenset({_W.ALIVE, _W.UNREACHABLE, _W.SUPERSEDED}),
    _W.UNREACHABLE: frozenset({_W.ALIVE, _W.LOST, _W.SUPERSEDED}),
    _W.LOST: frozenset({_W.ALIVE, _W.SUPERSEDED}),
    _W.DRAINING: frozenset({_W.ALIVE, _W.SUSPECT, _W.SUPERSEDED}),
    _W.SUPERSEDED: frozenset(),
}


class IllegalMove(Exception):
    """A move that is not in its table; the message tells from where, to where and for what."""


def check_move(table: Mapping[S, frozenset[S]], old: S, new: S, what: str) -> S:
    """Return `new` when the table allows it after `old` (staying is always allowed).

    Raises:
        IllegalMove: naming `what`, both states and the moves that were open.
    """
    if new is not old and new not in table[old]:
        open_moves = ", ".join(sorted(table[old])) or "none: it is final"
        raise IllegalMove(f"{what} cannot go from {old} to {new} (open: {open_moves})")
    return new


LIVE_SHARD_STATES = frozenset(
    {_S.ADOPTING, _S.STARTING, _S.READY, _S.STALLED, _S.DRAINING, _S.STOPPING}
)
"""States in which a process exists, or may still exist."""
