"""One actor in this process: its beginning, its messages, its failures, its end.

Decided here: what happens in which order when it fails or is stopped: callers first, then its
owner, then what it owns, then its own `__cleanup__`. Not decided here: how its code runs (inbox,
`special_methods`), and what its owner does about a failure. Invariant: its owner is told of at most
one failure that ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Final

from stagekeeper.actor.call_context import CallContext, enter_call
from stagekeeper.actor.failing import cut_off, failure_from, failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure, failure_id
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.hosting.actor_place import ActorPlace
from stagekeeper.actor.hosting.actor_thread import ActorThread
from stagekeeper.actor.hosting.answers import FailureAsError, died_error, stopped_error
from stagekeeper.actor.hosting.inbox import Inbox
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.owner_news import (
    Owner,
    refuse_as_failed,
    tell,
    tell_undelivered,
)
from stagekeeper.actor.hosting.serial import SerialTurns
from stagekeeper.actor.hosting.special_methods import SpecialMethods
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.scope import Scope, current_scope
from stagekeeper.v1 import actor_service_pb2 as actor_pb

_log = logging.getLogger("stagekeeper.actor")

DEFAULT_MAX_IN_FLIGHT: Final = 10_000
LEAST_CLEANUP_S: Final = 1.0
"""What `__cleanup__` gets even when the budget was used up by messages."""


class ActorState(Enum):
    """Where an actor is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    FAILED = "failed"
    ENDED = "ended"


