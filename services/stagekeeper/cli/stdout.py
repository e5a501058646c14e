"""Writing to whoever reads us, and going on when he has left.

Decided here: what becomes of output that nobody reads. Not decided here: whether a verb ends with
its reader (those that ask do) or goes on without (`up` does).
"""

from __future__ import annotations

import os
import sys

from stagekeeper.cli.text.lines import visible


def leave_stdout() -> None:
    """Send what is printed from now on nowhere; the interpreter's own flush at its end included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say(line: str) -> None:
    """Print a line at once, control characters as text, or drop it when nobody reads any more."""
    try:
        print(visible(line), flush=True)
    except BrokenPipeError:
        leave_stdout()
