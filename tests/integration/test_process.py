"""Real processes: told apart, found, signalled, reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagekeeper.host import process
from stagekeeper.host.process import (
    ExitStatus,
    ProcessHandle,
    ProcessIdentity,
    age_s,
    environment_holds,
    find_members,
    identity_of,
    is_alive,
    members_by,
    own_bytes,
    resident_bytes,
    spawn,
)
from tests.harness.waiting import wait_for

MARK = "STAGEKEEPER_TEST_MARK"
ENV = {"PATH": os.environ["PATH"]}


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A value for MARK that is this test's own; whatever carries it is killed at the end."""
    value = tmp_path.as_posix()
    yield value
    for member in find_members(MARK, value):
        os.kill(member.pid, signal.SIGKILL)


def start(tmp_path: Path, mark: str, *argv: str, go: bool = True) -> process.WaitingProcess:
    waiting = spawn(argv, env={**ENV, MARK: mark}, cwd=tmp_path, log_path=tmp_path / "log")
    if go:
        waiting.release(b"go\n")
    return waiting


@contextmanager
def stranger(*argv: str) -> Iterator[subprocess.Popen]:
    """A process of somebody else: started here, but not by `spawn`."""
    child = subprocess.Popen(argv)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def test_child_that_exits_is_reaped_with_its_code(tmp_path, mark):
    handle = start(tmp_path, mark, "sh", "-c", "exit 7").handle

    await asyncio.wait_for(handle.wait(), 5)

    assert handle.reap() == ExitStatus(code=7)
    assert handle.reap() == ExitStatus(code=7)
    handle.close()


async def test_child_that_is_killed_is_reaped_with_its_signal(tmp_path, mark):
    handle = start(tmp_path, mark, "sleep", "600").handle

    assert handle.send(signal.SIGKILL)
    await asyncio.wait_for(handle.wait(), 5)

    assert handle.reap() == ExitStatus(signal=9)
    assert not handle.send(signal.SIGTERM)
    handle.close()


async def test_how_a_child_ended_that_somebody_else_waited_for_is_not_known(tmp_path, mark):
    handle = start(tmp_path, mark, "sh", "-c", "exit 7").handle

    os.waitpid(handle.pid, 0)  # noqa: ASYNC222 (as a program that waits for any child, or ignores SIGCHLD)
    await asyncio.wait_for(handle.wait(), 5)

    assert handle.exit_status() == ExitStatus()
    assert handle.reap() == ExitStatus()
    handle.close()


async def test_other_peoples_process_is_waited_for_without_its_exit_being_known():
    # The shell starts a process and ends; nobody here is the parent of what is left.
    shell = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 600 >/dev/null & echo $!", stdout=subprocess.PIPE
    )
    output, _ = await shell.communicate()
    pid = int(output)
    identity = identity_of(pid)
    assert identity is not None
    handle = ProcessHandle.open(identity)
    assert handle is not None

    handle.send(signal.SIGKILL)
    await asyncio.wait_for(handle.wait(), 5)

    assert handle.reap() is None  # no child of ours: nobody tells how it ended
    assert not is_alive(identity)
    handle.close()


async def test_several_may_wait_and_one_may_leave(tmp_path, mark):
    handle = start(tmp_path, mark, "sleep", "600").handle
    first = asyncio.create_task(handle.wait())
    second = asyncio.create_task(handle.wait())
    await asyncio.sleep(0)

    first.cancel()
    handle.send(signal.SIGKILL)

    await asyncio.wait_for(second, 5)
    assert handle.has_exited
    handle.reap()
    handle.close()


def test_pid_with_other_ticks_is_not_opened():
    with stranger("sleep", "600") as child:
        identity = identity_of(child.pid)
        assert identity is not None
        reused = ProcessIdentity(child.pid, identity.start_ticks - 1)

        assert ProcessHandle.open(reused) is None
        assert not is_alive(reused)


def test_pid_of_nobody_is_not_opened():
    with stranger("true") as child:
        identity = identity_of(child.pid) or ProcessIdentity(child.pid, 1)
        child.wait()

    assert ProcessHandle.open(identity) is None


def test_process_that_waits_to_be_reaped_is_not_alive():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert process.read_stat(child.pid) is not None
    assert identity_of(child.pid) is None
    child.wait()


