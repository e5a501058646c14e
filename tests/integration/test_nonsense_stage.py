"""Whatever is sent to a stage process is answered, or refused with a reason, and it serves on."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagekeeper.core.errors import Reason
from stagekeeper.v1 import stage_control_service_pb2 as control_pb
from stagekeeper.v1 import stage_service_pb2, types_pb2
from tests.harness.fuzzing import LONG, QUICK, Effort, Target
from tests.harness.nonsense import Nonsense, label, methods
from tests.harness.stage_process import StageProcess
from tests.harness.verdicts import Verdict, verdict_of

METHODS = methods("stage")


def sound(method: MethodDescriptor, stage: StageProcess) -> Message:
    request: Any = GetMessageClass(method.input_type)()
    if "instance_id" in request.DESCRIPTOR.fields_by_name:
        request.instance_id = stage.launch.instance_id
    if isinstance(request, stage_service_pb2.CallRequest | stage_service_pb2.CallStreamRequest):
        request.endpoint, request.payload.text = "echo", '{"text": "hello"}'
    if isinstance(request, control_pb.SetPeersRequest):
        for number, name in enumerate(("one", "two")):
            request.peers.add(
                stage_id=number, stage_name=name, instance_id=f"i{number}", url="127.0.0.1:9"
            )
    if isinstance(request, control_pb.EndStageRequest):
        request.budget_s, request.reason = -1.0, "nonsense"
    return request


def would_end_it(request: Nonsense, method: MethodDescriptor) -> bool:
    """Say whether the request asks the process to end, and would be right to be obeyed."""
    if method.name != "EndStage":
        return False
    return control_pb.EndStageRequest.FromString(request.data).budget_s >= 0


async def endure(method: MethodDescriptor, effort: Effort) -> dict[str, int]:
    async with StageProcess("sample_stages:Echo") as stage:
        first = await stage.ready()

        async def state() -> dict[str, str]:
            """What is told of the stage, but what its own calls change."""
            told = await stage.until(lambda it: it.in_flight == 0)
            for field in ("progress", "busy_for_s"):
                told.ClearField(field)
            return {"told": str(told), "where": str(await stage.call("where"))}

        async def answered(verdict: Verdict) -> None:
            told = await stage.until(lambda it: it.in_flight == 0)
            assert told.state == types_pb2.SHARD_STATE_READY
            assert (told.pid, told.addresses) == (first.pid, first.addresses)

        is_control = method.containing_service.name == "StageControlService"
        target = Target(
            stage.control_channel if is_control else stage.channel,
            method,
            lambda: sound(method, stage),
            state,
            answered,
            is_sent=lambda request: not would_end_it(request, method),
        )
        reasons = await target.endure(effort)
        assert await stage.call("echo", "still here") == "still here"
        await stage.end(0.1)
        assert await stage.ended() == 0
        assert "bug" not in stage.output
    return reasons


@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_nonsense_is_answered_or_refused_with_a_reason_and_changes_nothing(method):
    reasons = await endure(method, QUICK)
    print(label(method), reasons)
    if method.name != "Connect":
        assert reasons["STALE_ROUTE"] > 0
    if method.name not in ("Connect", "WatchStage"):
        assert reasons["BAD_FIELD"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_much_nonsense_is_answered_or_refused_with_a_reason(method):
    await endure(method, LONG)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_stage_says_of_itself_is_told_also_where_it_is_no_text(fails):
    arguments = '{"fails": true}' if fails else "{}"
    async with StageProcess("stage_cases:OddWords", args_json=arguments) as stage:
        over = types_pb2.SHARD_STATE_FAILED if fails else types_pb2.SHARD_STATE_READY
        told = await stage.until(lambda it: it.state == over)
        if fails:
            assert told.error == "FileNotFoundError: no file ?"
            return
        await stage.ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.call("fail")
    refused = verdict_of(caught.value, "fail")
    assert refused.reason == Reason.ENDPOINT_RAISED
    assert refused.message.endswith("ValueError: no ?")
