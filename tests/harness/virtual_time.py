"""An event loop whose time passes only when nothing is left to do, and processes within it.

A process here is what runs in its context: killed, none of its callbacks ever runs again; frozen,
they wait for it to be thawed. So code that awaits meets SIGKILL and SIGSTOP at any of its awaits,
without a process, and a minute of waiting takes no time. Invariant: what runs, and when, depends
on nothing outside of the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class LoopProcess:
    """What runs in one context of a `VirtualLoop`.

    Attributes:
        is_dead: nothing of it runs any more.
        is_frozen: what is due waits.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.is_dead = False
        self.is_frozen = False
        self._loop = loop
        self._due: list[asyncio.Handle] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._context = contextvars.Context()
        self._context.run(_process.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in this process."""
        return self._loop.create_task(work, context=self._context.copy())

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        if not self.is_dead:
            due, self._due = self._due, []
            self._loop.run_soon(due)

    def kill(self) -> None:
        self.is_dead = True

    async def bury(self) -> None:
        """Close what a dead process left open, so that nothing of it runs when it is collected."""
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(20):
            self.is_dead = False  # also once more: what it had not run yet may be what ends it
            self.thaw()
            await asyncio.sleep(0.1)  # what has not begun can be cancelled only within
            tasks = [task for task in self._tasks if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
        assert not tasks, f"these did not end when cancelled: {tasks}"

    def owns(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def run(self, due: _Due) -> None:
        if self.is_dead or self.is_frozen:
            assert due.handle is not None
            self._due.append(due.handle)
            return
        due.callback(*due.args)


_process: contextvars.ContextVar[LoopProcess | None] = contextvars.ContextVar(
    "loop_process", default=None
)


def process_here() -> LoopProcess | None:
    """Return the process whose code runs here."""
    return _process.get()


class _Due:
    """A callback of a process."""

    __slots__ = ("args", "callback", "handle", "process")

    def __init__(self, process: LoopProcess, callback: Any, args: tuple[Any, ...]) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        self.process.run(self)


class _Waiting(selectors.DefaultSelector):
    """Waits by moving the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing is left that could happen"
            self.loop.now += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    _ready: Any

    def __init__(self) -> None:
        waiting = _Waiting()
        self.now = 1_000.0
        super().__init__(waiting)
        waiting.loop = self
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self.now

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        due = _due(callback, args, context)
        if due is None:
            return super().call_soon(callback, *args, context=context)
        due.handle = super().call_soon(due, context=context)
        return due.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        due = _due(callback, args, context)
        if due is None:
            return super().call_at(when, callback, *args, context=context)
        due.handle = handle = super().call_at(when, due, context=context)
        return handle

    @staticmethod
    def _make_task(loop: Any, work: Any, *, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        process = _process.get() if context is None else context.get(_process)
        if process is not None:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            process.owns(task)
        return task


def _due(callback: Any, args: Any, context: contextvars.Context | None) -> _Due | None:
    process = _process.get() if context is None else context.get(_process)
    return None if process is None else _Due(process, callback, args)


def in_no_process(loop: VirtualLoop, after_s: float, callback: Callable[[], object]) -> None:
    """Call `callback` later, as the kernel would: whatever becomes of who wanted it."""
    loop.call_at(loop.now + after_s, callback, context=contextvars.Context())


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    """Provide a loop, with `time.monotonic` on its clock, and close it at the end."""
    loop = VirtualLoop()
    with mock.patch("time.monotonic", loop.time):
        try:
            yield loop
        finally:
            loop.close()
