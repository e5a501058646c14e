"""Starting and ending the processes of actor trees, with real processes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagekeeper.host import tree_sweep
from stagekeeper.host.proc_launch import LaunchedProc, ProcNotStarted, launch, own_pythonpath
from stagekeeper.host.proc_line import ProcLaunch
from stagekeeper.host.process import ExitStatus, boot_id, identity_of, is_alive, read_stat
from stagekeeper.host.tree_ending import end_tree
from stagekeeper.host.tree_sweep import TREE_ENV, Sweep
from stagekeeper.host.warden import Warden, start_warden
from tests.fakes.tree_proc import MODULE
from tests.harness.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]
ALL_GONE_WITHIN_S = 5.0  # promised is 1 s; a busy machine may be late


class Tree:
    """The place of one test, and what it started there."""

    def __init__(self, folder: Path) -> None:
        self.tree_id = str(uuid.uuid4())
        self.log = folder / "log"
        self.pids_path = folder / "pids"
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self.env = {**os.environ, "PYTHONPATH": path}

    def spec(self, **extra: str) -> ProcLaunch:
        instance_id = str(uuid.uuid4())
        return ProcLaunch(
            instance_id=instance_id,
            name="workers",
            tree_path=f"{self.tree_id}/{instance_id}",
            token="very-secret",
            listen_host="127.0.0.1",
            lease_s=3,
            boot_id=boot_id(),
            owner="a test",
            extra={"pids": str(self.pids_path), **extra},
        )

    async def launch(
        self, spec: ProcLaunch | None = None, *, timeout_s: float = 60, **extra: str
    ) -> LaunchedProc:
        return await launch(
            spec or self.spec(**extra),
            env=self.env,
            cwd=Path("/"),
            log_path=self.log,
            start_timeout_s=timeout_s,
            module=MODULE,
        )

    @property
    def pids(self) -> list[int]:
        """All that were started there, in order; the processes before what they started."""
        return list(map(int, self.pids_path.read_text().split()))

    @property
    def living(self) -> list[int]:
        return [pid for pid in self.pids if identity_of(pid) is not None]

    def is_empty(self) -> bool:
        return not self.living and not tree_sweep.find(self.tree_id)

    @contextmanager
    def program(
        self, *, has_warden: bool = True, **extra: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        arguments = [self.tree_id, "yes" if has_warden else "no"]
        extra = {"pids": str(self.pids_path), **extra}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.tree_program", *arguments, json.dumps(extra)],
            stdout=subprocess.PIPE,
            env=self.env,
        ) as program:
            try:
                yield program
            finally:
                program.kill()

    @contextmanager
    def root_script(self, script: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a root that forks copies of itself, which are killed at the end."""
        with subprocess.Popen(
            [sys.executable, "-c", script, self.tree_id],
            stdout=subprocess.PIPE,
            env=self.env,
            start_new_session=True,
        ) as root:
            try:
                yield root
            finally:
                os.killpg(root.pid, signal.SIGKILL)

    def member(self, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, env={**os.environ, TREE_ENV: self.tree_id})

    def sleep(self, path: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], env={**os.environ, TREE_ENV: path})


@pytest.fixture
def tree(tmp_path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    tree.pids_path.touch()
    yield tree
    assert tree_sweep.sweep(tree.tree_id, deadline_s=60) == set()


async def line_of(program: subprocess.Popen[bytes]) -> str:
    assert program.stdout is not None
    return (await asyncio.wait_for(asyncio.to_thread(program.stdout.readline), 60)).decode()


async def test_proc_is_up_with_what_it_was_told_and_nothing_more(tree, tmp_path):
    spec = tree.spec(do="tell", told=str(tmp_path / "told"))
    spec.pythonpath.extend(["/somewhere", *own_pythonpath()])
    descriptors = len(os.listdir("/proc/self/fd"))

    proc = await tree.launch(spec)

    told = json.loads((tmp_path / "told").read_text())
    assert proc.address == f"127.0.0.1:{proc.identity.pid}"
    assert proc.instance_id == spec.instance_id
    assert told["path"][: len(spec.pythonpath)] == spec.pythonpath
    assert told["stdin"] == ""
    assert told["environment"][TREE_ENV] == spec.tree_path
    assert "very-secret" not in str(told)
    assert told["fds_of_child"] == ["0", "1", "2", "3"]  # 3 is the folder that it reads
    assert os.getsid(proc.identity.pid) == proc.identity.pid
    assert tree_sweep.find(tree.tree_id) == {(proc.identity.pid, proc.identity.start_ticks)}
    proc.close()
    assert await proc.gone() == ExitStatus(signal=signal.SIGKILL)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("what", "message", "status", "lines"),
    [
        ("exit", r"ended before it was up \(exit code 3\)", ExitStatus(code=3), ["I leave"]),
        ("hang", "was not up within 1.5 s", None, ["I hang"]),
        ("refuse", "no such class", None, []),
    ],
)
async def test_proc_that_does_not_come_up_is_told_and_leaves_nothing(
    tree, what, message, status, lines
):
    tree.log.write_text("of an earlier process\n")

    with pytest.raises(ProcNotStarted, match=message) as raised:
        await tree.launch(do=what, grandchildren="yes", timeout_s=1.5 if what == "hang" else 60)

    assert raised.value.exit_status == status
    assert raised.value.is_late == (what == "hang")
    assert raised.value.last_lines == lines
    assert len(tree.pids) == 4
    assert tree.is_empty()


