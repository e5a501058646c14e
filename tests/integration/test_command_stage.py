"""Programs that are not ours as stages: real HTTP and gRPC servers under one stage process each."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from stagekeeper.agent.child_environment import RUN_DIR_ENV
from stagekeeper.core.command_stage import GRPC, HTTP, LOG, TCP, CommandSpec, DrainSpec, Probe
from stagekeeper.host.process import descendants, identity_of
from stagekeeper.runtime.launch import INSTANCE_ENV, LaunchCommand, LaunchDevice
from stagekeeper.runtime.phase_lock import Mode, PhaseLock
from stagekeeper.v1 import types_pb2
from tests.harness.stage_process import StageProcess
from tests.harness.waiting import wait_for

PROGRAMS = Path(__file__).parent.parent / "programs"
READY = types_pb2.SHARD_STATE_READY
STALLED = types_pb2.SHARD_STATE_STALLED


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Command(StageProcess):
    """A stage process with a program; `{port}` in the arguments is its port."""

    def __init__(
        self,
        *argv: str,
        launch: dict[str, Any] | None = None,
        fixed_bytes: bool = False,
        **spec: Any,
    ) -> None:
        self.port = free_port()
        filled = [it.replace("{port}", str(self.port)) for it in argv]
        fields = {"ports": ("http",), **spec}
        command = LaunchCommand(
            spec=CommandSpec(argv=argv, **fields),
            argv=filled,
            env={
                "PATH": os.environ["PATH"],
                INSTANCE_ENV: "of the test",
                RUN_DIR_ENV: "of the test",
            },
            ports=dict.fromkeys(fields["ports"], self.port),
            has_fixed_bytes=fixed_bytes,
        )
        super().__init__("", command=command, **(launch or {}))

    def close(self) -> None:
        """End the program and what it has started too: they are in process groups of their own."""
        for process in descendants(self.pid):
            os.kill(process.pid, signal.SIGKILL)
        super().close()


def python_script(name: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-u", str(PROGRAMS / name), *args)


HTTP_SERVER = (sys.executable, "-u", "-m", "http.server", "{port}", "--bind", "127.0.0.1")


async def test_a_http_server_serves_and_is_stopped() -> None:
    drain = DrainSpec(budget_s=0.1, metric="running", path="/")
    command = Command(*HTTP_SERVER, ready=Probe(HTTP, "/"), canary=Probe(HTTP, "/"), drain=drain)
    async with command as stage:
        state = await stage.ready()

        found = {it.name: (it.protocol, it.url) for it in state.addresses}
        assert found["http"] == (
            types_pb2.ADDRESS_PROTOCOL_HTTP,
            f"http://127.0.0.1:{stage.port}",
        )
        with pytest.raises(grpc.aio.AioRpcError, match=f"call it at http://127.0.0.1:{stage.port}"):
            await stage.call("complete")
        await stage.end(budget_s=20)
        assert await stage.ended() == 0
        assert "SIGTERM to python" in stage.output
        assert "not told: GET / answered 200, and has no running" in stage.output
        assert '"GET / HTTP/1.1" 200' in stage.output  # its own output is the stage's log


async def test_a_grpc_server_is_ready_by_its_health_and_stalled_by_its_word(tmp_path: Path) -> None:
    ill = tmp_path / "ill"
    live = Probe(GRPC, interval_s=0.05, failures=2)
    command = Command(
        *python_script("health.py", "{port}", str(ill)),
        ports=("grpc",),
        ready=Probe(GRPC),
        live=live,
    )
    async with command as stage:
        state = await stage.ready()
        assert state.addresses[1].url == f"127.0.0.1:{stage.port}"
        assert state.addresses[1].protocol == types_pb2.ADDRESS_PROTOCOL_GRPC

        ill.touch()
        stalled = await stage.until(lambda it: it.state == STALLED)
        assert "NOT_SERVING" in stalled.stall_reason
        ill.unlink()
        again = await stage.until(lambda it: it.state == READY)
        assert again.stall_reason == ""

        os.kill(_main_process(stage), signal.SIGKILL)
        assert await stage.ended() == -signal.SIGKILL  # it tells the end of its program as its own
        assert "python" in stage.output and "was ended by SIGKILL, unasked" in stage.output


async def test_a_server_that_ignores_sigterm_goes_with_all_that_it_started() -> None:
    drain = DrainSpec(settle_s=0.1, budget_s=0.3, metric="running", path="/metrics")
    command = Command(
        *python_script("stubborn.py", "127.0.0.1", "{port}"),
        ready=Probe(LOG, "grandchildren"),
        canary=Probe(HTTP, "/v1/completions", body='{"prompt": 1}', contains="Paris"),
        drain=drain,
    )
    async with command as stage:
        await stage.ready()
        line = next(it for it in stage.output.splitlines() if it.startswith("grandchildren"))
        pids = [int(word) for word in line.split()[1:]]
        grandchildren = [identity_of(pid) for pid in pids]
        assert None not in grandchildren

        await stage.end(budget_s=2)
        assert await stage.ended() == 0
        assert "work is in flight still (running is 2)" in stage.output
        assert "what was left of python" in stage.output
        assert [identity_of(pid) for pid in pids] != grandchildren
        assert all(identity_of(pid) not in grandchildren for pid in pids)


@pytest.mark.parametrize(
    ("code", "ready", "exit_code"),
    [
        ("import sys; print('no weights'); sys.exit(3)", Probe(TCP), 3),
        ("print('done')", Probe(LOG, "never"), 0),
        ("import os; os.kill(os.getpid(), 11)", Probe(TCP), -11),
    ],
)
async def test_a_program_that_ends_while_it_starts_is_told_by_its_end(
    code: str, ready: Probe, exit_code: int
) -> None:
    async with Command(sys.executable, "-c", code, ready=ready) as stage:
        assert await stage.ended() == exit_code
        assert stage.output.splitlines()[-1].endswith(", unasked")


async def test_the_last_words_of_a_program_that_served_are_its_own(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\nprint('up', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "print('no weights any more', flush=True)\nsys.exit(3)"
    )
    argv = (sys.executable, "-c", code, str(tmp_path / "end"))
    async with Command(*argv, ready=Probe(LOG, "up"), ports=()) as stage:
        await stage.ready()
        (tmp_path / "end").touch()
        assert await stage.ended() == 3
        words, end = stage.output.splitlines()[-2:]
        assert words == "no weights any more" and end.endswith("exited with code 3, unasked")


async def test_a_canary_that_fails_ends_the_start_and_the_program() -> None:
    canary = Probe(HTTP, "/no-such-file", failures=2, interval_s=0.01)
    async with Command(*HTTP_SERVER, ready=Probe(TCP), canary=canary) as stage:
        failed = await stage.until(lambda it: it.state == types_pb2.SHARD_STATE_FAILED)

        assert failed.phase == types_pb2.PHASE_MEASURE
        assert failed.error.startswith("CanaryFailed: python")
        assert "GET /no-such-file answered 404" in failed.error
        await wait_for(lambda: _main_process(stage) == 0, "the program is gone")
        await stage.end()
        assert await stage.ended() == 1


async def test_a_log_of_looks_is_no_progress_and_what_is_wrong_is_shown() -> None:
    ready = Probe(HTTP, "/not-there", interval_s=0.01)
    async with Command(*HTTP_SERVER, ready=ready) as stage:
        shown = await stage.until(lambda it: "GET /not-there answered 404" in it.progress.note)
        looks = stage.output.count("GET /not-there")
        await wait_for(lambda: stage.output.count("GET /not-there") > looks + 3, "more looks")
        later = await stage.until(lambda it: True)
        assert later.progress.counter == shown.progress.counter
        assert "HTTP/1.1" not in later.progress.note


async def test_a_program_is_not_started_where_somebody_else_has_its_port() -> None:
    command = Command(*HTTP_SERVER, ready=Probe(TCP))
    with socket.create_server(("127.0.0.1", command.port)):
        async with command as stage:
            failed = await stage.until(lambda it: it.state == types_pb2.SHARD_STATE_FAILED)
            assert failed.error.startswith(f"PortTaken: port {command.port} at 127.0.0.1")
            assert _main_process(stage) == 0
            # No frames of ours push out of the last lines what a program said.
            assert failed.error in stage.output and "Traceback" not in stage.output


async def test_a_start_that_is_not_wanted_any_more_ends_the_program() -> None:
    command = Command(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    async with command as stage:
        # What it prints is shown, and what is waited for.
        await stage.until(lambda it: it.progress.note.startswith("up (127.0.0.1 port"))
        await stage.end(budget_s=20)
        assert await stage.ended() == 0


async def test_a_follower_is_up_when_it_lives() -> None:
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    probe = Probe(HTTP, "/health")
    async with Command(
        *sleeper, ready=probe, canary=probe, launch={"shard_index": 1, "shard_count": 2}
    ) as stage:
        state = await stage.ready()
        assert [it.name for it in state.addresses] == ["stage"]


@pytest.mark.parametrize("fixed_bytes", [False, True])
async def test_a_program_comes_up_alone_on_its_cards_unless_its_bytes_are_fixed(
    tmp_path: Path, fixed_bytes: bool
) -> None:
    card = LaunchDevice("cpu:0", "cpu", 2**20, 2**30)
    command = Command(
        sys.executable,
        "-uc",
        "import time; print('up'); time.sleep(600)",
        ready=Probe(LOG, "up"),
        ports=(),
        fixed_bytes=fixed_bytes,
        launch={"devices": [card], "lock_dir": str(tmp_path)},
    )
    lock = PhaseLock(tmp_path, command.launch.lock_domains, "another stage")
    async with AsyncExitStack() as stack:
        async with lock.held(Mode.SHARED, "LOAD"):
            stage = await stack.enter_async_context(command)
            if fixed_bytes:
                await stage.ready()
            else:
                await stage.until(lambda it: "another stage" in it.progress.note)
                assert _main_process(stage) == 0
        await stage.ready()


async def test_a_program_that_was_not_alone_on_its_cards_has_not_come_up(tmp_path: Path) -> None:
    command = Command(
        sys.executable,
        "-uc",
        "import time\nwhile True: print('loads'); time.sleep(0.1)",
        ready=Probe(LOG, "up"),
        ports=(),
        launch={
            "devices": [LaunchDevice("cpu:0", "cpu", 2**20, 2**30)],
            "lock_dir": str(tmp_path),
        },
    )
    async with command as stage:
        await stage.until(lambda it: "loads" in it.progress.note)
        for path in tmp_path.glob("*.lock"):
            path.rename(path.with_suffix(".old"))
            path.touch()
        with stage.log.open("a") as log:
            log.write("up\n")
        failed = await stage.until(lambda it: it.state == types_pb2.SHARD_STATE_FAILED)
        assert "was removed or replaced while it was held" in failed.error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        ("#!/no/such/python\n", "although it is there: what its #! line names"),
        ("echo hi\n", "no script with a #! line"),
    ],
)
async def test_a_program_that_cannot_be_executed_says_so(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "program"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    async with Command(str(path)) as stage:
        failed = await stage.until(lambda it: it.state == types_pb2.SHARD_STATE_FAILED)
        assert failed.error.startswith(f"ProgramUnusable: {path} cannot be executed")
        assert words in failed.error


def _main_process(stage: Command) -> int:
    """Return the pid of the program under a stage process; 0 when there is none."""
    children = Path(f"/proc/{stage.pid}/task/{stage.pid}/children").read_text().split()
    return int(children[0]) if children else 0
