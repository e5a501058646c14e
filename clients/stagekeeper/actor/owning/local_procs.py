"""Processes on this host, started by this process: its children, seen by the kernel's own word.

Invariant: an end by SIGKILL that was not ours is told as one for memory when the kernel has just
killed for memory, and only then.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stagekeeper.actor.failure import ExitInfo, FailureKind, MeshFailure, failure_id
from stagekeeper.actor.owning.proc_places import ProcEnd, ProcFailed
from stagekeeper.actor.place import Place
from stagekeeper.host.oom import RecentKills
from stagekeeper.host.proc_launch import (
    LaunchedProc,
    ProcLaunch,
    ProcNotStarted,
    launch,
    own_pythonpath,
)

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

START_LIMIT_S: Final = 60.0


class LocalProc:
    """A child process that is up."""

    def __init__(self, launched: LaunchedProc, boot_id: str, kills: RecentKills) -> None:
        self._launched = launched
        self._kills = kills
        self.place = Place(launched.address, launched.instance_id, launched.handle.pid, boot_id)

    async def ended(self) -> ProcEnd:
        status = await self._launched.wait()
        is_unexplained = status.signal == signal.SIGKILL and not self._launched.was_killed
        out_of_memory = is_unexplained and self._kills.is_one()
        return ProcEnd(ExitInfo.of(status, out_of_memory=out_of_memory), detected_by="pidfd")

    async def end(self, budget_s: float) -> bool:
        try:
            await self._launched.end(budget_s)
        except TimeoutError:  # the kernel still holds it, or something that it started
            return False
        return not self._launched.was_killed

    async def kill(self) -> None:
        self._launched.kill()
        await self._launched.gone()


class LocalProcSource:
    """Starts children of this process."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def start(self, index: int, instance_id: str, name: str) -> LocalProc:
        program = self._program
        program.before_child()
        program.memory_kills()  # from now on it is known what was before
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        try:
            cwd, pythonpath = Path.cwd(), own_pythonpath(Path(main) if main else None)
        except OSError as error:
            gone = ProcNotStarted(f"{name} has no folder to run in, since this process has none")
            raise ProcFailed(not_started(instance_id, name, gone)) from error
        spec = ProcLaunch(
            instance_id=instance_id,
            name=name,
            tree_path=f"{program.tree_path}/{instance_id}",
            token=program.token,
            listen_host=program.listen_host,
            lease_s=program.lease_s,
            boot_id=program.boot_id,
            owner=f"process {os.getpid()}",
            pythonpath=pythonpath,
        )
        try:
            launched = await launch(
                spec,
                env=os.environ,
                cwd=cwd,
                log_path=None,
                start_timeout_s=START_LIMIT_S,
            )
        except ProcNotStarted as error:
            raise ProcFailed(not_started(instance_id, name, error)) from error
        return LocalProc(launched, program.boot_id, program.memory_kills())

    async def close(self) -> None:
        """There is nothing beside the processes."""


def not_started(instance_id: str, name: str, error: ProcNotStarted) -> MeshFailure:
    """Make the failure of a process that did not come up."""
    status = error.exit_status
    return MeshFailure(
        id=failure_id(instance_id, "end"),
        kind=FailureKind.INIT_TIMEOUT if error.is_late else FailureKind.INIT_RAISED,
        mesh_name=name,
        instance_id=instance_id,
        message=error.message,
        exit=None if status is None else ExitInfo.of(status),
        detected_by="start",
        last_log_lines=tuple(error.last_lines),
    )