async def test_proc_that_cannot_be_run_at_all_is_told(tree, tmp_path):
    tree.env["PYTHONPATH"] = ""
    with pytest.raises(ProcNotStarted, match="exit code 1") as no_module:
        await tree.launch()
    assert "tests" in no_module.value.last_lines[-1]

    with pytest.raises(ProcNotStarted, match="could not be started"):
        await launch(tree.spec(), env={}, cwd=tmp_path / "none", log_path=None, start_timeout_s=60)


async def test_start_that_is_cancelled_leaves_nothing(tree):
    start = asyncio.create_task(tree.launch(do="hang", grandchildren="yes"))
    await wait_for(lambda: len(tree.pids) == 4, "it has started all")

    start.cancel()

    with pytest.raises(asyncio.CancelledError):
        await start
    await wait_for(tree.is_empty, "all are gone", within_s=ALL_GONE_WITHIN_S)


async def test_asked_end_is_a_signal_within_the_budget_and_a_kill_after_it(tree):
    willing, deaf = await asyncio.gather(tree.launch(), tree.launch(do="ignore"))

    assert await willing.end(60) == ExitStatus(signal=signal.SIGTERM)
    assert not willing.was_killed
    assert await deaf.end(0.05) == ExitStatus(signal=signal.SIGKILL)
    assert deaf.was_killed
    assert await deaf.end(0.05) == ExitStatus(signal=signal.SIGKILL)  # repeats change nothing


async def test_end_of_a_proc_ends_all_that_it_started_without_being_asked(tree):
    proc = await tree.launch(grandchildren="yes", bare="yes", below="yes")
    assert len(tree.living) == 9

    os.kill(proc.identity.pid, signal.SIGSEGV)

    assert await asyncio.wait_for(proc.wait(), 5) == ExitStatus(signal=signal.SIGSEGV)
    assert await asyncio.wait_for(proc.gone(), 5) == ExitStatus(signal=signal.SIGSEGV)
    assert tree.is_empty()
    assert not proc.was_killed


async def test_end_of_the_loop_ends_its_procs(tree):
    proc = await asyncio.to_thread(lambda: asyncio.run(tree.launch()))

    # Killed, or quicker than that by itself: its owner let go of it.
    let_go = ExitStatus(code=7)
    assert proc.handle.exit_status() in (ExitStatus(signal=signal.SIGKILL), let_go)
    assert tree.is_empty()


@pytest.mark.parametrize("killed", ["program", "proc", "both"])
async def test_supervision_u24_death_of_the_root_or_of_a_proc_ends_all_below(tree, killed):
    """supervision-U24: two levels of processes, each with three grandchildren."""
    with tree.program(grandchildren="yes", below="yes") as program:
        assert (await line_of(program)).startswith("up")
        assert len(tree.living) == 8

        if killed != "program":
            os.kill(tree.pids[0], signal.SIGKILL)
        if killed != "proc":
            program.kill()

        await wait_for(tree.is_empty, "all are gone", within_s=ALL_GONE_WITHIN_S)
        if killed == "proc":
            assert "signal=9" in await line_of(program)
            assert program.poll() is None


async def test_proc_whose_owner_died_before_it_was_bound_does_nothing(tree, tmp_path):
    tree.env["TREE_PROC_WAITS_FOR"] = str(tmp_path / "go")
    with tree.program(has_warden=False, grandchildren="yes") as program:
        await wait_for(lambda: has_its_line(tree), "the proc is there, and its launch line")

        program.kill()
        program.wait()
        (tmp_path / "go").touch()

    await wait_for(tree.is_empty, "it is gone", within_s=60)
    assert tree.pids == []


def has_its_line(tree: Tree) -> bool:
    [(pid, _)] = tree_sweep.find(tree.tree_id)
    with open(f"/proc/{pid}/fd/0", "rb") as start_pipe:
        waiting = fcntl.ioctl(start_pipe, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(waiting, sys.byteorder) > 0


async def test_proc_whose_owner_dies_before_the_launch_line_is_written_ends(tree):
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stagekeeper.host.process import spawn\n"
        "from stagekeeper.host.proc_start import start_arguments\n"
        f"argv = [sys.executable, '-m', '{MODULE}', *start_arguments(1)]\n"
        f"env = {{**os.environ, '{TREE_ENV}': sys.argv[1]}}\n"
        "waiting = spawn(argv, env=env, cwd=Path('/'), log_path=None, pass_fds=[1])\n"
        "print(waiting.handle.pid, flush=True)\n"
        # A copy of the owner keeps the start pipe open, so that its end tells nothing.
        "os.fork()\n"
        "signal.pause()\n"
    )
    with tree.root_script(script) as owner:
        pid = int(await line_of(owner))
        # It waits in a read of its start pipe: bound, and not told.
        await wait_for(
            lambda: Path(f"/proc/{pid}/wchan").read_text() in ("pipe_read", "anon_pipe_read"),
            "the proc waits for its line",
        )
        proc = identity_of(pid)
        assert proc is not None

        owner.kill()

        await wait_for(lambda: not is_alive(proc), "it is gone", within_s=ALL_GONE_WITHIN_S)


