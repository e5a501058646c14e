"""Meshes of actors that another process owns: their ranks are where that process says.

Decided here: that the owner is asked at the first call, and again when a rank is not where it
was. Invariant: what a caller is told of a rank's end is what the owner was told, as long as the
owner can be asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import grpc

from stagekeeper.actor.connection.link import Link, PendingCall
from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failing import seen_now
from stagekeeper.actor.failure import FailureKind, MeshFailure, failure_id
from stagekeeper.actor.failure_wire import failure_from_proto, failure_to_proto
from stagekeeper.actor.owning.mesh_owner import MeshOwner
from stagekeeper.actor.owning.mesh_tasks import mesh_tasks
from stagekeeper.actor.owning.ranks import ActorRank, RankState
from stagekeeper.actor.place import Place, place_from_proto
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.v1 import stage_service_pb2 as stage_pb
from stagekeeper.wire.error_details import describe

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

_log = logging.getLogger("stagekeeper.actor")

_ASK_PAUSE_S: Final = 0.02
"""Between two questions: ranks that come up one after the other are told of a few at a time."""


class ReferenceKeeper:
    """Keeps the ranks of a mesh of another process up to date. For the loop's thread only.

    Args:
        owner: the process that owns the mesh.
    """

    def __init__(self, program: Program, mesh_id: str, name: str, size: int, owner: Place) -> None:
        self.mesh_id = mesh_id
        self.mesh_name = name
        self.owner = owner
        self._program = program
        self._asked = MeshOwner(program, mesh_id, name, owner)
        self.ranks: tuple[ActorRank, ...] = tuple(
            ActorRank(self, rank, is_reference=True) for rank in range(size)
        )
        self.is_stopping = False
        self._seeking: set[int] = set()
        """The ranks of which the owner is being asked."""
        self._next: list[int] = []
        """Those of them that the next question is about."""
        self._tasks = mesh_tasks(f"reference {name}")

    def check_thread(self) -> None:
        """Check that the code that asks runs on the loop."""
        self._program.check_thread()

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run `work` in the loop's thread."""
        self._program.on_loop(work)

    def sought(self, rank: ActorRank) -> None:
        """Ask the owner where a rank is, once for all calls that wait for it."""
        if rank.rank in self._seeking:
            return
        self._seeking.add(rank.rank)
        self._next.append(rank.rank)
        if len(self._next) == 1:  # what is sought in this turn is asked for together
            _ = self._tasks.start("seek", self._seek())

    def lost(self, rank: ActorRank, link: Link, calls: list[PendingCall]) -> None:
        """Ask the owner what became of a rank whose connection broke."""
        _ = self._tasks.start("loss", self._judge_loss(rank, rank.actor_id, link, calls))

    def undelivered(self, rank: ActorRank, endpoint: str, sender: str) -> None:
        """Tell the owner of a message for a rank that has failed."""
        failure = MeshFailure(
            id=failure_id(rank.actor_id or self.mesh_id, FailureKind.UNDELIVERABLE),
            kind=FailureKind.UNDELIVERABLE,
            mesh_name=self.mesh_name,
            mesh_id=self.mesh_id,
            ranks=(rank.rank,),
            incarnations=(rank.incarnation,),
            message=f"{endpoint} from {sender} was for {rank.name}, which has failed",
            detect_time=seen_now(),
            endpoint=endpoint,
            sender=sender,
        )
        link = self._program.links.to(self.owner)
        link.tell(
            stage_pb.RankFailed(
                mesh_id=self.mesh_id,
                rank=rank.rank,
                actor_id=rank.actor_id,
                failure=failure_to_proto(failure),
            )
        )

    async def settled(self, ranks: Sequence[ActorRank]) -> None:
        """Return when each is up or has failed."""
        for rank in ranks:
            if rank.state is RankState.WAITING:
                self.sought(rank)
        await asyncio.gather(*(rank.settled() for rank in ranks))

    async def _seek(self) -> None:
        """Have every rank of the next question placed; none of them waits for the others."""
        left, self._next = set(self._next), []
        try:
            while left:
                places = await self._asked.places(sorted(left))
                found = {place.rank: place for place in places if place.rank in left}
                if not found:
                    raise ConnectionError("it has no such ranks")
                left.difference_update(found)
                for number, place in found.items():
                    _ = self._tasks.start("place", self._placed(self.ranks[number], place))
                if left:
                    await asyncio.sleep(_ASK_PAUSE_S)
        except MeshStopped:
            self._end(left, None)
        except (grpc.RpcError, ConnectionError) as error:
            self._end(left, self._nobody_says(error))
        finally:
            self._seeking.difference_update(left)

    async def _placed(self, rank: ActorRank, found: pb.RankPlace) -> None:
        try:
            await self._place(rank, found)
        finally:
            self._seeking.discard(rank.rank)
        if rank.is_sought:  # by what came after its end
            self.sought(rank)

    def _fail(
        self, rank: ActorRank, failure: MeshFailure, calls: Sequence[PendingCall] = ()
    ) -> None:
        rank.fail(failure, calls)
        for endpoint, sender in rank.take_late_casts():
            self.undelivered(rank, endpoint, sender)

    def _stopped(self, rank: ActorRank) -> None:
        rank.stopped()
        late = rank.take_late_casts()
        if late:
            _log.warning(
                "%d messages were for %s, which was stopped: %s from %s first",
                len(late),
                rank.name,
                *late[0],
            )

    async def _place(self, rank: ActorRank, found: pb.RankPlace) -> None:
        if rank.state is RankState.UP and rank.actor_id == found.actor_id:
            return
        rank.incarnation = found.incarnation
        rank.actor_id = found.actor_id
        if found.HasField("failure"):
            self._fail(rank, failure_from_proto(found.failure))
            return
        if not found.address:  # it was stopped before it was anywhere
            self._stopped(rank)
            return
        place = place_from_proto(found)
        link = self._program.links.to(place)
        try:
            await link.connected()
        except ConnectionError:
            try:
                self._fail(rank, await self._how_ended(rank, found.actor_id, link))
            except MeshStopped:
                self._stopped(rank)
            return
        rank.up(link, found.actor_id, place)

    async def _judge_loss(
        self, rank: ActorRank, actor_id: str, link: Link, calls: list[PendingCall]
    ) -> None:
        try:
            failure = await self._how_ended(rank, actor_id, link)
        except MeshStopped:  # but nobody told those who wait that their calls did not run
            failure = rank.failed_with(self._program.unexplained_end(link))
        if rank.actor_id == actor_id:
            self._fail(rank, failure, calls)
        else:
            rank.end_calls_with(calls, failure)

    async def _how_ended(self, rank: ActorRank, actor_id: str, link: Link) -> MeshFailure:
        """Ask the owner how an actor ended; what is seen from here, where it does not know.

        Raises:
            MeshStopped: the owner has stopped the mesh since.
        """
        end = await self._asked.end_of(actor_id)
        return end or rank.failed_with(self._program.unexplained_end(link))

    def _nobody_says(self, error: Exception) -> MeshFailure:
        """Make the failure of ranks of which nobody says where they are."""
        is_gone = isinstance(error, ConnectionError)
        text = describe(error).message if isinstance(error, grpc.RpcError) else str(error)
        kind = FailureKind.OWNER_GONE if is_gone else FailureKind.GONE
        says = "cannot be asked" if is_gone else "does not say"
        return MeshFailure(
            id=failure_id(self.mesh_id, kind),
            kind=kind,
            mesh_name=self.mesh_name,
            message=f"the owner of {self.mesh_name} {says} where it is: {text}",
            detected_by="connection",
        )

    def _end(self, numbers: Iterable[int], why: MeshFailure | None) -> None:
        """Take ranks that cannot be reached for failed; for stopped without a failure."""
        self._seeking.difference_update(numbers)
        for rank in map(self.ranks.__getitem__, sorted(numbers)):
            if rank.state is RankState.UP:
                continue
            if why is None:
                self._stopped(rank)
            else:
                self._fail(rank, rank.failed_with(why))
