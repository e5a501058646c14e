"""The root of an actor tree within a test process, with all that reaches its hook on record.

One root serves many tests, since processes cost more than tests do: each test finds the tree as
the first one did, and has to take every failure that reaches the hook.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import stagekeeper.actor as actor
from stagekeeper.actor import MeshFailure, ProcMesh, Root, root, this_host
from stagekeeper.actor.program import Program, current_program
from stagekeeper.host import proc_table, tree_sweep
from tests.harness.processes import start_ticks
from tests.harness.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]

SOON_S = 5.0
"""What is to take a few milliseconds; a busy machine may be late."""


class Faults:
    """The hook of a test: what reached it, in order, until a test takes it."""

    def __init__(self) -> None:
        self.waiting: list[MeshFailure] = []

    def __call__(self, failure: MeshFailure) -> None:
        self.waiting.append(failure)

    async def one(self, *, within_s: float = 20.0) -> MeshFailure:
        """Take the next failure; wait for it."""
        await wait_for(lambda: self.waiting, "a failure reaches the hook", within_s=within_s)
        return self.waiting.pop(0)


class Tree:
    """A root in this process."""

    def __init__(self, program: Program, faults: Faults, own: Root) -> None:
        self.program = program
        self.root = own
        self.faults = faults
        self.procs: ProcMesh | None = None
        """Processes that all tests share; those that a test ends are replaced after it."""

    @property
    def members(self) -> set[int]:
        """The pids of everything below this process that belongs to the tree."""
        return {pid for pid, _ in tree_sweep.find(self.program.tree_path)}

    async def shared(self, count: int) -> ProcMesh:
        """Start the processes that all tests share."""
        self.procs = this_host().spawn_procs(count, name="shared")
        await self.procs.ready(60)
        return self.procs

    async def clear(self) -> None:
        """Stop what a test spawned, and put processes in the places of those that it ended."""
        scope: Any = self.program.root_scope
        shared: Any = None if self.procs is None else self.procs._procs
        for mesh in reversed(list(scope._meshes)):
            if mesh is not shared:
                await mesh.stop(0.2)
        await scope.drained()
        if shared is not None and shared.failures:
            await shared.replace_ended([slot.instance_id for slot in shared._slots])
        left, self.faults.waiting = self.faults.waiting, []
        assert not left, "\n".join(map(str, left))


@asynccontextmanager
async def a_root(**options: Any) -> AsyncIterator[Tree]:
    """Make this process a root; at the end nothing of the tree is left, or it is an error."""
    before, faults = actor.unhandled_fault_hook, Faults()
    actor.unhandled_fault_hook = faults
    path = ""
    try:
        async with root(**options) as own:
            tree = Tree(current_program(), faults, own)
            path = tree.program.tree_path
            yield tree
    finally:
        actor.unhandled_fault_hook = before
        if path:
            left = tree_sweep.sweep(path, deadline_s=60)
            assert not left, f"left of the tree: {left}"


async def all_gone(pids: list[int], *, within_s: float = SOON_S) -> None:
    """Wait until these processes have ended; name those that have not."""
    started = {pid: start_ticks(pid) for pid in pids}

    def living() -> list[int]:
        return [pid for pid, ticks in started.items() if is_alive(pid, ticks)]

    try:
        await wait_for(lambda: not living(), f"{pids} are gone", within_s=within_s)
    finally:
        for pid in living():
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int, ticks: int | None = None) -> bool:
    """Return whether a process lives; one that waits to be reaped does not."""
    now = proc_table.living_start_ticks(pid)
    return now is not None and ticks in (None, now)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Keep a process from running, as a machine without memory does."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


class Script:
    """A program with a root of its own, run to its end, or killed."""

    def __init__(self, process: subprocess.Popen[str], journal: Path) -> None:
        self.process = process
        self.journal = journal
        self.output = ""
        self.errors = ""

    @property
    def noted(self) -> list[str]:
        """What the program and its actors wrote down."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def pids(self) -> list[int]:
        """All processes that the program named."""
        return [int(line.split()[-1]) for line in self.noted if line.startswith("pid ")]

    async def until(self, line: str) -> None:
        await wait_for(lambda: line in self.noted, f"the program notes {line!r}")

    async def ended(self, within_s: float = 60.0) -> int:
        """Return its exit code; a signal is a negative one."""
        self.output, self.errors = await asyncio.to_thread(self.process.communicate, None, within_s)
        return self.process.returncode


@contextmanager
def a_script(mode: str, journal: Path, *arguments: str) -> Iterator[Script]:
    """Run `tests.stages.actor_program`; nothing of it is left at the end."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stages.actor_program", mode, str(journal), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield Script(process, journal)
        finally:
            process.kill()


async def until(probe: Callable[[], Any], what: str) -> Any:
    """Wait for what is to be at once, with a limit that a busy machine keeps too."""
    return await wait_for(probe, what, within_s=20.0)
