"""One actor in this process: its `__init__`, its messages, its failures, its end.

Decided here: where each piece of its code runs and in which order, what an exception becomes, and
what happens in which order when it fails or is stopped: callers first, then its owner, then what it
owns, then its own `__cleanup__`. Not decided here: what its owner does about it.

Invariant: every message it took is answered, run to its end, or named as not run; and its owner is
told of at most one failure that ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Protocol

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.call_context import CallContext, enter_call
from stagekeeper.actor.endpoint import Endpoint, EndpointKind
from stagekeeper.actor.entrypoint import load_class
from stagekeeper.actor.error_text import author_traceback, one_line
from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.hosting.actor_place import ActorPlace
from stagekeeper.actor.hosting.actor_thread import ActorThread
from stagekeeper.actor.hosting.answers import (
    FailureAsError,
    died_error,
    is_misfit,
    stopped_error,
    undeliverable,
)
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.serial import SerialTurns
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.scope import NoSupervisor, Scope, current_scope
from stagekeeper.actor.remote_exception import exception_to_proto
from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.payload import PayloadError, content_type_of, decode_arguments, encode

_log = logging.getLogger("stagekeeper.actor")

DEFAULT_MAX_IN_FLIGHT: Final = 10_000
LEAST_CLEANUP_S: Final = 1.0
"""What `__cleanup__` gets even when the budget was used up by messages."""

_SUPERVISE_LIMIT_S: Final = 30.0


class ActorState(Enum):
    """Where an actor is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    FAILED = "failed"
    ENDED = "ended"


