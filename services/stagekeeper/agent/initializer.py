"""Start many stages, all or nothing: the drivers of `InitRun` for threads and for asyncio.

Decided here: which thread or task carries an order out, and what becomes of a caller that is
interrupted while it waits. Everything else (order, failure, rollback) is decided in
`core.init_run`, the same for both.

Invariant: a driver leaves only after every init has ended and every cleanup was tried, with the
handles or with exactly one exception. It waits for an init that does not end: what becomes of a
stage that nobody waits for cannot be known.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from stagekeeper.core.init_run import CleanStage, InitRun, StageTimeouts, StartStage
from stagekeeper.core.planner import DeviceKey, Table, init_groups

Stage = TypeVar("Stage", bound=int)
Handle = TypeVar("Handle")


def run_init(
    stage_devices: Table[Stage, Iterable[DeviceKey]],
    init_fn: Callable[[Stage], Handle],
    cleanup_fn: Callable[[Stage, Handle], object],
    *,
    max_workers: int = 8,
    stage_timeout_s: StageTimeouts[Stage] = None,
) -> dict[Stage, Handle]:
    """Start all stages, each group of `init_groups` serially, the groups side by side.

    After the first failure nothing new starts, what is in flight ends by itself, and then all that
    had come up is cleaned, one by one, in the reverse order of success. Both functions are called
    in threads of this run, without a lock held (in the caller's, where no thread can be had).

    Args:
        stage_devices: stage id → its cards.
        init_fn: brings a stage up and returns its handle (None is one too). Whatever it raises,
            it has cleaned up itself: a stage that failed is never cleaned.
        cleanup_fn: undoes a stage; what it raises is reported and stops no other.
        max_workers: threads at most, 1 or more.
        stage_timeout_s: seconds after which an init has failed. A thread cannot be stopped: its
            end is still waited for, and if it comes up after all, it is cleaned.

    Returns:
        The handle of each stage, ascending by stage id.

    Raises:
        PlanError, ValueError: before anything was started.
        InitError: from the exception of the stage that failed first.
        KeyboardInterrupt: raised by a signal in the caller's thread, and whatever else a handler
            raises there: once the rollback is complete, which is a note on it. Further ones do not
            shorten the rollback.
    """
    groups = init_groups(stage_devices)
    _check_width(max_workers, "max_workers")
    run = InitRun[Stage, Handle](groups, stage_timeout_s=stage_timeout_s)
    threads = _Threads(run, init_fn, cleanup_fn)
    interrupt: BaseException | None = None
    error: BaseException | None = None
    while error is None:
        # An interrupt can come at any point of this block. All of it may be repeated, and what a
        # handler would have to do is done at the next turn, where it is inside the block again.
        try:
            if interrupt is not None:
                threads.interrupt(interrupt)
            threads.settle(min(max_workers, len(groups)))
            error = run.error()
            if error is None:
                return run.handles()
        except BaseException as cause:
            interrupt, error = interrupt or cause, None
    raise error


async def run_init_async(
    stage_devices: Table[Stage, Iterable[DeviceKey]],
    init_fn: Callable[[Stage], Awaitable[Handle]],
    cleanup_fn: Callable[[Stage, Handle], Awaitable[object]],
    *,
    max_parallel: int | None = None,
    stage_timeout_s: StageTimeouts[Stage] = None,
) -> dict[Stage, Handle]:
    """Do what `run_init` does with coroutines, which, unlike threads, can be cancelled.

    An init that is over its limit is cancelled, and so is every init in flight when the caller is
    cancelled; it ends in its own time, with its own clean-up done. A *failure* elsewhere cancels
    nothing: the inits in flight end by themselves. Cleanups are never cancelled.

    Args:
        stage_devices: stage id → its cards.
        init_fn: awaited in a task of this run; see `run_init`.
        cleanup_fn: awaited in a task of this run; see `run_init`.
        max_parallel: inits at once at most, 1 or more; None is one for each group.
        stage_timeout_s: seconds after which an init has failed; for all, or for each stage.

    Returns:
        The handle of each stage, ascending by stage id.

    Raises:
        PlanError, ValueError: before anything was started.
        InitError: from the exception of the stage that failed first.
        asyncio.CancelledError: the caller was cancelled, and the rollback is complete.
    """
    groups = init_groups(stage_devices)
    if max_parallel is not None:
        _check_width(max_parallel, "max_parallel")
    run = InitRun[Stage, Handle](groups, stage_timeout_s=stage_timeout_s)
    tasks = _Tasks(run, init_fn, cleanup_fn)
    while True:
        try:
            await tasks.settle(min(max_parallel or len(groups), len(groups)))
            break
        except asyncio.CancelledError as cancelled:
            tasks.interrupt(cancelled)
    error = run.error()
    if error is not None:
        raise error
    return run.handles()


class _Threads(Generic[Stage, Handle]):
    """Carries the orders of one run out in threads. The lock guards the run, and nothing else."""

    def __init__(
        self,
        run: InitRun[Stage, Handle],
        init_fn: Callable[[Stage], Handle],
        cleanup_fn: Callable[[Stage, Handle], object],
    ) -> None:
        self._run = run
        self._init_fn = init_fn
        self._cleanup_fn = cleanup_fn
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # Rung by the thread that finds the run settled. A SimpleQueue is waited for in C: unlike
        # in Thread.join and Condition.wait, an interrupt there leaves nothing half done.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def interrupt(self, cause: BaseException) -> None:
        with self._lock:
            self._run.interrupt(cause)

    def settle(self, width: int) -> None:
        """Return when the run is settled and its threads have ended.

        May be called again after an interrupt: then one more thread sees to what is left.
        """
        while not self._is_settled():
            for _ in range(1 if self._threads else width):
                thread = threading.Thread(
                    target=contextvars.copy_context().run, args=(self._work,), name="stage-init"
                )
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError:  # the host has no thread left; what has begun must end well
                    self._work()
            self._bell.get()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _is_settled(self) -> bool:
        with self._lock:
            return self._run.is_settled

    def _work(self) -> None:
        while (order := self._next_order()) is not None:
            if isinstance(order, StartStage):
                self._start(order.stage_id)
            else:
                self._clean(order)

    def _next_order(self) -> StartStage[Stage] | CleanStage[Stage, Handle] | None:
        with self._lock:
            order = self._run.next_order(now=time.monotonic())
            if order is None and self._run.is_settled:
                self._bell.put(None)
            return order

    def _start(self, stage_id: Stage) -> None:
        try:
            handle = self._init_fn(stage_id)
        except BaseException as error:
            with self._lock:
                self._run.stage_failed(stage_id, error, now=time.monotonic())
        else:
            with self._lock:
                self._run.stage_succeeded(stage_id, handle, now=time.monotonic())

    def _clean(self, order: CleanStage[Stage, Handle]) -> None:
        raised: BaseException | None = None
        try:
            self._cleanup_fn(order.stage_id, order.handle)
        except BaseException as error:
            raised = error
        with self._lock:
            self._run.stage_cleaned(order.stage_id, raised, now=time.monotonic())


class _Tasks(Generic[Stage, Handle]):
    """Carries the orders of one run out in tasks of the running loop."""

    def __init__(
        self,
        run: InitRun[Stage, Handle],
        init_fn: Callable[[Stage], Awaitable[Handle]],
        cleanup_fn: Callable[[Stage, Handle], Awaitable[object]],
    ) -> None:
        self._run = run
        self._init_fn = init_fn
        self._cleanup_fn = cleanup_fn
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_init: set[asyncio.Task[None]] = set()

    def interrupt(self, cause: BaseException) -> None:
        self._run.interrupt(cause)
        for task in self._in_init:
            _cancel_once(task)

    async def settle(self, width: int) -> None:
        """Return when the run is settled; may be called again after an interrupt."""
        while not self._run.is_settled:
            if not self._tasks:
                self._tasks = {
                    asyncio.create_task(self._work(), name="stage-init") for _ in range(width)
                }
            ended, self._tasks = await asyncio.wait(self._tasks)
            for task in ended:
                if not task.cancelled():
                    task.result()

    async def _work(self) -> None:
        while (order := self._run.next_order(now=self._loop.time())) is not None:
            if isinstance(order, StartStage):
                await self._start(order)
            else:
                await self._clean(order)

    async def _start(self, order: StartStage[Stage]) -> None:
        task = asyncio.current_task()
        assert task is not None
        timer = None
        if order.deadline is not None:
            timer = self._loop.call_at(order.deadline, self._overdue, order.deadline, task)
        self._in_init.add(task)
        try:
            handle = await self._init_fn(order.stage_id)
        except BaseException as error:
            self._run.stage_failed(order.stage_id, error, now=self._loop.time())
        else:
            self._run.stage_succeeded(order.stage_id, handle, now=self._loop.time())
        finally:
            self._in_init.discard(task)
            if timer is not None:
                timer.cancel()
            # The cancellation was for the init alone, and this task has other orders to follow.
            while task.cancelling():
                task.uncancel()

    def _overdue(self, deadline: float, task: asyncio.Task[None]) -> None:
        self._run.fail_overdue(now=deadline)
        _cancel_once(task)

    async def _clean(self, order: CleanStage[Stage, Handle]) -> None:
        raised: BaseException | None = None
        try:
            await self._cleanup_fn(order.stage_id, order.handle)
        except BaseException as error:
            raised = error
        self._run.stage_cleaned(order.stage_id, raised, now=self._loop.time())


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancel, unless it was already: a second time would hit the init's own clean-up."""
    if not task.cancelling():
        task.cancel()


def _check_width(width: int, name: str) -> None:
    if width < 1:
        raise ValueError(f"{name} is {width}: nothing could ever start")
