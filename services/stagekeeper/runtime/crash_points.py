"""Hand-off points at which a test may have the agent killed; inert in every other run.

With `STAGEKEEPER_TEST_KILL_AT=NAME` in its environment the agent SIGKILLs itself when it reaches
that point, as a kernel would: nothing is flushed, no handler runs. What the next agent finds on
disk is then exactly what a real death there leaves. `NAME#2` means the second time that it gets
there.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Final

VARIABLE: Final = "STAGEKEEPER_TEST_KILL_AT"

AGENT_POINTS: Final = (
    "booked",  # the other agents of the host count it, nothing of it is on this agent's disk
    "reserve-written",  # the operation is on disk, nothing is spawned
    "starting-written",  # it is on disk as STARTING, nothing is spawned
    "intent-written",  # a stage's intent is on disk, no process exists
    "spawned",  # its process waits on its pipe, its pid is nowhere
    "pid-written",  # its pid is on disk, it still waits
    "released",  # it was let go
    "ready-written",  # its address is on disk
    "started-written",  # all stages of the operation are READY
    "peers-written",  # where the shards on other workers are is on disk, no stage was told
    "peers-pushed",  # the stages know each other, nothing is committed
    "commit-written",  # the operation is COMMITTED, its shards do not say so yet
    "commit-half-written",  # one of its shards says so
    "committed",  # all of them do
    "rollback-written",  # the operation is ROLLING_BACK
    "clean-written",  # one of its stages is gone, and the operation says so
    "rolled-back",  # it is ROLLED_BACK on disk
    "stopping-written",  # a stage is to be stopped, nobody has told it
    "stop-asked",  # it was told
    "stop-gone",  # its processes are gone, its record is there
    "stopped",  # its record is gone
    "failure-spooled",  # a stage died, its failure is on disk, its record does not say so
    "failed-written",  # its record says so, what is left of it was not killed
)
"""The agent's points, in the order of a stage's life."""

SUPERVISOR_POINTS: Final = (
    "desired-written",  # a wish is in the store, nothing was done about it, nobody was answered
    "operation-reserved",  # an agent has reserved, and was not told to start
    "step-failed",  # an agent could not do a step, and no other one was told to undo its part
    "part-undone",  # an agent has undone its part, and the registry does not know
    "operation-started",  # every stage is READY, and nothing is committed
    "commit-decided",  # it is on disk that a start on several workers is committed, none was told
    "operation-committed",  # an agent has committed, and the registry does not know
)
"""The supervisor's points, in the order of a creation."""

_POINTS: Final = AGENT_POINTS + SUPERVISOR_POINTS

_WANTED, _, _TIMES = os.environ.get(VARIABLE, "").partition("#")
_reached: Counter[str] = Counter()

if _WANTED and _WANTED not in _POINTS:
    raise ValueError(
        f"{VARIABLE}={_WANTED} names no hand-off point; there are {', '.join(_POINTS)}"
    )


def reached(point: str) -> None:
    """Die here if that is what the environment asks for."""
    if point != _WANTED:
        return
    _reached[point] += 1
    if _reached[point] == int(_TIMES or 1):
        os.kill(os.getpid(), signal.SIGKILL)
