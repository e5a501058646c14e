"""`events` as its reader sees it: lines as they come, and gaps said on stderr.

Decided here: what is said when there is nothing, and when the supervisor is away. Nothing ends a
reader that follows but its user.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.text.events import GAPS, event_json, plain_line, terminal_lines
from stagekeeper.client import Client, Gap, NotFound
from stagekeeper.v1.deployment_service_pb2 import Event


async def events_shown(
    client: Client, name: str, *, last: int, follow: bool, as_json: bool
) -> None:
    """Print the last events, and with `follow` those that come.

    Raises:
        CliError: nothing is known of that name, and nobody waits for it (`follow`).
    """
    count = 0
    events = client.events(name, last=last, follow=follow, on_gap=_say)
    async with contextlib.aclosing(events):
        async for event in events:
            count += 1
            _show(event, as_json=as_json)
            if follow:
                sys.stdout.flush()
    if not count and name and last and not follow:
        await _check_known(client, name)
    if not count and not as_json:
        of = f" of {name!r}" if name else ""
        print(f"no events{of}: they are kept since the supervisor's start", file=sys.stderr)


async def _check_known(client: Client, name: str) -> None:
    try:
        await client.get(name)
    except NotFound:
        raise CliError(
            ExitCode.FAILED,
            f"nothing is known of {name!r}: `stagekeeper status` lists what there is, and with "
            "--follow its events are waited for",
        ) from None


def _show(event: Event, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(event_json(event), ensure_ascii=False))
    elif sys.stdout.isatty():
        _show_in_terminal(event)
    else:
        print(plain_line(event))


def _show_in_terminal(event: Event) -> None:
    from rich.console import Console
    from rich.text import Text

    from stagekeeper.cli.text.tables import styled

    console = Console()
    for line in terminal_lines(event, time.time(), console.width):
        text = Text(line, style="red") if event.is_warning else styled(line)
        console.print(text, soft_wrap=True)


def _say(gap: Gap) -> None:
    sys.stdout.flush()
    print(GAPS[gap], file=sys.stderr, flush=True)
