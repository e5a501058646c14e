"""Events as `stagekeeper events` and `describe` show them: a line each, or an object each.

Decided here: the columns. A terminal gets the time of this machine and no subject, since each
sentence names its own; a pipe gets UTC, a level and the subject, for `grep` and `awk`.
"""

from __future__ import annotations

import textwrap
from typing import Any, Final

from stagekeeper.cli.text.amounts import enum_name
from stagekeeper.cli.text.lines import visible
from stagekeeper.cli.text.times import clock_text, utc_text
from stagekeeper.client import Gap
from stagekeeper.v1 import deployment_service_pb2 as pb2

KIND_WIDTH: Final = 20
"""The longest kind, DEPLOYMENT_REQUESTED."""

NARROWEST: Final = 30
"""Columns for a sentence; in a terminal with fewer it is wrapped by the terminal."""

GAPS: Final = {
    Gap.AWAY: "-- supervisor away --",
    Gap.BACK: "-- supervisor back: nothing was missed --",
    Gap.OTHER_REIGN: "-- another reign: earlier events are gone --",
    Gap.BEHIND: "-- fell behind: some events may be missing --",
}


def kind_of(event: pb2.Event) -> str:
    return enum_name(pb2.EventKind, event.kind, "EVENT_KIND_")


def subject_of(event: pb2.Event) -> str:
    """Name what it is about: `m`, `m/0`, `m/0/2` (a stage's id), a worker, or `supervisor`."""
    if not event.deployment:
        return event.worker_id or "supervisor"
    parts = [event.deployment]
    if event.HasField("replica_index"):
        parts.append(str(event.replica_index))
        if event.HasField("stage_id"):
            parts.append(str(event.stage_id))
    return "/".join(parts)


def plain_line(event: pb2.Event) -> str:
    """Write one event as a line for a pipe."""
    level = "warn" if event.is_warning else "info"
    return (
        f"{utc_text(event.time)}  {level}  {kind_of(event).ljust(KIND_WIDTH)}  "
        f"{subject_of(event)}  {_sentence(event)}"
    )


def terminal_lines(event: pb2.Event, now: float, columns: int) -> list[str]:
    """Write one event for a terminal of so many columns; its sentence stays in its own column."""
    head = f"{clock_text(event.time, now)}  {kind_of(event).ljust(KIND_WIDTH)}  "
    message = _sentence(event)
    width = columns - len(head)
    if width < NARROWEST:
        return [head + message]
    first, *rest = textwrap.wrap(message, width, break_long_words=False) or [""]
    return [head + first, *(" " * len(head) + line for line in rest)]


def _sentence(event: pb2.Event) -> str:
    return visible(" ".join(event.message.split()))


def event_json(event: pb2.Event) -> dict[str, Any]:
    """Make the document of one event; its keys are in docs/cli.md."""
    return {
        "time": utc_text(event.time),
        "kind": kind_of(event),
        "subject": subject_of(event),
        "message": event.message,
        "warning": event.is_warning,
        "deployment": event.deployment or None,
        "replica_index": event.replica_index if event.HasField("replica_index") else None,
        "stage_id": event.stage_id if event.HasField("stage_id") else None,
        "worker_id": event.worker_id or None,
        "failure_id": event.failure_id or None,
    }
