"""Channels to stages, one per address, and calls over them: one attempt, no choice, no retry.

Decided here: when a channel is made, dropped and closed, and what one failed attempt means. Not
decided here: which replica is called and whether again (calls.py); a stage calls its siblings with
the very same `StageCaller`. Invariant: however many calls run at once, an address has one channel,
and a channel is closed only when its last call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Protocol, cast

import grpc

from stagekeeper.client.errors import (
    UNREACHABLE,
    BadRequest,
    DeadlineExceeded,
    StagekeeperError,
    UnreadableAnswer,
    from_rpc,
)
from stagekeeper.v1.stage_service_pb2 import (
    CallRequest,
    CallResponse,
    CallStreamRequest,
    CallStreamResponse,
)
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceStub
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire import payload as codec
from stagekeeper.wire.payload import PayloadError, PayloadTooLarge, Tensors
from stagekeeper.wire.transport import CLIENT_OPTIONS


def open_channel(address: str) -> grpc.aio.Channel:
    """Make a channel with the project's options; nothing is dialled until the first call."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


class _CallMethod(Protocol):
    def __call__(
        self, request: CallRequest, *, timeout: float | None
    ) -> grpc.aio.UnaryUnaryCall[CallRequest, CallResponse]: ...


class _CallStreamMethod(Protocol):
    def __call__(
        self, request: CallStreamRequest, *, timeout: float | None
    ) -> grpc.aio.UnaryStreamCall[CallStreamRequest, CallStreamResponse]: ...


class _Link:
    """A channel, its calls under way, and whether new ones may take it."""

    __slots__ = ("call", "call_stream", "channel", "in_flight", "is_dropped")

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        stub = StageServiceStub(self.channel)
        self.call = cast(_CallMethod, stub.Call)
        self.call_stream = cast(_CallStreamMethod, stub.CallStream)
        self.in_flight = 0
        self.is_dropped = False


class StageCaller:
    """Calls stages by address. Owned by a client or a stage process; close it when done."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._retired: set[_Link] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> Collection[str]:
        """The addresses that have a channel now."""
        return self._links.keys()

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
        link = self._take(url)
        try:
            return (await link.call(request, timeout=timeout)).payload
        except grpc.RpcError as error:
            raise self._failed(url, link, error) from error
        finally:
            self._release(link)

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
        link = self._take(url)
        stream = link.call_stream(request, timeout=timeout)
        try:
            async for message in stream:
                yield message.payload
        except grpc.RpcError as error:
            raise self._failed(url, link, error) from error
        finally:
            stream.cancel()  # does nothing to one that has ended
            self._release(link)

    def drop(self, url: str) -> None:
        """Forget the channel to an address: the next call dials anew. Calls under way go on."""
        link = self._links.pop(url, None)
        if link is not None:
            self._retire(link)

    def keep_only(self, urls: Collection[str]) -> None:
        """Drop the channels to all other addresses."""
        for url in [url for url in self._links if url not in urls]:
            self.drop(url)

    async def close(self) -> None:
        """Close every channel; calls under way are cancelled. Closing twice changes nothing."""
        links = [*self._links.values(), *self._retired]
        self._links.clear()
        self._retired.clear()
        await asyncio.gather(*self._closing, *(link.channel.close() for link in links))

    def _take(self, url: str) -> _Link:
        link = self._links.get(url)
        if link is None:
            link = self._links[url] = _Link(url)
        link.in_flight += 1
        return link

    def _release(self, link: _Link) -> None:
        link.in_flight -= 1
        if link.is_dropped and link.in_flight == 0:
            self._close(link)

    def _retire(self, link: _Link) -> None:
        link.is_dropped = True
        if link.in_flight == 0:
            self._close(link)
        else:
            self._retired.add(link)

    def _close(self, link: _Link) -> None:
        self._retired.discard(link)
        task = asyncio.create_task(link.channel.close(), name="close a stage's channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _failed(self, url: str, link: _Link, error: grpc.RpcError) -> StagekeeperError:
        failure = from_rpc(error, where=f"the stage at {url}")
        # A cached address is a hint. The link is compared, since a late failure of an old channel
        # must not drop the one that replaced it.
        if failure.reason in ("STALE_ROUTE", UNREACHABLE) and self._links.get(url) is link:
            self.drop(url)
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


def deadline_over(what: str) -> DeadlineExceeded:
    """Build the error for time that ran out before anything was sent."""
    return DeadlineExceeded(
        f"the time was over before {what}",
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
        never_ran=True,
        next_move="allow more time, or look at the deployment's state",
    )
