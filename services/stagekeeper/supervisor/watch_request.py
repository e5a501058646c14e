"""What a watch asks for, read and checked as a whole.

Decided here: what makes no sense; a revision that makes sense and is not (any more) in the log is
refused by the log. Invariant: every wrong field is named at once.
"""

from __future__ import annotations

from typing import Final

from stagekeeper.core.errors import FieldProblem, bad_fields
from stagekeeper.core.field_check import length_problem, named
from stagekeeper.core.ids import ChangeRevision, DeploymentName
from stagekeeper.core.limits import MOST_EVENTS
from stagekeeper.core.names import name_problem
from stagekeeper.runtime.convert import revision_from_proto
from stagekeeper.supervisor.watchers import WatchChoice
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2
from stagekeeper.v1 import types_pb2

DEFAULT_EVENTS: Final = 100
"""In a snapshot, where no number is named."""

_ROUTES = frozenset(
    {
        deployment_pb2.WATCH_CONTENT_UNSPECIFIED,
        deployment_pb2.WATCH_CONTENT_ROUTES,
        deployment_pb2.WATCH_CONTENT_ROUTES_AND_EVENTS,
    }
)
_EVENTS = frozenset(
    {deployment_pb2.WATCH_CONTENT_EVENTS, deployment_pb2.WATCH_CONTENT_ROUTES_AND_EVENTS}
)


def read_watch(
    request: deployment_pb2.WatchDeploymentsRequest,
) -> tuple[ChangeRevision | None, WatchChoice]:
    """Return where to begin (None: with a snapshot), and what to tell.

    Raises:
        Refused: BAD_FIELD.
    """
    problems = []
    if request.HasField("after"):
        problems += _revision_problems(request.after)
    if request.content not in _ROUTES | _EVENTS:
        problems.append(FieldProblem("content", f"{request.content} is no content of a watch"))
    if request.deployment and (problem := name_problem(request.deployment)):
        problems.append(FieldProblem("deployment", problem))
    if request.last_events > MOST_EVENTS:
        problem = f"{request.last_events} is above {MOST_EVENTS}"
        problems.append(FieldProblem("last_events", problem))
    if problems:
        raise bad_fields(problems, "the watch")
    after = revision_from_proto(request.after) if request.HasField("after") else None
    choice = WatchChoice(
        has_routes=request.content in _ROUTES,
        has_events=request.content in _EVENTS,
        deployment=DeploymentName(request.deployment) if request.deployment else None,
        last_events=request.last_events or DEFAULT_EVENTS,
    )
    return after, choice


def _revision_problems(revision: types_pb2.ChangeRevision) -> list[FieldProblem]:
    supervisor_id = revision.epoch.supervisor_id
    if not supervisor_id:
        problem = "is missing: leave `after` out to begin with a snapshot"
        return [FieldProblem("after.epoch.supervisor_id", problem)]
    return list(named([("after.epoch.supervisor_id", length_problem(supervisor_id))]))
