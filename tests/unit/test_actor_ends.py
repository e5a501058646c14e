"""How the owner of processes names their ends: for memory, too late, asked for. No process runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagekeeper.actor.cluster_hosts import AgentHost
from stagekeeper.actor.failure import FailureKind
from stagekeeper.actor.owning import local_procs, remote_procs
from stagekeeper.actor.owning.local_procs import LocalProc
from stagekeeper.agent.procs.held_proc import ProcEnd
from stagekeeper.agent.procs.proc_events import proc_event
from stagekeeper.core.ids import InstanceId
from stagekeeper.host.oom import OomWitness, RecentKills
from stagekeeper.host.proc_launch import ProcNotStarted
from stagekeeper.host.process import ExitStatus


class Kernel(OomWitness):
    """Has killed for memory when the test says so; as the real one, it says so once."""

    def __init__(self) -> None:
        self.has_killed = False
        self.now = 0.0

    def look(self) -> bool:
        has_killed, self.has_killed = self.has_killed, False
        return has_killed


class EndedProc:
    """A child that has ended."""

    address, instance_id = "h:1", "a"

    def __init__(self, status: ExitStatus, *, was_killed: bool = False) -> None:
        self.status, self.was_killed = status, was_killed
        self.handle = SimpleNamespace(pid=7)

    async def wait(self) -> ExitStatus:
        return self.status


KILLED = ExitStatus(signal=9)


def kills_of(kernel: Kernel) -> RecentKills:
    return RecentKills(kernel, lambda: kernel.now)


async def is_for_memory(kills: RecentKills, status: ExitStatus, **how: bool) -> bool:
    end = await LocalProc(cast(Any, EndedProc(status, **how)), "boot", kills).ended()
    assert end.exit is not None
    return end.exit.out_of_memory


async def test_what_the_kernel_kills_for_memory_is_told_apart_from_other_kills():
    kernel = Kernel()
    kills = kills_of(kernel)
    assert not await is_for_memory(kills, KILLED)

    kernel.has_killed = True
    assert await is_for_memory(kills, KILLED)
    kernel.now += 1.0  # one kill may end several, each a moment later
    assert await is_for_memory(kills, KILLED)
    assert not await is_for_memory(kills, KILLED, was_killed=True)
    assert not await is_for_memory(kills, ExitStatus(signal=11))
    assert not await is_for_memory(kills, ExitStatus(code=137))
    kernel.now += 10.0
    assert not await is_for_memory(kills, KILLED)


async def test_a_kill_that_was_seen_before_the_death_counts_for_a_moment():
    kernel = Kernel()
    kills = kills_of(kernel)
    kernel.has_killed = True
    kills.look()
    kernel.now += 1.0
    assert await is_for_memory(kills, KILLED)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_start_that_took_too_long_is_a_kind_of_its_own(is_late):
    kind = FailureKind.INIT_TIMEOUT if is_late else FailureKind.INIT_RAISED
    error = ProcNotStarted("workers was not up", is_late=is_late)
    assert local_procs.not_started("a", "workers", error).kind is kind

    told = proc_event(InstanceId("a"), ProcEnd(is_late=is_late), cast(Any, None))
    end = remote_procs._end_of(told.ended)
    host = AgentHost("w", "h:1", "default")
    assert remote_procs._not_started("a", "workers", host, end).kind is kind
