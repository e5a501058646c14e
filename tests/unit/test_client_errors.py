"""From a failed call to the error that its caller is given: by reason, code, and what is sure."""

from __future__ import annotations

import grpc
import pytest

from stagekeeper.client import errors
from stagekeeper.core.errors import REASONS, NextMove, Reason
from stagekeeper.runtime.errors import CODES
from stagekeeper.wire.error_details import pack

_CLASSES = {
    NextMove.MEND_THE_REQUEST: errors.BadRequest,
    NextMove.LOOK_AT_THE_REASON: errors.NotFound,
    NextMove.CHOOSE_ANOTHER_NAME: errors.NameTaken,
    NextMove.GIVE_WAY: errors.OutOfDate,
    NextMove.WAIT_FOR_THE_STATE: errors.WrongState,
    NextMove.ASK_FOR_THE_RIGHT: errors.NotAllowed,
    NextMove.SAY_WHO_YOU_ARE: errors.NotAllowed,
    NextMove.FREE_SOMETHING: errors.NoRoom,
    NextMove.LIST_THEN_WATCH: errors.OutOfDate,
    NextMove.RETRY_WITH_BACKOFF: errors.Unavailable,
    NextMove.LOOK_AT_YOUR_CODE: errors.EndpointRaised,
    NextMove.REPORT_A_BUG: errors.Bug,
    NextMove.USE_A_LATER_RELEASE: errors.NotYet,
}


def _rpc_error(code, message="m", **details):
    trailers = grpc.aio.Metadata(*pack(code, message, **details)) if details else ()
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=message
    )


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_of_the_protocol_becomes_an_error_by_its_next_move(reason):
    move = REASONS[reason]
    error = errors.from_rpc(_rpc_error(CODES[move], reason=reason.value), "x")
    assert isinstance(error, _CLASSES[move])
    assert error.reason == reason
    assert error.code is CODES[move]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.value[0]])
def test_every_code_without_details_becomes_an_error_of_ours(code):
    error = errors.from_rpc(_rpc_error(code, ""), "the stage at h:1")
    assert type(error) is not errors.StagekeeperError
    assert "the stage at h:1" in str(error)
    assert not error.never_ran or code is grpc.StatusCode.INVALID_ARGUMENT


def test_facts_violations_and_wait_are_kept():
    error = errors.from_rpc(
        _rpc_error(
            grpc.StatusCode.INVALID_ARGUMENT,
            reason="BAD_FIELD",
            metadata={"a": "b"},
            violations=[("name", "is empty")],
        ),
        "x",
    )
    assert isinstance(error, errors.BadRequest)
    assert error.violations == (("name", "is empty"),)
    assert error.metadata == {"a": "b"}
    slow = _rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="SLOW_DOWN", retry_after_s=2.5)
    assert errors.from_rpc(slow, "x").retry_after_s == 2.5


@pytest.mark.parametrize("reason", ["STALE_ROUTE", "TOO_MANY_CALLS", "DRAINING", "BAD_FIELD"])
def test_what_a_stage_refused_never_ran(reason):
    code = CODES[REASONS[Reason(reason)]]
    assert errors.from_rpc(_rpc_error(code, reason=reason), "x").never_ran


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("failed to connect to all addresses; last error: …", errors.UNREACHABLE),
        ("errors resolving x:1: …", errors.UNREACHABLE),
        ("Stream removed (Socket closed)", errors.CONNECTION_LOST),
        ("Stream removed (ping timeout)", errors.CONNECTION_LOST),
        ("anything else", errors.CONNECTION_LOST),
    ],
)
def test_only_what_surely_never_left_counts_as_never_run(message, reason):
    error = errors.from_rpc(_rpc_error(grpc.StatusCode.UNAVAILABLE, message), "x")
    assert error.reason == reason
    assert error.never_ran is (reason == errors.UNREACHABLE)
    assert error.next_move


def test_deadline_is_also_pythons_own_timeout():
    error = errors.from_rpc(_rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED), "x")
    assert isinstance(error, TimeoutError)
