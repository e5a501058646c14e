"""StopStage: a slot emptied, up to a generation, once, however often it is asked for.

Decided here: what belongs to the slot, which budget counts, and that a repeat joins (a shorter
budget brings SIGKILL nearer, a longer one does not put it off). A slot of an operation that is not
committed is emptied by undoing the operation: half a start is of no use. What is to be stopped and
has not come yet is refused when it comes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from stagekeeper.agent.control_link import LinkError
from stagekeeper.agent.ending import kill_processes
from stagekeeper.agent.operations import Operations
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.ids import Generation, InstanceId, SlotKey
from stagekeeper.host.tasks import TaskOwner

_log = structlog.get_logger(__name__)

_ASK_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """What a stop did: how many stages had processes, and whether SIGKILL was needed."""

    stopped_count: int = 0
    killed: bool = False


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[bool]
    kill_at: float


class Stopping:
    """The stops of one agent; each goes on when whoever asked for it goes away."""

    def __init__(self, stages: Stages, operations: Operations, owner: TaskOwner) -> None:
        self._stages = stages
        self._operations = operations
        self._owner = owner
        self._running: dict[InstanceId, _Running] = {}

    @property
    def tasks(self) -> list[asyncio.Task[bool]]:
        return [running.task for running in self._running.values()]

    async def stop_slot(
        self, slot: SlotKey, up_to: Generation, budget_s: float | None, reason: str
    ) -> StopOutcome:
        """Stop what is in a slot; return when it is gone. May be cancelled; the stop goes on.

        Args:
            up_to: newer generations are left alone.
            budget_s: None is each stage's own.
        """
        self._operations.close_slot(slot, up_to)
        targets = [it for it in self._stages.of_slot(slot) if it.shard.generation <= up_to]
        stopped_count = sum(stage.holds_processes for stage in targets)
        for operation in self._operations.unended():
            record = operation.record
            if (
                record.replica == slot.replica
                and slot.stage_id in operation.stage_ids
                and record.generation <= up_to
            ):
                await self._operations.undo(
                    operation, f"stopped: {reason}" if reason else "stopped"
                )
        left = [it for it in self._stages.of_slot(slot) if it.shard.generation <= up_to]
        killed = await asyncio.gather(
            *(asyncio.shield(self.stop(stage, budget_s, reason)) for stage in left)
        )
        return StopOutcome(stopped_count, any(killed))

    def stop(self, stage: StageProcess, budget_s: float | None, reason: str) -> asyncio.Task[bool]:
        """Begin to stop one stage, or join the stop that is under way."""
        budget_s = stage.record.stop_budget_s if budget_s is None else budget_s
        kill_at = asyncio.get_running_loop().time() + budget_s
        running = self._running.get(stage.instance_id)
        if running is None:
            task = self._owner.start(
                f"stop of {stage.instance_id[:8]}", self._stop(stage, budget_s, reason)
            )
            running = self._running[stage.instance_id] = _Running(task, kill_at)
            task.add_done_callback(lambda _: self._running.pop(stage.instance_id, None))
        elif kill_at < running.kill_at:
            running.kill_at = kill_at
            _ = self._owner.start(
                f"hurry of {stage.instance_id[:8]}", self._hurry(stage, budget_s, reason)
            )
        return running.task

    async def _stop(self, stage: StageProcess, budget_s: float, reason: str) -> bool:
        _log.info("stopping", stage=str(stage), reason=reason, budget_s=budget_s)
        killed = await self._stages.take_down(stage, budget_s, reason or "asked to stop")
        _log.info("stopped", stage=str(stage), killed=killed)
        return killed

    async def _hurry(self, stage: StageProcess, budget_s: float, reason: str) -> None:
        """Bring SIGKILL nearer than the stop under way would have it."""
        if stage.link is not None and budget_s > 0:
            try:
                await stage.link.end(budget_s, reason, min(_ASK_TIMEOUT_S, budget_s))
            except LinkError:
                pass  # it is ending, or it does not listen: SIGKILL comes either way
        try:
            async with asyncio.timeout(budget_s):
                await stage.gone.wait()
        except TimeoutError:
            await kill_processes(stage)