async def test_warden_hears_no_polite_signal_and_another_can_follow_it(tree):
    first = start_warden(tree.tree_id)
    await wait_for(lambda: ignores(first, signal.SIGTERM), "it is up")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first.identity.pid, number)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first.ended(), 0.1)

    os.kill(first.identity.pid, signal.SIGKILL)
    assert not await asyncio.wait_for(first.ended(), 5)
    second = start_warden(tree.tree_id)

    with tree.sleep(f"{tree.tree_id}/a/b") as below:
        assert await second.close(60)
        assert below.wait() == -signal.SIGKILL
    assert await second.close(60)
    assert not await first.close(5)


def ignores(warden: Warden, number: signal.Signals) -> bool:
    status = Path(f"/proc/{warden.identity.pid}/status").read_text()
    mask = int(status.split("SigIgn:")[1].split()[0], 16)
    return bool(mask >> (number - 1) & 1)


async def test_warden_sees_the_end_of_a_root_whose_pipe_a_copy_holds_open(tree):
    script = (
        "import os, signal, sys\n"
        "from stagekeeper.host.warden import start_warden\n"
        "warden = start_warden(sys.argv[1])\n"
        "print(warden.identity.pid, flush=True)\n"
        "os.fork()\n"
        "signal.pause()\n"
    )
    with tree.sleep(tree.tree_id) as member, tree.root_script(script) as root:
        warden = int(await line_of(root))
        await wait_for(lambda: holds_another(warden), "the warden holds its root")
        await wait_for(lambda: len(members_of_session(root.pid)) == 2, "there is a copy")

        root.kill()

        assert await asyncio.to_thread(member.wait, 60) == -signal.SIGKILL


async def test_warden_that_is_let_go_of_ends_also_when_a_copy_holds_its_pipe_open(tree):
    warden = start_warden(tree.tree_id)
    copy = os.dup(warden._pipe)
    try:
        assert await warden.close(60)
    finally:
        os.close(copy)


def holds_another(pid: int) -> bool:
    return any("pidfd" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())


def members_of_session(session: int) -> list[int]:
    stats = (read_stat(int(it.name)) for it in Path("/proc").iterdir() if it.name.isdigit())
    return [it.identity.pid for it in stats if it is not None and it.session == session]


async def test_sweep_takes_what_is_at_or_below_a_place_and_nothing_beside_it(tree):
    top = tree.tree_id
    at, below, beside, above = map(tree.sleep, (f"{top}/a", f"{top}/a/b", f"{top}/ab", top))

    killed = await end_tree(Sweep(f"{top}/a"), deadline_s=60)

    assert {pid for pid, _ in killed} == {at.pid, below.pid}
    assert beside.poll() is None and above.poll() is None
    rest = tree_sweep.sweep(top, deadline_s=60)
    assert {pid for pid, _ in rest} == {beside.pid, above.pid}
    for process in (at, below, beside, above):
        assert process.wait() == -signal.SIGKILL


async def test_sweep_ends_what_goes_on_starting_others_while_it_looks(tree):
    hop = (
        "import os, time\n"
        "while True:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid()\n"
        "    time.sleep(0.05)\n"
    )
    spread = "while :; do setsid sleep 600 & sleep 0.01; done"
    with (
        tree.member(sys.executable, "-I", "-S", "-c", hop) as hopper,
        tree.member("sh", "-c", spread),
    ):
        hopper.wait()
        await wait_for(lambda: len(tree_sweep.find(tree.tree_id)) > 5, "they spread")

        killed = await end_tree(Sweep(tree.tree_id), deadline_s=60)

    assert len(killed) > 5
    assert tree.is_empty()


def test_pid_that_is_anothers_by_now_is_never_hit():
    with subprocess.Popen(["sleep", "600"]) as stranger:
        identity = identity_of(stranger.pid)
        assert identity is not None

        assert not tree_sweep.kill(identity.pid, identity.start_ticks - 1)
        assert is_alive(identity)
        assert tree_sweep.kill(identity.pid, identity.start_ticks)


def test_sweep_of_no_place_is_refused():
    with pytest.raises(ValueError, match="no tree"):
        tree_sweep.sweep("/", deadline_s=1)


async def test_sweep_that_does_not_come_to_its_end_says_who_is_left(tree, monkeypatch):
    monkeypatch.setattr(tree_sweep, "kill", lambda pid, start_ticks: True)
    with tree.sleep(tree.tree_id) as member:
        with pytest.raises(TimeoutError, match=rf"\[{member.pid}\]"):
            tree_sweep.sweep(tree.tree_id, deadline_s=0.05)
        member.kill()
