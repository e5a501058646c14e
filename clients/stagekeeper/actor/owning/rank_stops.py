"""Asking the process of a rank to stop it, and how long its answer is waited for.

Invariant: no rank is waited for longer than its budget and a moment, whatever its process does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import grpc

from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.owning.ranks import ActorRank
from stagekeeper.actor.place import Place
from stagekeeper.v1 import actor_service_pb2 as pb

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

GRACE_S: Final = 1.5
"""What an answer may take beyond the budget: a second for `__cleanup__`, and the way."""

GONE: Final = pb.StopActorResponse()
"""Stands for the answer of a process that cannot give one any more."""


class RankStops:
    """Stops ranks of one mesh. For the loop's thread only."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def settle(self, rank: ActorRank, budget_s: float) -> None:
        """Wait for a rank that is on its way, so that it can be stopped; but not for ever."""
        try:
            await asyncio.wait_for(rank.settled(), budget_s + GRACE_S)
        except TimeoutError:
            pass

    async def stop(
        self, rank: ActorRank, place: Place, budget_s: float, failure: MeshFailure | None
    ) -> pb.StopActorResponse | None:
        """Stop a rank that is up. GONE when its process is; None when it does not answer in time.

        Args:
            failure: why, when nobody asked for it.
        """
        request = self._request(place, rank.actor_id, budget_s)
        if failure is not None:
            request.failure.CopyFrom(failure_to_proto(failure))
        link = self._program.links.existing(place.instance_id)
        if link is None:
            return GONE
        # Who was silent for a whole lease is not waited for like one who works.
        answers_in_s = 0.0 if link.is_silent else budget_s
        try:
            answer: pb.StopActorResponse = await link.actors.StopActor(
                request, timeout=answers_in_s + GRACE_S
            )
        except grpc.RpcError as error:
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else GONE
        except ConnectionError:
            return GONE
        return answer

    async def end_of_failed(self, rank: ActorRank, place: Place) -> pb.StopActorResponse | None:
        """Wait for the end of a rank that has failed; None when nobody can say."""
        link = self._program.links.existing(place.instance_id)
        if link is None or link.is_silent:
            return None
        request = self._request(place, rank.actor_id, 0.0)
        try:
            answer: pb.StopActorResponse = await link.actors.StopActor(request, timeout=GRACE_S)
        except (grpc.RpcError, ConnectionError):
            return None  # its process has ended, or its cleanup takes long
        return answer

    async def end_late(self, place: Place, actor_id: str) -> pb.StopActorResponse:
        """Stop an actor for which nobody waits; whenever its process answers, or has ended."""
        link = self._program.links.existing(place.instance_id)
        if link is None:
            return GONE
        try:
            answer: pb.StopActorResponse = await link.actors.StopActor(
                self._request(place, actor_id, 0.0)
            )
        except (grpc.RpcError, ConnectionError):
            return GONE
        return answer

    def _request(self, place: Place, actor_id: str, budget_s: float) -> pb.StopActorRequest:
        return pb.StopActorRequest(
            token=self._program.token,
            instance_id=place.instance_id,
            actor_id=actor_id,
            budget_s=budget_s,
        )
