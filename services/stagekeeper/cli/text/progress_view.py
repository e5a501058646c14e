"""Showing a creation: a table that is drawn anew in a terminal, lines in a pipe.

Decided here: how it looks. What is printed meanwhile by anybody stands above the table.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from stagekeeper.cli.stdout import say
from stagekeeper.cli.text.amounts import seconds
from stagekeeper.cli.text.progress import QUIET_S, CreationProgress, StageRow, how_far
from stagekeeper.cli.text.tables import style_of
from stagekeeper.v1 import types_pb2 as pb2

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_FRAMES_PER_S: Final = 4
_BAR_WIDTH: Final = 12
_COLUMNS: Final = 6


class ProgressView(Protocol):
    """Takes the messages of one creation."""

    def show(self, progress: pb2.StageProgress) -> None: ...

    @property
    def elapsed_s(self) -> float: ...


@contextmanager
def progress_view() -> Iterator[ProgressView]:
    """Show one creation on stdout until the `with` ends; the last state stays. On a loop."""
    progress = CreationProgress(time.monotonic)
    if not sys.stdout.isatty():
        lines = _Lines(progress)
        lines.look_later()
        try:
            yield lines
        finally:
            lines.end()
        return
    from rich.live import Live

    table = _LiveTable(progress)
    # Live calls `get_renderable` in a thread of its own, so durations go on while nothing happens.
    table.live = Live(get_renderable=table.draw, refresh_per_second=_FRAMES_PER_S)
    try:
        yield table
    finally:
        table.live.stop()


class _Lines:
    def __init__(self, progress: CreationProgress) -> None:
        self._progress = progress
        self._timer: asyncio.TimerHandle | None = None

    def look_later(self) -> None:
        """Tell now and then what came too soon after another line, from here on."""
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        for line in self._progress.kept_back():
            say(f"  {line}")
        self.look_later()

    def show(self, progress: pb2.StageProgress) -> None:
        line = self._progress.feed(progress)
        if line:
            say(f"  {line}")

    @property
    def elapsed_s(self) -> float:
        return self._progress.elapsed_s


class _LiveTable:
    def __init__(self, progress: CreationProgress) -> None:
        self._progress = progress
        self.live: Live | None = None

    def show(self, progress: pb2.StageProgress) -> None:
        self._progress.feed(progress)
        # Not before: an empty table would leave an empty line.
        if self.live is not None and not self.live.is_started:
            self.live.start()

    @property
    def elapsed_s(self) -> float:
        return self._progress.elapsed_s

    def draw(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for _ in range(_COLUMNS):
            table.add_column(no_wrap=True, overflow="ellipsis")
        for row in self._progress.rows:
            table.add_row(
                f"  {row.replica_index}/{row.stage}",
                Text(row.worker_id, style="dim"),
                Text(row.state, style=style_of(row.state)),
                _bar(row),
                Text(how_far(row), style="dim"),
                Text(seconds(self._progress.age_s(row)), style="dim"),
            )
        return table


def _bar(row: StageRow) -> RenderableType:
    from rich.progress_bar import ProgressBar

    if not row.total or not row.state.startswith("STARTING"):
        return ""
    return ProgressBar(total=row.total, completed=row.done, width=_BAR_WIDTH)
