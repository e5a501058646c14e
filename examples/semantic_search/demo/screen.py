"""What the demo shows: lines anywhere, and one line that moves while something is waited for.

Decided here: how a terminal and a pipe differ. A reader that goes away (a closed terminal, `… |
head`) stops the writing, and never the demo, which has something to tidy up. Invariant: nobody else
writes to stdout while the demo runs; what `stagekeeper up` prints comes through here as well.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final, cast

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.status import Status

PIPE_WIDTH: Final = 100
INDENT: Final = 4
QUIET_S: Final = 5.0
"""In a pipe, a wait that lasts longer than this says so, and again after as long."""


class Screen:
    """Writes to stdout."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding loses ticks
        self._output = _Output()
        self._console = Console(
            file=cast(IO[str], self._output),
            width=None if self._output.isatty() else PIPE_WIDTH,
            highlight=False,
        )

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line; in a pipe long ones are not broken, so that programs can read them."""
        self._console.print(escape(text), style=style or None, soft_wrap=True)

    def heading(self, text: str) -> None:
        self.say()
        self.say(text, "bold")

    def paragraph(self, text: str, style: str = "") -> None:
        """Print text broken into lines, indented."""
        width = self._console.width - INDENT
        for line in textwrap.wrap(text, max(width, 20)):
            self.say(" " * INDENT + line, style)

    def draw(self, what: RenderableType) -> None:
        self._console.print(what)

    def pass_on(self, output: bytes) -> None:
        """Write what another program drew, as it is."""
        self._output.flush()
        self._output.write_bytes(output)

    def quote(self, lines: Sequence[str]) -> None:
        """Print lines of `stagekeeper up`, set off from the demo's own."""
        for line in lines:
            self.say(f"  up │ {line}", "dim")

    @contextlib.contextmanager
    def waiting(self, describe: Callable[[], str]) -> Iterator[Callable[[], None]]:
        """Show what is waited for until the `with` ends; call what is yielded now and then."""
        if self.is_terminal:
            with Status(escape(describe()), console=self._console) as status:
                yield lambda: status.update(escape(describe()))
            return
        told_at = time.monotonic()

        def tell() -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= QUIET_S:
                told_at = time.monotonic()
                self.say(f"  {describe()}")

        yield tell


class _Output(io.TextIOBase):
    """Standard output for as long as somebody reads it.

    It keeps the stream that it found: while something moves, rich puts one of its own in the place
    of `sys.stdout`, and that writes to us.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        with self._while_read():
            self._stream.write(text)
        return len(text)

    def write_bytes(self, output: bytes) -> None:
        with self._while_read():
            while output:
                output = output[os.write(self._stream.fileno(), output) :]

    def flush(self) -> None:
        with self._while_read():
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextlib.contextmanager
    def _while_read(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is still in the buffer goes nowhere, too, so that the interpreter's own flush at
            # its end finds nothing to complain about.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
