"""Waiting for things that may never come.

Decided here: how often one looks. Invariant: no wait is without a deadline, and the one that is
missed says what was waited for and what was seen last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Final, TypeVar

from stagekeeper.client import StagekeeperError

from .screen import Screen

POLL_S: Final = 0.05

Found = TypeVar("Found")


class DemoFailed(Exception):
    """The demo cannot go on: a law is broken, or a deadline was missed. One plain sentence."""


class Watch:
    """Waits for one thing at a time, and meanwhile sees to it that nothing else breaks.

    Attributes:
        guards: called at every look; one raises DemoFailed when waiting has lost its sense.
        footnote: what is shown beside each wait.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.guards: list[Callable[[], None]] = []
        self.footnote: Callable[[], str] = str

    async def until(
        self,
        what: str,
        look: Callable[[], Awaitable[Found | None]],
        *,
        within_s: float,
        is_shown: bool = True,
    ) -> Found:
        """Call `look` until it returns something, and return that.

        A StagekeeperError counts as "not yet": nobody answers while the supervisor is dead.

        Raises:
            DemoFailed: `within_s` seconds are over, or a guard raised.
        """
        began = time.monotonic()
        last = ""

        def describe() -> str:
            waited_s = time.monotonic() - began
            return "; ".join(filter(None, (f"{what}: {waited_s:.1f} s", self.footnote())))

        shown = self._screen.waiting(describe) if is_shown else nullcontext(lambda: None)
        with shown as show:
            while True:
                for guard in self.guards:
                    guard()
                left_s = within_s - (time.monotonic() - began)
                if left_s <= 0:
                    raise DemoFailed(
                        f"not within {within_s:.0f} s: {what}{f' (last: {last})' if last else ''}"
                    )
                try:
                    found = await asyncio.wait_for(look(), left_s)
                except StagekeeperError as error:
                    found, last = None, error.message
                except TimeoutError:
                    continue
                if found is not None:
                    return found
                show()
                await asyncio.sleep(POLL_S)
