"""What went wrong in a creation, as lines below the one that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stagekeeper.cli.text import states
from stagekeeper.cli.text.amounts import seconds, size
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

LOG_LINES_SHOWN: Final = 20

_ENDINGS: Final = {
    types.ROLLBACK_ENDING_WAS_GONE: "had ended already, ",
    types.ROLLBACK_ENDING_ASKED: "asked to end, ",
    types.ROLLBACK_ENDING_KILLED: "killed, ",
}


def failure_lines(failures: Sequence[pb2.ReplicaFailure]) -> list[str]:
    """Write each replica that did not come up: why, what its log said last, what was undone."""
    lines: list[str] = []
    for failure in failures:
        lines.append(failure.message or f"replica {failure.replica_index}: no reason was given")
        if failure.HasField("failure"):
            lines += _stage_lines(failure.failure)
        lines += [_rollback_line(entry) for entry in failure.rollback]
    return lines


def _stage_lines(failure: types.Failure) -> list[str]:
    lines = []
    how = exit_text(failure)
    if how:
        lines.append(f"  its process ended: {how}")
    log = [line for line in failure.last_log_lines if line.strip()][-LOG_LINES_SHOWN:]
    if log:
        lines.append(f"  the last lines of the log of {failure.origin.stage_name}:")
        lines += [f"    | {line}" for line in log]
    return lines


def exit_text(failure: types.Failure) -> str:
    """Write how a process ended; empty when it has not, or when that is unknown."""
    if not failure.HasField("exit"):
        return ""
    end = failure.exit
    if end.out_of_memory:
        return "killed for memory"
    if end.HasField("signal"):
        return f"signal {end.signal}"
    return f"exit code {end.code}" if end.HasField("code") else ""


def _rollback_line(entry: types.RollbackEntry) -> str:
    """Write what became of one stage: what it was, how it ended, how long that took, the memory."""
    stage = entry.stage_name or f"stage {entry.stage_id}"
    place = f" on {entry.worker_id}" if entry.worker_id else ""
    phase = states.phase(entry.phase)
    was = f", {states.shard_state(entry.was)}{f'({phase})' if phase else ''}" if entry.was else ""
    if not entry.cleaned:
        return f"  rolled back: {stage}{place}{was}: NOT stopped: {entry.error}"
    ending = _ENDINGS.get(entry.ending, "")
    memory = ""
    if entry.HasField("memory_before_bytes") and entry.HasField("memory_after_bytes"):
        before, after = size(entry.memory_before_bytes), size(entry.memory_after_bytes)
        memory = f", its cards {before} -> {after}"
    error = f"; with an error: {entry.error}" if entry.error else ""
    took = seconds(entry.duration_s)
    return f"  rolled back: {stage}{place}{was}: {ending}gone in {took}{memory}{error}"


def remote_tracebacks(failures: Sequence[pb2.ReplicaFailure]) -> str:
    """Return the tracebacks of the stages that raised, each under its name."""
    return "\n".join(
        f"replica {item.replica_index}, stage {item.failure.origin.stage_name}, "
        f"{states.phase(item.failure.origin.phase) or 'READY'}:\n{item.failure.remote_traceback}"
        for item in failures
        if item.failure.remote_traceback
    )
