"""The owner's side of one mesh of actors: bring its ranks up, hear of their ends, respawn, stop.

Decided here: that a rank's end is told to the owner once per incarnation, after its callers; what
a respawn replaces; and what a stop reports. Not decided here: how a process comes to be (procs)
and what the owner answers (scope). Invariant: after `expect_end` no end of a rank is a failure.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from stagekeeper.actor.connection.link import Link, PendingCall
from stagekeeper.actor.errors import Died, MeshError, MeshStopped
from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_from_proto, failure_to_proto
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.known_ends import KnownEnds
from stagekeeper.actor.owning.proc_places import ProcFailed
from stagekeeper.actor.owning.rank_stops import GONE, RankStops
from stagekeeper.actor.owning.ranks import ActorRank, RankState
from stagekeeper.actor.owning.spawn_plan import SpawnPlan, spawn_request
from stagekeeper.actor.owning.stop_budget import StopBudget
from stagekeeper.actor.owning.stop_report import StopReport, Unrun
from stagekeeper.actor.place import Place, place_to_proto
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.wire.error_details import describe

if TYPE_CHECKING:
    from stagekeeper.actor.owning.proc_places import ProcPlaces
    from stagekeeper.actor.owning.scope import Scope
    from stagekeeper.actor.program import Program

_log = logging.getLogger("stagekeeper.actor")

_NEVER_ASKED = (
    FailureKind.BROADCAST_RAISED,
    FailureKind.UNHANDLED,
    FailureKind.SUPERVISE_RAISED,
)
"""What a stop does not ask for: errors that nobody else is told of."""


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
        self._is_expecting_end = False
        self._stopping: asyncio.Task[StopReport] | None = None
        self._stop_budget = StopBudget(0.0)
        self.ranks: tuple[ActorRank, ...] = tuple(
            ActorRank(self, rank) for rank in range(procs.size)
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: list[asyncio.Task[None]] = []
        self._ends = KnownEnds()
        self._stops = RankStops(program)
        self._respawns = asyncio.Lock()

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
            self._starts.append(self._keep(self._bring_up(rank, is_awaited=False)))

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
                    await self._end_late(rank, place, actor_id)
                return
            if not response.HasField("failure"):
                rank.up(link, actor_id, place)
                if link.is_broken:  # since the answer came
                    rank.link_broke(link, [])
                return
            failure = failure_from_proto(response.failure)
        if incarnation == rank.incarnation:
            rank.is_told = rank.is_told or is_awaited
            self._failed(rank, failure)

    async def _end_late(self, rank: ActorRank, place: Place, actor_id: str) -> None:
        """End an actor of a stopped mesh that came up after it, or did not answer it."""
        answer = await self._stops.end_late(place, actor_id)
        for problem in self._heard_at_end(rank, answer):
            _log.warning("%s ended late: %s", rank.name, problem.summary)

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
        self._is_expecting_end = True

    def _is_asked_to_end(self) -> bool:
        return self._is_expecting_end

    def rank_failed(self, rank_number: int, actor_id: str, failure: MeshFailure) -> None:
        """Hear of a failure from the rank's own process."""
        if rank_number >= len(self.ranks):
            return
        rank = self.ranks[rank_number]
        if actor_id == rank.actor_id:
            self._failed(rank, failure)

    def lost(self, rank: ActorRank, link: Link, calls: list[PendingCall]) -> None:
        """The connection to a rank's process broke: find out how it ended, then tell everybody."""
        _ = self._keep(self._judge_loss(rank, rank.incarnation, link, calls))

    async def _judge_loss(
        self, rank: ActorRank, incarnation: int, link: Link, calls: list[PendingCall]
    ) -> None:
        end = await self._procs.end_of(link.place.instance_id)
        if end is None:
            end = self._program.unexplained_end(link)
        failure = rank.failed_with(end)
        if incarnation != rank.incarnation:
            rank.end_calls_with(calls, failure)
            return
        if rank.failure is not None:
            rank.end_calls(calls)
            return
        self._failed(rank, failure, calls)

    def process_failed(self, instance_id: str, end: MeshFailure) -> bool:
        """Hear of a process that is stalled; return whether a rank of this mesh is in it."""
        is_ours = False
        for rank in self.ranks:
            is_there = rank.place is not None and rank.place.instance_id == instance_id
            if is_there and rank.state in (RankState.UP, RankState.WAITING):
                is_ours = True
                self._failed(rank, rank.failed_with(end))
        return is_ours

    def holds(self, instance_id: str) -> bool:
        """Return whether a rank that has not ended is, or is about to be, in a process."""
        return any(
            self._procs.instance_id_of(rank.rank) == instance_id
            and rank.state is not RankState.STOPPED
            for rank in self.ranks
        )

    def undelivered(self, rank: ActorRank, endpoint: str, sender: str) -> None:
        """A message without an answer was for a rank that has failed."""
        if rank.is_undelivered_told or self._is_expecting_end:
            _log.warning("%s from %s was for %s, which has failed", endpoint, sender, rank.name)
            return
        identity = self._identity(rank, rank.actor_id)
        failure = failure_of(
            identity,
            FailureKind.UNDELIVERABLE,
            f"{endpoint} from {sender} was for {rank.name}, which has failed",
            endpoint=endpoint,
            sender=sender,
        )
        if rank.failure is not None:
            failure = replace(failure, causes=(*rank.failure.causes, rank.failure))
        self._failed(rank, failure)

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run `work` in the loop's thread."""
        self._program.on_loop(work)

    def sought(self, rank: ActorRank) -> None:
        """A call waits for a rank: it is being brought up already."""

    def _failed(
        self, rank: ActorRank, failure: MeshFailure, calls: Sequence[PendingCall] = ()
    ) -> None:
        """Settle a rank's failure: callers first, then the owner, once."""
        if failure.kind is FailureKind.UNDELIVERABLE:
            if not rank.is_undelivered_told and not self._is_expecting_end:
                rank.is_undelivered_told = True
                self._tell(failure)
            return
        if failure.kind is FailureKind.CLEANUP_RAISED:
            self._tell(failure)
            return
        if failure.kind is FailureKind.STALLED:  # no end: the rank may go on, or end later
            if not (rank.is_stall_told or rank.is_told or self._is_expecting_end):
                rank.is_stall_told = True
                self._tell(failure)
            return
        if rank.failure is not None:
            rank.end_calls(list(calls))
            return
        rank.fail(failure, list(calls))
        self._ends.add(rank.actor_id, failure)
        is_asked = self._is_expecting_end and failure.kind not in _NEVER_ASKED
        if not (rank.is_told or is_asked):
            rank.is_told = True
            self._tell(failure)
        for endpoint, sender in rank.take_late_casts():
            self.undelivered(rank, endpoint, sender)

    def _tell(self, failure: MeshFailure) -> None:
        self._scope.deliver(failure.attached(self.mesh, self.respawn))

    # --- respawn

    async def respawn(self, failure: MeshFailure) -> None:
        """Put new actors where these failed; see `MeshFailure.respawn`.

        It goes on when whoever awaits it is cut off; the owner is then told of what fails.
        """
        work = self._keep(self._respawn(failure))
        try:
            failed = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(self._tell_unawaited)
            raise
        if failed:
            problems = {rank: Died(of, rank=rank) for rank, of in failed.items()}
            raise MeshError(f"{self.plan.name} was not respawned", problems, {})
        is_over = any(self.ranks[number].state is RankState.STOPPED for number in failure.ranks)
        if is_over and not self._is_expecting_end:
            raise MeshStopped(f"{self.plan.name} was not respawned: its processes were stopped")

    def _tell_unawaited(self, respawn: asyncio.Task[dict[int, MeshFailure]]) -> None:
        if respawn.cancelled() or respawn.exception() is not None or self._is_expecting_end:
            return
        for failure in respawn.result().values():
            self._tell(failure)

    async def _respawn(self, failure: MeshFailure) -> dict[int, MeshFailure]:
        """Return the failures of those that did not come up, by rank."""
        async with self._respawns:
            failed = [
                self.ranks[number]
                for number, incarnation in zip(failure.ranks, failure.incarnations, strict=True)
                if self.ranks[number].incarnation == incarnation
            ]
            if not failed or self._is_asked_to_end():
                return {}
            ranks = list(self.ranks) if self.plan.is_group else failed
            stalled = failed if failure.kind is FailureKind.STALLED else []
            await self._end_old(ranks, stalled, failure)
            if self._is_asked_to_end():  # since then
                return {}
            ended = [rank.place.instance_id for rank in ranks if rank.place is not None]
            ended += [it.failure.instance_id for it in ranks if it.failure and not it.place]
            for rank in ranks:
                rank.renew()
            try:
                await self._procs.replace_ended(ended)
            except (grpc.RpcError, ConnectionError):
                pass  # their owner cannot be asked: each rank finds that out, and is told of
            if self._is_asked_to_end():
                for rank in ranks:
                    rank.stopped()
                return {}
            await asyncio.gather(*(self._bring_up(rank, is_awaited=True) for rank in ranks))
            for rank in ranks:
                rank.is_told = rank.state is RankState.FAILED
            return {rank.rank: rank.failure for rank in ranks if rank.failure is not None}

    async def _end_old(
        self, ranks: list[ActorRank], stalled: list[ActorRank], failure: MeshFailure
    ) -> None:
        """Make sure that nothing of the old incarnations goes on."""
        for rank in stalled:
            rank.is_told = True
            if rank.failure is None:
                # First, so that its callers hear of what its owner was told of, not of the kill.
                self._ends.add(rank.actor_id, failure)
                rank.fail(failure, rank.withdraw())
            if rank.place is not None:
                await self._procs.kill(rank.place.instance_id)
        others = [rank for rank in ranks if rank not in stalled]
        for rank in others:
            rank.is_told = True
        answers = await asyncio.gather(*(self._let_go(rank) for rank in others))
        stuck = set[str]()
        for rank, answer in zip(others, answers, strict=True):
            if answer is None:
                continue
            if answer.is_stuck and rank.place is not None:
                _log.warning("code of %s cannot be ended but with its process", rank.name)
                stuck.add(rank.place.instance_id)
            for problem in self._heard_at_end(rank, answer):
                _log.warning("%s was replaced: %s", rank.name, problem.summary)
        await asyncio.gather(*map(self._procs.kill, stuck))

    async def _let_go(self, rank: ActorRank) -> pb.StopActorResponse | None:
        """Stop a rank, or wait for the end of one that has failed; None: no answer."""
        if rank.state is RankState.UP:
            return await self._stop_rank(rank, StopBudget(0.0), None)
        return None if rank.place is None else await self._stops.end_of_failed(rank, rank.place)

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
            *(self._settle_and_stop(rank, budget, failure) for rank in self.ranks)
        )
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer is not None:
                (report.stuck if answer.is_stuck else report.clean).append(rank.rank)
                report.unrun += [
                    Unrun(rank.rank, it.endpoint, it.sender, it.had_begun) for it in answer.unrun
                ]
                report.cleanup += self._heard_at_end(rank, answer)
            elif rank.failure is not None:
                report.dead[rank.rank] = rank.failure
            elif rank.state is RankState.STOPPED:  # with its processes
                report.clean.append(rank.rank)
            else:
                report.unreachable.append(rank.rank)
                if rank.place is not None and rank.state is RankState.UP:
                    late = self._keep(self._end_late(rank, rank.place, rank.actor_id))
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

    def _heard_at_end(self, rank: ActorRank, answer: pb.StopActorResponse) -> list[MeshFailure]:
        """Tell the owner of what nobody handled in a rank; return the errors of its cleanup."""
        if not answer.HasField("cleanup_failure"):
            return []
        failure = failure_from_proto(answer.cleanup_failure)
        if failure.kind is FailureKind.CLEANUP_RAISED:
            return [failure]
        rank.is_told = False  # of its end, which was asked for; not of this
        self._failed(rank, failure)
        return []

    async def _settle_and_stop(
        self, rank: ActorRank, budget: StopBudget, failure: MeshFailure | None
    ) -> pb.StopActorResponse | None:
        if rank.state is RankState.WAITING:
            await budget.spend(partial(self._stops.settle, rank))
        return await self._stop_rank(rank, budget, failure)

    async def _stop_rank(
        self, rank: ActorRank, budget: StopBudget, failure: MeshFailure | None
    ) -> pb.StopActorResponse | None:
        """Stop one rank; None when it had failed, or does not answer in time."""
        place = rank.place
        if place is None or rank.state is not RankState.UP:
            return None
        answer = await budget.spend(
            lambda left_s: self._stops.stop(rank, place, left_s, failure),
        )
        if answer is GONE:
            # Its process is gone, and the news of how it ended is on the way.
            end = await self._procs.end_of(place.instance_id)
            if end is not None and rank.failure is None:
                self._failed(rank, rank.failed_with(end))
            return None
        return answer

    async def end_of(self, ended_id: str) -> MeshFailure | None:
        """Return how one actor ended; waits a moment for the news of it."""
        return await self._ends.of(ended_id)

    async def places(self) -> list[pb.RankPlace]:
        """Return where the ranks are, once each is up or has failed."""
        await self.settled(self.ranks)
        found = []
        for rank in self.ranks:
            if rank.place is None:
                place = pb.RankPlace(incarnation=rank.incarnation)
            else:
                place = place_to_proto(
                    rank.place, actor_id=rank.actor_id, incarnation=rank.incarnation
                )
            if rank.failure is not None:
                place.failure.CopyFrom(failure_to_proto(rank.failure))
            found.append(place)
        return found

    async def replace_ended(self, instance_ids: list[str], *, kills: bool = False) -> None:
        """A mesh of actors has no processes to replace."""

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work, name=f"mesh {self.plan.name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