class Owner(Protocol):
    """Whom an actor belongs to, seen from here: the connection of its owner's process."""

    def push_failure(self, news: pb.RankFailed) -> None: ...


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
        self._owner = owner
        self._stall_after_s = stall_after_s
        self._max_in_flight = max_in_flight
        self._is_stall_told = False
        self._actor: Actor | None = None
        self._early: list[Message] = []
        self._messages: dict[Message, asyncio.Task[None] | None] = {}
        """Taken and not over, in order of arrival; with the task of one that runs on the loop."""
        self._thread = ActorThread(identity.name)
        self._turns = SerialTurns(self._thread)
        self._context = contextvars.copy_context()
        self._context.run(current_scope.set, scope)
        self._place = ActorPlace(identity)
        outside = CallContext()
        outside.place = self._place
        self._context.run(enter_call, outside)
        self._idle: asyncio.Event = asyncio.Event()
        self._stopping: asyncio.Task[actor_pb.StopActorResponse] | None = None
        self._stop_at = 0.0
        self._budget_shrunk = asyncio.Event()
        self._started: asyncio.Task[MeshFailure | None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.on_ended: Callable[[HostedActor], None] = lambda _: None
        self.on_exit: Callable[[BaseException], None] = lambda _: None
        """Called when the actor's code wants the whole process to end, before that goes on up."""
        scope.supervise = self._supervise
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
        def make() -> Actor:
            cls = load_class(request.entrypoint, module_path)
            args, kwargs = decode_arguments(request.arguments)
            return cls(*args, **kwargs)

        try:
            actor = await self._thread.run(make, self._context.copy())
        except (SystemExit, KeyboardInterrupt) as error:
            self.on_exit(error)
            raise
        except BaseException as error:
            failure = self._failure_of(
                FailureKind.INIT_RAISED, error, f"{self.identity.name}: __init__ raised"
            )
            self._end_with(failure, error, is_told=False)
            return failure
        if self.state is not ActorState.STARTING:
            self._actor = actor
            return self.failure
        self._bind(actor)
        self.state = ActorState.SERVING
        early, self._early = self._early, []
        for message in early:
            if not message.is_over:
                self._begin(message)
        self.scope.open()
        return None

    def _bind(self, actor: Actor) -> None:
        self._actor = actor
        self._endpoints: dict[str, tuple[Endpoint, Any]] = {
            endpoint.name: (endpoint, endpoint.function.__get__(actor))
            for endpoint in actor.__endpoints__.values()
        }
        self._has_sync = any(not it.kind.is_async for it in actor.__endpoints__.values())

    # --- messages

    def take(self, message: Message) -> None:
        """Take a message, or refuse it."""
        message.place = self._place
        if self.state in (ActorState.SERVING, ActorState.STARTING):
            if len(self._messages) >= self._max_in_flight:
                message.refuse(
                    pb.CallError(
                        reason="TOO_MANY_CALLS",
                        message=f"{self.identity.name} has {self._max_in_flight} messages waiting",
                    )
                )
                return
            self._messages[message] = None
            if self.state is ActorState.SERVING:
                self._begin(message)
            else:
                self._early.append(message)
        elif self.failure is not None:
            self.refuse_as_failed(message)
        else:
            message.refuse(stopped_error(self.identity.name, message.endpoint))

    def refuse_as_failed(self, message: Message) -> None:
        """Answer a call with the failure that ended the actor; name a cast to the owner."""
        assert self.failure is not None
        message.refuse(died_error(self.identity.name, self.failure))
        if message.is_cast:
            self.push(undeliverable(self.identity, message))

    def over(self, message: Message) -> None:
        """Forget a message that was answered or given up."""
        self._messages.pop(message, None)
        if not self._messages:
            self._idle.set()

    def cancel(self, message: Message) -> None:
        """Nobody waits for this message any more: end it where that can be done."""
        message.cancel()
        task = self._messages.get(message)
        if task is not None:
            task.cancel()
        elif not message.began:
            message.is_over = True
            self.over(message)

    def _begin(self, message: Message) -> None:
        found = self._endpoints.get(message.endpoint)
        if found is None:
            offered = ", ".join(str(endpoint) for endpoint, _ in self._endpoints.values())
            self._refuse(
                message,
                "ENDPOINT_UNKNOWN",
                f"{self.identity.name} has no endpoint {message.endpoint}; it has: "
                f"{offered or 'none'}",
            )
            return
        endpoint, method = found
        if endpoint.kind.is_async:
            context = self._context.copy()
            context.run(enter_call, message)
            message.began = True
            work = self._run_async(message, endpoint, method)
            self._messages[message] = asyncio.get_running_loop().create_task(work, context=context)
        else:
            self._turns.queue(lambda: self._run_sync(message, endpoint, method))

    async def _run_async(self, message: Message, endpoint: Endpoint, method: Any) -> None:
        try:
            args, kwargs = decode_arguments(message.payload)
            content_type = content_type_of(message.payload)
            if endpoint.kind is EndpointKind.ASYNC:
                message.answer(encode(await method(*args, **kwargs), content_type))
                return
            values = method(*args, **kwargs)
            try:
                async for value in values:
                    message.progress()
                    message.yield_value(encode(value, content_type))
            finally:
                await values.aclose()
            message.answer(None)
        except (SystemExit, KeyboardInterrupt) as error:
            self.on_exit(error)
            raise
        except BaseException as error:
            self._raised(message, endpoint, error)

    async def _run_sync(self, message: Message, endpoint: Endpoint, method: Any) -> None:
        if message.is_over:
            return
        message.began = True
        message.progress()
        context = self._context.copy()
        context.run(enter_call, message)
        loop = asyncio.get_running_loop()
        content_type = content_type_of(message.payload)

        def run() -> Any:
            args, kwargs = decode_arguments(message.payload)
            if endpoint.kind is EndpointKind.SYNC:
                return encode(method(*args, **kwargs), content_type)
            values = method(*args, **kwargs)
            try:
                for value in values:
                    if message.cancelled:
                        break
                    message.progress()
                    loop.call_soon_threadsafe(message.yield_value, encode(value, content_type))
            finally:
                values.close()
            return None

        try:
            message.answer(await self._thread.run(run, context))
        except (SystemExit, KeyboardInterrupt) as error:
            self.on_exit(error)
            raise
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            self._raised(message, endpoint, RuntimeError("the endpoint raised CancelledError"))
        except BaseException as error:
            self._raised(message, endpoint, error)

    def _raised(self, message: Message, endpoint: Endpoint, error: BaseException) -> None:
        if message.cancelled and isinstance(error, asyncio.CancelledError):
            message.is_over = True
            self.over(message)
            return
        if message.is_over:
            return
        if isinstance(error, PayloadError) or is_misfit(error, __file__):
            problem = f"the call does not fit {self.identity.name}.{endpoint}: {error}"
            if message.is_cast:
                self._fail_of_cast(message, error)
            else:
                self._refuse(message, "BAD_FIELD", problem)
            return
        if message.is_cast:
            self._fail_of_cast(message, error)
            return
        exception = exception_to_proto(
            error, rank=self.identity.rank, mesh_name=self.identity.mesh_name
        )
        message.refuse(
            pb.CallError(
                reason="ENDPOINT_RAISED",
                message=f"{self.identity.name}.{endpoint.name} raised {exception.type}: "
                f"{exception.message}",
                exception=exception,
            )
        )

    def _fail_of_cast(self, message: Message, error: BaseException) -> None:
        message.is_over = True
        self.over(message)
        failure = self._failure_of(
            FailureKind.BROADCAST_RAISED,
            error,
            f"{self.identity.name}.{message.endpoint} raised, and nobody waited for its answer",
            endpoint=message.endpoint,
            sender=message.sender,
        )
        self.fail_with(failure, error)

    def _refuse(self, message: Message, reason: str, text: str) -> None:
        if message.is_cast:
            failure = self._plain_failure(
                FailureKind.UNDELIVERABLE, text, endpoint=message.endpoint, sender=message.sender
            )
            self.push(failure)
        message.refuse(pb.CallError(reason=reason, message=text))

    # --- failing

    def fail_with(self, failure: MeshFailure, error: BaseException | None = None) -> None:
        """Fail: callers are told, then the owner, then all below ends. Only the first counts.

        While it stops anyway, a failure from below goes on to its owner and changes nothing else.
        """
        if self.state in (ActorState.STOPPING, ActorState.ENDED):
            self.push(failure)
            return
        if self.state is ActorState.FAILED:
            return
        self._end_with(failure, error, is_told=True)

    def _end_with(
        self, failure: MeshFailure, error: BaseException | None, *, is_told: bool
    ) -> None:
        self.state = ActorState.FAILED
        self.failure = failure
        self._give_up_messages()
        if is_told:
            self.push(failure)
        self._ending = asyncio.create_task(
            self._end(failure, error), name=f"end of {self.identity.name}"
        )

    def _give_up_messages(self) -> None:
        """Answer every message with the failure, and end what runs."""
        assert self.failure is not None
        current = asyncio.current_task()
        for message, task in list(self._messages.items()):
            message.refuse(died_error(self.identity.name, self.failure))
            message.is_over = True
            message.cancel()
            if task is not None and task is not current:
                task.cancel()
        self._early.clear()
        self._messages.clear()

    async def _end(self, failure: MeshFailure, error: BaseException | None) -> None:
        budget_s = self.scope.stop_budget_s
        for below in await self.scope.stop(budget_s, failure):
            _log.warning("while %s ended: %s", self.identity.name, below.summary)
        cleanup_failure = await self._cleanup(error or FailureAsError(failure), budget_s)
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
            self._budget_shrunk.set()
        return await asyncio.shield(self._stopping)

    async def _stop(
        self, budget_s: float, failure: MeshFailure | None
    ) -> actor_pb.StopActorResponse:
        if self.state is ActorState.FAILED:
            if self._ending is not None:
                await self._ending
            return actor_pb.StopActorResponse()
        if self.state is ActorState.STARTING and self._started is not None:
            self.state = ActorState.STOPPING
            await asyncio.wait({self._started}, timeout=budget_s)
        self.state = ActorState.STOPPING
        await self._drained()
        response = actor_pb.StopActorResponse()
        for message, task in list(self._messages.items()):
            response.unrun.add(
                endpoint=message.endpoint, sender=message.sender, had_begun=message.began
            )
            message.refuse(
                stopped_error(self.identity.name, message.endpoint, had_begun=message.began)
            )
            message.cancel()
            if task is not None:
                task.cancel()
        self._messages.clear()
        self._early.clear()
        left_s = max(self._stop_at - time.monotonic(), min(budget_s, LEAST_CLEANUP_S))
        below = await self.scope.stop(left_s, failure)
        error = None if failure is None else FailureAsError(failure)
        left_s = max(self._stop_at - time.monotonic(), LEAST_CLEANUP_S)
        cleanup_failure = await self._cleanup(error, left_s)
        if cleanup_failure is None and below:
            cleanup_failure = below[0].with_hop(self.identity.name, "was stopping")
        if cleanup_failure is not None:
            response.cleanup_failure.CopyFrom(failure_to_proto(cleanup_failure))
        self._finish()
        return response

    async def _drained(self) -> None:
        """Return when no message is left, or the budget is over."""
        while self._messages and (left_s := self._stop_at - time.monotonic()) > 0:
            self._idle.clear()
            self._budget_shrunk.clear()
            waits = [
                asyncio.ensure_future(self._idle.wait()),
                asyncio.ensure_future(self._budget_shrunk.wait()),
            ]
            await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _cleanup(self, error: BaseException | None, budget_s: float) -> MeshFailure | None:
        """Run `__cleanup__`, once, within the budget; return what went wrong."""
        actor = self._actor
        cleanup = getattr(actor, "__cleanup__", None)
        if cleanup is None:
            return None
        self._turns.close()
        context = self._context.copy()
        try:
            async with asyncio.timeout(budget_s):
                if inspect.iscoroutinefunction(cleanup):
                    await asyncio.create_task(cleanup(error), context=context)
                else:
                    await self._thread.run(lambda: cleanup(error), context)
        except TimeoutError:
            return self._plain_failure(
                FailureKind.CLEANUP_RAISED,
                f"{self.identity.name}: __cleanup__ did not end within {budget_s:g} s",
            )
        except (SystemExit, KeyboardInterrupt) as error:
            self.on_exit(error)
            raise
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and is_own_cancellation():
                raise
            return self._failure_of(
                FailureKind.CLEANUP_RAISED, raised, f"{self.identity.name}: __cleanup__ raised"
            )
        return None

    def _finish(self) -> None:
        if self.state is not ActorState.FAILED:
            self.state = ActorState.ENDED
        self._turns.close()
        self._thread.close()
        self._actor = None
        self.on_ended(self)

    # --- supervising what it owns

    async def _supervise(self, failure: MeshFailure) -> object:
        """Ask the actor's `__supervise__`; raises what that raises."""
        handler = getattr(self._actor, "__supervise__", None)
        if handler is None:
            raise NoSupervisor
        context = self._context.copy()
        limit_s = float(getattr(self._actor, "__supervise_limit_s__", _SUPERVISE_LIMIT_S))
        async with asyncio.timeout(limit_s):
            if inspect.iscoroutinefunction(handler):
                return await asyncio.create_task(handler(failure), context=context)
            if self._has_sync:
                return await self._turns.urgent(lambda: handler(failure), context)
            return context.run(handler, failure)

    # --- looking

    def look(self, now: float) -> None:
        """Tell the owner of a message that makes no progress, once."""
        if not self._stall_after_s or self._is_stall_told or self.state is not ActorState.SERVING:
            return
        for message in self._messages:
            if message.began and now - message.last_progress >= self._stall_after_s:
                self._is_stall_told = True
                self.push(
                    self._plain_failure(
                        FailureKind.STALLED,
                        f"{self.identity.name}.{message.endpoint} has made no progress for "
                        f"{now - message.last_progress:.1f} s; its process lives",
                        endpoint=message.endpoint,
                        sender=message.sender,
                        detected_by="progress counter",
                    )
                )
                return

    def push(self, failure: MeshFailure) -> None:
        """Tell the owner's process of a failure of this rank."""
        self._owner.push_failure(
            pb.RankFailed(
                mesh_id=self.identity.mesh_id,
                rank=self.identity.rank,
                actor_id=self.identity.actor_id,
                failure=failure_to_proto(failure),
            )
        )

    def _failure_of(
        self, kind: FailureKind, error: BaseException, what: str, **more: Any
    ) -> MeshFailure:
        return self._plain_failure(
            kind, f"{what}: {one_line(error)}", remote_traceback=author_traceback(error), **more
        )

    def _plain_failure(self, kind: FailureKind, message: str, **more: Any) -> MeshFailure:
        return failure_of(self.identity, kind, message, **more)
