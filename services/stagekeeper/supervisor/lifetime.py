"""A supervisor process: it stands by, reigns, steps down, and stands by again, until it is told.

Decided here: what ends a reign and what ends the process. A reign that gives way to another one
ends as in order, and the process becomes a standby; a store that fails ends the process. Not
decided here: whose turn it is (`standby`) and how a reign is put together (`app`).

Invariant: nothing of a reign is left before the next one, and nothing at all at the end.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from stagekeeper.core.ids import Epoch
from stagekeeper.host.server import AddressTaken
from stagekeeper.runtime.clock import Clock, SystemClock
from stagekeeper.supervisor.app import Supervisor
from stagekeeper.supervisor.predecessor import find_predecessor
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.standby import Standby, Waiting
from stagekeeper.supervisor.state_lock import StateDirTaken
from stagekeeper.supervisor.store import EpochLost
from stagekeeper.supervisor.successor import HigherReign

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """A reign, `epoch`, gave way; `why` says before whom."""

    endpoint: str
    epoch: Epoch
    why: str


async def run(
    settings: SupervisorSettings,
    *,
    stop: asyncio.Event,
    ready: Callable[[Supervisor], None],
    on_standby: Callable[[Waiting], None] = lambda waiting: None,
    on_stepped_down: Callable[[SteppedDown], None] = lambda stepped: None,
    clock: Clock | None = None,
) -> None:
    """Run one supervisor until `stop` is set.

    Args:
        settings: checked already.
        stop: set by whoever runs this, on SIGTERM for one.
        ready: called with the supervisor each time that a reign of it answers everything.
        on_standby: called each time that it begins to wait for another one's end.
        on_stepped_down: called when a reign gave way and nothing of it is open any more.
        clock: time, handed in.

    Raises:
        StateDirTaken, AddressTaken: it cannot run here, and waiting would not mend that; or
            another one lives and it may not wait.
        EpochLost: another reign took the store, and nobody serves this endpoint.
        StoreFailed: it could not start, or could not go on: what it promises cannot be kept.
    """
    gc.freeze()  # what was imported stays: no collection has to look through it again
    # A registration makes hundreds of values that stay; looking for cycles among them after every
    # 700 would take its part of the time in which a cluster comes back.
    gc.set_threshold(20_000, 20, 20)
    clock = clock or SystemClock()
    standby = Standby(
        settings,
        functools.partial(find_predecessor, settings),
        clock=clock,
        random=random.random,
        on_standby=on_standby,
    )
    while not stop.is_set():
        turn = await _unless(stop, standby.turn())
        if turn is None:
            return
        supervisor = Supervisor(settings, clock, turn=turn)
        try:
            await supervisor.start()
        except (AddressTaken, StateDirTaken, EpochLost) as error:
            _log.info("this start came to nothing", why=str(error))
            _ = await _unless(stop, standby.start_failed(error))
            continue
        standby.began()
        try:
            ready(supervisor)
            await _unless(stop, _end_of_reign(supervisor.failed))
        except (EpochLost, HigherReign) as error:
            if not settings.standby:
                raise AddressTaken(f"{error}: this one has stepped down") from error
            await supervisor.stop()
            standby.deposed(supervisor.epoch, error)
            on_stepped_down(SteppedDown(settings.stable, supervisor.epoch, str(error)))
        finally:
            await supervisor.stop()


async def _end_of_reign(failed: asyncio.Future[None]) -> None:
    await failed


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` to its end, or cancel it when `stop` is set and return None."""
    working = asyncio.create_task(work, name="supervisor/turn")
    stopping = asyncio.create_task(stop.wait(), name="supervisor/stop")
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, stopping):
            if not task.done():
                task.cancel()
        await asyncio.wait({working, stopping})
    return None if working.cancelled() else working.result()
