"""The agent looks after its stages by itself, whether or not a supervisor hears of it.

Decided here: how often. Not decided here: what a sign of life means (`liveness`), what is told
(`worker_slice`). Invariant: a round depends on no connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stagekeeper.agent.damaged import DamagedRecords
from stagekeeper.agent.liveness import Liveness
from stagekeeper.agent.stages import Stages
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.process import resident_bytes
from stagekeeper.runtime.clock import Clock

_LONGEST_INTERVAL_S: Final = 2.0
"""An idle agent costs next to nothing at this pace, and it is that of heartbeats."""

_FIGURES_INTERVAL_S: Final = 5.0


class Rounds:
    """The rounds of one agent.

    Args:
        busy_after_s: see `AgentSettings`; what is to be noticed by then is looked for twice as
            often.
        on_figures: called when memory was read anew; no more often than that is it told anew.
    """

    def __init__(
        self,
        stages: Stages,
        damaged: DamagedRecords,
        liveness: Liveness,
        oom: OomWitness,
        clock: Clock,
        *,
        busy_after_s: float,
        on_figures: Callable[[], None],
    ) -> None:
        self._stages = stages
        self._damaged = damaged
        self._liveness = liveness
        self._oom = oom
        self._clock = clock
        self._interval_s = min(_LONGEST_INTERVAL_S, busy_after_s / 2)
        self._on_figures = on_figures
        self._figures_read_at = float("-inf")

    async def run(self) -> None:
        """Go round until cancelled."""
        while True:
            await self._clock.sleep(self._interval_s)
            self._look()

    def _look(self) -> None:
        """Look at each stage's signs of life; at its memory less often, which costs more."""
        self._oom.look()
        self._damaged.look()
        for stage in self._stages:
            self._liveness.look(stage)
        now = self._clock.monotonic()
        if now - self._figures_read_at < _FIGURES_INTERVAL_S:
            return
        self._figures_read_at = now
        for stage in self._stages:
            if stage.handle is not None and stage.holds_processes:
                stage.update(memory_bytes=resident_bytes(stage.handle.pid))
        self._on_figures()
