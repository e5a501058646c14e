"""Asking the process of a rank to stop it: how long its answer is waited for, and what it says.

Decided here: what becomes of an answer, and of none. Not decided here: what is stopped together,
and what the owner is told of (`rank_failures`). Invariant: no rank is waited for longer than its
budget and a moment, whatever its process does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc

from stagekeeper.actor.connection.fence import all_taken
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_from_proto, failure_to_proto
from stagekeeper.actor.owning.proc_places import ProcPlaces
from stagekeeper.actor.owning.rank_failures import RankFailures
from stagekeeper.actor.owning.ranks import ActorRank, RankState
from stagekeeper.actor.owning.stop_budget import StopBudget
from stagekeeper.actor.place import Place
from stagekeeper.v1 import actor_service_pb2 as pb

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

_log = logging.getLogger("stagekeeper.actor")

_LEAST_TAKEN_S: Final = 0.25
"""For messages that are on their way when nothing is to run any more: so that they are named."""

_GRACE_S: Final = 1.5
"""What an answer may take beyond the budget: a second for `__cleanup__`, and the way."""

_GONE: Final = pb.StopActorResponse()
"""Stands for the answer of a process that cannot give one any more."""


class RankStops:
    """Stops ranks of one mesh. For the loop's thread only."""

    def __init__(self, program: Program, procs: ProcPlaces, failures: RankFailures) -> None:
        self._program = program
        self._procs = procs
        self._failures = failures

    async def stop(
        self, rank: ActorRank, budget: StopBudget, failure: MeshFailure | None
    ) -> pb.StopActorResponse | None:
        """Stop a rank, also one that is on its way: it is waited for, but not for ever.

        Args:
            failure: why, when nobody asked for it.

        Returns:
            Its answer; None when it has failed, or does not answer in time.
        """
        if rank.state is RankState.WAITING:
            await budget.spend(partial(self._settled, rank))
        place = rank.place
        if place is None or rank.state is not RankState.UP:
            return None
        answer = await budget.spend(lambda left_s: self._ask(rank, place, left_s, failure))
        if answer is not _GONE:
            return answer
        # The news of how its process ended is on the way.
        end = await self._procs.end_of(place.instance_id)
        if end is not None and rank.failure is None:
            self._failures.settle(rank, rank.failed_with(end))
        return None

    async def let_go(self, rank: ActorRank) -> pb.StopActorResponse | None:
        """Stop a rank at once, or wait for the end of one that has failed; None: no answer."""
        if rank.state is RankState.UP:
            return await self.stop(rank, StopBudget(0.0), None)
        if rank.place is None or not rank.actor_id:  # no actor of it was begun there
            return None
        return await self._end_of_failed(rank, rank.place)

    def is_silent(self, place: Place) -> bool:
        """Return whether a process that may be there gave no sign of life for the lease."""
        link = self._program.links.existing(place.instance_id)
        return link is not None and link.is_silent

    async def end_late(self, rank: ActorRank, place: Place, actor_id: str) -> None:
        """End an actor for which nobody waits: it came up late, or did not answer in time.

        Returns when its process answers, or has ended.
        """
        link = self._program.links.existing(place.instance_id)
        if link is None:
            return
        try:
            answer = await link.actors.StopActor(self._request(place, actor_id, 0.0))
        except (grpc.RpcError, ConnectionError):
            return
        if rank.actor_id == actor_id:
            problems = self.heard(rank, answer)
        else:  # what is said of an earlier life is nothing of the one that is there
            said = answer.HasField("cleanup_failure")
            problems = [failure_from_proto(answer.cleanup_failure)] if said else []
        for problem in problems:
            _log.warning("%s ended late: %s", rank.name, problem.summary)

    def heard(self, rank: ActorRank, answer: pb.StopActorResponse) -> list[MeshFailure]:
        """Tell the owner of what nobody handled in a rank; return the errors of its cleanup."""
        if not answer.HasField("cleanup_failure"):
            return []
        failure = failure_from_proto(answer.cleanup_failure)
        if failure.kind is FailureKind.CLEANUP_RAISED:
            return [failure]
        self._failures.settle(rank, failure)
        return []

    async def _settled(self, rank: ActorRank, budget_s: float) -> None:
        try:
            await asyncio.wait_for(rank.settled(), budget_s + _GRACE_S)
        except TimeoutError:
            pass

    async def _ask(
        self, rank: ActorRank, place: Place, budget_s: float, failure: MeshFailure | None
    ) -> pb.StopActorResponse | None:
        """Stop a rank that is up. _GONE when its process is; None: no answer in time."""
        link = self._program.links.existing(place.instance_id)
        if link is None:
            return _GONE
        stop_at = time.monotonic() + budget_s
        # Who was silent for a whole lease is not waited for like one who works.
        if not link.is_silent:
            await all_taken(link, max(budget_s, _LEAST_TAKEN_S))
        left_s = max(0.0, stop_at - time.monotonic())
        request = self._request(place, rank.actor_id, left_s)
        if failure is not None:
            request.failure.CopyFrom(failure_to_proto(failure))
        answers_in_s = 0.0 if link.is_silent else left_s
        try:
            answer: pb.StopActorResponse = await link.actors.StopActor(
                request, timeout=answers_in_s + _GRACE_S
            )
        except grpc.RpcError as error:
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else _GONE
        except ConnectionError:
            return _GONE
        return answer

    async def _end_of_failed(self, rank: ActorRank, place: Place) -> pb.StopActorResponse | None:
        """Wait for the end of a rank that has failed; None when nobody can say."""
        link = self._program.links.existing(place.instance_id)
        if link is None or link.is_silent:
            return None
        request = self._request(place, rank.actor_id, 0.0)
        try:
            answer: pb.StopActorResponse = await link.actors.StopActor(request, timeout=_GRACE_S)
        except (grpc.RpcError, ConnectionError):
            return None  # its process has ended, or its cleanup takes long
        return answer

    def _request(self, place: Place, actor_id: str, budget_s: float) -> pb.StopActorRequest:
        return pb.StopActorRequest(
            token=self._program.token,
            instance_id=place.instance_id,
            actor_id=actor_id,
            budget_s=budget_s,
        )
