"""The one thread in which an actor's plain (not async) code runs, one piece at a time.

A thread of its own keeps the loop turning under a long computation, so that beats go on and others
are served. Invariant: pieces run in the order in which they were handed in; a thread that is stuck
holds up its actor and nothing else, and does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

_Piece = tuple[Callable[[], Any], "asyncio.Future[Any]", contextvars.Context, str]


def passable(error: BaseException) -> BaseException:
    """Return an error that code raised as one that tasks can pass on.

    Python ends coroutines and generators by these two: raised into one that waits for an outcome
    they would end it, without a word to anybody.
    """
    if not isinstance(error, StopIteration | GeneratorExit):
        return error
    passed = RuntimeError(f"{type(error).__name__} was raised by an actor's code")
    passed.__cause__ = error
    return passed


class ActorThread:
    """Runs plain code of one actor. For the loop's thread only; the thread starts at first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsettled = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = ""
        """What runs now, of what was handed in; for people."""

    def run(
        self, piece: Callable[[], Result], context: contextvars.Context, what: str
    ) -> asyncio.Future[Result]:
        """Run `piece` when all before it have run. Cancelling the future does not stop it.

        Args:
            what: its name, for people.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        if self._loop is None:
            self._loop = loop
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._pieces.put((piece, future, context, what))
        self._unsettled += 1
        self._idle.clear()
        return future

    @property
    def is_idle(self) -> bool:
        """Whether it has run all that it was given."""
        return not self._unsettled

    async def idle(self, limit_s: float) -> bool:
        """Return once it has run all that it was given; False: not within the limit."""
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let the thread end after what it has. A second call changes nothing."""
        if self._loop is not None:
            self._pieces.put(None)

    def _work(self) -> None:
        while (item := self._pieces.get()) is not None:
            piece, future, context, self.running = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = context.run(piece)
            except BaseException as raised:
                error = raised
            self.running = ""
            try:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process ends
            del item, piece, future, context, result, error  # keep nothing alive while waiting

    def _settle(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        self._unsettled -= 1
        if not self._unsettled:
            self._idle.set()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(passable(error))
