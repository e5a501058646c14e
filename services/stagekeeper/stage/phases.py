"""From a launch file to a stage that can serve: its class, then LOAD, MEASURE, ALLOCATE, CAPTURE.

Decided here: the order, where each phase runs, what `allocate` gets, and when a stage has used more
than it was given. Not decided here: what follows a failure (host). Invariant: the plain phases of
a stage all run in one thread: what they set up (a CUDA stream, inference mode) may belong to it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from stagekeeper.actor.call_context import enter_call, leave_call
from stagekeeper.core.states import Phase
from stagekeeper.runtime.launch import Launch, note_phase
from stagekeeper.stage.activity import Activity, Work
from stagekeeper.stage.stage import Stage, StageHooks, make_stage
from stagekeeper.stage.vitals import Vitals
from stagekeeper.stage.workers import Workers

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EntrypointError(Exception):
    """The class that the spec names cannot be had; the message says what to change."""


class BudgetExceeded(Exception):
    """The stage used more of a card in MEASURE than its spec asks for."""


class PhaseRunner:
    """Brings one stage up, once.

    Args:
        launch: what to start.
        hooks: what the stage is given.
        vitals, activity: where phases and their progress are shown.
    """

    def __init__(
        self, launch: Launch, hooks: StageHooks, vitals: Vitals, activity: Activity
    ) -> None:
        self._launch = launch
        self._hooks = hooks
        self._vitals = vitals
        self._activity = activity
        self._thread = Workers("phases", 1)

    async def run(self) -> Stage:
        """Run all phases and return the stage.

        Raises:
            BaseException: whatever the class or a phase raised; `vitals.phase` says where.
        """
        stage = await self._phase(Phase.LOAD, self._load)
        peak = await self._phase(Phase.MEASURE, lambda work: self._measure(stage, work))
        left = max(0, self._launch.budget_bytes - (peak or 0))
        await self._phase(
            Phase.ALLOCATE, lambda work: self._step(work, lambda: stage.allocate(left))
        )
        await self._phase(Phase.CAPTURE, lambda work: self._finish(stage, work))
        # The thread stays, idle: what a phase kept in thread-local storage stays with it.
        return stage

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
        return stage

    async def _measure(self, stage: Stage, work: Work) -> int | None:
        """Run MEASURE; return the peak, None where nothing measures it."""
        # A meter may have to wake a driver, which takes seconds: not on the event loop.
        meter = await self._thread.run(work, stage.memory_meter)
        if meter is None:
            await self._step(work, stage.measure)
            return None
        await self._thread.run(work, meter.reset_peak)
        await self._step(work, stage.measure)
        peak = await self._thread.run(work, meter.peak_bytes)
        budget = self._launch.budget_bytes
        self._vitals.uses(await self._thread.run(work, meter.used_bytes))
        if self._launch.devices and peak > budget:
            raise BudgetExceeded(
                f"stage {self._launch.stage_name} used {peak} bytes ({_mib(peak)}) of a card in "
                f"MEASURE, and its budget there is {budget} bytes ({_mib(budget)}): give it more "
                "memory in the spec, or measure a smaller batch"
            )
        return peak

    async def _finish(self, stage: Stage, work: Work) -> None:
        """Run CAPTURE, and read what the stage uses now that it is complete."""
        await self._step(work, stage.capture)
        meter = await self._thread.run(work, stage.memory_meter)
        if meter is not None:
            self._vitals.uses(await self._thread.run(work, meter.used_bytes))

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


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
