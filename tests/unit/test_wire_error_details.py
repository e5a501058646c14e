"""Error details: what is packed is unpacked, and always fits into trailing metadata."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import status_pb2  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.wire.error_details import (
    DETAILS_KEY,
    WireError,
    describe,
    fit_message,
    is_own_cancellation,
    pack,
    unpack,
)

in_its_time = settings(deadline=None)  # a busy machine is no failure

_short = st.text(max_size=20)


@in_its_time
@given(
    st.integers(1, 16),
    _short,
    _short.filter(bool),
    st.dictionaries(_short, _short, max_size=3),
    st.lists(st.tuples(_short, _short), max_size=3),
    st.none() | st.floats(0, 1000),
)
def test_what_is_packed_is_unpacked(code, message, reason, metadata, violations, retry_after_s):
    found = unpack(pack(code, message, reason, metadata, violations, retry_after_s))
    assert found is not None
    assert (found.code, found.message, found.reason) == (code, message, reason)
    assert found.metadata == metadata
    assert found.violations == tuple(violations)
    assert found.retry_after_s == (
        None if retry_after_s is None else pytest.approx(retry_after_s, abs=1e-9)
    )


@in_its_time
@given(
    st.text(min_size=0, max_size=40),
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(0, 400),
)
def test_everything_packed_fits_beside_its_message(unit, message_times, fact_times, count):
    message = unit * message_times
    metadata = {"traceback": unit * fact_times, "type": "E"}
    packed = pack(2, message, "R", metadata, [(unit, unit)] * count)
    in_base64 = len(packed[0][1]) * 4 // 3
    encoded = sum(1 if 0x20 <= b <= 0x7E else 3 for b in fit_message(message).encode())
    assert in_base64 + encoded < 8000
    assert unpack(packed) is not None


def test_long_traceback_keeps_its_end():
    traceback = "first\n" + "middle\n" * 5000 + "ValueError: the point"
    found = unpack(pack(2, "m", "ENDPOINT_RAISED", {"traceback": traceback}))
    assert found is not None
    assert found.metadata["traceback"].endswith("ValueError: the point")
    assert found.metadata["traceback"].startswith("…")


def test_status_code_of_grpc_is_accepted():
    found = unpack(pack(grpc.StatusCode.ABORTED, "m", "STALE_ROUTE"))
    assert found == WireError(10, "m", "STALE_ROUTE")


@pytest.mark.parametrize(
    "trailers",
    [None, (), (("x", "y"),), ((DETAILS_KEY, b"\xff\xff\xff"),), ((DETAILS_KEY, "text"),)],
)
def test_trailers_without_readable_details_are_none(trailers):
    assert unpack(trailers) is None


def test_details_of_others_leave_only_code_and_message():
    status = status_pb2.Status(code=5, message="gone")
    status.details.add(type_url="type.googleapis.com/other.Thing", value=b"\x01")
    found = unpack(((DETAILS_KEY, status.SerializeToString()),))
    assert found == WireError(5, "gone")


def test_failed_call_without_details_is_described_by_its_code():
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="down"
    )
    assert describe(error) == WireError(14, "down")


async def test_own_cancellation_is_told_from_a_call_that_the_other_end_cancelled():
    async def wait_for(call: asyncio.Future[None]) -> bool:
        try:
            await call
        except asyncio.CancelledError:
            return is_own_cancellation()
        raise AssertionError("nothing was cancelled")

    loop = asyncio.get_running_loop()
    theirs, ours = loop.create_future(), loop.create_future()
    waiting = [asyncio.create_task(wait_for(theirs)), asyncio.create_task(wait_for(ours))]
    await asyncio.sleep(0)

    theirs.cancel()
    waiting[1].cancel()

    assert await asyncio.gather(*waiting) == [False, True]
