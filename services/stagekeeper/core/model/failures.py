"""Ends that nobody asked for, in the words of whoever saw them.

Invariant: two reports of one death are equal in their id, whoever tells it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.ids import (
    DeploymentName,
    FailureId,
    Generation,
    InstanceId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.states import Phase


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """How a process ended; of an adopted one `code` and `signal` may both be unknown."""

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True)
class FailureOrigin:
    """Where a failure came from; `phase` is None when the shard was READY."""

    worker_id: WorkerId
    deployment: DeploymentName
    replica_index: ReplicaIndex
    stage_id: StageId
    stage_name: str
    shard_index: int
    instance_id: InstanceId
    generation: Generation | None = None
    phase: Phase | None = None
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An end that nobody asked for. Two reports of one death are equal in `failure_id`.

    `kind` is a name of the protocol's FailureKind without its prefix (EXITED, SIGNALED, …); `path`
    holds (owner, decision) pairs, innermost first; `causes` are root first.
    """

    failure_id: FailureId
    kind: str
    origin: FailureOrigin
    message: str
    exit: ExitInfo | None = None
    detected_by: str = ""
    detect_time: float | None = None
    last_log_lines: tuple[str, ...] = ()
    remote_traceback: str = ""
    path: tuple[tuple[str, str], ...] = ()
    restarts_tried: int = 0
    causes: tuple[Failure, ...] = ()
