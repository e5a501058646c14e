"""Being asked to end: once for an orderly end, twice for a quick one.

Decided here: which signals ask, and what they make of the exit code.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from stagekeeper.cli.exits import ExitCode


class EndRequests:
    """Counts SIGINT and SIGTERM of this process, from construction on."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self.asked_again = asyncio.Event()
        self.exit_code = ExitCode.DONE
        self._on_first = on_first
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self.exit_code = ExitCode.INTERRUPTED
        if self.asked.is_set():
            self.asked_again.set()
            return
        self.asked.set()
        self._on_first()
