"""Writing to whoever reads us, and going on when he has left.

Decided here: what becomes of output that nobody reads, or that the reader's encoding has no letters
for. Not decided here: whether a verb ends with its reader (those that ask do) or goes on without
(`up` does).
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys

from stagekeeper.cli.text.lines import visible

_ESCAPING = "stagekeeper-escape"


def open_what_is_closed() -> None:
    """Give a process that was started without stdin, stdout or stderr some that lead nowhere.

    Else the next file or connection that is opened would take the number, and what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def escape_what_has_no_letter() -> None:
    r"""Print characters that stdout's encoding has none for as `\uXXXX`, as JSON reads them too."""
    codecs.register_error(_ESCAPING, _escaped)
    if hasattr(sys.stdout, "reconfigure"):
        # Where the descriptor was replaced under the stream, it may not be set anew.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors=_ESCAPING)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


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
