"""The way to the supervisor: questions and streams over the stable endpoint.

Decided here: what a failed question means, how long an absent supervisor is waited for, and when
its channel is dropped. Invariant: after one failure of the connection the channel and every stub
made from it are gone, and the next attempt dials the stable endpoint anew.
Kept: whether anybody has ever answered, for who must not wait for an address that was wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from stagekeeper.client.errors import (
    CONNECTION_LOST,
    UNREACHABLE,
    StagekeeperError,
    SupervisorUnreachable,
    from_rpc,
)
from stagekeeper.client.pool import ChannelPool, Link
from stagekeeper.client.retry import for_a_while
from stagekeeper.v1.deployment_service_pb2_grpc import DeploymentServiceStub
from stagekeeper.wire.error_details import released

if TYPE_CHECKING:
    from stagekeeper.v1.deployment_service_pb2_grpc import DeploymentServiceAsyncStub

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_GONE = (UNREACHABLE, CONNECTION_LOST, "DRAINING")
_STRANGERS_CODES = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
"""A supervisor gives no error without a reason. With these somebody else has answered: another
program, or a proxy that has no supervisor behind it just now."""
_WHAT_TO_DO = "start the supervisor, or check the endpoint (--endpoint)"


class SupervisorLink:
    """One supervisor, by its stable endpoint.

    Args:
        endpoint: `host:port` that never changes, whoever reigns behind it.
        patience_s: how long a question goes on when nobody answers there; a restart takes a second
            or two.
    """

    def __init__(self, endpoint: str, *, patience_s: float) -> None:
        self.endpoint = endpoint
        self.patience_s = patience_s
        self.has_answered = False
        """Somebody said something at this endpoint, once."""
        self.last_failure = ""
        """How the last attempt failed, where nobody was there; in words: errors keep channels."""
        self.is_refused = False
        """The last attempt made no connection."""
        self._pool = ChannelPool()

    async def ask(
        self,
        rpc: Callable[
            [DeploymentServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Answer]
        ],
        request: Request,
        timeout: float,
        *,
        patience_s: float | None = None,
    ) -> Answer:
        """Ask once, and again while nobody is there; only for requests whose repeat is harmless.

        Args:
            rpc: which one, taken from the stub.
            request: what is asked.
            timeout: seconds for all attempts together.
            patience_s: other than the link's own; 0 asks once.

        Raises:
            SupervisorUnreachable: nobody answered for so long.
            StagekeeperError: what the supervisor said instead of an answer.
        """
        deadline = asyncio.get_running_loop().time() + timeout

        async def once() -> Answer:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            with self._pool.link(self.endpoint) as link:
                try:
                    answer = await rpc(link.stub(DeploymentServiceStub))(request, timeout=left_s)
                    self._answered()
                    return answer
                except grpc.RpcError as error:
                    raise self._failed(link, error) from released(error)

        patience_s = self.patience_s if patience_s is None else patience_s
        return await self.while_unreachable(once, min(patience_s, timeout))

    async def while_unreachable(
        self, attempt: Callable[[], Awaitable[Answer]], patience_s: float | None = None
    ) -> Answer:
        """Repeat `attempt` while nobody is there: for the link's patience, or for another."""
        patience_s = self.patience_s if patience_s is None else patience_s
        retrying = for_a_while(patience_s, lambda error: isinstance(error, SupervisorUnreachable))
        return await retrying(attempt)

    async def stream(
        self,
        rpc: Callable[
            [DeploymentServiceAsyncStub], grpc.aio.UnaryStreamMultiCallable[Request, Answer]
        ],
        request: Request,
        timeout: float | None = None,
        *,
        silence_s: float | None = None,
    ) -> AsyncGenerator[Answer, None]:
        """Yield a stream's messages, once; closing the generator cancels the stream.

        Args:
            rpc: which one, taken from the stub.
            request: what is asked.
            timeout: seconds for the whole stream.
            silence_s: the longest time between two messages, for streams that are never silent.

        Raises:
            SupervisorUnreachable: it could not be opened, it broke, or it fell silent.
            StagekeeperError: what the supervisor said instead of going on.
        """
        with self._pool.link(self.endpoint) as link:
            call = rpc(link.stub(DeploymentServiceStub))(request, timeout=timeout)
            messages = aiter(call)
            try:
                while True:
                    async with asyncio.timeout(silence_s):
                        message = await anext(messages, None)
                    if message is None:
                        return
                    self._answered()
                    yield message
            except grpc.RpcError as error:
                raise self._failed(link, error) from released(error)
            except TimeoutError:
                raise self._silent(link, silence_s) from None
            finally:
                call.cancel()  # does nothing to one that has ended
                del call, messages  # see `released`

    async def close(self) -> None:
        """Close the channel; questions under way are cancelled."""
        await self._pool.close()

    def unanswered(self) -> SupervisorUnreachable:
        """Build the error for who waited in vain at an endpoint where nobody ever was."""
        return SupervisorUnreachable(
            self.last_failure,
            reason=UNREACHABLE,
            code=grpc.StatusCode.UNAVAILABLE,
            never_ran=True,
            next_move=_WHAT_TO_DO,
        )

    def _answered(self) -> None:
        self.has_answered = True
        self.is_refused = False
        self.last_failure = ""

    def _failed(self, link: Link, error: grpc.RpcError) -> StagekeeperError:
        failure = from_rpc(error, where=f"the supervisor at {self.endpoint}")
        if not failure.reason and failure.code in _STRANGERS_CODES:
            return self._met_a_stranger(link, failure)
        if failure.reason not in _GONE:
            if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
                # Nobody said anything: the connection may be dead without a word.
                self._pool.drop(link)
            else:
                self._answered()
            return failure
        self._pool.drop(link)
        self.last_failure = failure.message
        self.is_refused = failure.reason == UNREACHABLE
        return SupervisorUnreachable(
            failure.message,
            reason=failure.reason,
            code=failure.code,
            never_ran=failure.never_ran,
            retry_after_s=failure.retry_after_s,
            next_move=_WHAT_TO_DO,
        )

    def _met_a_stranger(self, link: Link, failure: StagekeeperError) -> SupervisorUnreachable:
        self._pool.drop(link)
        assert failure.code is not None
        self.last_failure = (
            f"who answers at {self.endpoint} is no supervisor, or one of another release "
            f"({failure.code.name}: {failure.message})"
        )
        self.is_refused = True  # as good as: it took no question
        return self.unanswered()

    def _silent(self, link: Link, silence_s: float | None) -> SupervisorUnreachable:
        # The transport may be alive, and answer pings, before a supervisor that is not.
        self._pool.drop(link)
        self.last_failure = f"the supervisor at {self.endpoint} said nothing for {silence_s:g} s"
        self.is_refused = False
        return SupervisorUnreachable(
            self.last_failure,
            reason=CONNECTION_LOST,
            code=grpc.StatusCode.UNAVAILABLE,
            next_move="look at the supervisor's log: it runs and does not answer",
        )
