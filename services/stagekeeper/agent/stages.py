"""All stage processes that the agent holds, and the tasks that watch each of them.

Decided here: what is watched (the process's end by pidfd, its state by stream), and that a change
makes another slice. Invariant: an instance is in this table from its intent until its record is
gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import structlog

from stagekeeper.agent.cards.card_memory import CardMemory
from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.agent.control_link import ControlLink, LinkError
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.ending import end_processes
from stagekeeper.agent.ports import Ports
from stagekeeper.agent.records import RecordStore, StageRecord
from stagekeeper.agent.siblings import Siblings
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import InstanceId, OperationId, SlotKey
from stagekeeper.core.model import ShardRecord
from stagekeeper.core.states import ShardState
from stagekeeper.host.process import ProcessHandle
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_STREAM_RETRY_S: Final = 0.2
_STREAM_RETRY_CAP_S: Final = 2.0
_LOOK_S: Final = 0.005
_QUICK_LOOKS: Final = 1_000
_SLOW_LOOK_S: Final = 0.1


class Stages:
    """The table.

    Args:
        on_slice_change: called when what is reported is another thing now.
        memory: reads the cards around the end of a stage; None where nobody can.
        ports: the leases of command stages; None where no stage has any.
    """

    def __init__(
        self,
        records: RecordStore,
        ledger: Ledger,
        deaths: Deaths,
        owner: TaskOwner,
        clock: Clock,
        on_slice_change: Callable[[], None],
        memory: CardMemory | None = None,
        ports: Ports | None = None,
    ) -> None:
        self._records = records
        self._ledger = ledger
        self._deaths = deaths
        self._owner = owner
        self._clock = clock
        self._on_slice_change = on_slice_change
        self.memory = memory
        self.ports = ports
        self._by_instance: dict[InstanceId, StageProcess] = {}
        self.siblings = Siblings(self.of_operation, owner)
        self.on_progress: Callable[[StageProcess], None] = lambda stage: None

    def __iter__(self) -> Iterator[StageProcess]:
        return iter(list(self._by_instance.values()))

    def of_slot(self, slot: SlotKey) -> list[StageProcess]:
        return [stage for stage in self if stage.slot == slot]

    def of_operation(self, operation_id: OperationId) -> list[StageProcess]:
        """Return what an operation started and what is still held, ascending by stage."""
        found = [stage for stage in self if stage.shard.operation_id == operation_id]
        return sorted(found, key=lambda stage: stage.shard.stage_id)

    def shards(self) -> list[ShardRecord]:
        """Return what is reported, in a stable order."""
        return [
            stage.shard
            for stage in sorted(self, key=lambda it: (it.shard.slot, it.shard.shard_index))
        ]

    def add(self, record: StageRecord) -> StageProcess:
        """Hold an instance from its record on, and book what it claims."""
        stage = StageProcess(record, self._records, self._clock, self._changed)
        if self.memory is not None:
            stage.memory_returns = partial(self.memory.returns, stage)
        self._by_instance[record.instance_id] = stage
        shard = record.shard
        holder = f"{shard.replica} stage {shard.stage_name}"
        self._ledger.book(booking_of(stage), holder, shard.devices)
        if self.ports is not None:
            self.ports.hold_again(booking_of(stage), record.ports)
        self._tell_process(stage)
        self._on_slice_change()
        return stage

    def hold(self, stage: StageProcess, handle: ProcessHandle) -> None:
        """Watch a living process: its end, and what it says of itself."""
        stage.handle = handle
        stage.link = ControlLink(self._records.socket(stage.instance_id), stage.instance_id)
        name = stage.instance_id[:8]
        _ = self._owner.start(f"end of {name}", self._deaths.watch(stage))
        _ = self._owner.start(f"state of {name}", self._watch_state(stage, stage.link))

    async def take_down(self, stage: StageProcess, budget_s: float, reason: str) -> bool:
        """End a stage and forget it; return whether SIGKILL was needed.

        Written down first: whoever finds the record goes on. May be cancelled and repeated.

        Args:
            budget_s: from now until SIGKILL; 0 kills at once.
        """
        stage.is_asked = True
        if self.memory is not None:
            stage.card_pids |= self.memory.pids_of(stage)
        if stage.state is not ShardState.STOPPING:
            stage.budget_is(budget_s)
            stage.move(ShardState.STOPPING, state_reason=reason, busy_for_s=None)
            stage.persist()
        crash_points.reached("stopping-written")
        killed = await end_processes(stage, budget_s=budget_s, reason=reason)
        self.forget(stage)
        return killed

    def forget(self, stage: StageProcess) -> None:
        """Remove an instance that is proven gone; its log stays for a while. Repeats do nothing."""
        assert not stage.holds_processes, f"{stage} may have processes"
        if self._by_instance.pop(stage.instance_id, None) is None:
            return
        self._records.end(stage.record)
        crash_points.reached("stopped")
        self._ledger.free(booking_of(stage))
        self.siblings.forget(stage)
        self._on_slice_change()

    async def let_go(self) -> None:
        """Let go of all processes, which go on; the tasks that watch them were stopped before."""
        for stage in self:
            if stage.handle is not None:
                stage.handle.close()
            if stage.link is not None:
                await stage.link.close()
                stage.link = None

    def _changed(self, stage: StageProcess, is_other_slice: bool) -> None:
        if stage.holds_processes:
            self._tell_process(stage)
        else:
            self._ledger.free(booking_of(stage))
        if is_other_slice:
            self._on_slice_change()
        self.on_progress(stage)

    def _tell_process(self, stage: StageProcess) -> None:
        """Tell the ledger by which process a claim lives on; before the process is let go."""
        process = stage.record.process
        if process is not None:
            self._ledger.runs(booking_of(stage), stage.instance_id, process)

    async def _watch_state(self, stage: StageProcess, link: ControlLink) -> None:
        """Take in what a process says, as long as it lives; reach it again when the line breaks."""
        handle = stage.handle
        assert handle is not None
        await _until_served(link, handle)
        wait_s = _STREAM_RETRY_S
        while not handle.has_exited and stage.holds_processes:
            try:
                async for message in link.states():
                    is_first_word = stage.stream_ended.is_set()
                    stage.stream_ended.clear()
                    stage.saw(message)
                    if is_first_word:
                        wait_s = _STREAM_RETRY_S
                        _log.info("a stage is held", stage=str(stage), pid=message.pid)
                        self.siblings.reached_anew(stage)
            except LinkError as error:
                if stage.stream_ended.is_set() and not stage.is_asked:
                    _log.warning("a stage is not reached", stage=str(stage), error=str(error))
            finally:
                stage.stream_ended.set()
            # Mostly its end is behind the end of the stream; only a line that broke is tried again.
            try:
                async with asyncio.timeout(wait_s):
                    await handle.wait()
            except TimeoutError:
                wait_s = min(2 * wait_s, _STREAM_RETRY_CAP_S)


async def _until_served(link: ControlLink, handle: ProcessHandle) -> None:
    """Return when a process that starts serves its socket, or has ended.

    A look costs next to nothing, and they soon come seldom. A connection that was tried too early
    would be tried again only after a back-off, and the first phases would pass unseen.
    """
    looks = 0
    while not link.is_served and not handle.has_exited:
        await asyncio.sleep(_LOOK_S if looks < _QUICK_LOOKS else _SLOW_LOOK_S)
        looks += 1


def booking_of(stage: StageProcess) -> Booking:
    return Booking(stage.shard.operation_id, stage.shard.stage_id)
