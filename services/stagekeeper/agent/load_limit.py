"""How many stages of this agent load at once: `--max-loads`.

Decided here: when a stage may be spawned, so that never more than the limit are in LOAD. A stage
loads from its spawn until it says that it is in a later phase, or is gone. Not decided here: which
stages wait for each other because of their cards (`core.planner`), and who need not ask
(`operation_start`): who does not still counts for the others.

Invariant: nothing is counted, the table of stages is looked at. So there is no turn that could be
lost with a stage, and the stages that an earlier agent left loading take part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import structlog

from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.states import Phase

_log = structlog.get_logger(__name__)


class LoadLimit:
    """The turns to load on one agent, in the order in which they are asked for.

    Args:
        stages: those that the agent holds, as they are at any time.
        max_loads: 1 or more; None is no limit.
    """

    def __init__(self, stages: Iterable[StageProcess], max_loads: int | None) -> None:
        self._stages = stages
        self._max_loads = max_loads
        self._queue = asyncio.Lock()  # wakes its waiters in turn

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until one more may load. Inside, the caller spawns it; nobody else is let in then.

        The time that a stage waits here is not part of its start. May be cancelled.
        """
        if self._max_loads is None:
            yield
            return
        async with self._queue:
            if len(loading := self._loading()) >= self._max_loads:
                _log.info("a start waits: --max-loads", loading=[str(it) for it in loading])
            while len(self._loading()) >= self._max_loads:
                await self._change(self._max_loads)
            yield

    def _loading(self) -> list[StageProcess]:
        return [stage for stage in self._stages if is_loading(stage)]

    async def _change(self, max_loads: int) -> None:
        """Return when one of those that load has changed."""
        waits = {asyncio.ensure_future(stage.changed()) for stage in self._loading()}
        try:
            await asyncio.sleep(0)  # from here on they listen; what was before is looked at again
            if len(self._loading()) >= max_loads:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)


def is_loading(stage: StageProcess) -> bool:
    """Whether a stage loads, or may: before its first word it counts, and so does a dying one."""
    shard = stage.shard
    return stage.holds_processes and shard.ready_time is None and shard.phase in (None, Phase.LOAD)
