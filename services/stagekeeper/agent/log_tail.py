"""The last lines of a stage's log, and what is written after them.

Logs are written by stage processes and may hold anything: bytes that are no text are replaced, a
line that never ends is cut, and of one that was drawn over itself the last drawing is what counts.
A line counts once its end was written; what a process left without one counts when nobody writes
any more.

Invariant: however long a log and its lines are, a block of it is in memory at a time, and a piece
that is yielded fits into a message many times over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

LONGEST_LINE_BYTES: Final = 8 * 1024
_BLOCK_BYTES: Final = 64 * 1024
_FOLLOW_INTERVAL_S: Final = 0.2
"""How often a followed log is looked at, while somebody follows it; an idle agent looks at none."""


def last_lines(path: Path, count: int) -> list[str]:
    """Return up to `count` lines from the end, an unfinished one included; [] without a log."""
    last: deque[str] = deque(maxlen=count)
    for lines in _tail(path, count):
        last.extend(lines)
    return list(last)


async def tail(path: Path, count: int) -> AsyncIterator[list[str]]:
    """Yield what `last_lines` returns, in pieces."""
    pieces = _tail(path, count)
    while (lines := await asyncio.to_thread(next, pieces, None)) is not None:
        yield lines


async def follow(
    path: Path, count: int, *, is_over: Callable[[], bool]
) -> AsyncIterator[list[str]]:
    """Yield the last `count` whole lines, then what is appended, in pieces of whole lines.

    Ends once `is_over` and all was read. Cancel it to leave earlier; nothing is left behind.
    """
    offset, _ = await asyncio.to_thread(_begin_of_last, path, count, whole_ones=True)
    cutter = _LineCutter()
    while True:
        was_over = is_over()
        data = await asyncio.to_thread(_read, path, offset)
        offset += len(data)
        if lines := cutter.feed(data):
            yield lines
        elif not data and was_over:
            break
        elif not data:
            offset = await asyncio.to_thread(_still_there, path, offset)
            await asyncio.sleep(_FOLLOW_INTERVAL_S)
    if rest := cutter.end():
        yield rest


class _LineCutter:
    """Makes lines of the blocks of a log; of a long line, only its beginning."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_cut = False  # the line under way was given out already

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that have come to their end, or have become too long."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = _drawn_last(rest)
        if whole and self._is_cut:
            del whole[0]
            self._is_cut = False
        if self._is_cut:
            self._rest = b""
        elif len(self._rest) > LONGEST_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
            self._is_cut = True
        return list(map(_text, whole))

    def end(self) -> list[str]:
        """Return what has no end."""
        return [_text(self._rest)] if self._rest else []


def _drawn_last(line: bytes) -> bytes:
    """Return what a terminal would show of a line that is drawn over itself, as bars are."""
    body = line.rstrip(b"\r")
    return line[body.rfind(b"\r") + 1 :]


def _text(line: bytes) -> str:
    shown = _drawn_last(line).rstrip(b"\r")
    return shown[:LONGEST_LINE_BYTES].decode(errors="replace")


def _tail(path: Path, count: int) -> Iterator[list[str]]:
    offset, end = _begin_of_last(path, count, whole_ones=False)
    cutter = _LineCutter()
    while offset < end and (data := _read(path, offset, end)):
        offset += len(data)
        if lines := cutter.feed(data):
            yield lines
    if rest := cutter.end():
        yield rest


def _begin_of_last(path: Path, count: int, *, whole_ones: bool) -> tuple[int, int]:
    """Return where the last lines begin, and where the log ends.

    A log of long lines is not searched for ever, only as far as lines of the longest size reach.

    Args:
        whole_ones: do not count what comes after the last line's end.
    """
    try:
        with path.open("rb") as log:
            end = position = log.seek(0, 2)
            wanted = count + 1  # line ends, the last of which belongs to the line before
            earliest = max(0, end - wanted * LONGEST_LINE_BYTES)
            while position > earliest:
                step = min(_BLOCK_BYTES, position - earliest)
                position -= step
                log.seek(position)
                data = log.read(step)
                if position + step == end and not whole_ones and not data.endswith(b"\n"):
                    wanted -= 1
                place = step
                while wanted and (place := data.rfind(b"\n", 0, place)) >= 0:
                    wanted -= 1
                if not wanted:
                    return position + place + 1, end
            return earliest, end
    except FileNotFoundError:
        return 0, 0


def _still_there(path: Path, offset: int) -> int:
    """Return where to read on: at the beginning of a log that was emptied meanwhile."""
    try:
        return offset if path.stat().st_size >= offset else 0
    except FileNotFoundError:
        return offset


def _read(path: Path, offset: int, end: int | None = None) -> bytes:
    """Read one block from `offset`; nothing where the log is gone or has no more."""
    try:
        with path.open("rb") as log:
            log.seek(offset)
            return log.read(_BLOCK_BYTES if end is None else min(_BLOCK_BYTES, end - offset))
    except FileNotFoundError:
        return b""
