"""From an exception to what its user is told: an exit code and one line.

Decided here: which failure is whose, for every verb; a verb that knows better raises `CliError`
itself. Anything that is not in here is a bug of ours, and is said to be one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.text.lines import first_line

_HINTS: Final[Mapping[str, str]] = {
    "DEPLOYMENT_UNKNOWN": "`stagekeeper status` lists what there is",
    # The servers' sentences end with what to do, or with what there is to choose from.
    "ADMISSION_REFUSED": "",
    "BAD_FIELD": "",
    "DEPLOYMENT_EXISTS": "",
    "ENDPOINT_UNKNOWN": "",
    "NO_REPLICA": "repeat when `stagekeeper status` shows a READY replica",
    "NOT_YET": "",
    "PLAN_STALE": "",
    "STAGE_UNKNOWN": "",
    "TOO_LARGE": "",
}
"""Reason → what to do in the words of the command line; the client's own words for the others."""


_NO_RIGHT: Final = "give this user the right to it, or name another place"
_NO_SPACE: Final = "free some space, then start again"
_SYSTEM: Final[Mapping[int, tuple[str, str]]] = {
    errno.EACCES: ("open", _NO_RIGHT),
    errno.EDQUOT: ("write", _NO_SPACE),
    errno.EEXIST: ("make", "move away what is there, or name another place"),
    errno.EISDIR: ("open", "it is a folder: name a file"),
    errno.ELOOP: ("open", "mend the symbolic links on the way to it"),
    errno.EMFILE: ("open", "raise the number of open files that a process may have (ulimit -n)"),
    errno.ENAMETOOLONG: ("open", "name a shorter path"),
    errno.ENFILE: ("open", "raise the number of open files of this machine (fs.file-max)"),
    errno.ENOENT: ("find", "make it, or name another place"),
    errno.ENOSPC: ("write", _NO_SPACE),
    errno.ENOTDIR: ("open", "a file stands where a folder is needed: move it, or name another"),
    errno.EPERM: ("open", _NO_RIGHT),
    errno.EROFS: ("write", "name a place that can be written"),
}
"""What the system refuses → what was attempted, and what to do."""

_HANGS: Final = re.compile(
    r"supervisor at (?P<endpoint>\S+) .*(?:before receiving SETTINGS frame|said nothing for)", re.S
)
"""What the client says where a connection was taken and nothing came over it. One that was never
taken, which times out too in a network that drops packets, says neither."""

