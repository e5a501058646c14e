"""How long a start may take, and how it is seen to have failed.

A stage is READY when it says so. It has failed when it says so, when it ends, when its time is
over, or when it made no progress for too long: `start_timeout_s` counts all of it,
`stall_timeout_s` only the time without a sign of progress, so a slow first start is not a stalled
one.
"""

from __future__ import annotations

import asyncio

from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.model import Failure, StageSpec
from stagekeeper.core.states import Phase, ShardState


class StartFailed(Exception):
    """A stage did not come up. `phase` is the one it was in; `failure` is on disk already."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.phase: Phase | None = failure.origin.phase


async def until_ready(
    stage: StageProcess, spec: StageSpec, deaths: Deaths, *, age_s: float = 0.0
) -> None:
    """Return once the stage is READY. May be cancelled; the process is left as it is.

    Args:
        stage: has been spawned.
        spec: has its limits.
        deaths: is told of a limit that is over.
        age_s: how long ago it was spawned; an earlier life of the agent may have done that.

    Raises:
        StartFailed: it will not be; its processes may still live.
    """
    loop = asyncio.get_running_loop()
    start_timeout_s = spec.start_timeout_s
    start_deadline = None if start_timeout_s is None else loop.time() + start_timeout_s - age_s
    seen, seen_at = _progress_of(stage), loop.time()
    while True:
        if stage.failure is not None:
            raise StartFailed(stage.failure)
        if stage.raised is not None:
            raise StartFailed(deaths.raised(stage))
        if stage.state is ShardState.READY:
            return
        progress = _progress_of(stage)
        if progress != seen:
            seen, seen_at = progress, loop.time()
        stall_deadline = None if spec.stall_timeout_s is None else seen_at + spec.stall_timeout_s
        deadlines = [it for it in (start_deadline, stall_deadline) if it is not None]
        deadline = min(deadlines, default=None)
        if deadline is not None and loop.time() >= deadline:
            raise StartFailed(_overdue(stage, spec, deaths, is_stall=deadline != start_deadline))
        try:
            async with asyncio.timeout_at(deadline):
                await stage.changed()
        except TimeoutError:
            continue


def _overdue(stage: StageProcess, spec: StageSpec, deaths: Deaths, *, is_stall: bool) -> Failure:
    phase = f" in {stage.shard.phase}" if stage.shard.phase else ""
    note = stage.shard.progress.note
    last = f", last at {note!r}" if note else ""
    if is_stall:
        message = (
            f"{stage.name} made no progress for {spec.stall_timeout_s:g} s{phase}{last} "
            "(stall_timeout_s)"
        )
    else:
        message = (
            f"{stage.name} was not READY within {spec.start_timeout_s:g} s; it was"
            f"{phase or ' not yet in a phase'}{last} (start_timeout_s)"
        )
    return deaths.declare(stage, "INIT_TIMEOUT", message, seen_by="init")


def _progress_of(stage: StageProcess) -> tuple[object, ...]:
    # What is only shown, the note, is no progress: the counter says what is.
    return stage.state, stage.shard.phase, stage.shard.progress.counter
