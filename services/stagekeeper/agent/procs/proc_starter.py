"""How an agent starts a process for actors: where it lies, what it is told, what it inherits.

Decided here: its environment, its folder, its place in the tree of what this agent has started. The
place begins with the agent's own mark, which is the same in all of its lives: whatever carries it
is this agent's to end; behind it comes the life. Not decided here: when one is started, and what
its end means (`proc_set`).

Invariant: after `sweep_left` nothing of an earlier life's processes for actors runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from stagekeeper.agent.child_environment import RUN_DIR_ENV, passed_on
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.core.ids import InstanceId
from stagekeeper.core.procs import ProcsWanted
from stagekeeper.host.proc_launch import LaunchedProc, ProcLaunch, launch
from stagekeeper.host.process import host_boot_id
from stagekeeper.host.tree_sweep import sweep
from stagekeeper.runtime.private_folder import make_private_folder

_log = structlog.get_logger(__name__)

_START_TIMEOUT_S: Final = 60.0
"""Half a second is usual; a host that is busy with loading models is not."""

_SWEEP_S: Final = 10.0
_LOG_FILE: Final = "proc.log"
_MARK_BYTES: Final = 8


class ProcStarter:
    """Starts the processes for actors of one agent.

    Attributes:
        life_place: whatever this life starts is below it.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._folder = settings.directory.procs
        self._boot_id = host_boot_id()
        root = os.path.realpath(settings.directory.root)
        mark = hashlib.blake2b(os.fsencode(root), digest_size=_MARK_BYTES).hexdigest()
        self._mark = f"agent-{mark}"
        self.life_place = f"{self._mark}/{uuid.uuid4().hex[: 2 * _MARK_BYTES]}"
        self.before_start: Callable[[], None] = lambda: None
        """Called before each start of a process."""

    @property
    def boot_id(self) -> str:
        return self._boot_id

    async def sweep_left(self) -> None:
        """End all that an earlier life's processes for actors have left, and forget them.

        The processes themselves ended with their agent, by the kernel; what they had started may
        not have. What the kernel does not let go within a while is logged, and not waited for.
        """
        try:
            killed = await asyncio.to_thread(sweep, self._mark, deadline_s=_SWEEP_S)
        except TimeoutError as error:
            _log.error("processes of an earlier life are not gone", why=str(error))
        else:
            if killed:
                pids = sorted(pid for pid, _ in killed)
                _log.warning("ended what actors of an earlier life had started", pids=pids)
        for folder in self._folder.iterdir():
            _remove(folder)

    async def start(self, wanted: ProcsWanted, instance_id: InstanceId) -> LaunchedProc:
        """Start one process and return when it is up. Cancelled, it kills what was begun.

        Raises:
            ProcNotStarted: it did not come up, and nothing is left of it.
            OSError: its folder cannot be made, or nobody would end what it starts.
        """
        settings, folder = self._settings, self._folder / instance_id
        self.before_start()
        make_private_folder(folder)
        spec = ProcLaunch(
            instance_id=instance_id,
            name=wanted.name or wanted.procs_id,
            tree_path=self._place(instance_id),
            token=wanted.token,
            listen_host=settings.stage_host,
            lease_s=wanted.lease_s,
            boot_id=self._boot_id,
            owner=wanted.owner,
            pythonpath=[str(it.absolute()) for it in settings.pythonpath],
            extra={"allow": json.dumps(settings.allow)},
        )
        return await launch(
            spec,
            env=self._environment(wanted, folder),
            cwd=folder,
            log_path=folder / _LOG_FILE,
            start_timeout_s=_START_TIMEOUT_S,
            module=settings.proc_module,
        )

    async def sweep(self, instance_id: InstanceId) -> None:
        """End whatever there is of one process.

        Raises:
            TimeoutError: the kernel does not let go of something.
        """
        await asyncio.to_thread(sweep, self._place(instance_id), deadline_s=_SWEEP_S)

    def log_path(self, instance_id: InstanceId) -> Path:
        return self._folder / instance_id / _LOG_FILE

    def forget(self, instance_id: InstanceId) -> None:
        """Remove the folder of a process that is gone."""
        _remove(self._folder / instance_id)

    def _place(self, instance_id: InstanceId) -> str:
        return f"{self.life_place}/{instance_id}"

    def _environment(self, wanted: ProcsWanted, folder: Path) -> dict[str, str]:
        env = passed_on(self._settings.pythonpath)
        # Nothing is set aside for them, so they see a card only where their owner says which one.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ""
        env |= dict(wanted.env)
        env[RUN_DIR_ENV] = str(folder)
        return env


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
