"""A stage process from its spawn to READY or FAILED, as its agent sees it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagekeeper.runtime import launch as launch_module
from stagekeeper.runtime.launch import LaunchDevice
from stagekeeper.stage import __main__ as stage_main
from stagekeeper.v1 import stage_control_service_pb2 as control_pb
from stagekeeper.v1 import types_pb2
from stagekeeper.wire.error_details import unpack
from tests.harness.stage_process import StageProcess, State

READY = types_pb2.SHARD_STATE_READY
FAILED = types_pb2.SHARD_STATE_FAILED
STARTING = types_pb2.SHARD_STATE_STARTING
SERVING = health_pb2.HealthCheckResponse.SERVING


def test_start_line_is_the_one_that_agents_write():
    assert stage_main._GO == launch_module.START_LINE


async def test_pipe_that_ends_before_the_word_ends_the_process_without_a_trace():
    stage = StageProcess("stage_cases:Calls")
    try:
        stage.spawn()
        stage.go(b"")

        assert await stage.ended() == 0
        assert stage.output == ""
        assert not (stage.directory / "control").exists()
    finally:
        stage.close()


async def test_pipe_that_ends_within_the_word_ends_the_process():
    stage = StageProcess("stage_cases:Calls")
    try:
        stage.spawn()
        stage.go(b"go")

        assert await stage.ended() == 0
    finally:
        stage.close()


def test_waiting_process_has_imported_nothing_heavy():
    code = (
        "import sys, stagekeeper.stage.__main__;"
        "heavy = {'asyncio', 'grpc', 'google.protobuf', 'msgspec', 'torch', 'logging'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


def test_host_imports_neither_torch_nor_numpy():
    code = (
        "import sys, stagekeeper.stage.host, stagekeeper.stage.torch_stage;"
        "print(sorted({'torch', 'numpy', 'structlog', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


async def test_usage_and_bad_launch_file_end_with_two(tmp_path):
    bad = tmp_path / "launch.json"
    bad.write_text('{"instance_id": 3}')

    def start(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stagekeeper.stage", *argv],
            input="go\n",
            capture_output=True,
            text=True,
            timeout=20,
        )

    assert start().returncode == 2
    refused = start(str(bad))

    assert refused.returncode == 2
    assert "launch.json cannot be used" in refused.stderr


async def test_ready_stage_tells_its_address_and_endpoints():
    async with StageProcess("stage_cases:Calls", args_json='{"greeting": "hi"}') as stage:
        state = await stage.ready()

        assert state.instance_id == stage.launch.instance_id
        assert state.pid == stage.pid
        assert state.phase == types_pb2.PHASE_UNSPECIFIED
        assert [address.name for address in state.addresses] == ["stage"]
        told = {e.name: (e.idempotent, e.streaming) for e in state.endpoints}
        assert told["greet"] == (True, False)
        assert told["count"] == (False, True)
        assert "hidden" not in told
        assert not state.HasField("busy_for_s")
        assert not state.HasField("device_bytes")
        assert await stage.call("greet", "you") == "hi you"


async def test_stage_knows_where_it_stands():
    device = LaunchDevice(device_id="cpu:0", kind="cpu", budget_bytes=1000, total_bytes=2000)
    async with StageProcess("stage_cases:Calls", devices=[device]) as stage:
        await stage.ready()
        where = await stage.call("where")

        assert where["deployment"] == "demo"
        assert where["budget"] == 1000
        assert where["devices"] == ["cpu:0"]
        assert where["cache_is_there"]
        assert where["thread"].startswith("endpoint-")
        assert where["stdin"], "what the stage reads from stdin is at its end"


async def test_phases_run_in_order_in_one_thread_and_async_ones_on_the_loop():
    device = LaunchDevice(device_id="cpu:0", kind="cpu", budget_bytes=1000, total_bytes=2000)
    async with StageProcess("stage_cases:Phases", devices=[device]) as stage:
        await stage.ready()

        assert await stage.call("phases") == [
            ["load", "phases-1"],
            ["measure", "MainThread"],
            ["allocate", "phases-1", 1000],
            ["capture", "phases-1"],
        ]


@pytest.mark.parametrize(
    ("hold", "phase"),
    [
        ("load", types_pb2.PHASE_LOAD),
        ("allocate", types_pb2.PHASE_ALLOCATE),
        ("capture", types_pb2.PHASE_CAPTURE),
    ],
)
async def test_phase_that_takes_long_is_seen_with_its_progress(tmp_path, hold, phase):
    gate = tmp_path / "gate"
    arguments = f'{{"hold": "{hold}", "gate": "{gate}"}}'
    async with StageProcess("stage_cases:Phases", args_json=arguments) as stage:
        state = await stage.until(lambda state: state.progress.note == f"in {hold}")

        assert (state.state, state.phase) == (STARTING, phase)
        assert (state.progress.done, state.progress.total) == (1, 3)
        assert state.HasField("busy_for_s")
        assert not state.addresses
        assert [e.name for e in state.endpoints] == ["phases"]

        gate.touch()
        assert (await stage.ready()).progress.note == ""


async def test_busy_time_grows_while_a_phase_is_silent(tmp_path):
    arguments = f'{{"hold": "load", "gate": "{tmp_path / "gate"}"}}'
    async with StageProcess("stage_cases:Phases", args_json=arguments) as stage:
        seen: list[State] = []

        def collect(state: State) -> bool:
            seen.append(state)
            return state.busy_for_s > 2.0

        await stage.until(collect)

        # Nothing changes, and still something comes at least every second.
        quiet = [state for state in seen if state.progress.note == "in load"]
        assert len(quiet) >= 3
        assert len({state.progress.counter for state in quiet}) == 1


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("init", types_pb2.PHASE_LOAD),
        ("load", types_pb2.PHASE_LOAD),
        ("measure", types_pb2.PHASE_MEASURE),
        ("allocate", types_pb2.PHASE_ALLOCATE),
        ("capture", types_pb2.PHASE_CAPTURE),
    ],
)
async def test_phase_that_raises_is_shown_until_the_agent_ends_it(phase, told):
    async with StageProcess("stage_cases:Failing", args_json=f'{{"phase": "{phase}"}}') as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.phase == told
        assert state.error == f"RuntimeError: broken in {phase}"
        first_frame = state.traceback.splitlines()[1]
        assert "stage_cases.py" in first_frame
        assert "_act" in state.traceback
        assert not state.out_of_memory
        assert stage.process.poll() is None

        began = time.monotonic()
        await stage.end(0.0)
        assert await stage.ended() == 1
        assert time.monotonic() - began < 5
        assert f"broken in {phase}" in stage.output


SHOWN_SHORTLY = """
from stagekeeper.stage import __main__, host
assert host.FAILURE_SHOWN_S == 10.0
host.FAILURE_SHOWN_S = 1.0
raise SystemExit(__main__.main())
"""


async def test_failed_stage_ends_by_itself_when_no_agent_reads_it():
    stage = StageProcess("stage_cases:Failing", args_json='{"phase": "load"}')
    stage.program = ("-c", SHOWN_SHORTLY)
    async with stage:
        assert await stage.ended() == 1
        assert "broken in load" in stage.output


@pytest.mark.parametrize("name", ["FailsUnreadably", "CancelsItsStart"])
async def test_start_that_fails_in_an_odd_way_is_told_like_any_other(name):
    async with StageProcess(f"stage_cases:{name}") as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.error.startswith(("Unreadable: (its message", "CancelledError: not by"))


@pytest.mark.parametrize("phase", ["load", "measure"])
async def test_memory_that_runs_out_is_told_as_such(phase):
    arguments = f'{{"phase": "{phase}", "how": "memory"}}'
    async with StageProcess("stage_cases:Failing", args_json=arguments) as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.out_of_memory
        assert state.error == "MemoryError: no more"


@pytest.mark.parametrize("phase", ["load", "measure"])
async def test_phase_that_leaves_the_process_is_a_failed_start(phase):
    arguments = f'{{"phase": "{phase}", "how": "exit"}}'
    async with StageProcess("stage_cases:Failing", args_json=arguments) as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.error == "SystemExit: 0"
        await stage.end()
        assert await stage.ended() == 1


@pytest.mark.parametrize(
    ("entrypoint", "says"),
    [
        ("no_such_module:X", "--pythonpath"),
        ("stage_cases:Nothing", "has no Nothing; the stages in it: Asking, Calls"),
        ("stage_cases:NOT_A_STAGE", "not a subclass of stagekeeper.stage.Stage"),
        ("stage_cases", "not of the form module:Class"),
    ],
)
async def test_entrypoint_that_cannot_be_had_says_what_to_change(entrypoint, says):
    async with StageProcess(entrypoint) as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert state.phase == types_pb2.PHASE_LOAD
        assert says in state.error


async def test_arguments_that_do_not_fit_the_class_are_named():
    async with StageProcess("stage_cases:Calls", args_json='{"colour": 1}') as stage:
        state = await stage.until(lambda state: state.state == FAILED)

        assert "unexpected keyword argument 'colour'" in state.error


async def test_control_socket_refuses_another_instance():
    async with StageProcess("stage_cases:Calls") as stage:
        await stage.ready()
        for refused in (
            stage.control.SetPeers(control_pb.SetPeersRequest(instance_id="other")),
            stage.control.EndStage(control_pb.EndStageRequest(instance_id="other")),
            stage.control.WatchStage(control_pb.WatchStageRequest(instance_id="other")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused
            assert caught.value.code() is grpc.StatusCode.ABORTED
            details = unpack(caught.value)
            assert details is not None
            assert details.reason == "STALE_ROUTE"
            assert details.metadata["instance_id"] == stage.launch.instance_id

        assert await stage.call("greet", "x") == "hello x"


async def test_second_watch_takes_over_and_the_first_is_told():
    async with StageProcess("stage_cases:Calls") as stage:
        await stage.ready()
        first = stage.watch()
        await first.read()
        second = stage.watch()
        assert (await second.read()).state == READY

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first.read()

        assert caught.value.code() is grpc.StatusCode.ABORTED
        details = unpack(caught.value)
        assert details is not None
        assert details.reason == "STALE_INCARNATION"
        second.cancel()


async def test_health_on_both_doors_and_reflection_on_the_port():
    async with StageProcess("stage_cases:Calls") as stage:
        await stage.ready()
        for channel, service in (
            (stage.control_channel, "stagekeeper.v1.StageControlService"),
            (stage.channel, "stagekeeper.v1.StageService"),
        ):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", service):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == SERVING

        grpcurl = f"{sys.prefix}/bin/grpcurl"
        url = (await stage.ready()).addresses[0].url
        listing = await _run(grpcurl, "-plaintext", url, "list")
        answer = await _run(
            grpcurl,
            "-plaintext",
            "-d",
            '{"endpoint": "greet", "payload": {"text": "{\\"name\\": \\"grpcurl\\"}"}}',
            url,
            "stagekeeper.v1.StageService/Call",
        )

        assert "stagekeeper.v1.StageService" in listing
        assert "hello grpcurl" in answer


async def test_stage_without_torch_is_ready_after_half_a_second_of_work():
    least = float("inf")
    for _ in range(5):
        async with StageProcess("stage_cases:Calls") as stage:
            await stage.ready()
            # Of processor time, since the machine may be busy with other things.
            times = psutil.Process(stage.pid).cpu_times()
            least = min(least, times.user + times.system)
        if least <= 0.5:
            break

    assert least <= 0.5


async def test_process_leads_its_own_session_however_it_was_started():
    stage = StageProcess("stage_cases:Calls")
    try:
        stage.spawn(own_session=False)
        stage.go()
        await stage.ready()
        where = await stage.call("where")

        assert where["session"] == where["pid"] == stage.pid
        await stage.end(0.0)
        await stage.ended()
    finally:
        stage.process.kill()
        stage.close()


async def test_stacks_are_written_to_the_log_on_request():
    async with StageProcess("stage_cases:Calls") as stage:
        await stage.ready()
        holding = asyncio.create_task(stage.call("hold_gil", 1.0))
        await stage.until(lambda state: state.in_flight == 1 or not holding.done())
        stage.process.send_signal(signal.SIGUSR1)
        await holding

        assert "most recent call first" in stage.output
        assert await stage.call("greet", "x") == "hello x"


async def _run(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()
