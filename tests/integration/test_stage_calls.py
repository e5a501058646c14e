"""Calls to a real stage process: what comes back, and what is refused before it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from stagekeeper.v1 import stage_service_pb2, types_pb2
from stagekeeper.wire.error_details import WireError, unpack
from stagekeeper.wire.payload import JSON, MSGPACK, decode, encode_arguments
from tests.harness.stage_process import StageProcess
from tests.harness.waiting import wait_for


@pytest.fixture
async def stage():
    async with StageProcess("stage_cases:Calls", max_in_flight=4) as stage:
        await stage.ready()
        yield stage


async def refused(call) -> tuple[grpc.StatusCode, WireError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = unpack(caught.value)
    assert details is not None, caught.value
    return caught.value.code(), details


async def answers(stream) -> list:
    return [decode(message.payload) async for message in stream]


async def written(path: Path) -> str:
    await wait_for(lambda: path.exists() and path.read_text(), f"{path.name} is written")
    return path.read_text()


# --- answers


@pytest.mark.parametrize("endpoint", ["greet", "greet_async"])
async def test_sync_and_async_endpoints_answer(stage, endpoint):
    assert await stage.call(endpoint, "you") == "hello you"
    assert await stage.call(endpoint, name="you") == "hello you"


async def test_positional_and_keyword_arguments_mix_in_messagepack(stage):
    assert await stage.call("greet", "you", loud=True) == "HELLO YOU"


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
async def test_answer_has_the_content_type_of_the_request(stage, content_type):
    request = stage.request("greet", name="you", content_type=content_type)
    answer = await stage.calls.Call(request)

    assert answer.payload.content_type == content_type
    assert decode(answer.payload) == "hello you"


async def test_tensors_travel_both_ways(stage):
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4)

    answer = await stage.call("give", tensor)

    np.testing.assert_array_equal(answer, tensor)
    assert answer.dtype == np.float32


async def test_request_with_no_payload_means_no_arguments(stage):
    answer = await stage.calls.Call(stage_service_pb2.CallRequest(endpoint="remaining"))

    assert answer.payload.content_type == JSON
    assert answer.payload.text == "null"


@pytest.mark.parametrize("endpoint", ["count", "count_async"])
async def test_stream_gives_each_value_in_order(stage, endpoint):
    assert await answers(stage.stream(endpoint, 50)) == list(range(50))


async def test_stream_of_an_endpoint_that_answers_once_gives_that_answer(stage):
    assert await answers(stage.stream("greet", "you")) == ["hello you"]


async def test_steps_of_a_sync_generator_stay_in_one_thread(stage):
    assert len(set(await answers(stage.stream("threads_of_steps")))) == 1


# --- refused before anything runs


async def test_call_for_another_instance_is_refused_before_it_runs(stage):
    request = stage.request("greet", "you", instance_id="another")

    code, error = await refused(stage.calls.Call(request))

    assert code is grpc.StatusCode.ABORTED
    assert error.reason == "STALE_ROUTE"
    assert error.metadata["instance_id"] == stage.launch.instance_id


async def test_call_for_this_instance_is_served(stage):
    request = stage.request("greet", "you", instance_id=stage.launch.instance_id)

    assert decode((await stage.calls.Call(request)).payload) == "hello you"


@pytest.mark.parametrize("name", ["hidden", "load", "__init__", "progress", "nothing", ""])
async def test_only_marked_methods_can_be_called(stage, name):
    code, error = await refused(stage.call(name))

    assert code is grpc.StatusCode.NOT_FOUND
    assert error.reason == "ENDPOINT_UNKNOWN"
    assert "greet(name: str, *, loud: bool = False)" in error.message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "missing a required argument: 'name'"),
        ({"name": "x", "colour": 1}, "unexpected keyword argument 'colour'"),
    ],
)
async def test_arguments_that_do_not_fit_are_told_the_signature(stage, arguments, says):
    code, error = await refused(stage.call("greet", **arguments))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "BAD_FIELD"
    assert says in error.message
    assert "greet(name: str, *, loud: bool = False)" in error.message
    assert error.violations[0][0] == "payload"


@pytest.mark.parametrize(
    "payload",
    [
        types_pb2.Payload(text="{not json"),
        types_pb2.Payload(data=b"\xc1"),
        types_pb2.Payload(content_type="application/pickle", data=b"x"),
        types_pb2.Payload(content_type="application/json", data=b"{}"),
    ],
)
async def test_payload_that_does_not_decode_is_a_bad_field(stage, payload):
    request = stage_service_pb2.CallRequest(endpoint="greet", payload=payload)

    code, error = await refused(stage.calls.Call(request))

    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD")


async def test_payload_above_the_limit_is_too_large(stage):
    payload = types_pb2.Payload(text='"' + "x" * (30 * 1024 * 1024) + '"')
    request = stage_service_pb2.CallRequest(endpoint="greet", payload=payload)

    code, error = await refused(stage.calls.Call(request))

    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE")


async def test_call_of_a_generator_is_sent_to_the_stream(stage):
    code, error = await refused(stage.call("count", 3))

    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD")
    assert "CallStream" in error.message


async def test_calls_above_the_limit_are_refused_and_room_comes_back(stage, tmp_path):
    gate = tmp_path / "gate"
    running = [asyncio.create_task(stage.call("wait_for_file", str(gate))) for _ in range(4)]
    await stage.until(lambda state: state.in_flight == 4)

    code, error = await refused(stage.call("greet", "you"))

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.reason == "TOO_MANY_CALLS"
    assert error.metadata["max_in_flight"] == "4"
    gate.touch()
    assert await asyncio.gather(*running) == ["there"] * 4
    assert await stage.call("greet", "you") == "hello you"


async def test_connect_answers_calls_by_frame_with_values_errors_and_refusals(stage):
    stream = stage.calls.Connect()
    hello = stage_service_pb2.Hello(session_id="somebody", lease_s=3.0, beat_s=1.0)
    await stream.write(
        stage_service_pb2.ConnectRequest(frames=[stage_service_pb2.Frame(hello=hello)])
    )
    frames = FrameReader(stream)

    assert (await frames.next("hello")).hello.instance_id == stage.launch.instance_id
    await stream.write(
        stage_service_pb2.ConnectRequest(
            frames=[
                frame_of(1, "greet", ["you"]),
                frame_of(2, "fail", ["broken"]),
                frame_of(3, "nowhere", []),
                frame_of(4, "greet", ["you"], target_id="another"),
                frame_of(5, "count", [3], is_stream=True),
            ]
        )
    )
    answers = [await frames.next("reply", "error") for _ in range(8)]

    def of(frame_id):
        return [frame for frame in answers if frame.frame_id == frame_id]

    assert [decode(frame.reply.payload) for frame in of(1)] == ["hello you"]
    (raised,) = of(2)
    assert raised.error.reason == "ENDPOINT_RAISED"
    assert raised.error.exception.builtin_types[0] == "ValueError"
    assert [frame.error.reason for frame in of(3)] == ["ENDPOINT_UNKNOWN"]
    assert [frame.error.reason for frame in of(4)] == ["STALE_ROUTE"]
    assert [decode(it.reply.payload) for it in of(5) if it.reply.has_more] == [0, 1, 2]
    assert not of(5)[-1].reply.has_more
    stream.cancel()


@pytest.mark.parametrize("endpoint", ["count_for_ever", "count_for_ever_async"])
async def test_connect_sends_no_more_values_than_the_window_takes(stage, endpoint, tmp_path):
    stream = stage.calls.Connect()
    ended = tmp_path / "ended"
    frames = FrameReader(stream)

    async def say(*said):
        await stream.write(stage_service_pb2.ConnectRequest(frames=said))

    async def greeted(frame_id):
        """Call beside the stream; return the values that came before the answer."""
        await say(frame_of(frame_id, "greet", ["you"]))
        values = []
        while (frame := await frames.next("reply")).frame_id != frame_id:
            values.append(decode(frame.reply.payload))
        return values

    hello = stage_service_pb2.Hello(session_id="somebody", lease_s=3.0, beat_s=1.0)
    await say(stage_service_pb2.Frame(hello=hello))
    await say(frame_of(1, endpoint, [str(ended)], is_stream=True, window=3))
    values = [decode((await frames.next("reply")).reply.payload) for _ in range(3)]
    values += [value for frame_id in range(2, 6) for value in await greeted(frame_id)]
    assert values == [0, 1, 2]

    more = stage_service_pb2.More(count=2)
    await say(stage_service_pb2.Frame(frame_id=1, more=more))
    values = [decode((await frames.next("reply")).reply.payload) for _ in range(2)]
    values += await greeted(6)
    assert values == [3, 4]

    stream.cancel()
    await wait_for(ended.exists, "the endpoint has ended", within_s=20)


async def test_connect_without_a_hello_is_refused(stage):
    stream = stage.calls.Connect()
    await stream.write(stage_service_pb2.ConnectRequest(frames=[frame_of(1, "greet", ["you"])]))

    code, error = await refused(stream.read())

    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD")


class FrameReader:
    """Frames of a connection, whatever messages they share."""

    def __init__(self, stream):
        self._stream = stream
        self._frames = []

    async def next(self, *kinds):
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.WhichOneof("body") in kinds:
                    return frame
            self._frames = list((await self._stream.read()).frames)


def frame_of(frame_id, endpoint, args, *, target_id="", is_stream=False, window=0):
    call = stage_service_pb2.CallFrame(
        target_id=target_id,
        endpoint=endpoint,
        payload=encode_arguments(args, {}),
        is_stream=is_stream,
        window=window,
    )
    return stage_service_pb2.Frame(frame_id=frame_id, call=call)


# --- endpoints that raise


@pytest.mark.parametrize("endpoint", ["fail", "fail_async"])
async def test_exception_comes_back_typed_with_its_traceback_and_the_stage_lives(stage, endpoint):
    code, error = await refused(stage.call(endpoint, "no such voice"))

    assert code is grpc.StatusCode.UNKNOWN
    assert error.reason == "ENDPOINT_RAISED"
    assert error.message == f"Calls.{endpoint} raised ValueError: no such voice"
    assert error.metadata["type"] == "ValueError"
    assert error.metadata["rank"] == "0"
    trace = error.metadata["traceback"]
    assert "stage_cases.py" in trace
    assert "dispatch.py" not in trace
    assert trace.rstrip().endswith("ValueError: no such voice")
    assert "no such voice" in stage.output
    assert await stage.call("greet", "you") == "hello you"


async def test_exception_whose_message_cannot_be_read_is_still_the_endpoints(stage):
    code, error = await refused(stage.call("fail_unreadably"))

    assert code is grpc.StatusCode.UNKNOWN
    assert error.reason == "ENDPOINT_RAISED"
    assert "Unreadable: (its message cannot be read: __str__ raised ZeroDivisionError)" in (
        error.message
    )


async def test_cause_is_part_of_the_traceback(stage):
    _, error = await refused(stage.call("fail", "outer"))

    assert "KeyError: 'inner'" in error.metadata["traceback"]


async def test_long_traceback_is_cut_on_the_wire_and_whole_in_the_log(stage):
    code, error = await refused(stage.call("fail_deep", 120))

    assert code is grpc.StatusCode.UNKNOWN
    assert error.metadata["traceback"].rstrip().endswith("ValueError: at the bottom")
    assert (
        stage.output.count("in fail_deep_step")
        > 20
        > error.metadata["traceback"].count("in fail_deep_step")
    )


async def test_long_message_with_odd_characters_still_arrives(stage):
    message = "größer als erlaubt ☃ " * 2000

    code, error = await refused(stage.call("fail", message))

    assert code is grpc.StatusCode.UNKNOWN
    assert error.reason == "ENDPOINT_RAISED"
    assert "größer als erlaubt" in error.message


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        ("leave", "SystemExit"),
        ("leave_async", "SystemExit"),
        ("stop_iteration", "RuntimeError"),  # as in any coroutine
        ("cancel_itself", "asyncio.exceptions.CancelledError"),
    ],
)
async def test_what_would_end_a_program_is_an_exception_of_the_call(stage, endpoint, kind):
    code, error = await refused(stage.call(endpoint))

    assert (code, error.reason) == (grpc.StatusCode.UNKNOWN, "ENDPOINT_RAISED")
    assert error.metadata["type"] == kind
    assert stage.process.poll() is None
    assert await stage.call("greet", "you") == "hello you"


async def test_answer_that_cannot_be_sent_names_its_type(stage):
    code, error = await refused(stage.call("unsendable"))

    assert (code, error.reason) == (grpc.StatusCode.UNKNOWN, "ENDPOINT_RAISED")
    assert "object" in error.message


async def test_answer_above_the_limit_says_how_large_it_is(stage):
    code, error = await refused(stage.call("huge", 31 * 1024 * 1024))

    assert (code, error.reason) == (grpc.StatusCode.UNKNOWN, "ENDPOINT_RAISED")
    assert str(31 * 1024 * 1024)[:4] in error.message


async def test_stream_that_raises_gives_its_values_first(stage):
    stream = stage.stream("count_then_fail", 20)
    seen = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            seen.append(decode((await stream.read()).payload))

    assert seen == list(range(20))
    details = unpack(caught.value)
    assert details is not None
    assert (details.reason, details.metadata["type"]) == ("ENDPOINT_RAISED", "ValueError")


# --- deadlines, and callers that go


async def test_deadline_is_visible_in_the_endpoint(stage):
    left = await stage.call("remaining", timeout=15.0)

    assert 5.0 < left <= 15.0


@pytest.mark.parametrize(
    ("endpoint", "note"),
    [("sleep", "cancelled"), ("look_at_context", "cancelled, deadline False")],
)
async def test_caller_that_goes_cancels_the_endpoint(stage, tmp_path, endpoint, note):
    began, ended = tmp_path / "began", tmp_path / "ended"
    call = asyncio.create_task(stage.call(endpoint, str(began), str(ended), timeout=None))
    await wait_for(began.exists, "the endpoint runs")

    call.cancel()

    assert await written(ended) == note
    await stage.until(lambda state: state.in_flight == 0)


@pytest.mark.parametrize(
    ("endpoint", "note"),
    [("sleep", "cancelled"), ("look_at_context", "cancelled, deadline True")],
)
async def test_deadline_that_passes_cancels_the_endpoint(stage, tmp_path, endpoint, note):
    began, ended = tmp_path / "began", tmp_path / "ended"

    try:
        await stage.call(endpoint, str(began), str(ended), timeout=0.5)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:  # who looks at the deadline can answer in the very moment in which it passes
        assert endpoint == "look_at_context"

    assert await written(ended) == note


@pytest.mark.parametrize("endpoint", ["count_for_ever", "count_for_ever_async"])
async def test_reader_that_goes_closes_the_generator(stage, tmp_path, endpoint):
    ended = tmp_path / "ended"
    stream = stage.stream(endpoint, str(ended), timeout=None)
    for _ in range(3):
        await stream.read()

    stream.cancel()

    assert int(await written(ended)) >= 2
    await stage.until(lambda state: state.in_flight == 0)


async def test_sync_call_whose_caller_is_gone_still_takes_its_place(stage, tmp_path):
    gate = tmp_path / "gate"
    calls = [
        asyncio.create_task(stage.call("wait_for_file", str(gate), timeout=None)) for _ in range(4)
    ]
    await stage.until(lambda state: state.in_flight == 4)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)

    _, error = await refused(stage.call("greet", "you"))

    assert error.reason == "TOO_MANY_CALLS"
    gate.touch()
    await stage.until(lambda state: state.in_flight == 0)
    assert await stage.call("greet", "you") == "hello you"


# --- what the agent sees of calls


async def test_progress_in_a_call_is_seen_and_bounded(stage, tmp_path):
    until = tmp_path / "until"
    began = tmp_path / "began"
    call = asyncio.create_task(stage.call("work_with_progress", str(began), str(until)))
    await wait_for(began.exists, "the endpoint runs")
    loop = asyncio.get_running_loop()
    stream = stage.watch()
    times: list[float] = []
    counters: list[int] = []
    while len(times) < 8:
        state = await stream.read()
        times.append(loop.time())
        counters.append(state.progress.counter)
        assert state.busy_for_s < 1.0

    until.touch()
    await call
    stream.cancel()

    assert counters == sorted(set(counters))
    assert counters[-1] - counters[0] > 50, "many reports, few messages"
    assert times[-1] - times[1] > 6 * 0.19, "at most five a second"


async def test_call_without_progress_is_told_as_busy(stage, tmp_path):
    gate = tmp_path / "gate"
    call = asyncio.create_task(stage.call("wait_for_file", str(gate)))

    state = await stage.until(lambda state: state.busy_for_s > 1.5)

    assert state.in_flight == 1
    gate.touch()
    await call
    idle = await stage.until(lambda state: state.in_flight == 0)
    assert not idle.HasField("busy_for_s")


async def test_finished_calls_move_the_counter(stage):
    before = (await stage.until(lambda state: True)).progress.counter
    for _ in range(10):
        await stage.call("greet", "you")

    after = (await stage.until(lambda state: True)).progress.counter

    assert after >= before + 10


async def test_idle_stage_is_heard_and_one_whose_interpreter_is_held_is_not(stage):
    loop = asyncio.get_running_loop()
    stream = stage.watch()
    await stream.read()
    began = loop.time()
    await stream.read()
    idle_gap = loop.time() - began

    holding = asyncio.create_task(stage.call("hold_gil", 4.0))
    gaps = []
    while not holding.done():
        began = loop.time()
        await stream.read()
        gaps.append(loop.time() - began)
    stream.cancel()

    assert idle_gap < 3.0
    assert max(gaps) > 3.0
