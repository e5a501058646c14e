"""Starting the processes of an actor tree, and ending them with all that they started.

Decided here: what one start is. The child gets its launch line over a start pipe that stays open as
long as the owner lives, and answers its address over a pipe of its own; whatever goes wrong in
between, it is killed and nothing is left of it. Not decided here: what an end means to whom.

The kernel kills such a child when the *thread* that started it ends, so that is always the thread
of the event loop, which lives as long as the owner does.

Invariant: when a `LaunchedProc` is gone (`gone`), so is everything that it had started, in sessions
of their own too; until then its pid and its session are its own.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stagekeeper.host.proc_line import ProcLaunch, ProcReport
from stagekeeper.host.proc_start import start_arguments
from stagekeeper.host.process import ExitStatus, ProcessHandle, ProcessIdentity, spawn
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.host.tree_ending import end_tree
from stagekeeper.host.tree_sweep import TREE_ENV, Sweep

__all__ = ["LaunchedProc", "ProcLaunch", "ProcNotStarted", "launch", "own_pythonpath"]

PROC_MODULE: Final = "stagekeeper.actor.proc"
SWEEP_LIMIT_S: Final = 30.0
"""How long the kernel may take to end what was killed; a driver may hold a process for long."""

_READ_BYTES: Final = 64 * 1024
_LAST_LOG_BYTES: Final = 16 * 1024
_LAST_LOG_LINES: Final = 20
_BLOCK_AT_LOOP_END_MS: Final = 200
_END_AFTER_SILENCE_S: Final = 1.0
"""How soon a child that closed its report pipe without a word has to end, to be asked how."""


class ProcNotStarted(Exception):
    """A process did not come up. Nothing is left of it.

    Attributes:
        exit_status: how it ended by itself; None for one that was killed, and for one that the host
            could not start at all.
        last_lines: the end of what it wrote to its log, oldest first; [] without a log.
        is_late: it was not up within the limit, and was killed for that.
    """

    def __init__(
        self,
        message: str,
        exit_status: ExitStatus | None = None,
        last_lines: Sequence[str] = (),
        *,
        is_late: bool = False,
    ) -> None:
        self.message = message
        self.exit_status = exit_status
        self.last_lines = list(last_lines)
        self.is_late = is_late
        super().__init__("\n  ".join([message, *self.last_lines]))


class LaunchedProc:
    """A process of an actor tree. Made by `launch`.

    Its end is seen without anybody asking, and all that it had started is ended then.

    Attributes:
        address: where it listens.
        was_killed: whether this side sent SIGKILL, so that such an end says nothing of the host.
    """

    def __init__(self, spec: ProcLaunch, handle: ProcessHandle, start_pipe: int) -> None:
        self.handle = handle
        self.instance_id = spec.instance_id
        self.address = ""
        self.was_killed = False
        self._tree_path = spec.tree_path
        self._start_pipe = start_pipe
        self._end = TaskOwner(f"proc {spec.name}").start("end", self._see_end())

    @property
    def identity(self) -> ProcessIdentity:
        return self.handle.identity

    async def wait(self) -> ExitStatus:
        """Return how the process ended, as soon as it did; what it started may still be ending."""
        await self.handle.wait()
        status = self.handle.exit_status()
        assert status is not None  # it is our child
        return status

    async def gone(self) -> ExitStatus:
        """Return once the process and all that it had started are gone.

        Raises:
            TimeoutError: the kernel has not ended all of it within `SWEEP_LIMIT_S`.
        """
        await asyncio.shield(self._end)
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL the process; all that it started is ended right behind it. See `gone`."""
        self.was_killed = self.handle.send(signal.SIGKILL) or self.was_killed

    async def end(self, budget_s: float) -> ExitStatus:
        """Ask the process to end (SIGTERM), `kill` it when it has not after the budget.

        Raises:
            TimeoutError: as `gone`.
        """
        self.handle.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.handle.wait(), budget_s)
        except TimeoutError:
            self.kill()
        return await self.gone()

    def close(self) -> None:
        """Need the process no longer: one that lives is killed. Repeats change nothing."""
        if not self.handle.has_exited:
            self.kill()

    async def _see_end(self) -> None:
        identity = self.identity
        try:
            await self.handle.wait()
            # Not reaped before all is gone: that keeps the number of its session its own.
            await end_tree(
                Sweep(self._tree_path, session=identity.pid, since_ticks=identity.start_ticks),
                deadline_s=SWEEP_LIMIT_S,
            )
        finally:
            os.close(self._start_pipe)
            if not self.handle.has_exited:
                self._end_with_loop()
            self.handle.reap()
            self.handle.close()

    def _end_with_loop(self) -> None:
        """Kill the process that would have no owner once its owner's loop has ended."""
        self.kill()
        end = select.poll()
        end.register(self.handle.pidfd, select.POLLIN)
        end.poll(_BLOCK_AT_LOOP_END_MS)


