"""The first steps of a process of an actor tree: be tied to its owner, hear its line, answer.

Decided here: how the process is bound to whoever started it. The kernel kills it when its owner
dies; the start pipe, which stays open, tells the same a second time (an owner may also let go of it
on purpose). Not decided here: what the process then does.

Invariant: nothing of a user's runs before the process is bound. What it starts later inherits
neither of the two pipes, so it cannot hide an end from either side.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

from stagekeeper.host.parent_death import die_with
from stagekeeper.host.proc_line import ProcLaunch, ProcReport

OWNER_GONE_EXIT_CODE: Final = 83
"""Of a process whose owner was gone before it could be bound to it. Nobody is there to see it."""

_READ_BYTES: Final = 64 * 1024
_STDIN: Final = 0


def start_arguments(report_fd: int) -> list[str]:
    """Return the command-line arguments that `read_launch` of the child of this process expects."""
    return [str(os.getpid()), str(report_fd)]


def read_launch(arguments: Sequence[str] | None = None) -> tuple[ProcLaunch, ReportPipe]:
    """Bind this process to its owner and return what that one tells it.

    Call it in the main thread, once, as early as can be. Standard input is empty from then on, and
    modules are found where the owner finds them. When the owner is gone, this process exits here.

    Args:
        arguments: by default those of the command line.

    Raises:
        ValueError: the process was not started by `launch`.
    """
    owner_pid, report_fd = map(int, sys.argv[1:] if arguments is None else arguments)
    if not die_with(owner_pid, signal.SIGKILL):
        os._exit(OWNER_GONE_EXIT_CODE)
    start_pipe = _move_away_from_stdin()
    os.set_inheritable(report_fd, False)
    line = _read_line(start_pipe)
    if not line:
        os._exit(OWNER_GONE_EXIT_CODE)
    launch = ProcLaunch.from_line(line)
    _put_first_on_path(launch.pythonpath)
    return launch, ReportPipe(report_fd, start_pipe)


class ReportPipe:
    """The process's two ties to its owner: what it answers, and whether the owner still holds on.

    Made by `read_launch`; lasts as long as the process.
    """

    def __init__(self, report_fd: int, start_pipe: int) -> None:
        self._report_fd = report_fd
        self._start_pipe = start_pipe

    def report(self, address: str) -> None:
        """Tell the owner where this process listens. Nothing can be told after it."""
        self._write(ProcReport(address=address))

    def fail(self, problem: str) -> None:
        """Tell the owner, in a sentence, why this process will not come up; then exit."""
        self._write(ProcReport(problem=problem))

    def on_owner_gone(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once, in the running loop, when the owner lets go of the pipe.

        When the owner *died*, the kernel kills this process, and the callback may never run.
        """
        loop = asyncio.get_running_loop()

        def readable() -> None:
            if os.read(self._start_pipe, _READ_BYTES):
                return  # the owner has nothing to say; whatever it is, it still lives
            loop.remove_reader(self._start_pipe)
            callback()

        loop.add_reader(self._start_pipe, readable)

    def _write(self, report: ProcReport) -> None:
        if self._report_fd < 0:
            raise RuntimeError("the owner was told already")
        try:
            with open(self._report_fd, "wb") as pipe:
                pipe.write(report.to_line())
        except BrokenPipeError:
            pass  # it gave up on us, and kills us
        self._report_fd = -1


def _move_away_from_stdin() -> int:
    """Put the start pipe where no child of ours inherits it, and nothing onto standard input."""
    start_pipe = os.dup(_STDIN)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    return start_pipe


def _read_line(pipe: int) -> bytes:
    """Read up to the first line's end; nothing when the pipe ends before it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(pipe, _READ_BYTES)
        if not data:
            return b""
        line += data
    return bytes(line)


def _put_first_on_path(folders: Sequence[str]) -> None:
    first = list(dict.fromkeys(folders))
    sys.path[:] = [*first, *(folder for folder in sys.path if folder not in first)]
