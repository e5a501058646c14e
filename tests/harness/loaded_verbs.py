"""Commands that fork from a process which has loaded the command line, for all but a verb's first.

Three quarters of what a command costs is loading it. Decided here: such a command is a process with
its own streams, environment and end all the same; only its modules are there already. Not decided
here: which commands are run so (`command_line` does). Invariant: the server has loaded everything
and used nothing, so it is one thread when it forks; it ends when whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

_REQUEST_BYTES = 1 << 20


class LoadedVerbs:
    """The server, as a child of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self._socket = ours
        atexit.register(self._end)

    def start(self, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> None:
        """Start a command.

        Args:
            streams: stdout, stderr, and where its pid and then its exit code are written, a line
                each.
        """
        request = json.dumps([list(argv), dict(env)]).encode()
        socket.send_fds(self._socket, [request], list(streams))

    def _end(self) -> None:
        self._socket.close()
        self._process.wait(10)


@functools.cache
def loaded_verbs() -> LoadedVerbs:
    """Return this process's server, started by whoever asks first."""
    return LoadedVerbs()


async def run_loaded(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    """Run one command to its end; return its exit code, stdout and stderr.

    Raises:
        TimeoutError: it did not end in time, and was killed.
    """
    pipes = [os.pipe() for _ in range(3)]
    loaded_verbs().start(argv, env, [into for _, into in pipes])
    for _, into in pipes:
        os.close(into)
    with contextlib.ExitStack() as files:
        out, err, told = (files.enter_context(os.fdopen(end, "rb")) for end, _ in pipes)
        pid = int(await asyncio.to_thread(told.readline))
        whole = asyncio.gather(*(asyncio.to_thread(it.read) for it in (out, err, told)))
        try:
            written = await asyncio.wait_for(asyncio.shield(whole), timeout_s)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            await whole
            raise
    return int(written[2]), written[0], written[1]


def _load() -> None:
    import stagekeeper.cli
    import stagekeeper.client
    from stagekeeper.cli.main import run

    for module in pkgutil.walk_packages(stagekeeper.cli.__path__, "stagekeeper.cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    with contextlib.redirect_stderr(io.StringIO()):
        run(["validate", "/dev/null/no-such-file"])  # what is loaded to read a command line


def _serve(requests: socket.socket) -> None:
    _load()
    gc.freeze()  # or each command would write to all of it, and copy it by that
    while True:
        request, streams, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not request:
            return
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the fork"
        child = os.fork()
        if child == 0:
            _watch(request, streams)
        os.waitpid(child, 0)
        for stream in streams:
            os.close(stream)


def _watch(request: bytes, streams: Sequence[int]) -> None:
    """Start the command, let the server go on, and tell of the command's end."""
    if os.fork():
        os._exit(0)
    pid = os.fork()
    out, err, told = streams
    if pid == 0:
        os.close(told)
        _become_command(request, out, err)
    os.write(told, b"%d\n" % pid)
    os.close(out)
    os.close(err)
    _, status = os.waitpid(pid, 0)
    os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become_command(request: bytes, out: int, err: int) -> None:
    from stagekeeper.cli.main import main

    argv, env = json.loads(request)
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["stagekeeper", *argv]
    main()


if __name__ == "__main__":
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
