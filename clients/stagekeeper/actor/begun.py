"""Coroutines whose first step is taken at once, and not in the loop's next turn.

A task begins when the loop comes to it, and a turn of the loop costs more than most messages do.
Decided here: how a coroutine goes on of which somebody else took the first step. Invariants: its
code sees its own task as the current one from its first line on, so that time limits and groups of
tasks in it are its own; nothing that it raises reaches whoever began it; and a cancellation finds
it as it would find any task.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn, TypeVar, cast

Result = TypeVar("Result")


class Begun(Coroutine[Any, Any, Result]):
    """A coroutine that ran to its first await, or to its end, when `begin` was called.

    Whoever awaits it, once, takes the rest: what it waits for, what it returns, what it raised.
    """

    __slots__ = ("_awaits", "_coroutine", "_end", "_is_taken")

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._awaits: asyncio.Future[Any] | None = None
        self._end: BaseException | None = None
        """What it ended with in its first step; a StopIteration when it returned."""
        self._is_taken = False

    def begin(self) -> None:
        """Take the first step. Raises nothing."""
        try:
            self._awaits = self._coroutine.send(None)
        except BaseException as end:
            self._end = end

    def send(self, value: Any, /) -> Any:
        if self._is_taken:
            return self._coroutine.send(value)
        self._is_taken = True
        if self._end is not None:
            self._raise_end()
        return self._awaits

    def throw(self, *error: Any) -> Any:
        if not self._is_taken:
            self._is_taken = True
            if self._end is not None:
                self._raise_end()
            if self._awaits is not None and self._awaits.cancel():
                return self._awaits  # which raises it, as for a task that had waited already
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Result]:
        return cast("Generator[Any, Any, Result]", self)

    def __iter__(self) -> Begun[Result]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def _raise_end(self) -> NoReturn:
        assert self._end is not None
        try:
            raise self._end
        finally:
            self._end = None  # its traceback refers to this


def begin_task(
    coroutine: Coroutine[Any, Any, None],
    context: contextvars.Context,
    keep: Callable[[asyncio.Task[None]], None],
) -> None:
    """Take a coroutine's first step now, and have a task take the rest.

    Args:
        context: the variables that it sees.
        keep: given the task before the step is taken.
    """
    loop = asyncio.get_running_loop()
    begun = Begun(coroutine)
    task: asyncio.Task[None] = loop.create_task(begun, context=context)
    keep(task)
    beginner = asyncio.current_task()
    if beginner is not None:
        asyncio.tasks._leave_task(loop, beginner)
    asyncio.tasks._enter_task(loop, task)
    try:
        context.run(begun.begin)
    finally:
        asyncio.tasks._leave_task(loop, task)
        if beginner is not None:
            asyncio.tasks._enter_task(loop, beginner)
