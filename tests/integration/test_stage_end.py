"""How a stage process ends: asked by its agent, by a signal, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagekeeper.v1 import types_pb2
from stagekeeper.wire.error_details import unpack
from tests.harness.stage_process import StageProcess
from tests.harness.waiting import wait_for

DRAINING = types_pb2.SHARD_STATE_DRAINING


@pytest.fixture
async def stage():
    async with StageProcess("stage_cases:Calls", stop_budget_s=20.0) as stage:
        await stage.ready()
        yield stage


async def ask_by_control(stage: StageProcess) -> None:
    await stage.end(20.0)


async def ask_by_signal(stage: StageProcess) -> None:
    stage.process.send_signal(signal.SIGTERM)


async def ask_by_interrupt(stage: StageProcess) -> None:
    stage.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("ask", [ask_by_control, ask_by_signal, ask_by_interrupt])
async def test_idle_stage_ends_at_once_with_zero(stage, ask):
    began = time.monotonic()

    await ask(stage)

    assert await stage.ended() == 0
    assert time.monotonic() - began < 2.5, "nothing runs, so nothing is waited for"


@pytest.mark.parametrize("ask", [ask_by_control, ask_by_signal])
async def test_call_under_way_ends_and_new_ones_are_refused(stage, tmp_path, ask):
    gate = tmp_path / "gate"
    call = asyncio.create_task(stage.call("wait_for_file", str(gate)))
    await stage.until(lambda state: state.in_flight == 1)

    await ask(stage)
    draining = await stage.until(lambda state: state.state == DRAINING)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stage.call("greet", "you")
    stub: Any = health_pb2_grpc.HealthStub(stage.channel)
    health = await stub.Check(health_pb2.HealthCheckRequest())

    assert draining.in_flight == 1
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    details = unpack(caught.value)
    assert details is not None
    assert details.reason == "DRAINING"
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    gate.touch()
    assert await call == "there"
    assert await stage.ended() == 0


async def test_stream_under_way_ends_too(stage):
    values = aiter(stage.stream("count", 3000))
    await anext(values)

    await stage.end(20.0)
    rest = [message async for message in values]

    assert len(rest) == 2999
    assert await stage.ended() == 0


async def test_budget_that_is_over_gives_up_what_still_runs(stage, tmp_path):
    call = asyncio.create_task(stage.call("wait_for_file", str(tmp_path / "never")))
    await stage.until(lambda state: state.in_flight == 1)
    began = time.monotonic()

    await stage.end(0.5)

    assert await stage.ended() == 0
    assert 0.4 < time.monotonic() - began < 5
    assert "a call to wait_for_file did not end within the budget" in stage.output
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = unpack(caught.value)
    assert details is None, "it ran, so nothing may say that it did not"


async def test_async_call_is_cancelled_when_the_budget_is_over(stage, tmp_path):
    began, ended = tmp_path / "began", tmp_path / "ended"
    call = asyncio.create_task(stage.call("sleep", str(began), str(ended)))
    await wait_for(began.exists, "the endpoint runs")

    await stage.end(0.2)

    assert await stage.ended() == 0
    assert ended.read_text() == "cancelled"
    await asyncio.gather(call, return_exceptions=True)


async def test_repeated_wish_shortens_the_budget_and_never_lengthens_it(stage, tmp_path):
    call = asyncio.create_task(stage.call("wait_for_file", str(tmp_path / "never")))
    await stage.until(lambda state: state.in_flight == 1)
    began = time.monotonic()

    await stage.end(300.0)
    await stage.end(0.3)
    await stage.end(300.0)

    assert await stage.ended() == 0
    assert time.monotonic() - began < 10
    await asyncio.gather(call, return_exceptions=True)


async def test_second_signal_ends_at_once(stage, tmp_path):
    call = asyncio.create_task(stage.call("wait_for_file", str(tmp_path / "never")))
    await stage.until(lambda state: state.in_flight == 1)

    stage.process.send_signal(signal.SIGTERM)
    await stage.until(lambda state: state.state == DRAINING)
    stage.process.send_signal(signal.SIGTERM)

    assert await stage.ended(within_s=5) == -signal.SIGTERM
    await asyncio.gather(call, return_exceptions=True)


async def test_watch_ends_with_unavailable_after_the_last_state(stage):
    stream = stage.watch()
    states = [(await stream.read()).state]

    await stage.end(1.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            states.append((await stream.read()).state)

    assert states[-1] == DRAINING
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_end_while_a_phase_runs_is_at_once(tmp_path):
    arguments = f'{{"hold": "load", "gate": "{tmp_path / "never"}"}}'
    async with StageProcess("stage_cases:Phases", args_json=arguments) as stage:
        await stage.until(lambda state: state.progress.note == "in load")
        began = time.monotonic()

        await stage.end(60.0)

        assert await stage.ended() == 0
        assert time.monotonic() - began < 3


async def test_thread_of_the_model_does_not_keep_the_process():
    async with StageProcess("stage_cases:Talkative") as stage:
        await stage.ready()
        assert "a line from load" in stage.output

        await stage.end(0.0)

        assert await stage.ended(within_s=10) == 0


async def test_stage_goes_on_when_its_agent_leaves(stage):
    watch = stage.watch()
    await watch.read()
    watch.cancel()
    await stage.control_channel.close()
    stage._control_channel = None

    assert await stage.call("greet", "you") == "hello you"
    assert (await stage.until(lambda state: True)).state == types_pb2.SHARD_STATE_READY


async def test_frozen_agent_does_not_hold_up_calls(stage):
    watch = stage.watch()  # opened, and never read
    for _ in range(100):
        await stage.call("greet", "you")

    assert os.path.exists(f"/proc/{stage.pid}")
    watch.cancel()
