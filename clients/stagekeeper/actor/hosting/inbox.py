"""An actor's messages: taken in order, run where they belong, answered.

Decided here: which may enter, where each runs (async ones on the loop, in order of arrival; plain
ones in the actor's thread, one at a time), and what an exception becomes. Not decided here: what
a failure leads to. Invariant: every message that was taken is answered, or told of as not run.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.begun import begin_task
from stagekeeper.actor.call_context import enter_call
from stagekeeper.actor.endpoint import Endpoint, EndpointKind
from stagekeeper.actor.hosting.actor_place import ActorPlace
from stagekeeper.actor.hosting.actor_thread import ActorThread
from stagekeeper.actor.hosting.answers import is_misfit
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.serial import SerialTurns
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.remote_exception import exception_to_proto
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.payload import PayloadError, content_type_of, decode_arguments, encode


class _Misfit(Exception):
    """The payload of a message is no arguments."""


class Inbox:
    """The messages of one actor. For the loop's thread only.

    Args:
        thread: where its plain code runs.
        turns: who gives that code its turns.
        context: the variables that its code sees; copied for every message.
        max_in_flight: messages waiting and running; more are refused.
        on_cast_raised: a message that nobody waits for has raised: the actor fails.
        on_undelivered: a message that nobody waits for could not be run, and why.
        on_exit: the actor's code wants the whole process to end.
    """

    def __init__(
        self,
        identity: ActorIdentity,
        thread: ActorThread,
        turns: SerialTurns,
        context: contextvars.Context,
        *,
        max_in_flight: int,
        on_cast_raised: Callable[[Message, BaseException], None],
        on_undelivered: Callable[[Message, str], None],
        on_exit: Callable[[BaseException], None],
    ) -> None:
        self._identity = identity
        self._thread = thread
        self._turns = turns
        self._context = context
        self._place = ActorPlace(identity)
        self._max_in_flight = max_in_flight
        self._on_cast_raised = on_cast_raised
        self._on_undelivered = on_undelivered
        self._on_exit = on_exit
        self._endpoints: Mapping[str, tuple[Endpoint, Any]] | None = None
        self._messages: dict[Message, asyncio.Task[None] | None] = {}
        """Taken and not over, in order of arrival; with the task of one that runs on the loop."""
        self._changed = asyncio.Event()
        self._let_go: set[asyncio.Task[None]] = set()

    def open(self, actor: Actor) -> None:
        """Run what came before `__init__` was through, and from now on what comes."""
        self._endpoints = {
            endpoint.name: (endpoint, endpoint.function.__get__(actor))
            for endpoint in actor.__endpoints__.values()
        }
        for message in list(self._messages):
            self._begin(message)

    def take(self, message: Message) -> None:
        """Take a message, or refuse it."""
        message.place = self._place
        if len(self._messages) >= self._max_in_flight:
            what = f"{self._identity.name} has {self._max_in_flight} messages waiting"
            self._refuse(message, "TOO_MANY_CALLS", f"{what}; {message.endpoint} did not run")
            return
        self._messages[message] = None
        if self._endpoints is not None:
            self._begin(message)

    def over(self, message: Message) -> None:
        """Forget a message that was answered or given up."""
        self._messages.pop(message, None)
        if not self._messages:
            self._changed.set()

    def cancel(self, message: Message) -> None:
        """Nobody waits for this message any more: end it where that can be done."""
        message.cancel()
        task = self._messages.get(message)
        if task is not None:
            task.cancel()
        elif not message.began:
            message.is_over = True
            self.over(message)

    def give_up(self, answer: Callable[[Message], pb.CallError]) -> list[Message]:
        """Answer all that is left, and end what runs; return it, in order of arrival."""
        left = list(self._messages.items())
        self._messages.clear()
        current = asyncio.current_task()
        for message, task in left:
            message.refuse(answer(message))
            message.cancel()
            if task is not None and task is not current:
                task.cancel()
                self._let_go.add(task)
                task.add_done_callback(self._let_go.discard)
        return [message for message, _ in left]

    @property
    def is_running(self) -> bool:
        """Whether any of the actor's code runs, also of what was given up."""
        return bool(self._let_go) or not self._thread.is_idle

    async def ended(self, limit_s: float) -> bool:
        """Return once nothing runs that was given up; False: not within the limit."""
        if self._let_go:
            await asyncio.wait(self._let_go, timeout=max(0.0, limit_s))
        return not self._let_go and await self._thread.idle(limit_s)

    def hurry(self) -> None:
        """Have `drained` look at its time again."""
        self._changed.set()

    async def drained(self, until: Callable[[], float]) -> None:
        """Return when no message is left, or the time is over that `until` tells."""
        while self._messages and (left_s := until() - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                return

    def running(self) -> Iterator[Message]:
        """Yield the messages whose code has begun."""
        return (message for message in self._messages if message.began)

    def late(self, since: float) -> Message | None:
        """Return the first that makes no progress since a time, and is itself to blame for it."""
        running = self.running()
        return next((it for it in running if it.last_progress <= since and not it.is_held_up), None)

    # --- running them

    def _begin(self, message: Message) -> None:
        assert self._endpoints is not None
        found = self._endpoints.get(message.endpoint)
        if found is None:
            offered = ", ".join(str(endpoint) for endpoint, _ in self._endpoints.values())
            what = f"{self._identity.name} has no endpoint {message.endpoint}"
            self._refuse(message, "ENDPOINT_UNKNOWN", f"{what}; it has: {offered or 'none'}")
            return
        endpoint, method = found
        if endpoint.kind.is_async:
            context = self._context.copy()
            context.run(enter_call, message)
            self._mark_begun(message)
            begin_task(
                self._run_async(message, endpoint, method),
                context,
                partial(self._messages.__setitem__, message),
            )
        else:
            self._turns.queue(lambda: self._run_plain(message, endpoint, method))

    def _mark_begun(self, message: Message) -> None:
        message.began = True
        message.progress()

    async def _run_async(self, message: Message, endpoint: Endpoint, method: Any) -> None:
        try:
            args, kwargs, content_type = _arguments(message)
            if endpoint.kind is EndpointKind.ASYNC:
                message.answer(_result(message, await method(*args, **kwargs), content_type))
                return
            values = method(*args, **kwargs)
            try:
                async for value in values:
                    await message.send(encode(value, content_type))
            finally:
                await values.aclose()
            message.answer(None)
        except (SystemExit, KeyboardInterrupt) as error:
            self._on_exit(error)
            raise
        except BaseException as error:
            self._raised(message, endpoint, error)
        finally:
            self._ended(message)

    async def _run_plain(self, message: Message, endpoint: Endpoint, method: Any) -> None:
        if message.is_over:
            return
        self._mark_begun(message)
        context = self._context.copy()
        context.run(enter_call, message)
        loop = asyncio.get_running_loop()

        def run() -> Any:
            args, kwargs, content_type = _arguments(message)
            if endpoint.kind is EndpointKind.SYNC:
                return _result(message, method(*args, **kwargs), content_type)
            values = method(*args, **kwargs)
            try:
                for value in values:
                    message.progress()
                    payload = encode(value, content_type)
                    if message.is_crowded:
                        asyncio.run_coroutine_threadsafe(message.room(), loop).result()
                    if message.cancelled:
                        break
                    message.count_value()
                    loop.call_soon_threadsafe(message.put_value, payload)
            finally:
                values.close()
            return None

        try:
            message.answer(await self._thread.run(run, context, endpoint.name))
        except (SystemExit, KeyboardInterrupt) as error:
            self._on_exit(error)
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_own_cancellation():
                raise
            self._raised(message, endpoint, error)
        finally:
            self._ended(message)

    def _ended(self, message: Message) -> None:
        """Forget a message whose code has ended, also where nobody waits for its answer."""
        message.is_over = True
        self.over(message)

    def _raised(self, message: Message, endpoint: Endpoint, error: BaseException) -> None:
        if message.is_over:
            return
        if message.cancelled and isinstance(error, asyncio.CancelledError):
            return
        if isinstance(error, _Misfit) or is_misfit(error, __file__):
            # No code of the actor's ran, so a message that nobody waits for does not end it.
            problem = f"the call does not fit {self._identity.name}.{endpoint}: {error}"
            self._refuse(message, "BAD_FIELD", problem)
            return
        if message.is_cast:
            message.is_over = True
            self.over(message)
            self._on_cast_raised(message, error)
            return
        exception = exception_to_proto(
            error, rank=self._identity.rank, mesh_name=self._identity.mesh_name
        )
        raised = f"{self._identity.name}.{endpoint.name} raised {exception.type}"
        message.refuse(
            pb.CallError(
                reason="ENDPOINT_RAISED",
                message=f"{raised}: {exception.message}",
                exception=exception,
            )
        )

    def _refuse(self, message: Message, reason: str, text: str) -> None:
        if message.is_cast:
            self._on_undelivered(message, text)
        message.refuse(pb.CallError(reason=reason, message=text))


def _arguments(message: Message) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Decode what a message brings; the last is the content type of its answer."""
    try:
        return *decode_arguments(message.payload), content_type_of(message.payload)
    except PayloadError as error:
        raise _Misfit(str(error)) from error


def _result(message: Message, value: object, content_type: str) -> Payload | None:
    """Encode what an endpoint returned; nothing where nobody waits for it."""
    return None if message.is_cast else encode(value, content_type)
