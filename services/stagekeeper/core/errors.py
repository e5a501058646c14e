"""Everything the core can refuse, cut by what the caller should do next.

A refusal carries a `Reason`; the one table `REASONS` says which `NextMove` a reason asks of the
caller. The servers turn a next move into a status code; nothing else in the program chooses codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto


class NextMove(StrEnum):
    """What a caller can do about a refusal."""

    MEND_THE_REQUEST = auto()
    LOOK_AT_THE_REASON = auto()
    CHOOSE_ANOTHER_NAME = auto()
    GIVE_WAY = auto()
    WAIT_FOR_THE_STATE = auto()
    FREE_SOMETHING = auto()
    LIST_THEN_WATCH = auto()
    RETRY_WITH_BACKOFF = auto()
    ASK_FOR_THE_RIGHT = auto()
    SAY_WHO_YOU_ARE = auto()
    LOOK_AT_YOUR_CODE = auto()
    REPORT_A_BUG = auto()
    USE_A_LATER_RELEASE = auto()


class Reason(StrEnum):
    """Why something was refused; the names are part of the protocol (``google.rpc.ErrorInfo``)."""

    BAD_FIELD = "BAD_FIELD"
    SHARD_OUT_OF_RANGE = "SHARD_OUT_OF_RANGE"
    UNKNOWN_DEVICE = "UNKNOWN_DEVICE"
    TOO_LARGE = "TOO_LARGE"
    WORKER_UNKNOWN = "WORKER_UNKNOWN"
    DEPLOYMENT_UNKNOWN = "DEPLOYMENT_UNKNOWN"
    STAGE_UNKNOWN = "STAGE_UNKNOWN"
    ENDPOINT_UNKNOWN = "ENDPOINT_UNKNOWN"
    PROCS_UNKNOWN = "PROCS_UNKNOWN"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    MESH_UNKNOWN = "MESH_UNKNOWN"
    ACTOR_UNKNOWN = "ACTOR_UNKNOWN"
    ACTOR_FAILED = "ACTOR_FAILED"
    ACTOR_STOPPED = "ACTOR_STOPPED"
    DEPLOYMENT_EXISTS = "DEPLOYMENT_EXISTS"
    WORKER_ID_IN_USE = "WORKER_ID_IN_USE"
    STALE_INCARNATION = "STALE_INCARNATION"
    STALE_EPOCH = "STALE_EPOCH"
    STALE_GENERATION = "STALE_GENERATION"
    STALE_ROUTE = "STALE_ROUTE"
    REPLICA_DRAINING = "REPLICA_DRAINING"
    WRONG_CLUSTER = "WRONG_CLUSTER"
    PLAN_STALE = "PLAN_STALE"
    AGENT_UNREACHABLE = "AGENT_UNREACHABLE"
    ADMISSION_REFUSED = "ADMISSION_REFUSED"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    SLOW_DOWN = "SLOW_DOWN"
    REVISION_GONE = "REVISION_GONE"
    SUPERVISOR_RECOVERING = "SUPERVISOR_RECOVERING"
    DRAINING = "DRAINING"
    NO_REPLICA = "NO_REPLICA"
    NOT_ALLOWED = "NOT_ALLOWED"
    BAD_TOKEN = "BAD_TOKEN"
    ENDPOINT_RAISED = "ENDPOINT_RAISED"
    NOT_YET = "NOT_YET"
    INTERNAL_BUG = "INTERNAL_BUG"


REASONS: Mapping[Reason, NextMove] = {
    Reason.BAD_FIELD: NextMove.MEND_THE_REQUEST,
    Reason.SHARD_OUT_OF_RANGE: NextMove.MEND_THE_REQUEST,
    Reason.UNKNOWN_DEVICE: NextMove.MEND_THE_REQUEST,
    Reason.TOO_LARGE: NextMove.MEND_THE_REQUEST,
    Reason.WORKER_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.DEPLOYMENT_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.STAGE_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.ENDPOINT_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.PROCS_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.SESSION_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.MESH_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.ACTOR_UNKNOWN: NextMove.LOOK_AT_THE_REASON,
    Reason.ACTOR_FAILED: NextMove.LOOK_AT_THE_REASON,
    Reason.ACTOR_STOPPED: NextMove.LOOK_AT_THE_REASON,
    Reason.DEPLOYMENT_EXISTS: NextMove.CHOOSE_ANOTHER_NAME,
    Reason.WORKER_ID_IN_USE: NextMove.CHOOSE_ANOTHER_NAME,
    Reason.STALE_INCARNATION: NextMove.GIVE_WAY,
    Reason.STALE_EPOCH: NextMove.GIVE_WAY,
    Reason.STALE_GENERATION: NextMove.GIVE_WAY,
    Reason.STALE_ROUTE: NextMove.GIVE_WAY,
    Reason.REPLICA_DRAINING: NextMove.WAIT_FOR_THE_STATE,
    Reason.WRONG_CLUSTER: NextMove.WAIT_FOR_THE_STATE,
    Reason.PLAN_STALE: NextMove.WAIT_FOR_THE_STATE,
    Reason.AGENT_UNREACHABLE: NextMove.WAIT_FOR_THE_STATE,
    Reason.ADMISSION_REFUSED: NextMove.FREE_SOMETHING,
    Reason.TOO_MANY_CALLS: NextMove.FREE_SOMETHING,
    Reason.SLOW_DOWN: NextMove.FREE_SOMETHING,
    Reason.REVISION_GONE: NextMove.LIST_THEN_WATCH,
    Reason.SUPERVISOR_RECOVERING: NextMove.RETRY_WITH_BACKOFF,
    Reason.DRAINING: NextMove.RETRY_WITH_BACKOFF,
    Reason.NO_REPLICA: NextMove.RETRY_WITH_BACKOFF,
    Reason.NOT_ALLOWED: NextMove.ASK_FOR_THE_RIGHT,
    Reason.BAD_TOKEN: NextMove.SAY_WHO_YOU_ARE,
    Reason.ENDPOINT_RAISED: NextMove.LOOK_AT_YOUR_CODE,
    Reason.NOT_YET: NextMove.USE_A_LATER_RELEASE,
    Reason.INTERNAL_BUG: NextMove.REPORT_A_BUG,
}


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One wrong field: its path as the caller wrote it (``stages[1].memory``) and what is wrong."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


class Refused(Exception):
    """The core said no. `reason` decides the status code; `metadata` and `problems` explain it.

    Args:
        reason: from the protocol's table.
        message: one sentence for a person: what, where and what to do.
        metadata: facts a program can act on (``highest_incarnation``), text to text.
        problems: every wrong field at once, for requests that must be mended.
        retry_after_s: seconds after which a retry makes sense; None says nothing.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        problems: Sequence[FieldProblem] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.problems = tuple(problems)
        self.retry_after_s = retry_after_s

    @property
    def next_move(self) -> NextMove:
        return REASONS[self.reason]


