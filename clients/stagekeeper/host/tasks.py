"""Background tasks with a name and an owner.

A `TaskOwner` starts tasks, hears of every one that ends with an error, and ends them all in `stop`.
A task that fails is never silent: its owner's `on_failure` gets the exception, and without one the
failure is logged as the bug that it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class TaskOwner:
    """Owns the background tasks of one part of a program.

    Args:
        name: prefixes the names of the tasks.
        on_failure: called with (task name, exception) when a task ends with an error; must not
            raise. By default the failure is logged with its traceback.
    """

    def __init__(
        self, name: str, on_failure: Callable[[str, BaseException], None] | None = None
    ) -> None:
        self._name = name
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as a task of this owner.

        Raises:
            RuntimeError: the owner is stopping; `work` is closed and nothing was started.
        """
        if self._is_stopping:
            work.close()
            raise RuntimeError(f"{self._name} is stopping: {name} is not started")
        task = asyncio.create_task(work, name=f"{self._name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    async def stop(self) -> None:
        """Cancel every task and wait until each has ended. A second call changes nothing."""
        self._is_stopping = True
        current = asyncio.current_task()
        pending = [task for task in self._tasks if task is not current]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)
        else:
            import structlog  # here: it takes long to import, and is seldom needed

            structlog.get_logger(__name__).error(
                "a background task failed", task=task.get_name(), exc_info=error
            )
