"""What a servicer raises, as callers see it: by the table, and bugs without their insides."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.limits import LARGEST_REQUEST_BYTES
from stagekeeper.runtime.errors import answers_refusals, answers_refusals_up_to
from stagekeeper.v1 import deployment_service_pb2 as pb
from stagekeeper.wire.error_details import WireError, unpack


class Aborted(Exception):
    """What a context raises to end the call."""


class Context:
    """Keeps what the call was ended with."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details: WireError | None = None

    async def abort(self, code: grpc.StatusCode, message: str, trailing_metadata: Any) -> None:
        self.code, self.details = code, unpack(trailing_metadata)
        raise Aborted


class Servicer:
    def __init__(self, raised: Exception | None = None) -> None:
        self.raised = raised

    @answers_refusals
    async def Unary(self, request: Any, context: Any) -> str:
        if self.raised is not None:
            raise self.raised
        return "answer"

    @answers_refusals
    async def Stream(self, request: Any, context: Any):
        yield "first"
        if self.raised is not None:
            raise self.raised

    @answers_refusals_up_to(None)
    async def Unlimited(self, request: Any, context: Any) -> str:
        return "answer"


async def read(servicer: Servicer, rpc: str, request: Any) -> Context:
    context = Context()
    with pytest.raises(Aborted):
        if rpc == "Stream":
            async for _ in servicer.Stream(request, context):
                pass
        else:
            await servicer.Unary(request, context)
    assert context.details is not None
    return context


def request(size: int = 0) -> pb.GetDeploymentRequest:
    return pb.GetDeploymentRequest(name="x" * size)


@pytest.mark.parametrize("rpc", ["Unary", "Stream"])
async def test_a_bug_is_internal_and_keeps_its_insides_for_the_log(rpc):
    context = await read(Servicer(KeyError("a secret")), rpc, request())

    assert context.code is grpc.StatusCode.INTERNAL
    assert context.details is not None and context.details.reason == Reason.INTERNAL_BUG
    assert "KeyError" in context.details.message and "secret" not in context.details.message


async def test_what_the_system_refused_is_said_without_where():
    full = OSError(28, "No space left on device", "/secret")
    context = await read(Servicer(full), "Unary", request())

    assert context.details is not None
    assert "(OSError: No space left on device)" in context.details.message
    assert "/secret" not in context.details.message


@pytest.mark.parametrize("rpc", ["Unary", "Stream"])
async def test_a_caller_that_is_gone_while_it_is_written_to_is_no_bug(rpc):
    """A method that writes by itself meets what gRPC raises then; nobody is left to be told."""
    context, servicer = Context(), Servicer(grpc.aio.InternalError("Failed execute_batch"))

    with pytest.raises(grpc.aio.InternalError):
        if rpc == "Stream":
            async for _ in servicer.Stream(request(), context):
                pass
        else:
            await servicer.Unary(request(), context)

    assert context.code is None


@pytest.mark.parametrize("rpc", ["Unary", "Stream"])
async def test_a_refusal_names_every_field_and_its_wait(rpc):
    refused = Refused(
        Reason.BAD_FIELD, "no", problems=[FieldProblem("a", "x"), FieldProblem("b[0].c", "y")]
    )
    context = await read(Servicer(refused), rpc, request())

    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details is not None
    assert context.details.violations == (("a", "x"), ("b[0].c", "y"))


@pytest.mark.parametrize("rpc", ["Unary", "Stream"])
async def test_a_request_that_is_too_large_reaches_no_servicer(rpc):
    context = await read(Servicer(AssertionError("reached")), rpc, request(LARGEST_REQUEST_BYTES))

    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details is not None and context.details.reason == Reason.TOO_LARGE
    assert str(LARGEST_REQUEST_BYTES) in context.details.message


async def test_a_request_at_the_limit_and_one_without_limit_are_taken():
    at_the_limit = request(LARGEST_REQUEST_BYTES - len(request(1 << 22).SerializeToString()))

    assert at_the_limit.ByteSize() <= LARGEST_REQUEST_BYTES
    assert await Servicer().Unary(at_the_limit, Context()) == "answer"
    assert await Servicer().Unlimited(request(LARGEST_REQUEST_BYTES), Context()) == "answer"


async def test_ten_thousand_wrong_fields_are_a_status_that_fits():
    problems = [FieldProblem(f"stages[{number}].name", "x" * 200) for number in range(10_000)]
    context = await read(Servicer(bad_fields(problems)), "Unary", request())

    assert context.details is not None
    *named, (path, rest) = context.details.violations
    assert len(named) > 5
    assert named[0][0] == "stages[0].name"
    assert (path, rest) == ("", f"and {10_000 - len(named)} more")
