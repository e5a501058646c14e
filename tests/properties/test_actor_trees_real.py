"""Random trees of actors on real processes, with real kills and freezes, under the same rules.

What the trees in one loop (`test_actor_trees_properties`) cannot show: sockets, signals, the
kernel's word, threads, and that no process is left.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import stagekeeper.actor as actor
from stagekeeper.actor import root
from stagekeeper.actor.program import current_program
from stagekeeper.host import proc_table, tree_sweep
from tests.harness import random_trees
from tests.harness.tree_ops import draw_ops
from tests.harness.tree_trials import Trial

_HOLDS_WITHIN_S = 40.0
_LOOKS_S = 0.3


class RealWorld:
    """What a trial does to real processes."""

    naps_s = (0.05, 0.5, 3.0)
    supervise_limit_s = 0.8
    lease_s = 0.5
    has_real_time = True
    call_limit_s = 30.0

    def __init__(self, journal: str) -> None:
        self._journal = journal
        self._known: dict[str, tuple[int, int]] = {}
        """Pid and start of each process in which an actor was born."""

    def _signal(self, process: str, number: signal.Signals) -> None:
        pid, ticks = self._of(process) or (0, 0)
        if not pid:
            return
        assert pid != os.getpid()
        fd = tree_sweep.open_pidfd(pid, ticks)
        if fd is not None:
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                pass
            finally:
                os.close(fd)

    def _of(self, process: str) -> tuple[int, int] | None:
        if process not in self._known:
            for it in random_trees.notes(self._journal):
                if it["what"] == "born":
                    self._known[it["path"][-1]] = (it["pid"], it["ticks"])
        return self._known.get(process)

    def learn(self, process: str, pid: int) -> None:
        ticks = proc_table.living_start_ticks(pid)
        if ticks is not None:
            self._known.setdefault(process, (pid, ticks))

    def kill(self, process: str) -> None:
        self._signal(process, signal.SIGKILL)

    def freeze(self, process: str) -> None:
        self._signal(process, signal.SIGSTOP)

    def thaw(self, process: str) -> None:
        self._signal(process, signal.SIGCONT)

    def is_living(self, process: str) -> bool:
        found = self._of(process)
        return found is not None and tree_sweep.is_alive(*found)

    def fail_starts(self, count: int) -> None:
        """A real process that does not come up is another test's."""

    async def quiet(self) -> None:
        await asyncio.sleep(_LOOKS_S)

    async def holds(self, check: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HOLDS_WITHIN_S
        while True:
            try:
                return await check()
            except AssertionError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(_LOOKS_S)


async def live_a_tree(seed: int, journal: Path) -> None:
    journal.touch()
    chance = random.Random(seed)
    ops = draw_ops(chance, 9, depth=1)
    print(f"seed {seed}:", *ops, sep="\n  ")
    trial = Trial(RealWorld(str(journal)), str(journal))
    path = ""
    before = actor.unhandled_fault_hook
    actor.unhandled_fault_hook = trial.hook
    try:
        async with root(lease_s=RealWorld.lease_s, stop_budget_s=0.5):
            path = current_program().tree_path
            await trial.run(ops)
        await trial.finish()
        assert not tree_sweep.find(path), "processes are left"
    finally:
        actor.unhandled_fault_hook = before
        tree_sweep.sweep(path, deadline_s=30)


@pytest.mark.parametrize("seed", range(2))
async def test_a_random_tree_of_processes_keeps_the_rules(seed: int, tmp_path: Path) -> None:
    await live_a_tree(seed, tmp_path / "notes")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(100, 300))
async def test_so_do_many(seed: int, tmp_path: Path) -> None:
    await live_a_tree(seed, tmp_path / "notes")
