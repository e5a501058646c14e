"""Asking a supervisor from the command line: one client, one question, one event loop.

Decided here: that an address beyond this machine needs `--insecure`, and how what a failed question
leaves behind is said.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stagekeeper.cli.exits import usage
from stagekeeper.cli.log_output import silence_libraries
from stagekeeper.cli.reader import while_read
from stagekeeper.client import Client

Answer = TypeVar("Answer")


def ask(
    endpoint: str,
    work: Callable[[Client], Awaitable[Answer]],
    *,
    insecure: bool = False,
    ends_with_reader: bool = False,
) -> Answer:
    """Run `work` with a client of `endpoint`, and return what it returns.

    Args:
        ends_with_reader: `work` waits for what comes, which nobody needs once stdout is not read.

    Raises:
        CliError: the endpoint is no address, or is beyond loopback without `insecure`.
        BrokenPipeError: stdout is not read any more.
        KeyboardInterrupt: Ctrl-C; `work` was cancelled.
    """
    check_endpoint(endpoint, insecure=insecure)
    silence_libraries()

    async def session() -> Answer:
        async with Client(endpoint, watch_at_once=False) as client:
            return await (while_read(work(client)) if ends_with_reader else work(client))

    return asyncio.run(session())


def check_endpoint(endpoint: str, *, insecure: bool) -> None:
    """Refuse an endpoint that cannot be meant.

    Raises:
        CliError: exit code 2.
    """
    from stagekeeper.host.server import check_loopback

    try:
        check_loopback(endpoint, insecure=insecure)
    except ValueError as error:
        raise usage(f"--endpoint: {error}") from error


def check_seconds(value: float | None, flag: str) -> None:
    """Refuse a wait that is none; None is no limit.

    Raises:
        CliError: exit code 2.
    """
    if value is not None and not 0 < value < math.inf:
        raise usage(f"{flag} {value:g} is no number of seconds above 0")


def stage_of(text: str | None) -> str | int | None:
    """Read `--stage`: a name, or an id; None names the entry stage."""
    return int(text) if text is not None and text.isdecimal() else text
