"""Signs of life of stages that are in service: BUSY without progress, STALLED without any sign.

Looked at with each of the agent's rounds. A process tells that it works, and for how long without
progress; one that holds the interpreter's lock cannot even do that, and it may have taken the lock
before it told that it has work. So a stage that has been silent for a while is asked for its
health, and its silence counts only while that question is open. Decided here: when silence is BUSY
and when it is STALLED. Not decided here: what follows from it.

Invariant: a stage that answers is never STALLED.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Final

import structlog

from stagekeeper.agent.control_link import LinkError
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.states import ShardState
from stagekeeper.host.process import catches_signal
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_LOOKED_AT: Final = frozenset({ShardState.STARTING, ShardState.READY, ShardState.STALLED})
_ASK_AGAIN_S: Final = 1.0
_LOOKS_WITHOUT_ANSWER: Final = 2
"""So many looks must find the question open: after a halt of the agent itself the first look comes
before the answer was read that has long arrived."""


class Liveness:
    """Looks at the stages of one agent.

    Args:
        busy_after_s, stall_after_s: see `AgentSettings`.
    """

    def __init__(
        self, owner: TaskOwner, clock: Clock, *, busy_after_s: float, stall_after_s: float
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._busy_after_s = busy_after_s
        self._stall_after_s = stall_after_s

    def look(self, stage: StageProcess) -> None:
        """Judge one stage, and ask it when it has been silent for long."""
        if stage.state not in _LOOKED_AT or stage.link is None:
            return
        silent_for_s = self._clock.monotonic() - stage.last_sign_at
        if stage.question_is_open:
            stage.looks_without_answer += 1
        elif silent_for_s >= self._busy_after_s and not self._owner.is_stopping:
            stage.question_is_open = True
            _ = self._owner.start(f"health of {stage.instance_id[:8]}", self._ask(stage))
        is_mute = stage.looks_without_answer >= _LOOKS_WITHOUT_ANSWER
        busy_for_s = silent_for_s if is_mute else 0.0
        if stage.has_work:
            busy_for_s = (stage.told_busy_for_s or 0.0) + silent_for_s
        stage.update(busy_for_s=busy_for_s if busy_for_s >= self._busy_after_s else None)
        if stage.state is ShardState.READY and is_mute and silent_for_s >= self._stall_after_s:
            _log.warning("a stage is STALLED", stage=str(stage), silent_for_s=round(silent_for_s))
            dumped = "; the stacks of its threads are in its log" if _dumps_stacks(stage) else ""
            stage.move(
                ShardState.STALLED,
                state_reason=f"it has shown no sign of life for {silent_for_s:.0f} s{dumped}",
            )

    async def _ask(self, stage: StageProcess) -> None:
        """Wait for an answer for as long as it takes; the end of the process is one too."""
        try:
            while stage.link is not None:
                try:
                    await stage.link.answers(self._stall_after_s)
                except LinkError:
                    await asyncio.sleep(_ASK_AGAIN_S)
                    continue
                stage.shows_life()
                return
        finally:
            stage.question_is_open = False
            stage.looks_without_answer = 0


def _dumps_stacks(stage: StageProcess) -> bool:
    """Have a stage write where its threads are, if it listens: the signal would end another one."""
    handle = stage.handle
    if handle is None or not catches_signal(handle.pid, signal.SIGUSR1):
        return False
    return handle.send(signal.SIGUSR1)
