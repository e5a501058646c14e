"""Calls into a library that may never return, made on one thread that nobody waits for for long.

A driver that hangs holds its caller in the kernel, where no signal and no cancellation reaches it.
So the calls are made on a thread of their own, one after another, each under a deadline; a call
that is over it is left alone, and its thread with it, until it returns by itself. Decided here:
when that is told. Not decided here: what is called, and what a call that hangs means.

Invariants: there is one thread at most, and it has one piece of work at most; the loop never waits
for it; it keeps no program from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

Result = TypeVar("Result")
Value = TypeVar("Value")

_LOOK_TWICE_S: Final = 0.5
"""After a halt of this whole process a call looks late that stood still like everybody else."""


class CallOverdue(Exception):
    """A call has not returned within its deadline; it goes on, and so does the work it is part of.

    Attributes:
        call: its name.
    """

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.call = call


class CallThread(Generic[Result]):
    """A piece of work that is done again and again, and is made of calls that may hang.

    Args:
        name: of the thread.
        work: runs on the thread, and makes every dangerous call through `call`.
        deadline_s: for each call.
    """

    def __init__(self, name: str, work: Callable[[], Result], *, deadline_s: float) -> None:
        self._name = name
        self._work = work
        self._deadline_s = deadline_s
        self._wanted: queue.SimpleQueue[asyncio.Future[Result]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: asyncio.Future[Result] | None = None
        self._is_overdue = False
        # One assignment of one tuple, so that the loop never sees the name of one call with the
        # time of another.
        self._current = ("", 0.0)

    async def run(self) -> Result:
        """Do the work once, or go on waiting for the work that hung before, and return its result.

        May be cancelled; the work goes on, and the next call here joins it.

        Raises:
            CallOverdue: told at once while the call of an earlier `run` still hangs.
            Exception: what the work raised.
        """
        pending = self._pending or self._begin()
        while not pending.done():
            left_s = self._left_s()
            if left_s <= 0:
                if not self._is_overdue:
                    await asyncio.wait({pending}, timeout=_LOOK_TWICE_S)
                if not pending.done() and self._left_s() <= 0:
                    self._is_overdue = True
                    raise CallOverdue(self._current[0])
            else:
                await asyncio.wait({pending}, timeout=left_s)
        if self._pending is pending:  # another one who waited for it may have begun anew
            self._pending = None
        self._is_overdue = False
        return pending.result()

    def call(self, name: str, function: Callable[..., Value], *args: Any) -> Value:
        """Make one call of the work, on the thread; its deadline begins now."""
        self._current = (name, time.monotonic())
        return function(*args)

    def _left_s(self) -> float:
        return self._current[1] + self._deadline_s - time.monotonic()

    def _begin(self) -> asyncio.Future[Result]:
        self._current = (f"the thread {self._name!r}", time.monotonic())
        self._pending = asyncio.get_running_loop().create_future()
        self._wanted.put(self._pending)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        return self._pending

    def _serve(self) -> None:
        while True:
            pending = self._wanted.get()
            result: Result | None = None
            error: BaseException | None = None
            try:
                result = self._work()
            except BaseException as raised:
                error = raised
            try:
                pending.get_loop().call_soon_threadsafe(_settle, pending, result, error)
            except RuntimeError:  # its loop is closed: nobody is left to be told
                return


def _settle(pending: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        pending.set_result(result)
    else:
        pending.set_exception(error)
        pending.exception()  # whoever waited may be gone, and then nobody asks
