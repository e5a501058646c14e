"""Failures until somebody has settled them: made, spooled on disk, told to the supervisor.

A failure is on disk before anything else is done about it, and leaves the disk when a supervisor
says that it is settled. Its id is made from the instance and the kind, so the same death has the
same id whoever reports it and however often. Invariant: no instance has two failures of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from stagekeeper.agent.directory import AgentDirectory, file_name
from stagekeeper.agent.durable_file import remove_durably, rename_durably, write_durably
from stagekeeper.core.ids import FailureId, InstanceId, WorkerId
from stagekeeper.core.limits import (
    LONGEST_FAILURE_LINE,
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    MOST_LOG_LINES,
)
from stagekeeper.core.model import ExitInfo, Failure, FailureOrigin, ShardRecord
from stagekeeper.core.names import cut

_log = structlog.get_logger(__name__)


def failure_id_of(instance_id: InstanceId, kind: str) -> FailureId:
    """Make the id of the one failure of this kind that an instance can have."""
    return FailureId(f"{instance_id}-{kind.lower()}-1")


def make_failure(
    worker_id: WorkerId,
    shard: ShardRecord,
    kind: str,
    message: str,
    *,
    detected_by: str,
    detect_time: float,
    exit_info: ExitInfo | None = None,
    last_log_lines: Iterable[str] = (),
    remote_traceback: str = "",
) -> Failure:
    """Make the failure of a shard's process; `shard` is as it was before it failed.

    Texts are cut to what a supervisor takes: one that it refused would never be settled.
    """
    return Failure(
        failure_id=failure_id_of(shard.instance_id, kind),
        kind=kind,
        origin=FailureOrigin(
            worker_id=worker_id,
            deployment=shard.deployment,
            replica_index=shard.replica_index,
            stage_id=shard.stage_id,
            stage_name=shard.stage_name,
            shard_index=shard.shard_index,
            instance_id=shard.instance_id,
            generation=shard.generation,
            phase=shard.phase,
            pid=shard.pid,
        ),
        message=cut(message, LONGEST_MESSAGE),
        exit=exit_info,
        detected_by=detected_by,
        detect_time=detect_time,
        last_log_lines=tuple(
            [cut(line, LONGEST_FAILURE_LINE) for line in last_log_lines][-MOST_LOG_LINES:]
        ),
        remote_traceback=remote_traceback[-LONGEST_TRACEBACK:],
        path=((f"stage {shard.stage_name}", "passed on"),),
    )


class FailureSpool:
    """The failures that no supervisor has settled, the oldest first."""

    def __init__(self, directory: AgentDirectory) -> None:
        self._folder = directory.failures
        self._pending: dict[FailureId, Failure] = {}

    def load(self) -> None:
        """Read what earlier lives left."""
        found: list[Failure] = []
        for path in self._folder.glob("*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Failure))
            except msgspec.DecodeError as error:
                rename_durably(path, path.with_suffix(".damaged"))
                _log.error("a spooled failure is damaged and was set aside", error=str(error))
        for failure in sorted(found, key=lambda it: it.detect_time or 0.0):
            self._pending[failure.failure_id] = failure

    def add(self, failure: Failure) -> None:
        """Put a failure on disk; one that is there already is left as it was."""
        if failure.failure_id in self._pending:
            return
        write_durably(self._path(failure.failure_id), msgspec.json.encode(failure))
        self._pending[failure.failure_id] = failure

    def settle(self, failure_ids: Iterable[FailureId]) -> bool:
        """Forget failures that a supervisor has settled; return whether any was still here."""
        settled = [it for it in failure_ids if self._pending.pop(it, None) is not None]
        for failure_id in settled:
            remove_durably(self._path(failure_id))
        return bool(settled)

    def of_instance(self, instance_id: InstanceId) -> Failure | None:
        """Return a failure of an instance that is still pending."""
        return next(
            (it for it in self._pending.values() if it.origin.instance_id == instance_id), None
        )

    @property
    def pending(self) -> tuple[Failure, ...]:
        return tuple(self._pending.values())

    def _path(self, failure_id: FailureId) -> Path:
        return self._folder / f"{file_name(failure_id)}.json"
