"""The turns of an actor's plain code: failures before messages, one at a time, in one thread.

Decided here: what comes next. Invariants: a piece begins only when the one before it has ended,
and no queued message goes before a failure that is known; turns that can go on no more say so.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from stagekeeper.actor.hosting.actor_thread import ActorThread

Result = TypeVar("Result")
Turn = Callable[[], Awaitable[None]]


class SerialTurns:
    """Hands out turns in an actor's thread. For the loop's thread only.

    Args:
        on_broken: called with what was raised out of a turn: no other one will come.
    """

    def __init__(self, thread: ActorThread, on_broken: Callable[[BaseException], None]) -> None:
        self._thread = thread
        self._on_broken = on_broken
        self._urgent: deque[Turn] = deque()
        self._queued: deque[Turn] = deque()
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def queue(self, turn: Turn) -> None:
        """Give `turn` its place behind all others."""
        self._queued.append(turn)
        self._wake()

    async def urgent(
        self, piece: Callable[[], Result], context: contextvars.Context, what: str
    ) -> Result:
        """Run `piece` in the next turn, and return what it returns.

        Cancelled before its turn it does not run; cancelled within, its result is lost.
        """
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def turn() -> None:
            if outcome.done():
                return
            try:
                result = await self._thread.run(piece, context, what)
            except BaseException as error:
                if not outcome.done():
                    outcome.set_exception(error)
                return
            if not outcome.done():
                outcome.set_result(result)

        self._urgent.append(turn)
        self._wake()
        result: Result = await outcome
        return result

    def close(self) -> None:
        """Hand out no more turns. A piece that runs goes on; the rest never begins."""
        if self._task is not None:
            self._task.cancel()
        self._urgent.clear()
        self._queued.clear()

    def _wake(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="actor turns")
            self._task.add_done_callback(self._over)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_broken(error)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._urgent:
                await self._urgent.popleft()()
            elif self._queued:
                await self._queued.popleft()()
            else:
                self._waiter = loop.create_future()
                await self._waiter
