"""`stagekeeper up`, with everything real: what it starts, keeps running, takes over and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from stagekeeper.cli.exits import ExitCode
from tests.harness.cluster import STAGES
from tests.harness.command_line import Up, command_line, own_environment
from tests.harness.waiting import wait_for

ECHO = """\
name: echo
stages:
  - {name: only, entrypoint: "sample_stages:Echo", devices: [0], memory: {bytes: 64MiB}}
"""
MORE_ECHO = ECHO.replace("name: echo", "name: echo\nreplicas: 2")
BROKEN = """\
name: broken
stages:
  - {name: good, entrypoint: "sample_stages:Echo", devices: [0], memory: {bytes: 64MiB}}
  - {name: bad, entrypoint: "sample_stages:Broken", devices: [0], memory: {bytes: 64MiB}}
"""

SLOW = """\
name: slow
stages:
  - {{name: only, entrypoint: "sample_stages:Slow", args: {{gate: "{gate}"}}}}
"""


@pytest.fixture
async def up() -> AsyncIterator[Up]:
    async with Up() as made:
        yield made


async def test_ctrl_c_deletes_what_was_deployed_and_leaves_no_process(up: Up) -> None:
    program = await up.serving(up.spec(ECHO), agents=2)
    called = await command_line("call", "echo", "echo", '"hello"', endpoint=up.endpoint)
    assert (called.code, called.out) == (0, '"hello"\n')
    assert len(up.stage_processes()) == 1

    program.send(signal.SIGINT)

    assert await program.ended() == ExitCode.INTERRUPTED
    assert "echo: deleted" in program.output
    assert up.programs() == {}
    assert up.stage_processes() == {}


async def test_sigterm_ends_in_order_with_code_zero(up: Up) -> None:
    program = await up.serving(up.spec(ECHO))

    program.send(signal.SIGTERM)

    assert await program.ended() == ExitCode.DONE
    assert up.programs() == {}
    assert up.stage_processes() == {}


async def test_killed_children_are_started_again_and_stages_go_on(up: Up) -> None:
    program = await up.serving(up.spec(MORE_ECHO), agents=2)
    stages = up.stage_processes()

    os.kill(await up.child_pid("supervisor"), signal.SIGKILL)
    await up.child_pid("supervisor", nth=2)
    for agent in ("agent-0", "agent-1"):
        os.kill(await up.child_pid(agent), signal.SIGKILL)
    for agent in ("agent-0", "agent-1"):
        await up.child_pid(agent, nth=2)

    assert "supervisor: ended (killed by SIGKILL); starting again in" in program.output
    called = await command_line("call", "echo", "echo", '"hello"', endpoint=up.endpoint)
    assert (called.code, called.out) == (0, '"hello"\n')
    assert up.stage_processes() == stages


async def test_killed_up_leaves_the_stages_to_the_next_one(up: Up) -> None:
    spec = up.spec(ECHO)
    first = await up.serving(spec)
    stages = up.stage_processes()

    first.kill()
    await wait_for(lambda: not up.programs(), "supervisor and agents end with `up`")
    assert up.stage_processes() == stages

    second = await up.serving(spec)
    assert up.stage_processes() == stages
    assert "took over 1 running stage" in second.output
    assert "echo: READY, 1 replica: nothing to do" in second.output

    second.send(signal.SIGTERM)
    assert await second.ended() == ExitCode.DONE
    assert up.stage_processes() == {}


async def test_keep_leaves_the_stages_running_at_the_end(up: Up) -> None:
    program = await up.serving(up.spec(ECHO), "--keep")
    stages = up.stage_processes()

    program.send(signal.SIGTERM)

    assert await program.ended() == ExitCode.DONE
    assert "left running: echo (1 stage); the next `stagekeeper up`" in program.output
    assert up.programs() == {}
    assert up.stage_processes() == stages


async def test_what_was_deployed_from_elsewhere_goes_on_and_that_is_said(up: Up) -> None:
    program = await up.serving(up.spec(ECHO), "--allow=sample_stages:*")
    assert "Ctrl-C deletes echo and ends the supervisor and agents" in program.output
    other = up.spec(ECHO.replace("64MiB", "32MiB").replace("name: echo", "name: h2"), "h2.yaml")
    assert (await command_line("deploy", str(other), endpoint=up.endpoint)).code == ExitCode.DONE

    program.send(signal.SIGINT)

    assert await program.ended() == ExitCode.INTERRUPTED
    assert "left running: h2 (1 stage); the next `stagekeeper up` with this --state-dir takes" in (
        program.output
    )
    assert "left running: echo" not in program.output
    assert len(up.stage_processes()) == 1


async def test_failed_start_is_told_and_leaves_nothing_for_the_mended_one_to_trip_over(
    up: Up,
) -> None:
    program = up.start(up.spec(ECHO, "echo.yaml"), up.spec(BROKEN))

    assert await program.ended(within_s=40) == ExitCode.FAILED
    assert "'broken' did not come up and is FAILED" in program.output
    assert "| RuntimeError: weights are half downloaded" in program.output
    assert "Traceback (most recent call last)" not in program.output.rpartition("rolled back")[2]
    assert up.programs() == {}
    assert up.stage_processes() == {}

    await up.serving(up.spec(BROKEN.replace("Broken", "Echo")))


async def test_failed_start_leaves_alone_what_an_earlier_up_left_serving(up: Up) -> None:
    echo, broken = up.spec(ECHO, "echo.yaml"), up.spec(BROKEN)
    first = await up.serving(echo, "--keep")
    first.send(signal.SIGTERM)
    await first.ended()
    stages = up.stage_processes()

    second = up.start(echo, broken)

    assert await second.ended(within_s=40) == ExitCode.FAILED
    assert "echo: left as it is" in second.output
    assert up.stage_processes() == stages


async def test_changed_spec_of_what_still_runs_is_refused_and_nothing_is_touched(up: Up) -> None:
    first = await up.serving(up.spec(ECHO), "--keep")
    first.send(signal.SIGTERM)
    await first.ended()
    stages = up.stage_processes()

    second = up.start(up.spec(MORE_ECHO))

    assert await second.ended(within_s=40) == ExitCode.FAILED
    assert "exists with another spec" in second.output
    assert "run `stagekeeper up` without a file" in second.output
    assert up.stage_processes() == stages


async def test_second_signal_kills_everything_and_the_next_up_begins_anew(up: Up) -> None:
    program = await up.serving(up.spec(ECHO))
    # A supervisor that does not answer: the orderly end cannot come to one.
    os.kill(await up.child_pid("supervisor"), signal.SIGSTOP)
    program.send(signal.SIGINT)
    await program.line("ending; once more kills")

    program.send(signal.SIGINT)

    assert await program.ended() == ExitCode.INTERRUPTED
    assert up.programs() == {}
    await wait_for(lambda: not up.stage_processes(), "the stages were killed")

    await up.serving(up.spec(MORE_ECHO))


async def test_second_up_in_one_state_directory_is_refused_with_the_owners_pid(up: Up) -> None:
    program = await up.serving(up.spec(ECHO))
    state_dir = up.directory / "s"

    second = await command_line("up", f"--state-dir={state_dir}", "--endpoint=127.0.0.1:0")

    assert second.code == ExitCode.FAILED
    assert f"process {program.pid}" in second.err
    assert len(second.err.splitlines()) == 1


async def test_endpoint_that_somebody_else_serves_ends_up_with_the_reason(up: Up) -> None:
    await up.serving(up.spec(ECHO))

    async with Up() as other:
        other.endpoint = up.endpoint
        program = other.start()
        assert await program.ended(within_s=40) == ExitCode.FAILED
        assert "lives at" in program.output
        assert other.programs() == {}


async def test_bad_spec_starts_nothing(up: Up) -> None:
    program = up.start(up.spec("name: x\n"))

    assert await program.ended() == ExitCode.BAD_SPEC
    assert not (up.directory / "s").exists()


async def test_agents_of_up_start_only_what_its_files_name(up: Up) -> None:
    await up.serving(up.spec(ECHO))
    other = up.spec(ECHO.replace("Echo", "Front").replace("echo", "other"), "other.yaml")

    refused = await command_line("deploy", str(other), endpoint=up.endpoint)

    assert refused.code == ExitCode.FAILED
    assert "not allowed" in refused.err


async def test_starter_of_init_runs_as_it_says(up: Up) -> None:
    folder = up.directory / "new"
    assert (await command_line("init", str(folder))).code == ExitCode.DONE

    up.start(folder / "spec.yaml", pythonpath=[folder])
    assert up.program is not None
    endpoint = (await up.program.line(r"^up: endpoint (\S+);"))[1]

    called = await command_line("call", "hello", "greet", '{"name": "Ada"}', endpoint=endpoint)
    assert (called.code, called.out) == (0, '"Hello, Ada!"\n')


async def test_agent_killed_under_a_start_is_started_again_and_goes_on_with_it(up: Up) -> None:
    gate = up.directory / "gate"
    program = up.start(up.spec(SLOW.format(gate=gate)))
    await program.line(r"0/only on agent-0: STARTING\(LOAD\)")
    before = up.stage_processes()

    os.kill(await up.child_pid("agent-0"), signal.SIGKILL)
    await program.line("took over 1 running stage", within_s=60)
    gate.touch()

    await program.line(r"^slow: READY, 1 replica, in ", within_s=60)
    assert up.stage_processes() == before and len(before) == 1


async def test_up_goes_on_when_nobody_reads_it_any_more(up: Up) -> None:
    command = " ".join(
        [
            f"{sys.executable} -m stagekeeper.cli up {up.spec(ECHO)}",
            f"--endpoint=127.0.0.1:0 --state-dir={up.directory / 's'}",
            f"--lock-dir={up.directory / 'l'} --pythonpath={STAGES}",
            "--devices=cpu:0=1GiB --devices=cpu:1=1GiB",
        ]
    )
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"{command} | head -n 2"),
        stdout=asyncio.subprocess.DEVNULL,
        env=own_environment(),
        start_new_session=True,
    )
    try:
        await wait_for(lambda: len(up.stage_processes()) == 1, "its stage runs")
        # The reader left after two lines, and `up` said more since.
        assert any(
            "stagekeeper.cli up" in command and not command.startswith("bash")
            for command in up.programs().values()
        )
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        await shell.wait()
