"""From a refusal of the core to a status on the wire: the one table, and the one place that aborts.

A servicer's method is wrapped in `answers_refusals`; it then may simply raise `Refused`, and no
request that is too large reaches it. Anything else that escapes is a bug of ours: logged with its
traceback, answered INTERNAL without it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import grpc

from stagekeeper.core.errors import NextMove, Reason, Refused
from stagekeeper.core.limits import LARGEST_REQUEST_BYTES
from stagekeeper.wire.error_details import fit_message, pack

CODES: Mapping[NextMove, grpc.StatusCode] = {
    NextMove.MEND_THE_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    NextMove.LOOK_AT_THE_REASON: grpc.StatusCode.NOT_FOUND,
    NextMove.CHOOSE_ANOTHER_NAME: grpc.StatusCode.ALREADY_EXISTS,
    NextMove.GIVE_WAY: grpc.StatusCode.ABORTED,
    NextMove.WAIT_FOR_THE_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    NextMove.FREE_SOMETHING: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NextMove.LIST_THEN_WATCH: grpc.StatusCode.OUT_OF_RANGE,
    NextMove.RETRY_WITH_BACKOFF: grpc.StatusCode.UNAVAILABLE,
    NextMove.ASK_FOR_THE_RIGHT: grpc.StatusCode.PERMISSION_DENIED,
    NextMove.SAY_WHO_YOU_ARE: grpc.StatusCode.UNAUTHENTICATED,
    NextMove.LOOK_AT_YOUR_CODE: grpc.StatusCode.UNKNOWN,
    NextMove.REPORT_A_BUG: grpc.StatusCode.INTERNAL,
    NextMove.USE_A_LATER_RELEASE: grpc.StatusCode.UNIMPLEMENTED,
}

_CALL_IS_OVER = (grpc.aio.AbortError, grpc.aio.InternalError, grpc.RpcError)
"""What gRPC itself raises in a method whose call has ended: aborted, or its caller is gone while a
message was being written. Nobody is left to tell, and it is no bug."""

Context = grpc.aio.ServicerContext[Any, Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def code_of(refused: Refused) -> grpc.StatusCode:
    """Return the status code that the protocol gives to a refusal."""
    return CODES[refused.next_move]


async def abort_refused(context: Context, refused: Refused) -> NoReturn:
    """End the call with the refusal's code, message and details."""
    code = code_of(refused)
    await context.abort(
        code,
        fit_message(refused.message),
        trailing_metadata=pack(
            code.value[0],
            refused.message,
            reason=refused.reason.value,
            metadata=refused.metadata,
            violations=[(problem.path, problem.problem) for problem in refused.problems],
            retry_after_s=refused.retry_after_s,
        ),
    )
    raise AssertionError("abort returned")


async def _abort_bug(context: Context, method: str, error: Exception) -> NoReturn:
    import structlog  # here: it takes a quarter of a stage process's start, and is seldom needed

    structlog.get_logger(__name__).error("a call met a bug", method=method, exc_info=error)
    await abort_refused(
        context,
        Refused(
            Reason.INTERNAL_BUG,
            f"{method} met a bug ({_kind(error)}); the server's log has the traceback",
        ),
    )


def _kind(error: Exception) -> str:
    """Name an error without its insides; what the system refused is nobody's secret."""
    name = type(error).__name__
    return f"{name}: {error.strerror}" if isinstance(error, OSError) and error.strerror else name


def answers_refusals(method: Method) -> Method:
    """Let a servicer's coroutine or async generator raise `Refused`, and turn it into a status.

    Requests above LARGEST_REQUEST_BYTES are refused with TOO_LARGE, before the method sees them.
    """
    return _answering(method, LARGEST_REQUEST_BYTES)


def answers_refusals_up_to(largest_bytes: int | None) -> Callable[[Method], Method]:
    """Do as `answers_refusals`, with another limit; None where the method limits what is in it."""
    return lambda method: _answering(method, largest_bytes)


def _answering(method: Method, largest_bytes: int | None) -> Method:
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: object, request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                _check_size(request, largest_bytes)
                async for message in method(self, request, context):
                    yield message
            except Refused as refused:
                await abort_refused(context, refused)
            except _CALL_IS_OVER:
                raise
            except Exception as error:
                await _abort_bug(context, method.__name__, error)

        return cast(Method, stream)

    @functools.wraps(method)
    async def unary(self: object, request: Any, context: Context) -> Any:
        try:
            _check_size(request, largest_bytes)
            return await cast(Awaitable[Any], method(self, request, context))
        except Refused as refused:
            await abort_refused(context, refused)
        except _CALL_IS_OVER:
            raise
        except Exception as error:
            await _abort_bug(context, method.__name__, error)

    return cast(Method, unary)


def _check_size(request: Any, largest_bytes: int | None) -> None:
    if largest_bytes is not None and (size := request.ByteSize()) > largest_bytes:
        raise Refused(
            Reason.TOO_LARGE,
            f"the request has {size} bytes, at most {largest_bytes} are taken",
            metadata={"largest_bytes": str(largest_bytes)},
        )
