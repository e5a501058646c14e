"""One process for actors as its agent holds it: on its way, up, ended, gone.

Decided here: what is known of it at each moment, and what its end is said to be. Not decided here:
who is told, and when it is to end (`proc_set`).

Invariant: it is up at most once and ends at most once; when it is gone, so is all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from stagekeeper.agent.log_tail import last_lines
from stagekeeper.agent.procs.proc_starter import ProcStarter
from stagekeeper.core.ids import InstanceId
from stagekeeper.core.limits import LONGEST_FAILURE_LINE, LONGEST_MESSAGE, MOST_LOG_LINES
from stagekeeper.core.model import ExitInfo
from stagekeeper.core.names import cut
from stagekeeper.core.procs import ProcsWanted
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.proc_launch import LaunchedProc, ProcNotStarted
from stagekeeper.host.process import ExitStatus

_log = structlog.get_logger(__name__)

_FORGOTTEN: Final = "it ended, and has been forgotten since"


@dataclass(frozen=True, slots=True)
class ProcUp:
    """Where a process that is up listens."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class ProcEnd:
    """How a process ended; `exit` is None where that is not known, `pid` 0 where it never ran.

    Attributes:
        is_late: it was not up within the limit of a start.
    """

    exit: ExitInfo | None = None
    reason: str = ""
    last_log_lines: tuple[str, ...] = ()
    pid: int = 0
    is_late: bool = False


class HeldProc:
    """One process for actors.

    Args:
        on_change: called after each change of what is known of it.

    Attributes:
        up: where it listens, once it is up; kept when it has ended.
        end: how it ended, once it has.
    """

    def __init__(
        self,
        wanted: ProcsWanted,
        instance_id: InstanceId,
        starter: ProcStarter,
        oom: OomWitness,
        on_change: Callable[[], None],
    ) -> None:
        self.instance_id = instance_id
        self.up: ProcUp | None = None
        self.end: ProcEnd | None = None
        self._gone = asyncio.Event()
        self._wanted = wanted
        self._starter = starter
        self._oom = oom
        self._on_change = on_change
        self._asked = ""
        self._starting: asyncio.Task[LaunchedProc] | None = None
        self._launched: LaunchedProc | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it, and of what it started, is left."""
        return self._gone.is_set()

    async def run(self) -> None:
        """Start it and see it through to its end. Cancelled, it kills the process."""
        self._starting = asyncio.ensure_future(self._starter.start(self._wanted, self.instance_id))
        if self._asked:
            self._starting.cancel()
        try:
            await asyncio.wait({self._starting})
            if self._starting.cancelled():
                await self._was_never_up()
            elif (error := self._starting.exception()) is not None:
                self._did_not_start(error)
            else:
                await self._see_through(self._starting.result())
        finally:
            self._starting.cancel()  # does nothing to one that is done
            if self._launched is not None:
                self._launched.close()
        self._gone.set()
        self._on_change()

    def kill(self, why: str) -> None:
        """SIGKILL it, and all that it started; one that is still on its way never comes up.

        Args:
            why: what is said of its end, by whoever asked first.
        """
        self._asked = self._asked or why
        if self._launched is not None:
            self._launched.kill()
        elif self._starting is not None:
            self._starting.cancel()

    async def stop(self, why: str, budget_s: float) -> None:
        """Ask it to end, `kill` it when it has not after the budget; returns when it is gone."""
        if self._launched is None or not budget_s:
            self.kill(why)
        else:
            self._asked = self._asked or why
            with contextlib.suppress(TimeoutError):  # what is not gone is logged in its course
                await self._launched.end(budget_s)
        await self._gone.wait()

    # --- how it goes

    async def _see_through(self, launched: LaunchedProc) -> None:
        self._launched = launched
        if self._asked:
            launched.kill()
        self.up = ProcUp(launched.address, launched.handle.pid)
        _log.info("a process for actors is up", **self._told(), address=launched.address)
        self._on_change()
        status = await launched.wait()
        self._ended(
            ProcEnd(
                self._exit(status, was_killed=launched.was_killed),
                self._asked,
                self._last_lines(),
                launched.handle.pid,
            )
        )
        try:
            await launched.gone()
        except TimeoutError as error:
            _log.error("not all that actors started is gone", **self._told(), why=str(error))

    def _did_not_start(self, error: BaseException) -> None:
        if not isinstance(error, ProcNotStarted | OSError):
            raise error
        status = error.exit_status if isinstance(error, ProcNotStarted) else None
        message = error.message if isinstance(error, ProcNotStarted) else str(error)
        self._ended(
            ProcEnd(
                None if status is None else self._exit(status, was_killed=False),
                cut(message, LONGEST_MESSAGE),
                self._last_lines(),
                is_late=isinstance(error, ProcNotStarted) and error.is_late,
            )
        )

    async def _was_never_up(self) -> None:
        try:
            await self._starter.sweep(self.instance_id)
        except TimeoutError as error:
            _log.error("a process that was not up is not gone", **self._told(), why=str(error))
        self._ended(ProcEnd(ExitInfo(asked=True), self._asked, self._last_lines()))

    def _ended(self, end: ProcEnd) -> None:
        self.end = end
        _log.info("a process for actors ended", **self._told(), exit=end.exit, why=end.reason)
        self._on_change()

    def _exit(self, status: ExitStatus, *, was_killed: bool) -> ExitInfo:
        is_unexplained = status.signal == signal.SIGKILL and not was_killed
        return ExitInfo(
            code=status.code,
            signal=status.signal,
            out_of_memory=is_unexplained and self._oom.look(),
            asked=bool(self._asked),
        )

    def _last_lines(self) -> tuple[str, ...]:
        lines = last_lines(self._starter.log_path(self.instance_id), MOST_LOG_LINES)
        return tuple([cut(line, LONGEST_FAILURE_LINE) for line in lines])

    def _told(self) -> dict[str, object]:
        pid = self.up.pid if self.up else 0
        return {"set": self._wanted.name, "instance": self.instance_id[:8], "pid": pid}


class ForgottenProc:
    """Stands for a process that ended so long ago that nothing is known of it any more."""

    def __init__(self, instance_id: InstanceId) -> None:
        self.instance_id = instance_id
        self.up: ProcUp | None = None
        self.end = ProcEnd(reason=_FORGOTTEN)