async def launch(
    spec: ProcLaunch,
    *,
    env: Mapping[str, str],
    cwd: Path,
    log_path: Path | None,
    start_timeout_s: float,
    module: str = PROC_MODULE,
) -> LaunchedProc:
    """Start a process of an actor tree and wait until it reports its address.

    Cancelling it ends what was begun. The process leads its own session; its output goes to
    `log_path`, or where this process's own goes.

    Args:
        env: the process's environment; its place in the tree is added.
        module: what it runs.

    Raises:
        ProcNotStarted: it ended, said why it cannot come up, was silent for `start_timeout_s`, or
            could not be started at all; nothing is left of it.
    """
    log_begin = _size(log_path)
    report_pipe, report_fd = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            waiting = spawn(
                [sys.executable, "-P", "-m", module, *start_arguments(report_fd)],
                env={**env, TREE_ENV: spec.tree_path},
                cwd=cwd,
                log_path=log_path,
                pass_fds=[report_fd],
            )
        except OSError as error:
            raise ProcNotStarted(f"{spec.name} could not be started: {error}") from error
        finally:
            os.close(report_fd)
        start_pipe = waiting.take_pipe()
        proc = LaunchedProc(spec, waiting.handle, start_pipe)
        try:
            proc.address = await _address(proc, spec, start_pipe, report_pipe, start_timeout_s)
        except _NotUp as error:
            ended = proc.handle.exit_status()
            proc.kill()
            await proc.gone()
            lines = _last_lines(log_path, log_begin)
            is_late = isinstance(error, _Late)
            raise ProcNotStarted(f"{spec.name} {error}", ended, lines, is_late=is_late) from None
        except BaseException:
            proc.kill()
            raise
    finally:
        os.close(report_pipe)
    return proc


def own_pythonpath(main_path: Path | None = None) -> list[str]:
    """Return where this process looks for modules, so that another finds the same ones.

    Args:
        main_path: the file of the program, whose folder is searched as well.
    """
    folders = [os.path.abspath(folder or os.curdir) for folder in sys.path]
    if main_path is not None:
        folders.append(os.path.abspath(main_path.parent))
    return list(dict.fromkeys(folders))


class _NotUp(Exception):
    pass


class _Late(_NotUp):
    pass


async def _address(
    proc: LaunchedProc,
    spec: ProcLaunch,
    start_pipe: int,
    report_pipe: int,
    timeout_s: float,
) -> str:
    """Tell the process its line and return its answer."""
    try:
        async with asyncio.timeout(timeout_s):
            await _write(start_pipe, spec.to_line())
            line = await _read_line(report_pipe)
    except TimeoutError:
        raise _Late(f"was not up within {timeout_s:g} s") from None
    if not line:
        try:
            ended = await asyncio.wait_for(proc.wait(), _END_AFTER_SILENCE_S)
        except TimeoutError:
            raise _NotUp("let go of its owner before it was up") from None
        raise _NotUp(f"ended before it was up ({_told(ended)})")
    try:
        report = ProcReport.from_line(line)
    except ValueError as error:
        raise _NotUp(f"did not say where it listens: {error}") from None
    if report.problem:
        raise _NotUp(f"did not come up: {report.problem}")
    return report.address


async def _write(pipe: int, line: bytes) -> None:
    """Write a whole line; harmless when the reader is gone."""
    os.set_blocking(pipe, False)
    rest = memoryview(line)
    while rest:
        try:
            rest = rest[os.write(pipe, rest) :]
        except BlockingIOError:
            await _ready(pipe, is_reader=False)
        except BrokenPipeError:
            return


async def _read_line(pipe: int) -> bytes:
    """Read up to the first line's end; nothing when the pipe ends before it."""
    os.set_blocking(pipe, False)
    line = b""
    while not line.endswith(b"\n"):
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            await _ready(pipe, is_reader=True)
            continue
        if not data:
            return b""
        line += data
    return line


async def _ready(pipe: int, *, is_reader: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def now() -> None:
        if not ready.done():
            ready.set_result(None)

    if is_reader:
        loop.add_reader(pipe, now)
    else:
        loop.add_writer(pipe, now)
    try:
        await ready
    finally:
        if is_reader:
            loop.remove_reader(pipe)
        else:
            loop.remove_writer(pipe)


def _told(status: ExitStatus) -> str:
    if status.signal is None:
        return f"exit code {'unknown' if status.code is None else status.code}"
    try:
        return signal.Signals(status.signal).name
    except ValueError:  # a real-time signal
        return f"signal {status.signal}"


def _size(log_path: Path | None) -> int:
    return log_path.stat().st_size if log_path is not None and log_path.exists() else 0


def _last_lines(log_path: Path | None, begin: int) -> list[str]:
    """Return the end of what was written to a log since it was `begin` bytes long."""
    if log_path is None:
        return []
    with log_path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(begin, end - _LAST_LOG_BYTES))
        return log.read().decode(errors="replace").splitlines()[-_LAST_LOG_LINES:]
