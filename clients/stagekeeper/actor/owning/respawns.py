"""New actors in the places of those that failed.

Decided here: which ranks are replaced, and in which order: the old ones end, then their processes
are replaced, then new ones come up. Not decided here: how an actor or a process comes up.
Invariant: a rank's next incarnation begins when nothing of the one before it goes on; one that
does not come up is told of once, to who awaits the respawn or else to the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from stagekeeper.actor.errors import Died, MeshError, MeshStopped
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.owning.mesh_tasks import mesh_tasks
from stagekeeper.actor.owning.proc_places import ProcPlaces
from stagekeeper.actor.owning.rank_failures import RankFailures
from stagekeeper.actor.owning.rank_stops import RankStops
from stagekeeper.actor.owning.ranks import ActorRank, RankState
from stagekeeper.actor.owning.spawn_plan import SpawnPlan

_log = logging.getLogger("stagekeeper.actor")


class Respawns:
    """Those of one mesh, one after the other. For the loop's thread only.

    Args:
        procs: where its ranks are.
        bring_up: starts the incarnation that a rank is at; settles what goes wrong.
    """

    def __init__(
        self,
        plan: SpawnPlan,
        ranks: Sequence[ActorRank],
        procs: ProcPlaces,
        failures: RankFailures,
        stops: RankStops,
        bring_up: Callable[[ActorRank], Awaitable[None]],
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._procs = procs
        self._failures = failures
        self._stops = stops
        self._bring_up = bring_up
        self._not_back: dict[int, set[int]] = {}
        """By rank, the lives since the last good one: those that a respawn was to follow."""
        self._turn = asyncio.Lock()
        self._tasks = mesh_tasks(f"respawn {plan.name}")

    async def respawn(self, failure: MeshFailure) -> None:
        """Put new actors where these failed; see `MeshFailure.respawn`.

        It goes on when whoever awaits it is cut off; the owner is then told of what fails.
        """
        work = self._tasks.start("work", self._respawn(failure))
        try:
            failed = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(self._tell_unawaited)
            raise
        if failed:
            problems = {rank: Died(of, rank=rank) for rank, of in failed.items()}
            raise MeshError(f"{self._plan.name} was not respawned", problems, {})
        is_over = any(self._ranks[number].state is RankState.STOPPED for number in failure.ranks)
        if is_over and not self._failures.expects_end():
            raise MeshStopped(f"{self._plan.name} was not respawned: its processes were stopped")

    def _tell_unawaited(self, respawn: asyncio.Task[dict[int, MeshFailure]]) -> None:
        if respawn.cancelled() or respawn.exception() is not None or self._failures.expects_end():
            return
        for failure in respawn.result().values():
            self._failures.tell(failure)

    async def _respawn(self, failure: MeshFailure) -> dict[int, MeshFailure]:
        """Return the failures of those that did not come up, by rank."""
        async with self._turn:
            failed = [
                self._ranks[number]
                for number, incarnation in zip(failure.ranks, failure.incarnations, strict=True)
                if self._is_due(self._ranks[number], incarnation)
            ]
            if not failed or self._failures.expects_end():
                return {}
            ranks = list(self._ranks) if self._plan.is_group else failed
            stalled = failed if failure.kind is FailureKind.STALLED else []
            await self._end_old(ranks, stalled, failure)
            if self._failures.expects_end():  # since then
                return {}
            ended = [rank.place.instance_id for rank in ranks if rank.place is not None]
            ended += [it.failure.instance_id for it in ranks if it.failure and not it.place]
            for rank in ranks:
                rank.renew()
            try:
                await self._procs.replace_ended(ended)
            except (grpc.RpcError, ConnectionError):
                pass  # their owner cannot be asked: each rank finds that out, and is told of
            if self._failures.expects_end():
                for rank in ranks:
                    rank.stopped()
                return {}
            await asyncio.gather(*map(self._bring_up, ranks))
            for rank in ranks:
                if rank.failure is None:
                    self._not_back.pop(rank.rank, None)
                else:
                    self._not_back.setdefault(rank.rank, set()).add(rank.incarnation - 1)
            return {rank.rank: rank.failure for rank in ranks if rank.failure is not None}

    async def _out_of_reach(self, rank: ActorRank) -> str:
        """Return the process of a rank, if it is silent or was lost with its connection; else "".

        It may be frozen, and then no actor comes up in it.
        """
        if rank.place is None:
            return ""
        is_lost = rank.failure is not None and rank.failure.kind is FailureKind.GONE
        if not (is_lost or self._stops.is_silent(rank.place)):
            return ""
        if await self._procs.end_of(rank.place.instance_id) is not None:
            return ""
        _log.warning("the process of %s is out of reach, and is replaced", rank.name)
        return rank.place.instance_id

    def _is_due(self, rank: ActorRank, incarnation: int) -> bool:
        """Return whether this life of a rank is its last, or no respawn since brought it back."""
        if rank.incarnation == incarnation:
            return True
        is_down = rank.state is RankState.FAILED
        return is_down and incarnation in self._not_back.get(rank.rank, ())

    async def _end_old(
        self, ranks: list[ActorRank], stalled: list[ActorRank], failure: MeshFailure
    ) -> None:
        """Make sure that nothing of the old incarnations goes on."""
        for rank in stalled:
            self._failures.owner_knows(rank)
            if rank.failure is None:
                # First, so that its callers hear of what its owner was told of, not of the kill.
                self._failures.end(rank, failure, rank.withdraw())
            if rank.place is not None:
                await self._procs.kill(rank.place.instance_id)
        others = [rank for rank in ranks if rank not in stalled]
        for rank in others:
            self._failures.owner_knows(rank)
        answers = await asyncio.gather(*map(self._stops.let_go, others))
        lost = await asyncio.gather(*map(self._out_of_reach, others))
        stuck = {instance_id for instance_id in lost if instance_id}
        for rank, answer in zip(others, answers, strict=True):
            if answer is None:
                continue
            if answer.is_stuck and rank.place is not None:
                _log.warning("code of %s cannot be ended but with its process", rank.name)
                stuck.add(rank.place.instance_id)
            for problem in self._stops.heard(rank, answer):
                _log.warning("%s was replaced: %s", rank.name, problem.summary)
        await asyncio.gather(*map(self._procs.kill, stuck))
