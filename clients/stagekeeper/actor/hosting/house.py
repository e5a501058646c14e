"""All actors of this process, by their ids, and the sessions that own them.

Decided here: which actor a message is for, what one is told that is gone, and that actors end
with their session. Invariant: an actor that ended is remembered, so that what comes late for it
is answered by what ended it and not by "unknown".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_from_proto, failure_to_proto
from stagekeeper.actor.hosting.ended_actor import EndedActor
from stagekeeper.actor.hosting.hosted_actor import (
    DEFAULT_MAX_IN_FLIGHT,
    LEAST_CLEANUP_S,
    HostedActor,
)
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.owner_news import tell_undelivered
from stagekeeper.actor.hosting.sessions import Session
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.scope import DEFAULT_STOP_BUDGET_S, Scope
from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb

_log = logging.getLogger("stagekeeper.actor")

_MOST_REMEMBERED: Final = 10_000


class House:
    """The actors of one process. For the loop's thread only.

    Args:
        refuse_class: says why an entrypoint is not allowed here; "" when it is.
    """

    def __init__(self, *, refuse_class: Callable[[str], str]) -> None:
        self._refuse_class = refuse_class
        self._actors: dict[str, HostedActor] = {}
        self._owners: dict[str, str] = {}
        self._ended: OrderedDict[str, EndedActor] = OrderedDict()
        self._stuck: list[EndedActor] = []
        self._sessions: dict[str, Session] = {}
        self._ends: set[asyncio.Task[object]] = set()
        self.is_closing = False
        self.on_exit: Callable[[BaseException], None] = lambda _: None
        """Called when the code of an actor wants the whole process to end."""
        self.on_deserted: Callable[[], None] = lambda: None
        """Called when the last session is over, and it was of another host."""

    # --- sessions

    @property
    def session_count(self) -> int:
        """Of those whose connection may come back, with those that have one."""
        return len(self._sessions)

    def session(self, hello: pb.Hello, own_boot_id: str) -> Session:
        """Return the session of a process that says hello; make it where there is none.

        One without a name owns nothing, and is not kept.
        """
        is_same_host = hello.boot_id == own_boot_id
        session = self._sessions.get(hello.session_id)
        if session is None or session.is_over:
            session = Session(
                hello.session_id,
                lease_s=hello.lease_s,
                # Of one without a name nothing has to be kept for its return.
                is_same_host=is_same_host or not hello.session_id,
                on_over=self._session_over,
            )
            if not hello.session_id:
                return session
            self._sessions[hello.session_id] = session
        return session

    def known_session(self, session_id: str) -> Session | None:
        """Return a session that is not over."""
        return self._sessions.get(session_id)

    def others_count(self, session_id: str) -> int:
        """Count the actors that other sessions than this one own."""
        return sum(owner != session_id for owner in self._owners.values())

    def look(self, now: float, stalled_s: float) -> None:
        """Look after silences and stalls; called several times a lease."""
        for session in list(self._sessions.values()):
            if stalled_s:
                session.forgive(stalled_s)
            session.look(now)
        for actor in list(self._actors.values()):
            if stalled_s:
                actor.forgive(stalled_s)
            actor.look(now)
        self._stuck = [ended for ended in self._stuck if ended.look()]

    def _session_over(self, session: Session) -> None:
        if self._sessions.pop(session.session_id, None) is None:
            return
        for actor_id, owner in list(self._owners.items()):
            if owner == session.session_id and actor_id in self._actors:
                actor = self._actors[actor_id]
                failure = failure_of(
                    actor.identity,
                    FailureKind.OWNER_GONE,
                    f"the owner of {actor.identity.name} is gone",
                    detected_by="connection",
                )
                _log.info("%s ends: its owner is gone", actor.identity.name)
                self._keep(asyncio.create_task(actor.stop(0.0, failure), name="owner gone"))
        if not self._sessions and not session.is_same_host:
            self.on_deserted()

    def _keep(self, task: asyncio.Task[object]) -> None:
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    # --- actors

    @property
    def actor_count(self) -> int:
        """Those that have not ended."""
        return len(self._actors)

    def knows(self, actor_id: str) -> bool:
        """Return whether it is here, or was."""
        return actor_id in self._actors or actor_id in self._ended

    async def spawn(
        self, request: actor_pb.SpawnActorRequest, session: Session
    ) -> MeshFailure | None:
        """Make an actor; return what went wrong in `__init__`. A repeat joins."""
        ended = self._ended.get(request.actor_id)
        if ended is not None:
            return ended.start_failure
        actor = self._actors.get(request.actor_id)
        if actor is None:
            identity = ActorIdentity(
                actor_id=request.actor_id,
                mesh_id=request.mesh_id,
                mesh_name=request.mesh_name,
                rank=request.rank,
                size=request.size,
                incarnation=request.incarnation,
                owner_path=tuple(request.owner_path),
            )
            actor = HostedActor(
                identity,
                Scope(identity, stop_budget_s=DEFAULT_STOP_BUDGET_S),
                session,
                stall_after_s=request.stall_after_s,
                max_in_flight=request.max_in_flight or DEFAULT_MAX_IN_FLIGHT,
            )
            actor.on_ended = self._actor_ended
            actor.on_exit = lambda error: self.on_exit(error)
            self._actors[request.actor_id] = actor
            self._owners[request.actor_id] = session.session_id
        return await actor.start(request, request.main_path)

    def refusal_of(self, entrypoint: str) -> str:
        """Say why a class may not be an actor here; "" when it may."""
        return self._refuse_class(entrypoint)

    def take(self, target_id: str, message: Message) -> None:
        """Hand a message to its actor, or answer for it."""
        actor = self._actors.get(target_id)
        if actor is not None:
            actor.take(message)
            return
        ended = self._ended.get(target_id)
        if ended is not None:
            ended.take(message)
            return
        message.refuse(
            pb.CallError(
                reason="ACTOR_UNKNOWN",
                message=f"there is no actor {target_id} in this process",
            )
        )

    def no_room(self, call: pb.CallFrame, why: str) -> None:
        """A message that nobody waits for is not taken: the actor's owner hears of it."""
        actor = self._actors.get(call.target_id)
        if actor is not None:
            tell_undelivered(actor.owner, actor.identity, call, why)

    def over(self, target_id: str, message: Message) -> None:
        """A message was answered."""
        actor = self._actors.get(target_id)
        if actor is not None:
            actor.over(message)

    def cancel(self, target_id: str, message: Message) -> None:
        """Nobody waits for a message any more."""
        actor = self._actors.get(target_id)
        if actor is not None:
            actor.cancel(message)

    async def stop(self, request: actor_pb.StopActorRequest) -> actor_pb.StopActorResponse:
        """Stop one actor; one that is gone is no error."""
        if not request.actor_id:
            return await self.stop_all(request.budget_s)
        response = actor_pb.StopActorResponse()
        actor = self._actors.get(request.actor_id)
        if actor is not None:
            failure = failure_from_proto(request.failure) if request.HasField("failure") else None
            response.CopyFrom(await actor.stop(request.budget_s, failure))
        ended = self._ended.get(request.actor_id)
        if ended is not None:
            if ended.failure is not None and not response.HasField("cleanup_failure"):
                # Its owner may hear this before the news of it, and of the mesh nothing after.
                response.cleanup_failure.CopyFrom(failure_to_proto(ended.failure))
            response.is_stuck = await ended.is_stuck()
        return response

    async def stop_all(self, budget_s: float) -> actor_pb.StopActorResponse:
        """Stop every actor, the last made first, all within the budget; nothing new is made."""
        self.is_closing = True
        stop_at = time.monotonic() + budget_s
        whole = actor_pb.StopActorResponse()
        for actor in reversed(list(self._actors.values())):
            response = await actor.stop(max(0.0, stop_at - time.monotonic()), None)
            whole.unrun.extend(response.unrun)
            if response.HasField("cleanup_failure") and not whole.HasField("cleanup_failure"):
                whole.cleanup_failure.CopyFrom(response.cleanup_failure)
        if self._ends:
            await asyncio.wait(self._ends, timeout=LEAST_CLEANUP_S)
        return whole

    def _actor_ended(self, actor: HostedActor) -> None:
        actor_id = actor.identity.actor_id
        if self._actors.pop(actor_id, None) is None:
            return
        self._owners.pop(actor_id, None)
        ended = self._ended[actor_id] = EndedActor(actor)
        if ended.look():
            self._stuck.append(ended)
        if len(self._ended) > _MOST_REMEMBERED:
            self._ended.popitem(last=False)
