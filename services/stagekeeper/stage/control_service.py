"""`StageControlService`: the agent's view of its stage process, and its few wishes.

Decided here: what is sent to the agent, and how often. A change of state is sent at once; progress
at most five times a second; calls that begin and end at most once a second; and something at least
every second while the stage is busy and every two while it is idle. So silence means that nothing
in the process runs: a call into native code that keeps the interpreter to itself is often at work
before it could be announced. Invariant: one agent watches at a time, the last that came; with none,
the stage goes on as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.field_check import (
    count_problem,
    id_problem,
    named,
    range_problem,
    seconds_problem,
)
from stagekeeper.core.limits import MOST_PEERS, MOST_SHARDS_OF_STAGE, MOST_STAGES
from stagekeeper.core.model import MemoryProfile
from stagekeeper.core.names import cut, name_problem, shown
from stagekeeper.core.states import Phase, ShardState
from stagekeeper.runtime.convert import memory_profile_to_proto
from stagekeeper.runtime.errors import answers_refusals
from stagekeeper.stage.activity import Activity
from stagekeeper.stage.siblings import PeerAddress
from stagekeeper.stage.vitals import Vitals
from stagekeeper.v1 import stage_control_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.stage_control_service_pb2_grpc import StageControlServiceServicer

SERVICE = pb.DESCRIPTOR.services_by_name["StageControlService"].full_name

PROGRESS_INTERVAL_S = 0.2
BUSY_INTERVAL_S = 1.0
IDLE_INTERVAL_S = 2.0

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_STATES = {
    ShardState.STARTING: types_pb2.SHARD_STATE_STARTING,
    ShardState.READY: types_pb2.SHARD_STATE_READY,
    ShardState.STALLED: types_pb2.SHARD_STATE_STALLED,
    ShardState.DRAINING: types_pb2.SHARD_STATE_DRAINING,
    ShardState.FAILED: types_pb2.SHARD_STATE_FAILED,
}
_PROTOCOLS = {
    "grpc": types_pb2.ADDRESS_PROTOCOL_GRPC,
    "http": types_pb2.ADDRESS_PROTOCOL_HTTP,
}
_PHASES = {
    None: types_pb2.PHASE_UNSPECIFIED,
    Phase.LOAD: types_pb2.PHASE_LOAD,
    Phase.MEASURE: types_pb2.PHASE_MEASURE,
    Phase.ALLOCATE: types_pb2.PHASE_ALLOCATE,
    Phase.CAPTURE: types_pb2.PHASE_CAPTURE,
}


class StageControlService(StageControlServiceServicer):
    """Serves the control socket of one stage process.

    Args:
        instance_id: this start of the process; requests that name another are refused.
        vitals, activity: what is shown. Their callbacks become this object's.
        set_peers: takes the addresses of the siblings.
        end: takes (budget_s, reason) when the agent asks for the end.
    """

    def __init__(
        self,
        instance_id: str,
        vitals: Vitals,
        activity: Activity,
        *,
        set_peers: Callable[[Sequence[PeerAddress]], None],
        end: Callable[[float, str], None],
    ) -> None:
        self._instance_id = instance_id
        self._vitals = vitals
        self._activity = activity
        self._set_peers = set_peers
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._watch_count = 0
        self._is_over = False
        # Each is set by what happened and cleared when it has been told: in between, more of the
        # same costs no wake-up. `begin` is in the path of every call.
        self._state_changed = False
        self._progressed = False
        self._called = False
        vitals.on_change = self._on_change
        activity.on_begin = self._on_begin
        activity.on_progress = self._on_progress

    @answers_refusals
    async def WatchStage(
        self, request: pb.WatchStageRequest, context: Context
    ) -> AsyncIterator[pb.WatchStageResponse]:
        self._check_instance(request.instance_id)
        self._watch_count += 1
        mine = self._watch_count
        self._wake.set()  # the watch before this one sees that it is not the last any more
        _log.info("an agent watches")
        while True:
            self._state_changed = self._progressed = self._called = False
            message = self.snapshot()
            yield message
            await self._until_due(mine, time.monotonic(), message)

    @answers_refusals
    async def SetPeers(self, request: pb.SetPeersRequest, context: Context) -> pb.SetPeersResponse:
        self._check_instance(request.instance_id)
        _check_peers(request.peers)
        self._set_peers(
            [
                PeerAddress(
                    peer.stage_id, peer.stage_name, peer.shard_index, peer.instance_id, peer.url
                )
                for peer in request.peers
            ]
        )
        return pb.SetPeersResponse()

    @answers_refusals
    async def EndStage(self, request: pb.EndStageRequest, context: Context) -> pb.EndStageResponse:
        self._check_instance(request.instance_id)
        if problem := seconds_problem(request.budget_s):
            raise bad_fields([FieldProblem("budget_s", problem)])
        self._end(request.budget_s, cut(request.reason) or "its agent asked for it")
        return pb.EndStageResponse()

    def end_streams(self) -> None:
        """End every watch: the process ends."""
        self._is_over = True
        self._wake.set()

    def snapshot(self) -> pb.WatchStageResponse:
        """Build the message that tells how the stage is now."""
        vitals, progress = self._vitals, self._activity.progress_view()
        failure = vitals.failure
        return pb.WatchStageResponse(
            instance_id=self._instance_id,
            pid=os.getpid(),
            state=_STATES[vitals.state],
            phase=_PHASES[vitals.phase],
            progress=types_pb2.Progress(
                counter=progress.counter,
                done=progress.done,
                total=progress.total,
                note=progress.note,
            ),
            in_flight=self._activity.call_count,
            busy_for_s=self._activity.busy_for_s(),
            addresses=[
                types_pb2.ShardAddress(name=name, protocol=_PROTOCOLS[protocol], url=url)
                for name, protocol, url in vitals.addresses
            ],
            endpoints=[
                types_pb2.EndpointInfo(
                    name=endpoint.name,
                    idempotent=endpoint.idempotent,
                    streaming=endpoint.kind.is_streaming,
                )
                for endpoint in vitals.endpoints
            ],
            device_bytes=vitals.device_bytes,
            error=failure.error if failure else "",
            traceback=failure.traceback if failure else "",
            out_of_memory=failure.out_of_memory if failure else False,
            predicted_memory=_profile_to_proto(vitals.predicted_memory),
            measured_memory=_profile_to_proto(vitals.measured_memory),
            stall_reason=vitals.stall_reason,
        )

    # --- when to send

    async def _until_due(self, mine: int, sent: float, told: pb.WatchStageResponse) -> None:
        """Return when there is something to tell again.

        Raises:
            Refused: the stream is over.
        """
        while True:
            if self._is_over:
                raise Refused(Reason.DRAINING, "the stage process ends")
            if mine != self._watch_count:
                raise Refused(
                    Reason.STALE_INCARNATION, "another agent has taken over this stage process"
                )
            if self._state_changed:
                return
            wait_s = self._wait_s(time.monotonic() - sent, told)
            if wait_s <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _wait_s(self, since_sent_s: float, told: pb.WatchStageResponse) -> float:
        """Seconds until the next message is due, unless something happens before."""
        if self._progressed:
            return PROGRESS_INTERVAL_S - since_sent_s
        if self._activity.is_busy or self._activity.counter != told.progress.counter:
            return BUSY_INTERVAL_S - since_sent_s
        return IDLE_INTERVAL_S - since_sent_s

    def _on_change(self) -> None:
        self._state_changed = True
        self._wake.set()

    def _on_begin(self) -> None:
        if not self._called:
            self._called = True
            self._wake.set()

    def _on_progress(self) -> None:
        if not self._progressed:
            self._progressed = True
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                pass  # a thread of the model's own reports while the process ends

    def _check_instance(self, instance_id: str) -> None:
        if instance_id != self._instance_id:
            raise Refused(
                Reason.STALE_ROUTE,
                f"instance {self._instance_id} answers here, not {shown(instance_id)}",
                metadata={"instance_id": self._instance_id},
            )


def _profile_to_proto(profile: MemoryProfile | None) -> types_pb2.MemoryProfile | None:
    return None if profile is None else memory_profile_to_proto(profile)


def _check_peers(peers: Sequence[types_pb2.Peer]) -> None:
    if problem := count_problem(len(peers), MOST_PEERS):
        raise bad_fields([FieldProblem("peers", problem)])
    found: list[tuple[str, str]] = []
    places: set[tuple[int, int]] = set()
    for index, peer in enumerate(peers):
        path, place = f"peers[{index}]", (peer.stage_id, peer.shard_index)
        found += [
            (f"{path}.stage_id", range_problem(peer.stage_id, 0, MOST_STAGES - 1)),
            (f"{path}.stage_name", name_problem(peer.stage_name)),
            (f"{path}.shard_index", range_problem(peer.shard_index, 0, MOST_SHARDS_OF_STAGE - 1)),
            (f"{path}.instance_id", id_problem(peer.instance_id)),
            (f"{path}.url", id_problem(peer.url)),
            (path, "is there twice" if place in places else ""),
        ]
        places.add(place)
    if problems := list(named(found)):
        raise bad_fields(problems)
