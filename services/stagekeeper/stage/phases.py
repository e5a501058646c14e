"""From a launch file to a stage that can serve: its class, then LOAD, MEASURE, ALLOCATE, CAPTURE.

Decided here: the order, where each phase runs, how each has the phase lock of the cards, what
`allocate` gets, and when a stage has used more than it was given. Not decided here: what follows a
failure (host). Invariants: the plain phases of a stage all run in one thread: what they set up (a
CUDA stream, inference mode) may belong to it. From the memory baseline to the end of ALLOCATE
nobody else who keeps to the lock moves memory on the cards.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from stagekeeper.actor import context
from stagekeeper.actor.call_context import enter_call, leave_call
from stagekeeper.core.states import Phase
from stagekeeper.runtime.launch import Launch, note_phase
from stagekeeper.runtime.phase_lock import LOOK_S, Hold, Mode, PhaseLock, Wait
from stagekeeper.stage.activity import Activity, Work
from stagekeeper.stage.memory_account import StageMemory
from stagekeeper.stage.stage import Stage, StageHooks, make_stage
from stagekeeper.stage.vitals import Vitals, is_out_of_memory
from stagekeeper.stage.workers import Workers

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EntrypointError(Exception):
    """The class that the spec names cannot be had; the message says what to change."""


class PhaseRunner:
    """Brings one stage up, once.

    Args:
        launch: what to start.
        hooks: what the stage is given.
        vitals, activity: where phases and their progress are shown.
        stage: that of a program; None makes the one that the launch names.
    """

    def __init__(
        self,
        launch: Launch,
        hooks: StageHooks,
        vitals: Vitals,
        activity: Activity,
        stage: Stage | None = None,
    ) -> None:
        self._launch = launch
        self._hooks = hooks
        self._vitals = vitals
        self._activity = activity
        self._stage = stage
        self._thread = Workers("phases", 1)
        self._memory = StageMemory(launch, vitals)
        self._lock = PhaseLock(
            Path(launch.lock_dir),
            launch.lock_domains,
            f"stage {launch.stage_name} of {launch.deployment}/{launch.replica_index}",
            limit_s=launch.lock_limit_s,
            on_wait=self._show_wait,
        )

    async def run(self) -> Stage:
        """Run all phases and return the stage.

        Raises:
            LockTimeout, LockUnusable: the phase lock could not be had; nothing went on without it.
            BaseException: whatever the class or a phase raised; `vitals.phase` says where.
        """
        if self._stage is not None:
            return await self._run_program(self._stage)
        async with self._locked(Mode.SHARED, Phase.LOAD) as hold:
            stage = await self._phase(Phase.LOAD, self._load)
            if not self._memory.needs_measure:
                # Others may load meanwhile, and nobody measures: that is enough to allocate.
                await self._allocate(stage, hold)
        if self._memory.needs_measure:
            async with self._locked(Mode.ALONE, Phase.MEASURE) as hold:
                await self._phase(Phase.MEASURE, lambda work: self._measure(stage, work))
                hold.check_intact()
                await self._allocate(stage, hold)
        # Graphs take memory too, which nobody's measurement may count as its own.
        async with self._locked(Mode.SHARED, Phase.CAPTURE):
            await self._phase(Phase.CAPTURE, lambda work: self._capture(stage, work))
        # The thread stays, idle: what a phase kept in thread-local storage stays with it.
        return stage

    async def _run_program(self, stage: Stage) -> Stage:
        """Bring up a program, which cannot say when it measures.

        So it has its cards for itself until it has come up. One whose spec fixes its bytes measures
        nothing, and loads beside others.
        """
        assert self._launch.command is not None
        mode = Mode.SHARED if self._launch.command.has_fixed_bytes else Mode.ALONE
        async with self._locked(mode, Phase.LOAD) as hold:
            await self._phase(Phase.LOAD, lambda work: self._step(work, stage.load))
            hold.entered(Phase.MEASURE.value)
            await self._phase(Phase.MEASURE, lambda work: self._step(work, stage.measure))
            if mode is Mode.ALONE:
                hold.check_intact()
        return stage

    @asynccontextmanager
    async def _locked(self, mode: Mode, phase: Phase) -> AsyncIterator[Hold]:
        """Hold the lock of the cards, and show others who wait for it that this stage gets on.

        A wait belongs to the phase before: none begins without the lock.
        """
        wait = Work(f"wait for {phase}", is_call=False)
        self._activity.begin(wait)
        async with AsyncExitStack() as held:
            try:
                hold = await held.enter_async_context(self._lock.held(mode, phase.value))
            finally:
                self._activity.end(wait)
            telling = asyncio.create_task(self._tell_progress(hold), name="tell progress")
            try:
                yield hold
            finally:
                telling.cancel()
                await asyncio.wait({telling})

    async def _tell_progress(self, hold: Hold) -> None:
        while True:
            hold.progressed(self._activity.counter)
            await asyncio.sleep(LOOK_S)

    def _show_wait(self, wait: Wait) -> None:
        # To wait is no stall: how long it may last is the lock's own limit.
        self._activity.report(context(), 0, 0, str(wait))

    async def _phase(self, phase: Phase, run: Callable[[Work], Awaitable[T]]) -> T:
        work = Work(phase.value, is_call=False)
        self._activity.reset_progress()
        self._activity.begin(work)
        note_phase(Path(self._launch.run_dir), phase)
        self._vitals.enter_phase(phase)
        try:
            result = await run(work)
        finally:
            self._activity.end(work)
        _log.info("%s took %.3f s", phase.value, time.monotonic() - work.began)
        return result

    async def _load(self, work: Work) -> Stage:
        cls = await self._thread.run(work, lambda: find_class(self._launch))
        self._vitals.has_class(cls.__endpoints__.values())
        stage = await self._thread.run(
            work, lambda: make_stage(cls, _arguments(self._launch), self._hooks)
        )
        await self._step(work, stage.load)
        # A meter may have to wake a driver, which takes seconds: not on the event loop.
        await self._thread.run(work, lambda: self._memory.loaded(stage.memory_meter()))
        return stage

    async def _measure(self, stage: Stage, work: Work) -> None:
        await self._thread.run(work, self._memory.measure_begins)
        await self._step(work, stage.measure)
        await self._thread.run(work, self._memory.measured)
        self._memory.tell()

    async def _allocate(self, stage: Stage, hold: Hold) -> None:
        hold.entered(Phase.ALLOCATE.value)
        left_bytes = self._memory.left_bytes
        await self._phase(
            Phase.ALLOCATE, lambda work: self._step(work, lambda: stage.allocate(left_bytes))
        )

    async def _capture(self, stage: Stage, work: Work) -> None:
        await self._thread.run(work, self._memory.capture_begins)
        try:
            await self._step(work, stage.capture)
        except Exception as error:
            if is_out_of_memory(error) and (note := self._memory.capture_failed()):
                error.add_note(note)
                _log.error("memory ran out in CAPTURE: %s", note)
            raise
        await self._thread.run(work, self._memory.captured)
        self._memory.tell()

    async def _step(self, work: Work, method: Callable[[], Awaitable[None] | None]) -> None:
        """Run one method of the stage: on the loop when it is a coroutine, else in the thread."""
        awaitable: Awaitable[None] | None
        if inspect.iscoroutinefunction(method):
            awaitable = method()
        else:
            awaitable = await self._thread.run(work, method)
        if awaitable is not None:
            token = enter_call(work)
            try:
                await awaitable
            finally:
                leave_call(token)


def find_class(launch: Launch) -> type[Stage]:
    """Import the class that the launch names, with its search path.

    Raises:
        EntrypointError: there is no such module, no such class in it, or it is no stage.
        Exception: whatever the module raises when it is imported.
    """
    for folder in reversed(launch.pythonpath):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module_name, separator, qualname = launch.entrypoint.partition(":")
    if not separator or not module_name or not qualname:
        raise EntrypointError(f"entrypoint {launch.entrypoint!r} is not of the form module:Class")
    module = _import(module_name)
    found: object = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if isinstance(found, type) and issubclass(found, Stage):
        return found
    if found is None:
        offered = _stages_in(module)
        raise EntrypointError(
            f"module {module_name} has no {qualname}; the stages in it: "
            + (", ".join(offered) or "none")
        )
    raise EntrypointError(
        f"{launch.entrypoint} is {type(found).__name__} {found!r:.80}, not a subclass of "
        "stagekeeper.stage.Stage"
    )


def _import(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise  # the module is there, and something that it imports is not
        raise EntrypointError(
            f"module {module_name} is not found (no module named {missing!r}): install it beside "
            "the agent, or add its folder with the agent's --pythonpath"
        ) from error


def _stages_in(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Stage)
        and not value.__module__.startswith("stagekeeper.stage.")
    )


def _arguments(launch: Launch) -> dict[str, object]:
    arguments = json.loads(launch.args_json)
    if not isinstance(arguments, dict):
        raise EntrypointError(f"args of {launch.entrypoint} are no mapping: {launch.args_json:.80}")
    return arguments
