"""How a verb ends: its exit code, and the one line that says why.

Decided here: the codes, which scripts may rely on. Not decided here: which exception gets which
(`explain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees. The numbers above 64 are those of sysexits.h."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    BUG = 70
    BAD_SPEC = 78
    INTERRUPTED = 130


class CliError(Exception):
    """An end that its user can do something about.

    Args:
        code: what the process ends with.
        message: one line: what, where, and what to do.
        details: further lines, shown below; for what does not fit on one (all wrong fields, the
            last lines of a log).
        debug: shown only with `--debug`, and instead of our own traceback: one from elsewhere.
    """

    def __init__(
        self, code: ExitCode, message: str, *, details: Sequence[str] = (), debug: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = tuple(details)
        self.debug = debug


def usage(message: str) -> CliError:
    """Build the error of a command line that cannot be meant."""
    return CliError(ExitCode.USAGE, message)
