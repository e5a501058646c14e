"""The owner's side of one mesh of actors: bring its ranks up, hear of their ends, stop them.

Decided here: when a rank is up, which incarnation news is of, and what a stop reports. Not decided
here: how a process comes to be (procs), what a failure leads to (`rank_failures`, `respawns`), and
what the owner answers (scope). Invariant: what is heard of an earlier incarnation changes nothing
about the one that is there.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from stagekeeper.actor.connection.link import Link, PendingCall
from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_from_proto, failure_to_proto
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.mesh_tasks import first_of, mesh_tasks
from stagekeeper.actor.owning.proc_places import ProcFailed, ProcPlaces
from stagekeeper.actor.owning.rank_failures import RankFailures
from stagekeeper.actor.owning.rank_stops import RankStops
from stagekeeper.actor.owning.ranks import ActorRank, RankState
from stagekeeper.actor.owning.respawns import Respawns
from stagekeeper.actor.owning.spawn_plan import SpawnPlan, spawn_request
from stagekeeper.actor.owning.stop_budget import StopBudget
from stagekeeper.actor.owning.stop_report import StopReport, Unrun
from stagekeeper.actor.place import place_to_proto
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.wire.error_details import describe

if TYPE_CHECKING:
    from stagekeeper.actor.owning.scope import Scope
    from stagekeeper.actor.program import Program


class ActorMeshControl:
    """One mesh of actors, for its owner. For the loop's thread only."""

    def __init__(self, program: Program, scope: Scope, plan: SpawnPlan, procs: ProcPlaces) -> None:
        self.mesh_id = str(uuid.uuid4())
        self.plan = plan
        self.mesh: Any = None
        """What the owner holds; failures name it."""
        self._program = program
        self._scope = scope
        self._procs = procs
        self.ranks: tuple[ActorRank, ...] = tuple(
            ActorRank(self, rank) for rank in range(procs.size)
        )
        self._tasks = mesh_tasks(f"mesh {plan.name}")
        self._starts: list[asyncio.Task[None]] = []
        self._failures = RankFailures(self._identity, self._tell)
        self._stops = RankStops(program, procs, self._failures)
        bring_up_again = partial(self._bring_up, is_awaited=True)
        self._respawns = Respawns(
            plan, self.ranks, procs, self._failures, self._stops, bring_up_again
        )
        self._stopping: asyncio.Task[StopReport] | None = None
        self._stop_budget = StopBudget(0.0)

    @property
    def mesh_name(self) -> str:
        return self.plan.name

    @property
    def owner(self) -> Scope:
        """Whose it is: nobody else may stop it."""
        return self._scope

    @property
    def is_stopping(self) -> bool:
        """It takes no more messages."""
        return self._stopping is not None

    # --- coming up

    def start(self) -> None:
        """Begin to bring every rank up."""
        for rank in self.ranks:
            start = self._tasks.start(f"start {rank.rank}", self._bring_up(rank, is_awaited=False))
            self._starts.append(start)

    async def _bring_up(self, rank: ActorRank, *, is_awaited: bool) -> None:
        """Bring one incarnation up. Of one that is awaited only whoever awaits it is told."""
        incarnation = rank.incarnation
        actor_id = str(uuid.uuid4())
        identity = self._identity(rank, actor_id)
        try:
            rank.place = place = await self._procs.place(rank.rank)
            link = self._program.links.to(place)
            await link.connected()
            request = spawn_request(
                self.plan,
                identity,
                token=self._program.token,
                session_id=self._program.instance_id,
                instance_id=place.instance_id,
            )
            rank.actor_id = actor_id
            if link.is_silent:  # which only the meshes that were there then were told
                self.process_failed(place.instance_id, self._program.stalled(link))
            response = await link.actors.SpawnActor(request)
        except MeshStopped:  # its processes were, which is no failure
            if incarnation == rank.incarnation:
                rank.stopped()
            return
        except ProcFailed as error:
            failure = rank.failed_with(error.failure)
        except (grpc.RpcError, ConnectionError) as error:
            failure = await self._never_up(rank, identity, error)
        else:
            if incarnation != rank.incarnation or rank.state is not RankState.WAITING:
                if not response.HasField("failure"):
                    await self._stops.end_late(rank, place, actor_id)
                return
            if not response.HasField("failure"):
                rank.up(link, actor_id, place)
                if link.is_broken:  # since the answer came
                    rank.link_broke(link, [])
                return
            failure = failure_from_proto(response.failure)
        if incarnation == rank.incarnation:
            if is_awaited:
                self._failures.owner_knows(rank)
            self._failures.settle(rank, failure)

    async def _never_up(
        self, rank: ActorRank, identity: ActorIdentity, error: grpc.RpcError | ConnectionError
    ) -> MeshFailure:
        if rank.place is not None:
            end = await self._procs.end_of(rank.place.instance_id)
            if end is not None:
                return rank.failed_with(end)
        text = describe(error).message if isinstance(error, grpc.RpcError) else str(error)
        return failure_of(identity, FailureKind.INIT_RAISED, text, detected_by="spawn")

    def _identity(self, rank: ActorRank, actor_id: str) -> ActorIdentity:
        return ActorIdentity(
            actor_id=actor_id,
            mesh_id=self.mesh_id,
            mesh_name=self.plan.name,
            rank=rank.rank,
            size=len(self.ranks),
            incarnation=rank.incarnation,
            owner_path=self._scope.identity.path,
        )

    async def settled(self, ranks: Iterable[ActorRank]) -> None:
        """Return when each is up, failed or stopped."""
        await asyncio.gather(*(rank.settled() for rank in ranks))

    # --- failures

    def expect_end(self) -> None:
        """From now on the end of a rank is asked for, and no failure."""
        self._failures.expect_end()

    def rank_failed(self, rank_number: int, actor_id: str, failure: MeshFailure) -> None:
        """Hear of a failure from the rank's own process."""
        if rank_number >= len(self.ranks):
            return
        rank = self.ranks[rank_number]
        if actor_id == rank.actor_id:
            self._failures.settle(rank, failure)

    def lost(self, rank: ActorRank, link: Link, calls: list[PendingCall]) -> None:
        """The connection to a rank's process broke: find out how it ended, then tell everybody."""
        _ = self._tasks.start("loss", self._judge_loss(rank, rank.incarnation, link, calls))

    async def _judge_loss(
        self, rank: ActorRank, incarnation: int, link: Link, calls: list[PendingCall]
    ) -> None:
        end = await self._procs.end_of(link.place.instance_id)
        if end is None:
            end = self._program.unexplained_end(link)
        failure = rank.failed_with(end)
        if incarnation != rank.incarnation:
            rank.end_calls_with(calls, failure)
        else:
            self._failures.settle(rank, failure, calls)

    def process_failed(self, instance_id: str, end: MeshFailure) -> bool:
        """Hear of a process that is stalled; return whether a rank of this mesh is in it."""
        is_ours = False
        for rank in self.ranks:
            is_there = rank.place is not None and rank.place.instance_id == instance_id
            if is_there and rank.state in (RankState.UP, RankState.WAITING):
                is_ours = True
                self._failures.settle(rank, rank.failed_with(end))
        return is_ours

    def undelivered(self, rank: ActorRank, endpoint: str, sender: str) -> None:
        """A message without an answer was for a rank that has failed."""
        self._failures.undelivered(rank, endpoint, sender)

    def check_thread(self) -> None:
        """Check that the code that asks runs on the loop."""
        self._program.check_thread()

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run `work` in the loop's thread."""
        self._program.on_loop(work)

    def sought(self, rank: ActorRank) -> None:
        """A call waits for a rank: it is being brought up already."""

    def _tell(self, failure: MeshFailure) -> None:
        self._scope.deliver(failure.attached(self.mesh, self.respawn))

    async def respawn(self, failure: MeshFailure) -> None:
        """Put new actors where these failed; see `MeshFailure.respawn`."""
        self._program.check_thread()
        await self._respawns.respawn(failure)

    # --- for others

    def holds(self, instance_id: str) -> bool:
        """Return whether a rank that has not ended is, or is about to be, in a process."""
        return any(
            self._procs.instance_id_of(rank.rank) == instance_id
            and rank.state is not RankState.STOPPED
            for rank in self.ranks
        )

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        """Return how one actor ended; waits a moment for the news of it."""
        return await self._failures.known_ends.of(ended_id)

    async def places(self, ranks: Sequence[int] = ()) -> list[pb.RankPlace]:
        """Return where ranks are: of all once each is up or has failed, of `ranks` once one is."""
        asked = [self.ranks[number] for number in ranks if number < len(self.ranks)]
        if not any(rank.is_settled for rank in asked):
            await first_of([rank.settled() for rank in asked])
        while not ranks and not all(rank.is_settled for rank in self.ranks):
            await self.settled(self.ranks)  # one may be respawned while another comes up
        found = []
        for rank in asked if ranks else self.ranks:
            if not rank.is_settled:
                continue
            if rank.place is None:
                place = pb.RankPlace(rank=rank.rank, incarnation=rank.incarnation)
            else:
                place = place_to_proto(
                    rank.place,
                    rank=rank.rank,
                    actor_id=rank.actor_id,
                    incarnation=rank.incarnation,
                )
            if rank.failure is not None:
                place.failure.CopyFrom(failure_to_proto(rank.failure))
            found.append(place)
        return found

    async def replace_ended(self, instance_ids: list[str], *, kills: bool = False) -> None:
        """A mesh of actors has no processes to replace."""

    # --- stop

    async def stop(self, budget_s: float, failure: MeshFailure | None = None) -> StopReport:
        """Stop every rank; a second call joins, and hurries the first when it gives less time."""
        self.expect_end()
        if self._stopping is None:
            self._stop_budget = StopBudget(budget_s)
            self._stopping = asyncio.create_task(
                self._stop(self._stop_budget, failure), name=f"stop {self.plan.name}"
            )
        else:
            self._stop_budget.shorten(budget_s)
        return await asyncio.shield(self._stopping)

    async def stop_for_owner(
        self, budget_s: float, failure: MeshFailure | None
    ) -> list[MeshFailure]:
        return (await self.stop(budget_s, failure)).cleanup

    async def _stop(self, budget: StopBudget, failure: MeshFailure | None) -> StopReport:
        report = StopReport(name=self.mesh_name)
        answers = await asyncio.gather(
            *(self._stops.stop(rank, budget, failure) for rank in self.ranks)
        )
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer is not None:
                report.cleanup += self._stops.heard(rank, answer)
                report.unrun += [
                    Unrun(rank.rank, it.endpoint, it.sender, it.had_begun) for it in answer.unrun
                ]
            if answer is not None and answer.is_stuck:
                report.stuck.append(rank.rank)
            elif rank.failure is not None:
                report.dead[rank.rank] = rank.failure
            elif answer is not None or rank.state is RankState.STOPPED:  # with its processes
                report.clean.append(rank.rank)
            else:
                report.unreachable.append(rank.rank)
                if rank.place is not None and rank.state is RankState.UP:
                    ending = self._stops.end_late(rank, rank.place, rank.actor_id)
                    late = self._tasks.start(f"late end of {rank.rank}", ending)
                    late.add_done_callback(lambda _: self._program.forget(self.mesh_id))
            rank.stopped([] if answer is not None else rank.withdraw())
            report.unrun += [Unrun(rank.rank, *it, False) for it in rank.take_late_casts()]
        for rank, start in zip(self.ranks, self._starts, strict=False):
            if not rank.actor_id:  # else it ends what it is about to bring up
                start.cancel()
        self._scope.remove(self)
        if not report.unreachable:  # else there may be news yet
            self._program.forget(self.mesh_id)
        return report
