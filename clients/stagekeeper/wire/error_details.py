"""Error details on the wire: `google.rpc.Status` in the trailing metadata, packed and unpacked.

Decided here: how a reason, its facts, wrong fields and a wait become `ErrorInfo`, `BadRequest` and
`RetryInfo`, and how they are cut to size. Not decided here: which code a reason has (the servers)
and what a caller does about it (the client). Invariant: what `pack` makes, message included, stays
below 8 KiB of metadata, since gRPC drops a call whose trailers are larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

DOMAIN: Final = "stagekeeper"
DETAILS_KEY: Final = "grpc-status-details-bin"

Metadata = tuple[tuple[str, bytes], ...]

_BUDGET_BYTES: Final = 7_400  # of the 8,192 that a default gRPC client accepts; the rest is headers
_MESSAGE_BUDGET_BYTES: Final = 2_400
_MOST_VIOLATIONS: Final = 256
_CUT: Final = " …"


@dataclass(frozen=True, slots=True)
class WireError:
    """What a failed call says about itself.

    Attributes:
        code: gRPC's number of the status code.
        message: one sentence for a person.
        reason: why, from the protocol's table; empty when the other end gave none.
        metadata: facts a program can act on, text to text.
        violations: (field path, what is wrong with it), every wrong field at once.
        retry_after_s: seconds after which a retry makes sense; None says nothing.
    """

    code: int
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None


def pack(
    code: int | grpc.StatusCode,
    message: str,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    violations: Sequence[tuple[str, str]] = (),
    retry_after_s: float | None = None,
) -> Metadata:
    """Make the trailing metadata that carries an error; for `context.abort`.

    Long values of `metadata` lose their beginning (a traceback ends with what matters), a long list
    of violations its end, and a message stays as it is up to about 2 KiB. Each cut is marked: that
    of a list by a last violation, of no field, which says how many more there are.
    """
    message = fit_message(message)
    budget = _BUDGET_BYTES - _percent_encoded_len(message)
    share = 4_000
    # More than so many never fit, and each try to fit them costs time.
    listed = list(violations[:_MOST_VIOLATIONS])
    while True:
        told = listed
        if len(listed) < len(violations):
            told = [*listed, ("", f"and {len(violations) - len(listed)} more")]
        status = _status(code, message, reason, metadata or {}, told, retry_after_s, share)
        data = status.SerializeToString()
        if len(data) * 4 // 3 + 8 <= budget or (share <= 32 and not listed):
            return ((DETAILS_KEY, data),)
        if share > 64 or not listed:  # rather short words on many fields than many on a few
            share //= 2
        else:
            listed = listed[: len(listed) // 2]


def fit_message(message: str) -> str:
    """Cut a message to what a status can carry beside its details; mostly it is unchanged.

    What is no text in any encoding (half a surrogate pair, from a file's name for one) becomes "?".
    """
    if not message.isascii():
        message = message.encode("utf-8", "replace").decode()
    is_bounded = len(message) <= _MESSAGE_BUDGET_BYTES
    if is_bounded and _percent_encoded_len(message) <= _MESSAGE_BUDGET_BYTES:
        return message
    room = _MESSAGE_BUDGET_BYTES - _percent_encoded_len(_CUT)
    for end, character in enumerate(message):
        room -= _percent_encoded_len(character)
        if room < 0:
            return message[:end] + _CUT
    return message


def unpack(
    source: grpc.RpcError | Iterable[tuple[str, str | bytes]] | None,
) -> WireError | None:
    """Read an error's details from a failed call or from its trailing metadata.

    Returns:
        None when there are none, or when they are not ours to read (not a google.rpc.Status).
    """
    for key, value in _trailers(source):
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return _read(status_pb2.Status.FromString(value))
            except DecodeError:
                return None
    return None


def describe(error: grpc.RpcError) -> WireError:
    """Read a failed call, whoever made it fail: with details where there are, else bare."""
    found = unpack(error)
    if found is not None:
        return found
    code = error.code()
    return WireError(code=code.value[0], message=error.details() or "")


def released(error: grpc.RpcError) -> grpc.RpcError:
    """Return `error` without its traceback, as a cause that may be kept.

    The frames of the traceback hold the call, and a call holds its channel's connection, which goes
    on dialling after the channel was closed for as long as anybody keeps the error.
    """
    return error.with_traceback(None)


def is_own_cancellation() -> bool:
    """Say whether the CancelledError just caught means that the running task shall end.

    grpc.aio raises it also when the other end, or whoever closed the channel, has ended the call.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _trailers(
    source: grpc.RpcError | Iterable[tuple[str, str | bytes]] | None,
) -> Iterable[tuple[str, str | bytes]]:
    if isinstance(source, grpc.RpcError):
        # What an RpcError promises is in its types only; one that was made by hand has nothing.
        read: Any = getattr(source, "trailing_metadata", None)
        source = read() if read is not None else None
    return source or ()


def _status(
    code: int | grpc.StatusCode,
    message: str,
    reason: str,
    metadata: Mapping[str, str],
    violations: Sequence[tuple[str, str]],
    retry_after_s: float | None,
    share: int,
) -> status_pb2.Status:
    number = code if isinstance(code, int) else int(code.value[0])
    status = status_pb2.Status(code=number, message=message)
    if reason:
        facts = {key: _keep_end(value, share) for key, value in metadata.items()}
        info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=facts)
        status.details.add().Pack(info)
    if violations:
        bad = error_details_pb2.BadRequest()
        for path, problem in violations:
            bad.field_violations.add(
                field=_keep_end(path, share), description=_keep_end(problem, share)
            )
        status.details.add().Pack(bad)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(max(0.0, retry_after_s) * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _read(status: status_pb2.Status) -> WireError:
    reason, metadata, retry_after_s = "", {}, None
    violations: tuple[tuple[str, str], ...] = ()
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = tuple((item.field, item.description) for item in bad.field_violations)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return WireError(status.code, status.message, reason, metadata, violations, retry_after_s)


def _keep_end(text: str, share: int) -> str:
    data = text[-share - 1 :].encode("utf-8", "replace")
    if len(data) <= share:
        return text if text.isascii() else data.decode()
    return "… " + data[-share:].decode("utf-8", "ignore")


def _percent_encoded_len(text: str) -> int:
    """Count the bytes of `grpc-message`: all but printable ASCII, and "%", take three."""
    data = text.encode("utf-8", "replace")
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in data)