def test_name_with_parentheses_does_not_disturb(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with stranger(str(program), "600") as child:
        stat = process.read_stat(child.pid)

        assert stat is not None
        assert stat.identity == ProcessIdentity(child.pid, stat.identity.start_ticks)
        assert stat.session == os.getsid(child.pid)


async def test_child_waits_on_its_pipe_and_exits_when_it_is_abandoned(tmp_path, mark):
    waiting = start(
        tmp_path, mark, "sh", "-c", 'read line && echo "got $line" && exit 0; exit 9', go=False
    )

    waiting.abandon()
    await asyncio.wait_for(waiting.handle.wait(), 5)

    assert waiting.handle.reap() == ExitStatus(code=9)
    waiting.handle.close()


async def test_child_appends_to_its_log(tmp_path, mark):
    (tmp_path / "log").write_text("before\n")
    waiting = start(
        tmp_path, mark, "sh", "-c", 'read line; echo "got $line"; echo oh >&2', go=False
    )

    waiting.release(b"go\n")
    await asyncio.wait_for(waiting.handle.wait(), 5)

    waiting.handle.reap()
    waiting.handle.close()
    assert (tmp_path / "log").read_text() == "before\ngot go\noh\n"


async def test_processes_are_found_by_the_value_of_a_variable_the_eldest_first(tmp_path, mark):
    first = start(tmp_path, mark, "sleep", "600").handle
    other = start(tmp_path, f"{mark}-other", "sleep", "600").handle

    def found() -> dict[str, list[int]]:
        return {
            value: [it.pid for it in members]
            for value, members in members_by(MARK).items()
            if value.startswith(mark)
        }

    await wait_for(
        lambda: found() == {mark: [first.pid], f"{mark}-other": [other.pid]}, "both are found"
    )
    assert 0 <= age_s(first.identity) < 60
    assert own_bytes(first.identity) > 0
    for handle in (first, other):
        handle.send(signal.SIGKILL)
        await handle.wait()
        handle.reap()
        handle.close()
    assert found() == {}
    assert own_bytes(first.identity) == 0


async def test_release_of_a_child_that_is_gone_is_harmless(tmp_path, mark):
    waiting = start(tmp_path, mark, "true", go=False)
    await asyncio.wait_for(waiting.handle.wait(), 5)

    waiting.release(b"go\n")

    waiting.handle.reap()
    waiting.handle.close()


async def test_child_leads_its_own_session_and_has_the_given_environment_alone(tmp_path, mark):
    os.environ["STAGEKEEPER_TEST_NOT_INHERITED"] = "yes"
    try:
        handle = start(tmp_path, mark, "sleep", "600").handle
    finally:
        del os.environ["STAGEKEEPER_TEST_NOT_INHERITED"]

    assert os.getsid(handle.pid) == handle.pid
    assert environment_holds(handle.pid, MARK, mark)
    assert not environment_holds(handle.pid, "STAGEKEEPER_TEST_NOT_INHERITED", "yes")


async def test_startup_26_child_outlives_the_thread_that_spawned_it(tmp_path, mark):
    """startup-26"""
    handles: list[ProcessHandle] = []
    thread = threading.Thread(
        target=lambda: handles.append(start(tmp_path, mark, "sleep", "600").handle)
    )
    thread.start()
    thread.join()

    # A death signal would come at the end of the thread, so it would be here by now.
    assert is_alive(handles[0].identity)


def test_program_that_does_not_exist_starts_nothing(tmp_path, mark):
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(FileNotFoundError):
        start(tmp_path, mark, "no-such-program")

    assert len(os.listdir("/proc/self/fd")) == before


async def test_members_are_found_by_environment_and_by_session(tmp_path, mark):
    script = (
        "sleep 601 & "  # in the session, with the environment
        "env -i sleep 602 & "  # in the session, without it
        "setsid sleep 603 & "  # out of the session, with it
        "wait"
    )
    handle = start(tmp_path, mark, "sh", "-c", script).handle

    def commands(session: int | None) -> set[str]:
        return {
            Path(f"/proc/{member.pid}/cmdline").read_bytes().split(b"\0")[1].decode()
            for member in find_members(MARK, mark, session=session)
        }

    await wait_for(lambda: commands(handle.pid) >= {"601", "602", "603"}, "all have started")
    assert commands(None) == {"-c", "601", "603"}
    for member in find_members(MARK, mark, session=handle.pid):
        os.kill(member.pid, signal.SIGKILL)
    await asyncio.wait_for(handle.wait(), 5)
    handle.reap()
    handle.close()


async def test_member_that_waits_to_be_reaped_is_none(tmp_path, mark):
    handle = start(tmp_path, mark, "true").handle

    await asyncio.wait_for(handle.wait(), 5)

    assert find_members(MARK, mark, session=handle.pid) == []
    handle.reap()
    handle.close()


async def test_resident_memory_counts_descendants(tmp_path, mark):
    hold = "import time; block = bytearray(50_000_000); time.sleep(600)"
    script = f'{sys.executable} -c "{hold}" & wait'
    handle = start(tmp_path, mark, "sh", "-c", script).handle

    await wait_for(
        lambda: (resident_bytes(handle.pid) or 0) > 50_000_000, "the child's memory is seen"
    )

    assert 50_000_000 < (resident_bytes(handle.pid) or 0) < 200_000_000
    assert resident_bytes(2**22) is None


async def test_closing_lets_the_process_go_on(tmp_path, mark):
    handle = start(tmp_path, mark, "sleep", "600").handle
    waiter = asyncio.create_task(handle.wait())
    await asyncio.sleep(0)

    handle.close()
    handle.close()

    assert is_alive(handle.identity)
    waiter.cancel()


async def test_exit_is_known_before_the_child_is_reaped(tmp_path, mark):
    handle = start(tmp_path, mark, "sh", "-c", "exit 3").handle
    assert handle.exit_status() is None or handle.exit_status() == ExitStatus(code=3)

    await asyncio.wait_for(handle.wait(), 5)

    assert handle.exit_status() == ExitStatus(code=3)
    assert process.read_stat(handle.pid) is not None  # its number is still its own
    assert handle.reap() == ExitStatus(code=3)
    assert process.read_stat(handle.pid) is None
    handle.close()


def test_child_that_cannot_be_held_is_not_left_behind(tmp_path, mark, monkeypatch):
    descriptors = len(os.listdir("/proc/self/fd"))

    def none_left(pid: int) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="too many"):
        start(tmp_path, mark, "sleep", "600", go=False)

    assert find_members(MARK, mark) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
