"""One stage calls another: two real processes, addresses pushed as an agent pushes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from stagekeeper.v1 import stage_control_service_pb2 as control_pb
from stagekeeper.v1 import types_pb2
from stagekeeper.wire.error_details import unpack
from stagekeeper.wire.payload import decode
from tests.harness.stage_process import StageProcess
from tests.harness.waiting import wait_for


async def introduce(*stages: StageProcess, instance_id: str | None = None) -> None:
    """Tell each stage of all, as the agent does once the replica is READY."""
    peers = [
        types_pb2.Peer(
            stage_id=stage.launch.stage_id,
            stage_name=stage.launch.stage_name,
            instance_id=instance_id or stage.launch.instance_id,
            url=(await stage.ready()).addresses[0].url,
        )
        for stage in stages
    ]
    for stage in stages:
        await stage.control.SetPeers(
            control_pb.SetPeersRequest(instance_id=stage.launch.instance_id, peers=peers)
        )


@pytest.fixture
async def front():
    async with StageProcess("stage_cases:Asking", stage_name="front", stage_id=0) as stage:
        await stage.ready()
        yield stage


@pytest.fixture
async def back():
    async with StageProcess("stage_cases:Calls", stage_name="back", stage_id=1) as stage:
        await stage.ready()
        yield stage


async def reason_of(call) -> tuple[str, str]:
    """Return (type, message) of what the endpoint raised."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = unpack(caught.value)
    assert details is not None
    assert details.reason == "ENDPOINT_RAISED"
    return details.metadata["type"], details.metadata["traceback"]


@pytest.mark.parametrize("endpoint", ["ask", "ask_sync"])
async def test_sibling_answers_async_and_sync_code(front, back, endpoint):
    await introduce(front, back)

    assert await front.call(endpoint, "back", "greet", "front") == "hello front"
    assert await front.call("names") == ["back"]


@pytest.mark.parametrize("endpoint", ["relay", "relay_sync"])
async def test_sibling_streams_to_async_and_sync_code(front, back, endpoint):
    await introduce(front, back)

    values = [decode(message.payload) async for message in front.stream(endpoint, "back", 30)]

    assert values == list(range(30))


async def test_sibling_that_is_not_known_yet_says_so(front):
    kind, trace = await reason_of(front.call("ask", "back", "greet", "x"))

    assert kind.endswith("NoReplica")
    assert "the replica is not READY" in trace


async def test_sibling_that_there_is_not_lists_those_that_there_are(front, back):
    await introduce(front, back)

    kind, trace = await reason_of(front.call("ask", "bakc", "greet", "x"))

    assert kind.endswith("SiblingUnknown")
    assert "it has: front, back" in trace


async def test_what_a_sibling_raises_shows_both_tracebacks(front, back):
    await introduce(front, back)

    kind, trace = await reason_of(front.call("ask", "back", "fail", "no such voice"))

    assert kind.endswith("EndpointRaised")
    assert "The sibling's traceback:" in front.output
    assert "ValueError: no such voice" in trace


async def test_sync_call_from_async_code_is_refused_and_not_a_deadlock(front, back):
    await introduce(front, back)

    kind, trace = await reason_of(front.call("ask_sync_on_loop", "back"))

    assert kind == "RuntimeError"
    assert "await call_one" in trace


async def test_sibling_call_names_the_instance_and_is_refused_by_another(front, back):
    await introduce(front, back, instance_id="an earlier start")

    kind, trace = await reason_of(front.call("ask", "back", "greet", "x"))

    assert kind.endswith("OutOfDate")
    assert "STALE_ROUTE" in trace or "take a fresh route" in trace


async def test_sibling_that_moved_is_found_at_its_new_address(front, back):
    await introduce(front, back)
    assert await front.call("ask", "back", "greet", "x") == "hello x"
    await back.end(0.0)
    await back.ended()
    again = StageProcess("stage_cases:Calls", stage_name="back", stage_id=1)
    async with again:
        await introduce(front, again)

        assert await front.call("ask", "back", "greet", "x") == "hello x"


@pytest.mark.parametrize("endpoint", ["ask", "ask_sync"])
async def test_deadline_goes_on_to_the_sibling(front, back, endpoint):
    await introduce(front, back)

    left = await front.call(endpoint, "back", "remaining", timeout=10.0)
    none = await front.call(endpoint, "back", "remaining", timeout=None)

    # gRPC rounds a timeout up to what its header has digits for: 10.0 s and a bit is 10.1 s there.
    assert 5.0 < left <= 10.2
    assert none is None


@pytest.mark.parametrize("endpoint", ["ask", "ask_sync"])
async def test_cancellation_goes_on_to_the_sibling(front, back, tmp_path: Path, endpoint):
    await introduce(front, back)
    began, ended = tmp_path / "began", tmp_path / "ended"
    call = asyncio.create_task(
        front.call(endpoint, "back", "sleep", str(began), str(ended), timeout=None)
    )
    await wait_for(began.exists, "the sibling runs")

    call.cancel()

    await wait_for(ended.exists, "the sibling is cancelled")
    await front.until(lambda state: state.in_flight == 0)
