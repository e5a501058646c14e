"""A mesh of processes, for its owner: start them, see their ends, replace them, stop them.

Decided here: when the end of a process is a failure, who hears of it, and that a place gets a new
process only when the old one is gone. Not decided here: how one is started; a `ProcSource` does
it, on this host or through an agent. Invariant: a process that was started is stopped by its
owner's end at the latest, with all that it started.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from stagekeeper.actor.errors import Died, MeshError, MeshStopped
from stagekeeper.actor.failing import as_of_rank, seen_now
from stagekeeper.actor.failure import FailureKind, MeshFailure, failure_id
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.hosting.hosted_actor import LEAST_CLEANUP_S
from stagekeeper.actor.owning.known_ends import KnownEnds
from stagekeeper.actor.owning.mesh_tasks import first_of
from stagekeeper.actor.owning.proc_places import (
    UNCONFIRMED,
    ProcEnd,
    ProcFailed,
    ProcSource,
    StartedProc,
    is_unconfirmed,
)
from stagekeeper.actor.owning.stop_budget import StopBudget
from stagekeeper.actor.owning.stop_report import StopReport
from stagekeeper.actor.place import Place, place_to_proto
from stagekeeper.v1 import actor_service_pb2 as pb

if TYPE_CHECKING:
    from stagekeeper.actor.owning.scope import OwnedActors, Scope
    from stagekeeper.actor.program import Program

_log = logging.getLogger("stagekeeper.actor")

_LEAST_END_S: Final = 1.0
"""What a process whose actors have ended gets for its own end, whatever they left of the budget."""


_ENDINGS: Final = (signal.SIGTERM, signal.SIGKILL)
"""By what an owner ends a process."""


class _Slot:
    """One place of a mesh of processes."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = 0
        self.instance_id = ""
        self.proc: StartedProc | None = None
        self.failure: MeshFailure | None = None
        self.is_asked = False
        self.ready = asyncio.Event()
        self.watching: asyncio.Task[None] | None = None


