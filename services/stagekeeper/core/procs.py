"""What an owner of actors asks of an agent, as a value, checked whole: every wrong field at once.

Decided here: what is wrong in the request itself. Not decided here: what becomes of it
(`agent.proc_sets`).

Invariant: an instance id that passed is a file name, and a part of a place in an actor tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stagekeeper.core.counted import counted
from stagekeeper.core.env_check import env_problems
from stagekeeper.core.errors import FieldProblem
from stagekeeper.core.field_check import (
    count_problem,
    id_problem,
    length_problem,
    named,
    range_problem,
    seconds_problem,
    twice_problem,
)
from stagekeeper.core.ids import InstanceId
from stagekeeper.core.limits import LARGEST_NUMBER, LONGEST_ID, LONGEST_PROC_LEASE_S, MOST_PROCS
from stagekeeper.core.names import shown, text_problem

_INSTANCE_ID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\Z", re.ASCII)

_PYTHONPATH_ENV = {"PYTHONPATH": "is set by the agent (--pythonpath): leave it out"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcsWanted:
    """Processes for actors.

    Attributes:
        procs_id: the set that they are of.
        token: of the actor tree.
        instance_ids: the processes, as starts.
        incarnation: the life of the agent that started some of them; 0 before any was heard of.
        lease_s: how long they go on while nobody holds them.
        env: variables of new ones.
        name, owner: for people.
        ends: whether they are to end; all of the set when none is named.
        end_budget_s: from SIGTERM until SIGKILL; 0 is SIGKILL at once.
    """

    procs_id: str
    token: str = field(repr=False)
    instance_ids: tuple[InstanceId, ...]
    incarnation: int = 0
    lease_s: float
    env: tuple[tuple[str, str], ...] = ()
    name: str = ""
    owner: str = ""
    ends: bool = False
    end_budget_s: float = 0.0

    def __str__(self) -> str:
        count = counted(len(self.instance_ids), "process", "processes")
        return f"{self.name or self.procs_id} ({count})"


def wanted_problems(wanted: ProcsWanted) -> list[FieldProblem]:
    """Say what is wrong with a request for processes."""
    found = [
        ("procs_id", id_problem(wanted.procs_id)),
        ("token", _token_problem(wanted.token)),
        ("instance_ids", _ids_problem(wanted)),
        ("incarnation", range_problem(wanted.incarnation, 0, LARGEST_NUMBER)),
        ("lease_s", _lease_problem(wanted.lease_s)),
        ("end_budget_s", seconds_problem(wanted.end_budget_s)),
        ("name", length_problem(wanted.name) or text_problem(wanted.name)),
        ("owner", length_problem(wanted.owner) or text_problem(wanted.owner)),
    ]
    return [
        *named(found),
        *_instance_problems(wanted),
        *env_problems("environment", wanted.env, taken=_PYTHONPATH_ENV),
    ]


def _ids_problem(wanted: ProcsWanted) -> str:
    ids = wanted.instance_ids
    if not ids:
        return "" if wanted.ends else "are missing"
    return count_problem(len(ids), MOST_PROCS) or twice_problem(ids)


def _instance_problems(wanted: ProcsWanted) -> Iterator[FieldProblem]:
    for index, instance_id in enumerate(wanted.instance_ids[:MOST_PROCS]):
        if not _INSTANCE_ID.match(instance_id):
            yield FieldProblem(
                f"instance_ids[{index}]",
                f"{shown(instance_id)} is no UUID in lower case",
            )


def _token_problem(token: str) -> str:
    """Check a secret, which is never shown."""
    if not token:
        return "is empty"
    return length_problem(token, LONGEST_ID) or ("" if token.isprintable() else "is not printable")


def _lease_problem(lease_s: float) -> str:
    # nan compares false with everything, and so it is refused here.
    if 0 < lease_s <= LONGEST_PROC_LEASE_S:
        return ""
    return f"{lease_s!r} is not a number of seconds above 0 and to {LONGEST_PROC_LEASE_S:g}"
