"""The last lines of a stage's log, and what is written after them.

Logs are written by stage processes and may hold anything: bytes that are no text are replaced, and
a line that never ends is cut. A line counts once its end was written; what a process left without
one counts when nobody writes any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

LONGEST_LINE_BYTES: Final = 8 * 1024
_BLOCK_BYTES: Final = 64 * 1024
_FOLLOW_INTERVAL_S: Final = 0.2
"""How often a followed log is looked at, while somebody follows it; an idle agent looks at none."""


def last_lines(path: Path, count: int) -> list[str]:
    """Return up to `count` lines from the end, an unfinished one included; [] without a log."""
    lines, rest, _ = _tail(path, count)
    return (lines + ([rest.decode(errors="replace")] if rest else []))[-count:]


async def follow(
    path: Path, count: int, *, is_over: Callable[[], bool]
) -> AsyncIterator[list[str]]:
    """Yield the last `count` lines, then what is appended, in pieces of whole lines.

    Ends once `is_over` and all was read. Cancel it to leave earlier; nothing is left behind.
    """
    lines, rest, offset = _tail(path, count)
    if lines:
        yield lines
    while True:
        was_over = is_over()
        lines, rest, offset = _read_on(path, rest, offset)
        if lines:
            yield lines
        elif was_over:
            break
        else:
            await asyncio.sleep(_FOLLOW_INTERVAL_S)
    if rest:
        yield [rest.decode(errors="replace")]


def _tail(path: Path, count: int) -> tuple[list[str], bytes, int]:
    """Return the last whole lines, the unfinished rest, and where the file was read to."""
    try:
        with path.open("rb") as log:
            end = position = log.seek(0, 2)
            data = b""
            while position > 0 and data.count(b"\n") <= count:
                if len(data) > count * LONGEST_LINE_BYTES:
                    break
                step = min(_BLOCK_BYTES, position)
                position -= step
                log.seek(position)
                data = log.read(step) + data
    except FileNotFoundError:
        return [], b"", 0
    lines, rest = _split(data)
    return lines[-count:] if count else [], rest, end


def _read_on(path: Path, rest: bytes, offset: int) -> tuple[list[str], bytes, int]:
    try:
        with path.open("rb") as log:
            log.seek(offset)
            data = log.read(_BLOCK_BYTES)
    except FileNotFoundError:
        return [], rest, offset
    lines, rest = _split(rest + data)
    return lines, rest, offset + len(data)


def _split(data: bytes) -> tuple[list[str], bytes]:
    *whole, rest = data.split(b"\n")
    if len(rest) > LONGEST_LINE_BYTES:
        whole.append(rest)
        rest = b""
    return [line[:LONGEST_LINE_BYTES].decode(errors="replace") for line in whole], rest
