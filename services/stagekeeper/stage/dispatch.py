"""The way of a call inside a stage: who may enter, where it runs, what comes back.

Decided here: the order of the checks (everything that can be refused is refused before any code of
the model runs), the limit of calls at once, and what an exception of an endpoint becomes. Not
decided here: the wire (stage_service). Invariant: a call counts until its code has really ended,
also when its caller is long gone, so that `max_in_flight` bounds the work and not the callers.

This is the hot path: an async endpoint runs in the task that gRPC made for the call, a sync one
takes a single hop into a worker thread and is encoded there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from stagekeeper.actor import Endpoint, EndpointKind
from stagekeeper.actor.call_context import enter_call, leave_call
from stagekeeper.actor.error_text import author_traceback
from stagekeeper.actor.remote_exception import exception_to_proto
from stagekeeper.core.errors import FieldProblem, Reason, Refused
from stagekeeper.core.names import shown
from stagekeeper.stage.activity import Activity, Work
from stagekeeper.stage.stage import Stage
from stagekeeper.stage.value_channel import ValueChannel
from stagekeeper.stage.vitals import text_of
from stagekeeper.stage.workers import NoThread, Workers
from stagekeeper.v1.stage_service_pb2 import RemoteException
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.payload import (
    PayloadError,
    PayloadTooLarge,
    content_type_of,
    decode_arguments,
    encode,
)

_log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 500
_MAX_TRACEBACK_CHARS = 16_000

Send = Callable[[Payload], Awaitable[object]]


class EndpointRaised(Refused):
    """The endpoint ran and raised; `exception` is what, for callers that take more than text."""

    def __init__(
        self, message: str, *, metadata: Mapping[str, str], exception: RemoteException
    ) -> None:
        super().__init__(Reason.ENDPOINT_RAISED, message, metadata=metadata)
        self.exception = exception


class Dispatcher:
    """Runs calls on one stage.

    Args:
        stage: has come up.
        instance_id: calls that name another are refused.
        rank: told with what an endpoint raises.
        max_in_flight: calls at once; one worker thread each at most.
        activity: where calls are counted.
        instead: what to do for want of an endpoint; said behind a refusal.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        instance_id: str,
        rank: int,
        max_in_flight: int,
        activity: Activity,
        instead: str = "",
    ) -> None:
        self._instance_id = instance_id
        self._rank = rank
        self._max_in_flight = max_in_flight
        self._activity = activity
        self._tensors = stage.tensors
        self._name = type(stage).__qualname__
        self._endpoints: dict[str, tuple[Endpoint, Callable[..., Any]]] = {
            endpoint.name: (endpoint, endpoint.function.__get__(stage))
            for endpoint in stage.__endpoints__.values()
        }
        self._threads = Workers("endpoint", max_in_flight)
        self._instead = instead and f"; {instead}"
        self._is_closed = False

    def close(self) -> None:
        """Refuse every further call; those under way go on."""
        self._is_closed = True

    async def call(
        self, instance_id: str, name: str, payload: Payload, timeout_s: float | None
    ) -> Payload:
        """Run an endpoint that answers once.

        Args:
            timeout_s: what is left of the caller's deadline; None without one.

        Raises:
            Refused: nothing was executed, except with ENDPOINT_RAISED.
            asyncio.CancelledError: the caller gave up.
        """
        endpoint, method = self._admit(instance_id, name)
        if endpoint.kind.is_streaming:
            raise Refused(Reason.BAD_FIELD, f"{name} yields several values: use CallStream")
        args, kwargs = self._arguments(endpoint, payload)
        content_type = content_type_of(payload)
        work = Work(name, _deadline(timeout_s))
        self._activity.begin(work)
        if endpoint.kind is EndpointKind.ASYNC:
            token = enter_call(work)
            try:
                return encode(await method(*args, **kwargs), content_type)
            except BaseException as error:
                self._reraise(work, error)
            finally:
                leave_call(token)
                self._activity.end(work)

        def run() -> Payload:
            try:
                return encode(method(*args, **kwargs), content_type)
            except BaseException:
                if work.cancelled:  # nobody awaits this; it must not be lost
                    _log.exception("endpoint %s raised after its caller had gone", name)
                raise

        try:
            return await self._threads.run(work, run, on_end=lambda: self._activity.end(work))
        except BaseException as error:
            self._reraise(work, error)

    async def stream(
        self, instance_id: str, name: str, payload: Payload, timeout_s: float | None, send: Send
    ) -> None:
        """Run an endpoint and `send` each value that it yields; one that answers once, once.

        Raises as `call` does.
        """
        endpoint, method = self._admit(instance_id, name)
        if not endpoint.kind.is_streaming:
            await send(await self.call(instance_id, name, payload, timeout_s))
            return
        args, kwargs = self._arguments(endpoint, payload)
        content_type = content_type_of(payload)
        work = Work(name, _deadline(timeout_s))
        self._activity.begin(work)
        if endpoint.kind is EndpointKind.ASYNC_STREAM:
            await self._stream_on_loop(work, method(*args, **kwargs), content_type, send)
        else:
            await self._stream_from_thread(work, method, args, kwargs, content_type, send)

    # --- before anything runs

    def _admit(self, instance_id: str, name: str) -> tuple[Endpoint, Callable[..., Any]]:
        if instance_id and instance_id != self._instance_id:
            raise Refused(
                Reason.STALE_ROUTE,
                f"this is instance {self._instance_id} of the stage, not {shown(instance_id)}: "
                "take a fresh route and call again; nothing was executed",
                metadata={"instance_id": self._instance_id},
            )
        if self._is_closed:
            raise Refused(
                Reason.DRAINING,
                f"{self._name} is stopping and takes no new calls; nothing was executed",
            )
        found = self._endpoints.get(name)
        if found is None:
            offered = ", ".join(str(endpoint) for endpoint, _ in self._endpoints.values())
            raise Refused(
                Reason.ENDPOINT_UNKNOWN,
                f"{self._name} has no endpoint {shown(name)}; it has: {offered or 'none'}"
                + self._instead,
            )
        if self._activity.call_count >= self._max_in_flight:
            raise Refused(
                Reason.TOO_MANY_CALLS,
                f"{self._name} runs {self._max_in_flight} calls already, as many as its "
                "max_in_flight allows; nothing was executed",
                metadata={"max_in_flight": str(self._max_in_flight)},
            )
        return found

    def _arguments(
        self, endpoint: Endpoint, payload: Payload
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            args, kwargs = decode_arguments(payload, self._tensors)
            endpoint.signature.bind(*args, **kwargs)
        except PayloadTooLarge as error:
            raise Refused(Reason.TOO_LARGE, f"{endpoint}: {error}") from error
        except (PayloadError, TypeError) as error:
            problem = f"{error}; it is called as {endpoint}"
            raise Refused(
                Reason.BAD_FIELD,
                f"the arguments of {endpoint.name} do not fit: {problem}",
                problems=[FieldProblem("payload", problem)],
            ) from error
        return args, kwargs

    # --- streams

    async def _stream_on_loop(self, work: Work, values: Any, content_type: str, send: Send) -> None:
        token = enter_call(work)
        try:
            async for value in values:
                await send(encode(value, content_type))
                self._activity.touch(work)
        except BaseException as error:
            self._reraise(work, error)
        finally:
            try:
                await values.aclose()  # where a send was cancelled: its `finally` runs now
            except Exception:
                _log.exception("endpoint %s raised while it was closed", work.name)
            leave_call(token)
            self._activity.end(work)

    async def _stream_from_thread(
        self,
        work: Work,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        content_type: str,
        send: Send,
    ) -> None:
        channel: ValueChannel[Payload] = ValueChannel()

        def run() -> None:
            values = method(*args, **kwargs)
            try:
                for value in values:
                    # False: nobody waits any more. The generator is closed where it stands.
                    if not channel.put(encode(value, content_type)):
                        return
            finally:
                values.close()

        running = asyncio.ensure_future(self._threads.run(work, run))
        running.add_done_callback(lambda _: channel.close())  # also where it was never begun
        try:
            async for payload in channel:
                await send(payload)
                self._activity.touch(work)
            await running
        except BaseException as error:
            channel.abandon()
            self._reraise(work, error)
        finally:
            # Over when its code has ended and its values are sent, whichever is later.
            running.add_done_callback(_forget_outcome)
            running.add_done_callback(lambda _: self._activity.end(work))

    # --- what comes back

    def _reraise(self, work: Work, error: BaseException) -> NoReturn:
        """Turn what ended a call into a refusal, unless it is the caller who ended it."""
        if isinstance(error, asyncio.CancelledError) and is_own_cancellation():
            work.cancel()
            raise error
        if isinstance(error, GeneratorExit):
            raise error
        if isinstance(error, NoThread):
            raise Refused(
                Reason.TOO_MANY_CALLS,
                f"{self._name} has no thread for {work.name}, and can start none ({error}): its "
                "host's limit of processes is reached; nothing was executed",
            ) from error
        if isinstance(error, PayloadError):
            kind, message = type(error).__qualname__, f"its result cannot be sent: {error}"
        else:
            kind, message = _name_of(error), text_of(error)
        trace = author_traceback(error)
        _log.error("endpoint %s raised\n%s", work.name, trace.rstrip())
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[:_MAX_MESSAGE_CHARS] + " …"
        raise EndpointRaised(
            f"{self._name}.{work.name} raised {kind}: {message}",
            metadata={
                "type": kind,
                "traceback": trace[-_MAX_TRACEBACK_CHARS:],
                "rank": str(self._rank),
            },
            exception=exception_to_proto(error, rank=self._rank, mesh_name=self._name),
        ) from None


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _name_of(error: BaseException) -> str:
    """Return the type as Python would print it: `ValueError`, `torch.OutOfMemoryError`."""
    cls = type(error)
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _forget_outcome(running: asyncio.Future[None]) -> None:
    """Read the outcome of work whose caller is gone, so that asyncio does not report it as lost."""
    if not running.cancelled():
        running.exception()
