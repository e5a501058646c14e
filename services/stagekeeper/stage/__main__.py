"""`python -m stagekeeper.stage <launch file>`: wait for the word, then become a stage.

Invariant: nothing heavier than the standard library's `gc`, `os` and `sys` is imported before the
agent has this process on record. If the start pipe ends first, the agent died in between, nobody
knows of this process, and it ends without a trace.
"""

from __future__ import annotations

import gc
import os
import sys

_GO = b"go\n"  # runtime.launch.START_LINE, which is not worth an import here; a test compares them


def _may_start() -> bool:
    """Wait on stdin for the word. False: the pipe ended, or something else was said."""
    heard = b""
    while len(heard) < len(_GO):
        some = os.read(0, len(_GO) - len(heard))
        if not some:
            return False
        heard += some
    return heard == _GO


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m stagekeeper.stage <launch file>", file=sys.stderr)  # noqa: T201
        return 2
    if not _may_start():
        return 0
    # The pipe has done its work; whatever the model's code reads from stdin is at its end.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if os.getsid(0) != os.getpid():
        try:
            os.setsid()  # started by hand: a terminal's Ctrl-C and hang-up are not meant for it
        except PermissionError:
            pass  # it leads its process group, as a shell's jobs do
    # What modules make while they are loaded stays: looking for garbage among it takes a sixteenth
    # of our start. The model's own code has Python's collections as they are.
    gc.disable()
    from stagekeeper.stage.host import run

    gc.freeze()
    gc.enable()
    return run(sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
