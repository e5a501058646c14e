"""One stage process as its agent holds it: what is known of it, and how that changes.

Kept here: the shard as it is reported, the hold on the process, the line to it. Decided here: what
a message of the process does to the shard. Not decided here: what is done about it (`starting`,
`ending`, `deaths`).

Invariant: the shard moves as its table says; what must survive the agent is written before others
see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import structlog

from stagekeeper.agent.control_link import ControlLink
from stagekeeper.agent.figures import shard_without_figures
from stagekeeper.agent.records import RecordStore, StageRecord
from stagekeeper.core.ids import InstanceId, SlotKey
from stagekeeper.core.model import (
    EndpointInfo,
    ExitInfo,
    Failure,
    Peer,
    ShardAddress,
    ShardRecord,
)
from stagekeeper.core.states import SHARD_MOVES, IllegalMove, Phase, ShardState, check_move
from stagekeeper.host.process import ProcessHandle, resident_bytes
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.convert import (
    memory_profile_from_proto,
    phase_from_proto,
    progress_from_proto,
    shard_state_from_proto,
)
from stagekeeper.v1 import stage_control_service_pb2 as control_pb2
from stagekeeper.v1 import types_pb2

_log = structlog.get_logger(__name__)

# A process that is here is told by its state; what it says of itself moves it between these.
_FOLLOWS_PROCESS: Final = frozenset(
    {ShardState.ADOPTING, ShardState.STARTING, ShardState.READY, ShardState.STALLED}
)
_PROTOCOLS: Final = {
    types_pb2.ADDRESS_PROTOCOL_GRPC: "grpc",
    types_pb2.ADDRESS_PROTOCOL_HTTP: "http",
}


@dataclass(frozen=True, slots=True)
class RaisedInStart:
    """What a phase of the start raised, as the process told it."""

    phase: Phase | None
    error: str
    traceback: str
    out_of_memory: bool


class StageProcess:
    """One start of a stage, from its intent until its record is gone.

    Attributes:
        handle: the hold on the main process; None when there is none (yet, or any more).
        link: the line to it; None likewise.
        failure: the failure that put it into FAILED.
        raised: what its start raised, as it said itself.
        is_asked: it was asked to end, so its end is no failure.
        was_killed: a SIGKILL of ours is on its way to it.
        gone: set once all that belonged to it is proven gone.
        killing: held by the one that kills what is left of it.
        stream_ended: not set while the process tells its state.
        last_sign_at: when it was last heard, on the monotonic clock.
        has_work, told_busy_for_s, says_stalled: as it said then.
        question_is_open, looks_without_answer: it was asked for its health (`liveness`).
        memory_returns: waits until the memory of these pids is back, a while at most; returns what
            is to be said when it is not.
        memory_note: what that said.
        card_pids: those of its processes that were seen on its cards before they ended.
    """

    def __init__(
        self,
        record: StageRecord,
        store: RecordStore,
        clock: Clock,
        on_change: Callable[[StageProcess, bool], None],
    ) -> None:
        """`on_change` gets the stage, and whether the slice is another one now."""
        self._record = record
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._changed = asyncio.Event()
        self.handle: ProcessHandle | None = None
        self.link: ControlLink | None = None
        self.failure: Failure | None = None
        self.raised: RaisedInStart | None = None
        self.exit_info: ExitInfo | None = None
        self.is_asked = record.shard.state is ShardState.STOPPING
        self.was_killed = False
        self.gone = asyncio.Event()
        self.killing = asyncio.Lock()
        self.stream_ended = asyncio.Event()
        self.stream_ended.set()
        self.last_sign_at = clock.monotonic()
        self.has_work = False
        self.told_busy_for_s: float | None = None
        self.says_stalled = False
        self.question_is_open = False
        self.looks_without_answer = 0
        self.memory_returns: Callable[[Collection[int]], Awaitable[str]] = _at_once
        self.memory_note = ""
        self.card_pids: frozenset[int] = frozenset()

    @property
    def record(self) -> StageRecord:
        return self._record

    @property
    def shard(self) -> ShardRecord:
        return self._record.shard

    @property
    def instance_id(self) -> InstanceId:
        return self._record.instance_id

    @property
    def slot(self) -> SlotKey:
        return self.shard.slot

    @property
    def state(self) -> ShardState:
        return self.shard.state

    @property
    def holds_processes(self) -> bool:
        """Whether a process of it lives, or may."""
        return not self.gone.is_set()

    @property
    def name(self) -> str:
        """Say for people which stage, and which part of it, it is."""
        shard = self.shard
        part = f" shard {shard.shard_index} of {shard.shard_count}" if shard.shard_count > 1 else ""
        return f"stage {shard.stage_name}{part}"

    def __str__(self) -> str:
        return f"{self.name} of {self.shard.replica} ({self.instance_id[:8]})"

    async def changed(self) -> None:
        """Return at the next change of anything, progress included."""
        await self._changed.wait()

    def move(self, state: ShardState, **changes: Any) -> None:
        """Change the state, and what goes with it.

        Raises:
            IllegalMove: the table does not have it.
        """
        check_move(SHARD_MOVES, self.state, state, str(self))
        self.update(state=state, **changes)

    def update(self, **changes: Any) -> None:
        """Change fields of the shard and tell whom it concerns; equal values change nothing."""
        old = self.shard
        new = replace(old, **changes)
        if new == old:
            return
        self._record = msgspec.structs.replace(self._record, shard=new)
        self._tell(shard_without_figures(new) != shard_without_figures(old))

    def process_started(self, pid: int, start_ticks: int) -> None:
        """Put the process on record; until then it waits on its pipe."""
        self._record = msgspec.structs.replace(self._record, pid=pid, start_ticks=start_ticks)
        self.update(pid=pid)
        self.persist()

    def budget_is(self, budget_s: float) -> None:
        """Keep what a stop grants, for whoever has to go on with it; written by the next write."""
        self._record = msgspec.structs.replace(self._record, stop_budget_s=budget_s)

    def peers_are(self, peers: tuple[Peer, ...]) -> None:
        """Keep where its replica's shards on other workers are; written by the next write."""
        self._record = msgspec.structs.replace(self._record, peers=peers)

    def persist(self) -> None:
        """Write the record; it is on disk when this returns."""
        self._store.write(self._record)

    def fail(self, failure: Failure) -> None:
        """Enter FAILED for a failure, on disk first. A second failure changes nothing."""
        if self.failure is not None:
            return
        self.failure = failure
        if self.state is not ShardState.STOPPING:
            self.move(
                ShardState.FAILED,
                state_reason=failure.message,
                failure_id=failure.failure_id,
                busy_for_s=None,
            )
            self.persist()

    def all_gone(self) -> None:
        """Note that every process of it is proven gone: it holds nothing any more."""
        self.gone.set()
        self.update(devices=(), memory_bytes=None, pid=0)
        self._tell(True)

    def saw(self, message: control_pb2.WatchStageResponse) -> None:
        """Take in what the process says of itself."""
        self.last_sign_at = self._clock.monotonic()
        self.has_work = message.in_flight > 0 or message.state == types_pb2.SHARD_STATE_STARTING
        self.says_stalled = message.state == types_pb2.SHARD_STATE_STALLED
        self.told_busy_for_s = message.busy_for_s if message.HasField("busy_for_s") else None
        if message.state == types_pb2.SHARD_STATE_FAILED and self.raised is None:
            self.raised = RaisedInStart(
                phase=phase_from_proto(message.phase),
                error=message.error,
                traceback=message.traceback,
                out_of_memory=message.out_of_memory,
            )
            self.update(phase=self.raised.phase)
            self._tell(False)
        state = shard_state_from_proto(message.state)
        if state is None or state is ShardState.FAILED or self.state not in _FOLLOWS_PROCESS:
            return
        self._follow(state, message)

    def shows_life(self) -> None:
        """Note that the process did something just now; a STALLED one is READY again.

        Not one that said itself that what it serves does not answer: it says too when that does.
        """
        self.last_sign_at = self._clock.monotonic()
        if self.state is ShardState.STALLED and not self.says_stalled:
            self.move(ShardState.READY, state_reason="")

    def _follow(self, state: ShardState, message: control_pb2.WatchStageResponse) -> None:
        changes: dict[str, Any] = {
            "phase": phase_from_proto(message.phase) if state is ShardState.STARTING else None,
            "progress": progress_from_proto(message.progress),
            "addresses": tuple(
                ShardAddress(it.name, _PROTOCOLS[it.protocol], it.url)
                for it in message.addresses
                if it.protocol in _PROTOCOLS
            ),
            "endpoints": tuple(
                EndpointInfo(it.name, it.idempotent, it.streaming) for it in message.endpoints
            ),
            "state_reason": message.stall_reason,
        }
        if message.HasField("device_bytes"):
            changes["devices"] = tuple(
                replace(claim, used_bytes=message.device_bytes) for claim in self.shard.devices
            )
        if message.HasField("predicted_memory"):
            changes["predicted_memory"] = memory_profile_from_proto(message.predicted_memory)
        if message.HasField("measured_memory"):
            changes["measured_memory"] = memory_profile_from_proto(message.measured_memory)
        becomes_ready = state is ShardState.READY and not self.shard.ready_time
        if becomes_ready:
            changes["ready_time"] = self._clock.wall()
        if state is ShardState.READY and self.shard.memory_bytes is None and self.handle:
            # So that the report that tells of it has it; later readings are told if they differ.
            changes["memory_bytes"] = resident_bytes(self.handle.pid)
        addresses_moved = changes["addresses"] != self.shard.addresses
        try:
            if self.state is ShardState.ADOPTING and state is ShardState.DRAINING:
                self.move(ShardState.READY)  # it was, before somebody else asked it to end
            self.move(state, **changes)
        except IllegalMove as error:
            _log.warning("a stage says what cannot be", stage=str(self), error=str(error))
            return
        if becomes_ready or (state is ShardState.READY and addresses_moved):
            self.persist()

    def _tell(self, is_other_slice: bool) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change(self, is_other_slice)


async def _at_once(pids: Collection[int]) -> str:
    return ""
