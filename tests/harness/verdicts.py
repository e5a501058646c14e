"""What came back for a request, and whether it is what the contract promises of a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from stagekeeper.core.errors import REASONS, Reason
from stagekeeper.runtime.errors import CODES
from stagekeeper.wire.error_details import DETAILS_KEY, DOMAIN, released
from tests.harness.nonsense import Nonsense, label

TIMEOUT_S = 20.0
_LOST_RACE = "Internal error from Core"
"""What gRPC's client says of a stream that was refused while it still sent, now and then."""

BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


@dataclass(frozen=True)
class Verdict:
    """`answer` is the answer, or the first of a stream; `reason` is why there is none."""

    answer: Any = None
    reason: str = ""
    paths: tuple[str, ...] = ()
    message: str = ""

    @property
    def is_refused(self) -> bool:
        return bool(self.reason)


async def send(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> Any:
    """Send bytes as a request; return the answer, or the first one of a stream."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    how: dict[str, Any] = {
        "request_serializer": lambda data: data,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    if method.client_streaming:
        both: Any = channel.stream_stream(path, **how)(iter([data]), timeout=TIMEOUT_S)
        return await _first_of(both)
    if method.server_streaming:
        stream: Any = channel.unary_stream(path, **how)(data, timeout=TIMEOUT_S)
        return await _first_of(stream)
    unary: Any = channel.unary_unary(path, **how)
    return await unary(data, timeout=TIMEOUT_S)


async def _first_of(stream: Any) -> Any:
    try:
        async for message in stream:
            return message
        return None
    finally:
        stream.cancel()


async def judge(channel: grpc.aio.Channel, method: MethodDescriptor, request: Nonsense) -> Verdict:
    """Send nonsense. It is answered, or refused with a reason and the code that goes with it."""
    while True:
        try:
            return Verdict(answer=await send(channel, method, request.data))
        except grpc.aio.AioRpcError as error:
            released(error)
            if method.client_streaming and error.details() == _LOST_RACE:
                continue
            return verdict_of(error, f"{label(method)} with {request}")


def verdict_of(error: grpc.aio.AioRpcError, what: str) -> Verdict:
    """Read a refusal, and check that it has a reason of the table with the code of the table."""
    story = f"{error.code()} {error.details()!r} for {what}"
    trailers = dict(error.trailing_metadata() or ())
    assert DETAILS_KEY in trailers, f"no details: {story}"
    status = status_pb2.Status.FromString(trailers[DETAILS_KEY])
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        for known in (info, bad):
            if detail.Is(known.DESCRIPTOR):
                detail.Unpack(known)
    assert info.domain == DOMAIN, story
    assert info.reason in set(Reason), story
    assert error.code() == CODES[REASONS[Reason(info.reason)]], story
    assert error.code() not in BUGS or info.reason == Reason.ENDPOINT_RAISED, story
    if info.reason == Reason.BAD_FIELD:
        assert bad.field_violations, f"no field is named: {story}"
    paths = tuple(violation.field for violation in bad.field_violations)
    return Verdict(reason=info.reason, paths=paths, message=error.details() or "")
