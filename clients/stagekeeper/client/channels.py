"""Calls to stages by address: one attempt, no choice, no retry.

Decided here: what one failed attempt means, and when it puts its channel in doubt. Not decided
here: which replica is called and whether again (calls.py); a stage calls its siblings with the
very same `StageCaller`. Invariant: a channel that failed, or at whose end another process now
answers, is never used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection, Container, Mapping, Sequence
from typing import Any

import grpc

from stagekeeper.client.errors import (
    CONNECTION_LOST,
    UNREACHABLE,
    BadRequest,
    DeadlineExceeded,
    StagekeeperError,
    UnreadableAnswer,
    from_rpc,
)
from stagekeeper.client.pool import ChannelPool, Link, open_channel
from stagekeeper.v1.stage_service_pb2 import CallRequest, CallStreamRequest
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceStub
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire import payload as codec
from stagekeeper.wire.error_details import released
from stagekeeper.wire.payload import PayloadError, PayloadTooLarge, Tensors

__all__ = ["StageCaller", "deadline_over", "decode_answer", "encode_call", "open_channel"]


class StageCaller:
    """Calls stages by address. Owned by a client or a stage process; close it when done."""

    def __init__(self) -> None:
        self._pool = ChannelPool()

    @property
    def addresses(self) -> Collection[str]:
        """The addresses that have a channel now."""
        return self._pool.addresses

    async def call(
        self,
        url: str,
        instance_id: str,
        endpoint: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        timeout: float | None = None,
        *,
        tensors: Tensors = "numpy",
    ) -> Any:
        """Call one endpoint of one instance, once, and return its decoded answer.

        Args:
            url: `host:port` of its StageService.
            instance_id: the start of the process that is meant; empty means any.
            endpoint: the endpoint's name.
            args: positional arguments, as `wire.payload` encodes them.
            kwargs: keyword arguments.
            timeout: seconds until the endpoint is told to give up; None waits for ever.
            tensors: what tensors in the answer become.

        Raises:
            BadRequest: an argument cannot travel or does not fit the endpoint; mend it.
            EndpointRaised: the endpoint ran and raised.
            StagekeeperError: anything else; `never_ran` says whether a repeat is safe.

        Cancelling the call cancels the endpoint.
        """
        payload = encode_call(args, kwargs or {})
        return decode_answer(
            await self.send(url, instance_id, endpoint, payload, timeout), tensors, url
        )

    async def send(
        self, url: str, instance_id: str, endpoint: str, payload: Payload, timeout: float | None
    ) -> Payload:
        """Like `call`, with arguments that are encoded already and an answer that still is."""
        request = CallRequest(instance_id=instance_id, endpoint=endpoint, payload=payload)
        with self._pool.link(url) as link:
            try:
                answer = await link.stub(StageServiceStub).Call(request, timeout=timeout)
            except grpc.RpcError as error:
                raise self._failed(link, error) from released(error)
            return answer.payload

    async def call_stream(
        self,
        url: str,
        instance_id: str,
        endpoint: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        timeout: float | None = None,
        *,
        tensors: Tensors = "numpy",
    ) -> AsyncGenerator[Any, None]:
        """Call an endpoint that yields; each value comes as soon as it is there.

        Arguments and errors are those of `call`. Closing the generator cancels the endpoint; one
        that is left early is closed when nobody holds it any more (`contextlib.aclosing`: at once).
        """
        payload = encode_call(args, kwargs or {})
        answers = self.send_stream(url, instance_id, endpoint, payload, timeout)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield decode_answer(answer, tensors, url)

    async def send_stream(
        self, url: str, instance_id: str, endpoint: str, payload: Payload, timeout: float | None
    ) -> AsyncGenerator[Payload, None]:
        """Like `call_stream`, with arguments that are encoded already and values that still are."""
        request = CallStreamRequest(instance_id=instance_id, endpoint=endpoint, payload=payload)
        with self._pool.link(url) as link:
            stream = link.stub(StageServiceStub).CallStream(request, timeout=timeout)
            try:
                async for message in stream:
                    yield message.payload
            except grpc.RpcError as error:
                raise self._failed(link, error) from released(error)
            finally:
                stream.cancel()  # does nothing to one that has ended
                del stream  # see `released`

    def keep_only(self, urls: Container[str]) -> None:
        """Drop the channels to all other addresses; calls under way go on."""
        self._pool.keep_only(urls)

    async def close(self) -> None:
        """Close every channel; calls under way are cancelled. Closing twice changes nothing."""
        await self._pool.close()

    def _failed(self, link: Link, error: grpc.RpcError) -> StagekeeperError:
        failure = from_rpc(error, where=f"the stage at {link.address}")
        # A cached address is a hint. After a lost connection too: the channel may hand the dying
        # one to the next call.
        if failure.reason in ("STALE_ROUTE", UNREACHABLE, CONNECTION_LOST):
            self._pool.drop(link)
        return failure


def encode_call(
    args: Sequence[object], kwargs: Mapping[str, object], content_type: str = codec.MSGPACK
) -> Payload:
    """Encode a call's arguments.

    Raises:
        BadRequest: one of them cannot travel; the message names where it is.
    """
    try:
        return codec.encode_arguments(args, kwargs, content_type)
    except PayloadError as error:
        reason = "TOO_LARGE" if isinstance(error, PayloadTooLarge) else "BAD_FIELD"
        raise BadRequest(f"the arguments cannot be sent: {error}", reason=reason) from error


def decode_answer(payload: Payload, tensors: Tensors, where: str) -> Any:
    """Decode what an endpoint returned.

    Raises:
        UnreadableAnswer: it does not decode here.
    """
    try:
        return codec.decode(payload, tensors)
    except PayloadError as error:
        raise UnreadableAnswer(f"the answer of {where} cannot be read: {error}") from error


def deadline_over(what: str, last_error: StagekeeperError | str | None = None) -> DeadlineExceeded:
    """Build the error for time that ran out before anything was sent."""
    ending = f"; the last attempt said: {last_error}" if last_error else ""
    return DeadlineExceeded(
        f"the time was over before {what}{ending}",
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
        never_ran=True,
        next_move="allow more time, or look at the deployment's state",
    )