def bad_fields(problems: Sequence[FieldProblem], what: str = "the request") -> Refused:
    """Build the one refusal that lists every wrong field of `what`."""
    listed = "; ".join(str(problem) for problem in problems)
    return Refused(Reason.BAD_FIELD, f"{what} is refused: {listed}", problems=problems)


class PlanError(ValueError):
    """A plan that no inventory could satisfy; `problems` names every mistake at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class RollbackEntry:
    """What became of one stage that had come up before a start failed.

    `duration_s` is None where the cleanup was never called or its time is unknown; `error` is the
    text of what the cleanup raised, None when it succeeded.
    """

    stage_id: int
    cleaned: bool
    error: str | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """What a failed start left behind: one entry per stage that had succeeded, in cleanup order."""

    entries: tuple[RollbackEntry, ...] = field(default=())

    @property
    def is_clean(self) -> bool:
        return all(entry.cleaned for entry in self.entries)


class InitError(Exception):
    """A start that failed and was rolled back; raised from the first stage's own exception.

    Args:
        stage_id: the stage whose failure was recorded first.
        phase: its phase when it failed (LOAD, MEASURE, ALLOCATE, CAPTURE); None where unknown.
        also_failed: stages that failed after it, stage id to exception.
        cleanup_errors: stages whose cleanup raised, stage id to exception.
        report: what was cleaned, in the order in which it was done.
    """

    def __init__(
        self,
        stage_id: int,
        phase: str | None = None,
        *,
        also_failed: Mapping[int, BaseException] | None = None,
        cleanup_errors: Mapping[int, BaseException] | None = None,
        report: RollbackReport | None = None,
        message: str = "",
    ) -> None:
        where = f"stage {stage_id} failed to start"
        if phase is not None:
            where += f" in {phase}"
        super().__init__(f"{where}: {message}" if message else where)
        self.stage_id = stage_id
        self.phase = phase
        self.also_failed = dict(also_failed or {})
        self.cleanup_errors = dict(cleanup_errors or {})
        self.report = report or RollbackReport()
