"""`call`: JSON from the command line to an endpoint, and its answer as JSON.

Decided here: how an argument is read, and how an answer is written: indented in a terminal, one
line in a pipe; one line a value when the endpoint yields several.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from stagekeeper.cli.exits import CliError, ExitCode, usage
from stagekeeper.cli.text.lines import first_line
from stagekeeper.client import Client, DeadlineExceeded, NotFound
from stagekeeper.client.view import stage_id_of
from stagekeeper.wire.payload import JSON

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

FROM_STDIN = "-"


def read_argument(text: str | None) -> Arguments:
    """Read the argument: an object is keyword arguments, anything else one positional one.

    Args:
        text: JSON; `-` reads it from stdin; None means no arguments.

    Raises:
        CliError: it is not JSON.
    """
    if text is None:
        return (), {}
    source = sys.stdin.read() if text == FROM_STDIN else text
    try:
        value = json.loads(source)
    except ValueError as error:
        shown = source if len(source) <= 40 else source[:40] + "…"
        raise usage(
            f"{shown!r} is not JSON ({error}); a text needs its own quotes: '\"like this\"'"
        ) from error
    return ((), value) if isinstance(value, dict) else ((value,), {})


def write_answer(value: Any) -> None:
    """Print one answer."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(value, indent=indent, ensure_ascii=False), flush=True)


async def call_shown(
    client: Client,
    name: str,
    endpoint: str,
    arguments: Arguments,
    *,
    stage: str | int | None,
    timeout: float,
) -> None:
    """Call, and print the answer, or every answer of an endpoint that yields.

    Raises:
        CliError: the time was over.
    """
    try:
        await _call(client, name, endpoint, arguments, stage, timeout)
    except DeadlineExceeded as error:
        # What was never sent has a reason of its own; what was sent did not answer.
        why = f" ({first_line(error.message)})" if error.never_ran else ""
        raise CliError(
            ExitCode.FAILED,
            f"{endpoint!r} of {name!r} did not answer within {timeout:g} s{why}: raise --timeout",
        ) from error


async def _call(
    client: Client,
    name: str,
    endpoint: str,
    arguments: Arguments,
    stage: str | int | None,
    timeout: float,
) -> None:
    args, kwargs = arguments
    if not await _is_streaming(client, name, endpoint, stage):
        answer = await client.call_with(
            name, endpoint, args, kwargs, stage=stage, timeout=timeout, content_type=JSON
        )
        write_answer(answer)
        return
    answers = client.call_stream_with(
        name, endpoint, args, kwargs, stage=stage, timeout=timeout, content_type=JSON
    )
    async with contextlib.aclosing(answers):
        async for answer in answers:
            print(json.dumps(answer, ensure_ascii=False), flush=True)


async def _is_streaming(client: Client, name: str, endpoint: str, stage: str | int | None) -> bool:
    """Look up whether the endpoint yields; False when nothing says so: the call finds out."""
    try:
        deployment = await client.get(name)
    except NotFound:
        return False
    stage_id = stage_id_of(deployment, stage)
    return any(
        info.streaming
        for replica in deployment.replicas
        for shard in replica.shards
        if shard.record.stage_id == stage_id
        for info in shard.record.endpoints
        if info.name == endpoint
    )