_PARSERS_WORDS: Final = (
    (re.compile(r"Input should be a valid integer\b.*"), "it needs a whole number"),
    (re.compile(r"Input should be a valid number\b.*"), "it needs a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"it needs at least \1"),
    (re.compile(r"Value error, "), ""),
)
"""What the library says that typer reads values with, and what we say."""


def explain(error: Exception) -> CliError:
    """Return what to say about `error` and which code to end with. Never raises."""
    if isinstance(error, CliError):
        return error
    try:
        known = (
            _of_the_command_line(error)
            or _of_a_server(error)
            or _of_the_client(error)
            or _of_the_system(error)
        )
    except Exception:
        # What is looked up there is imported only now. An installation that is broken in a module
        # must still say with what it is broken.
        known = None
    if known is None:
        what = first_line(f"{type(error).__name__}: {error}")
        return CliError(ExitCode.BUG, f"a bug ({what}): please report it")
    return known


def _of_the_command_line(error: Any) -> CliError | None:
    # typer's own errors; where their classes live has changed between its releases.
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "stagekeeper"
    message = error.format_message().strip().rstrip(".")
    for theirs, ours in _PARSERS_WORDS:
        message = theirs.sub(ours, message)
    return CliError(ExitCode.USAGE, f"{message} (see `{command} --help`)")


def _of_a_server(error: Exception) -> CliError | None:
    """Settings and addresses that a supervisor or an agent refuses at its start."""
    from stagekeeper.agent.connection import SupervisorNotFound
    from stagekeeper.agent.host_lock import LockHeld
    from stagekeeper.agent.identity import IdentityUnreadable
    from stagekeeper.agent.settings import SettingsError
    from stagekeeper.host.server import NotLoopback
    from stagekeeper.supervisor.settings import SettingsRefused

    if isinstance(error, SettingsError | SettingsRefused):
        return _listed(ExitCode.USAGE, "these settings cannot work", error.problems)
    if isinstance(error, NotLoopback):
        return CliError(ExitCode.USAGE, str(error))
    if isinstance(error, LockHeld | IdentityUnreadable):
        return CliError(ExitCode.FAILED, str(error))
    if isinstance(error, SupervisorNotFound):
        return CliError(
            ExitCode.UNREACHABLE,
            f"{_short(str(error))}: start a supervisor, or name another with --endpoint",
        )
    return None


def _of_the_client(error: Exception) -> CliError | None:
    from stagekeeper.cli.spec_files import bad_specs
    from stagekeeper.client.errors import (
        BadEndpoint,
        BadRequest,
        Bug,
        EndpointRaised,
        StagekeeperError,
        SupervisorUnreachable,
    )
    from stagekeeper.client.spec_file import SpecError

    if isinstance(error, SpecError):
        return bad_specs([error])
    if isinstance(error, SupervisorUnreachable):
        if somebody := _HANGS.search(error.message):
            return CliError(
                ExitCode.UNREACHABLE,
                f"somebody is at {somebody['endpoint']} and does not answer (a supervisor that "
                "hangs, or another program): look at its log, or name another with --endpoint",
            )
        return CliError(
            ExitCode.UNREACHABLE,
            f"{_short(error.message)}: start one with `stagekeeper supervisor` (or everything with "
            "`stagekeeper up FILE`), or name another with --endpoint",
        )
    if isinstance(error, EndpointRaised):
        return CliError(
            ExitCode.FAILED,
            f"{first_line(error.message)} (--debug shows the remote traceback)",
            debug=error.remote_traceback,
        )
    if isinstance(error, BadEndpoint):
        return CliError(ExitCode.USAGE, f"--{error.message}")
    if isinstance(error, BadRequest) and error.violations:
        problems = [f"{path}: {problem}" if path else problem for path, problem in error.violations]
        return _listed(ExitCode.FAILED, "the request is refused", problems)
    if isinstance(error, StagekeeperError):
        code = ExitCode.BUG if isinstance(error, Bug) else ExitCode.FAILED
        hint = _HINTS.get(error.reason, error.next_move)
        said = first_line(error.message)
        return CliError(code, f"{said}: {hint}" if hint else said)
    return None


def _of_the_system(error: Exception) -> CliError | None:
    if not isinstance(error, OSError):
        return None
    if error.errno is None or not error.strerror:
        return CliError(ExitCode.FAILED, str(error))  # one of ours: it says what to do
    attempt, what_to_do = _SYSTEM.get(error.errno, ("use", ""))
    where = " and ".join(os.fsdecode(it) for it in (error.filename, error.filename2) if it)
    why = error.strerror[:1].lower() + error.strerror[1:]
    said = f"cannot {attempt} {where or 'a file'}: {why}" if where or what_to_do else why
    return CliError(ExitCode.FAILED, f"{said}: {what_to_do}" if what_to_do else said)


def _short(message: str) -> str:
    """Cut what gRPC says of a failed connection down to its last word: `Connection refused`."""
    head, found, rest = message.partition(": failed to connect to all addresses")
    return f"{head} ({rest.rpartition(': ')[2]})" if found else message


def _listed(code: ExitCode, what: str, problems: list[str] | tuple[str, ...]) -> CliError:
    """One problem goes on the line itself; several below it."""
    if len(problems) == 1:
        return CliError(code, f"{what}: {problems[0]}")
    return CliError(code, f"{what}:", details=problems)