class HostedActor:
    """Hosts one actor. For the loop's thread only.

    Args:
        scope: what it owns.
        owner: told of its failures.
        stall_after_s: a message without progress for so long is a stall; 0 means never.
        max_in_flight: messages waiting and running; more are refused.
    """

    def __init__(
        self,
        identity: ActorIdentity,
        scope: Scope,
        owner: Owner,
        *,
        stall_after_s: float,
        max_in_flight: int,
    ) -> None:
        self.identity = identity
        self.scope = scope
        self.state = ActorState.STARTING
        self.failure: MeshFailure | None = None
        self.has_served = False
        self.owner = owner
        self._stall_after_s = stall_after_s
        self._stalled: Message | None = None
        self._stalls = 0
        self._thread = ActorThread(identity.name)
        self._turns = SerialTurns(self._thread, self._turns_broke)
        context = _context_of(identity, scope)
        self._methods = SpecialMethods(
            identity,
            self._thread,
            self._turns,
            context,
            on_handled=scope.answered,
            on_exit=lambda error: self.on_exit(error),
        )
        self._inbox = Inbox(
            identity,
            self._thread,
            self._turns,
            context,
            max_in_flight=max_in_flight,
            on_cast_raised=self._cast_raised,
            on_undelivered=lambda *what: tell_undelivered(owner, identity, *what),
            on_exit=lambda error: self.on_exit(error),
        )
        self._stopping: asyncio.Task[actor_pb.StopActorResponse] | None = None
        self._left: list[MeshFailure] = []
        """What failed while it was stopping: told of by the answer to the stop."""
        self._stop_at = 0.0
        self._let_go_at = 0.0
        self._started: asyncio.Task[MeshFailure | None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended_by: BaseException | None = None
        """Why it was stopped; None when that was asked for."""
        self.on_ended: Callable[[HostedActor], None] = lambda _: None
        self.on_exit: Callable[[BaseException], None] = lambda _: None
        """Called when the actor's code wants the whole process to end, before that goes on up."""
        scope.supervise = self._methods.supervise
        scope.on_unhandled = self.fail_with

    # --- its beginning

    async def start(
        self, request: actor_pb.SpawnActorRequest, module_path: str
    ) -> MeshFailure | None:
        """Run `__init__`; return what went wrong. A repeat joins."""
        if self._started is None:
            self._started = asyncio.create_task(
                self._start(request, module_path), name=f"start {self.identity.name}"
            )
        return await asyncio.shield(self._started)

    async def _start(
        self, request: actor_pb.SpawnActorRequest, module_path: str
    ) -> MeshFailure | None:
        try:
            actor = await self._methods.make(request, module_path)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            what = f"{self.identity.name}: __init__ raised"
            failure = failure_from(self.identity, FailureKind.INIT_RAISED, error, what)
            if self.state is ActorState.ENDED:
                _log.warning("after %s was stopped: %s", self.identity.name, failure.summary)
                self._let_go()
            else:
                self._end_with(failure, error, is_told=False)
            return self.failure
        if self.state is ActorState.ENDED:
            await self._clean_up_late()
        if self.state is ActorState.STOPPING:
            self._inbox.open(actor)  # for what came before the stop, and is not given up yet
        if self.state is not ActorState.STARTING:
            return self.failure
        self.state = ActorState.SERVING
        self.has_served = True
        self._inbox.open(actor)
        self.scope.open()
        return None

    async def _clean_up_late(self) -> None:
        """Clean up after an `__init__` that took longer than the stop waited for it."""
        cleanup_failure = await self._methods.clean_up(self._ended_by, LEAST_CLEANUP_S)
        if cleanup_failure is not None:
            _log.warning("%s", cleanup_failure.summary)
        self._let_go()

    # --- messages

    def take(self, message: Message) -> None:
        """Take a message, or refuse it."""
        if self.state in (ActorState.SERVING, ActorState.STARTING):
            self._inbox.take(message)
        elif self.failure is not None:
            refuse_as_failed(self.owner, self.identity, self.failure, message)
        else:
            message.refuse(stopped_error(self.identity.name, message.endpoint))

    def over(self, message: Message) -> None:
        """Forget a message that was answered or given up."""
        self._inbox.over(message)

    def cancel(self, message: Message) -> None:
        """Nobody waits for this message any more."""
        self._inbox.cancel(message)

    def _cast_raised(self, message: Message, error: BaseException) -> None:
        what = f"{self.identity.name}.{message.endpoint} raised, and nobody waited for its answer"
        failure = failure_from(
            self.identity, FailureKind.BROADCAST_RAISED, error, what, **_of(message)
        )
        self.fail_with(failure, error)

    # --- failing

    def _turns_broke(self, error: BaseException) -> None:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return  # the whole process ends by it
        what = f"{self.identity.name} runs no plain code any more"
        self.fail_with(failure_from(self.identity, FailureKind.UNHANDLED, error, what), error)

    def fail_with(self, failure: MeshFailure, error: BaseException | None = None) -> None:
        """Fail: callers are told, then the owner, then all below ends. Only the first counts.

        While it stops anyway, a failure goes on to its owner with the stop's answer.
        """
        if self.state is ActorState.STOPPING:
            self._left.append(failure)
            return
        if self.state is ActorState.ENDED:
            self.push(failure)
            return
        if self.state is ActorState.FAILED:
            _log.warning("while %s ended: %s", self.identity.name, failure.summary)
            return
        self._end_with(failure, error, is_told=True)

    def _end_with(
        self, failure: MeshFailure, error: BaseException | None, *, is_told: bool
    ) -> None:
        # What it had not handled yet ends with it: its owner is told of both at once.
        failure = replace(failure, causes=(*self.scope.take_open(), *failure.causes))
        self.state = ActorState.FAILED
        self.failure = failure
        self._let_go_at = time.monotonic()
        self._inbox.give_up(lambda _: died_error(self.identity.name, failure))
        if is_told:
            self.push(failure)
        self._ending = asyncio.create_task(
            self._end(failure, error), name=f"end of {self.identity.name}"
        )

    async def _end(self, failure: MeshFailure, error: BaseException | None) -> None:
        budget_s = self.scope.stop_budget_s
        for below in await self.scope.stop(budget_s, failure):
            _log.warning("while %s ended: %s", self.identity.name, below.summary)
        cleanup_failure = await self._methods.clean_up(error or FailureAsError(failure), budget_s)
        if cleanup_failure is not None:
            _log.warning("%s", cleanup_failure.summary)
        self._finish()

    # --- stopping

    async def stop(
        self, budget_s: float, failure: MeshFailure | None
    ) -> actor_pb.StopActorResponse:
        """Stop: drain, then what it owns, then `__cleanup__`. A repeat joins, and may hurry it."""
        stop_at = time.monotonic() + budget_s
        if self._stopping is None:
            self._stop_at = stop_at
            self._stopping = asyncio.create_task(
                self._stop(budget_s, failure), name=f"stop {self.identity.name}"
            )
        elif stop_at < self._stop_at:
            self._stop_at = stop_at
            self._inbox.hurry()
        return await asyncio.shield(self._stopping)

    async def _stop(
        self, budget_s: float, failure: MeshFailure | None
    ) -> actor_pb.StopActorResponse:
        if self.state is ActorState.STARTING and self._started is not None:
            self.state = ActorState.STOPPING
            await asyncio.wait({self._started}, timeout=budget_s)
        if self._ending is not None:
            await self._ending
            return actor_pb.StopActorResponse()
        self.state = ActorState.STOPPING
        await self._inbox.drained(lambda: self._stop_at)
        name = self.identity.name
        response = actor_pb.StopActorResponse()
        self._let_go_at = time.monotonic()
        for message in self._inbox.give_up(
            lambda it: stopped_error(name, it.endpoint, had_begun=it.began)
        ):
            response.unrun.add(
                endpoint=message.endpoint, sender=message.sender, had_begun=message.began
            )
        left_s = max(self._stop_at - time.monotonic(), min(budget_s, LEAST_CLEANUP_S))
        below = await self.scope.stop(left_s, failure)
        self._ended_by = None if failure is None else FailureAsError(failure)
        left_s = max(self._stop_at - time.monotonic(), LEAST_CLEANUP_S)
        if self._started is not None and not self._started.done():
            left_s /= 2  # one half for `__init__`, which still runs
            await self._made(left_s)
        cleanup_failure = await self._methods.clean_up(self._ended_by, left_s)
        went_wrong = [*self._left, *below, *([cleanup_failure] if cleanup_failure else [])]
        if went_wrong:
            whole = cut_off(self.identity, went_wrong)
            response.cleanup_failure.CopyFrom(failure_to_proto(whole))
            if whole.kind is not FailureKind.CLEANUP_RAISED:
                self.push(whole)  # whoever asked may be gone, or wait no longer
        self._finish()
        return response

    async def _made(self, limit_s: float) -> None:
        """Return once `__init__` has ended, with what comes of its raising; or after the limit."""
        if self._started is not None:
            await asyncio.wait({self._started}, timeout=limit_s)
        if self._ending is not None:
            await self._ending

    @property
    def is_running(self) -> bool:
        """Whether code of it runs now, also such as was let go of."""
        return self._inbox.is_running

    async def is_stuck(self) -> bool:
        """Say whether code of it still runs that was let go of: after a second, at once if not."""
        return not await self._inbox.ended(self._let_go_at + LEAST_CLEANUP_S - time.monotonic())

    def _finish(self) -> None:
        if self.state is not ActorState.FAILED:
            self.state = ActorState.ENDED
        self._turns.close()
        if self._started is None or self._started.done():
            self._let_go()
        self.on_ended(self)

    def _let_go(self) -> None:
        """Hold what was made no longer. No code of it is begun after this."""
        self._thread.close()
        self._methods.forget()

    # --- looking

    def look(self, now: float) -> None:
        """Tell the owner of a message that makes no progress: once, until it does or is over."""
        if not self._stall_after_s or self.state is not ActorState.SERVING:
            return
        told = self._stalled
        if told is not None and not (told.is_over or told.has_progressed):
            return
        self._stalled = late = self._inbox.late(now - self._stall_after_s)
        if late is not None:
            late.has_progressed = False
            self._stalls += 1
            self.push(
                failure_of(
                    self.identity,
                    FailureKind.STALLED,
                    f"{self.identity.name}.{late.endpoint} has made no progress for "
                    f"{now - late.last_progress:.1f} s; its process lives",
                    id=failure_id(
                        self.identity.origin.instance_id, FailureKind.STALLED, self._stalls
                    ),
                    detected_by="progress counter",
                    **_of(late),
                )
            )

    def forgive(self, stalled_s: float) -> None:
        """Leave out of account a time in which this process itself did not run."""
        for message in self._inbox.running():
            message.last_progress += stalled_s

    def push(self, failure: MeshFailure) -> None:
        """Tell the owner's process of a failure of this rank."""
        tell(self.owner, self.identity, failure)


def _context_of(identity: ActorIdentity, scope: Scope) -> contextvars.Context:
    """Return the variables that the actor's code sees: who it is, and what it owns."""
    context = contextvars.copy_context()
    context.run(current_scope.set, scope)
    outside = CallContext()
    outside.place = ActorPlace(identity)
    context.run(enter_call, outside)
    return context


def _of(message: Message) -> dict[str, str]:
    return {"endpoint": message.endpoint, "sender": message.sender}