class ProcMeshControl:
    """A mesh of processes, for its owner. For the loop's thread only."""

    def __init__(
        self, program: Program, scope: Scope, name: str, size: int, source: ProcSource
    ) -> None:
        self.mesh_id = str(uuid.uuid4())
        self.mesh_name = name
        self.mesh: Any = None
        self._program = program
        self._scope = scope
        self._source = source
        self._slots = [_Slot(index) for index in range(size)]
        self._ends = KnownEnds()
        self._is_expecting_end = False
        self._stopping: asyncio.Task[StopReport] | None = None
        self._stop_budget = StopBudget(0.0)

    @property
    def owner(self) -> Scope:
        """Whose it is: nobody else may stop it."""
        return self._scope

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def failures(self) -> dict[int, MeshFailure]:
        """The failures of the places whose process ended, by place."""
        return {slot.index: slot.failure for slot in self._slots if slot.failure is not None}

    def start(self) -> None:
        """Begin to start every process, unless a stop was faster."""
        for slot in self._slots:
            if not self._is_expecting_end:
                self._begin(slot)

    def _begin(self, slot: _Slot) -> None:
        slot.incarnation += 1
        slot.instance_id = str(uuid.uuid4())
        slot.proc, slot.failure, slot.is_asked = None, None, False
        slot.ready = asyncio.Event()
        slot.watching = asyncio.create_task(
            self._live(slot), name=f"process {self.mesh_name}[{slot.index}]"
        )

    async def _live(self, slot: _Slot) -> None:
        """Start one process and see its end."""
        name = f"{self.mesh_name}[{slot.index}]"
        try:
            slot.proc = proc = await self._source.start(slot.index, slot.instance_id, name)
        except ProcFailed as error:
            self._never_started(slot, error.failure)
            return
        except Exception as error:  # unforeseen; whoever waits for the process is told all the same
            _log.warning("the start of %s went wrong", name, exc_info=error)
            self._never_started(slot, _not_started(slot.instance_id, name, error))
            return
        slot.ready.set()
        end = await proc.ended()
        is_told = self._program.holds_rank_in(slot.instance_id)
        slot.failure = self._failure(slot, end, proc.place)
        self._ends.add(slot.instance_id, slot.failure)
        link = self._program.links.existing(slot.instance_id)
        if link is not None:
            await link.close()  # tells every caller, and each mesh with a rank in it
        if not is_told:
            self._tell_if_nobody_is_in(slot, 0 if link is None else link.other_actor_count)

    def _never_started(self, slot: _Slot, failure: MeshFailure) -> None:
        slot.failure = self._own(slot, failure)
        slot.ready.set()
        self._ends.add(slot.instance_id, slot.failure)
        self._tell_if_nobody_is_in(slot)

    def _tell_if_nobody_is_in(self, slot: _Slot, other_actor_count: int = 0) -> None:
        is_told = other_actor_count > 0 or self._program.holds_rank_in(slot.instance_id)
        if is_told or slot.is_asked or slot.failure is None:
            return
        self._scope.deliver(slot.failure.attached(self.mesh, self.respawn))

    def _failure(self, slot: _Slot, end: ProcEnd, place: Place) -> MeshFailure:
        kind = FailureKind.GONE
        if end.exit is not None and end.exit.out_of_memory:
            kind = FailureKind.OUT_OF_MEMORY
        elif end.exit is not None and end.exit.signal is not None:
            kind = FailureKind.SIGNALED
        elif end.exit is not None and end.exit.code is not None:
            kind = FailureKind.EXITED
        exit_info, message = end.exit, end.message
        if slot.is_asked and exit_info is not None:
            # Those who own actors in it did not ask: to them it is a failure.
            exit_info = replace(exit_info, asked=True)
            if exit_info.code == 0 or exit_info.signal in _ENDINGS:
                name = f"{self.mesh_name}[{slot.index}]"
                message = f"{name} was ended by its owner, {self._scope.identity.name}"
        return MeshFailure(
            id=failure_id(slot.instance_id, "end"),
            kind=kind,
            mesh_name=self.mesh_name,
            mesh_id=self.mesh_id,
            ranks=(slot.index,),
            incarnations=(slot.incarnation,),
            instance_id=slot.instance_id,
            message=message,
            exit=exit_info,
            detected_by=end.detected_by,
            detect_time=seen_now(),
            pid=place.pid,
            last_log_lines=end.last_log_lines,
        )

    def _own(self, slot: _Slot, failure: MeshFailure) -> MeshFailure:
        return as_of_rank(
            failure,
            mesh_name=self.mesh_name,
            mesh_id=self.mesh_id,
            rank=slot.index,
            incarnation=slot.incarnation,
        )

    # --- for the meshes of actors in it

    @property
    def is_stopping(self) -> bool:
        """Its processes were asked to end, or are about to be."""
        return self._is_expecting_end

    def instance_id_of(self, rank: int) -> str:
        return self._slots[rank].instance_id

    async def place(self, rank: int) -> Place:
        slot = self._slots[rank]
        await slot.ready.wait()
        if self._is_expecting_end and (slot.failure is not None or slot.proc is None):
            raise MeshStopped(
                f"{self.mesh_name} was stopped: nothing is spawned there", mesh_name=self.mesh_name
            )
        if slot.failure is not None:
            raise ProcFailed(slot.failure)
        assert slot.proc is not None
        return slot.proc.place

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        """Return how one process ended; waits a moment for the news of it."""
        return await self._ends.of(ended_id)

    async def kill(self, instance_id: str) -> None:
        slot = self._slot_of(instance_id)
        if slot is not None and slot.proc is not None:
            slot.is_asked = True
            await slot.proc.kill()

    async def replace_ended(self, instance_ids: list[str], *, kills: bool = False) -> None:
        if self._is_expecting_end:
            return
        if kills:
            await asyncio.gather(*map(self.kill, instance_ids))
        slots = [
            slot
            for slot in self._slots
            if slot.instance_id in instance_ids and slot.failure is not None
        ]
        for slot in slots:
            if slot.watching is not None and slot.watching is not asyncio.current_task():
                await asyncio.wait({slot.watching}, timeout=5.0)
            if slot.instance_id in instance_ids:
                self._begin(slot)
        for slot in slots:
            await slot.ready.wait()

    async def respawn(self, failure: MeshFailure) -> None:
        """Put new processes in the places of those that failed; see `MeshFailure.respawn`."""
        self._program.check_thread()
        ids = [
            slot.instance_id
            for slot in self._slots
            if slot.index in failure.ranks and slot.failure is not None
        ]
        await self.replace_ended(ids)
        problems: dict[int, Exception] = {
            slot.index: Died(slot.failure, rank=slot.index)
            for slot in self._slots
            if slot.index in failure.ranks and slot.failure is not None
        }
        if problems and not self._is_expecting_end:
            raise MeshError(f"{self.mesh_name} was not respawned", problems, {})

    def _slot_of(self, instance_id: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.instance_id == instance_id), None)

    async def places(self, ranks: Sequence[int] = ()) -> list[pb.RankPlace]:
        asked = [self._slots[rank] for rank in ranks if rank < self.size]
        if not any(slot.ready.is_set() for slot in asked):
            await first_of([slot.ready.wait() for slot in asked])
        while not ranks and not all(slot.ready.is_set() for slot in self._slots):
            await asyncio.gather(*(slot.ready.wait() for slot in self._slots))
        found = []
        for slot in asked if ranks else self._slots:
            if not slot.ready.is_set():
                continue
            if slot.proc is None:
                place = pb.RankPlace(
                    rank=slot.index, instance_id=slot.instance_id, incarnation=slot.incarnation
                )
            else:
                place = place_to_proto(
                    slot.proc.place, rank=slot.index, incarnation=slot.incarnation
                )
            if slot.failure is not None:
                place.failure.CopyFrom(failure_to_proto(slot.failure))
            found.append(place)
        return found

    # --- stop

    def expect_end(self) -> None:
        """From now on the end of a process is asked for, and no failure."""
        self._is_expecting_end = True
        for slot in self._slots:
            slot.is_asked = True

    async def stop(self, budget_s: float, failure: MeshFailure | None = None) -> StopReport:
        """End every process; a second call joins, and hurries the first when it gives less time."""
        dead = {slot.index: slot.failure for slot in self._slots if slot.failure is not None}
        inside = self._scope.meshes_in([slot.instance_id for slot in self._slots])
        for mesh in inside:
            mesh.expect_end()
        self.expect_end()
        if self._stopping is None:
            self._stop_budget = StopBudget(budget_s)
            self._stopping = asyncio.create_task(
                self._stop(self._stop_budget, dead, inside, failure),
                name=f"stop {self.mesh_name}",
            )
        else:
            self._stop_budget.shorten(budget_s)
        return await asyncio.shield(self._stopping)

    async def stop_for_owner(
        self, budget_s: float, failure: MeshFailure | None
    ) -> list[MeshFailure]:
        report = await self.stop(budget_s, failure)
        return [*report.cleanup, *report.unconfirmed]

    async def _stop(
        self,
        budget: StopBudget,
        dead: dict[int, MeshFailure],
        inside: Sequence[OwnedActors],
        failure: MeshFailure | None,
    ) -> StopReport:
        report = StopReport(dead=dead, name=self.mesh_name)
        for mesh in inside:
            of_mesh = await budget.spend(partial(mesh.stop, failure=failure))
            report.actors.append(of_mesh)
            report.unrun += of_mesh.unrun
            report.cleanup += of_mesh.cleanup
        answers = await asyncio.gather(*(self._end(slot, budget) for slot in self._slots))
        for slot, is_clean in zip(self._slots, answers, strict=True):
            if slot.index in dead:
                continue
            if slot.failure is not None and is_unconfirmed(slot.failure):
                report.unconfirmed.append(slot.failure)
            (report.clean if is_clean else report.unreachable).append(slot.index)
        await self._source.close()
        self._scope.remove(self)
        self._program.forget(self.mesh_id, self._ends)
        return report

    async def _end(self, slot: _Slot, budget: StopBudget) -> bool:
        is_clean = True
        if slot.proc is None and slot.watching is not None and not slot.watching.done():
            slot.watching.cancel()  # a start that is under way ends with nothing left
            await asyncio.wait({slot.watching})
        elif slot.proc is not None:
            proc, least_end_at = slot.proc, 0.0
            if await budget.spend(partial(self._end_actors, slot)):
                least_end_at = time.monotonic() + _LEAST_END_S
            is_clean = await budget.spend(
                lambda left_s: proc.end(max(left_s, least_end_at - time.monotonic()))
            )
            if slot.watching is not None:
                await asyncio.wait({slot.watching}, timeout=1.0)
                slot.watching.cancel()
            if slot.failure is None:
                nobody_knows = ProcEnd(None, UNCONFIRMED, "its end was not seen: it may still run")
                slot.failure = self._failure(slot, nobody_knows, slot.proc.place)
        if slot.failure is None and slot.proc is None:
            slot.ready.set()
        return is_clean

    async def _end_actors(self, slot: _Slot, budget_s: float) -> bool:
        """Let the actors of others in a process end in order, before it is told to.

        Returns:
            Whether it answered, so that it is worth while to wait for its end.
        """
        link = self._program.links.existing(slot.instance_id)
        if link is None or slot.failure is not None:
            return True
        if link.is_silent:
            return False
        request = pb.StopActorRequest(
            token=self._program.token, instance_id=slot.instance_id, budget_s=budget_s
        )
        try:
            await link.actors.StopActor(request, timeout=budget_s + LEAST_CLEANUP_S)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        except ConnectionError:
            pass  # it ends already
        return True


def _not_started(instance_id: str, name: str, error: Exception) -> MeshFailure:
    return MeshFailure(
        id=failure_id(instance_id, "end"),
        kind=FailureKind.INIT_RAISED,
        mesh_name=name,
        instance_id=instance_id,
        message=f"it could not be started: {type(error).__name__}: {error}",
        detected_by="start",
        detect_time=seen_now(),
    )
