"""Actor trees on a cluster: a real supervisor, two agents, and what becomes of it when parts die.

Both agents are on this machine; each is given another boot's id, which is all that tells hosts
apart.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from stagekeeper.actor import Died, MeshError, ValueMesh
from stagekeeper.actor.failure import ExitInfo, FailureKind
from stagekeeper.host import proc_table
from stagekeeper.host.process import HOST_BOOT_ENV
from tests.harness.actor_trees import REPOSITORY, Script, a_root, all_gone, is_alive
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.stages.actor_cases import Worker
from tests.stages.kept_actor import Far

ALLOW = "--allow=tests.stages.kept_actor.*"


@asynccontextmanager
async def two_hosts() -> AsyncIterator[Cluster]:
    async with Cluster() as them:
        await them.start_supervisor()
        for name in ("node-1", "node-2"):
            env = {"PYTHONPATH": str(REPOSITORY), HOST_BOOT_ENV: f"boot of {name}"}
            await them.start_agent(name, ALLOW, env=env)
        async with them.client() as client:
            await them.workers_alive(2, client)
        yield them


@contextmanager
def program(mode: str, endpoint: str, journal: Path, lease_s: float) -> Iterator[Script]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    arguments = [mode, endpoint, str(journal), str(lease_s)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stages.cluster_program", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield Script(process, journal)
        finally:
            process.kill()


def processes_of_agent(pid: int) -> list[int]:
    """Return an agent and its children."""
    children = []
    for other in proc_table.other_pids():
        fields = proc_table.stat_fields(other)
        if fields is not None and int(fields[1]) == pid:
            children.append(other)
    return [pid, *children]


async def is_called_killed_respawned_and_ends_with_its_agent(them: Cluster) -> None:
    async with a_root(endpoint=them.endpoint, lease_s=1.0, stop_budget_s=1.0) as tree:
        hosts = await tree.root.hosts()
        assert hosts.names == ("node-1", "node-2")
        procs = hosts.spawn_procs(1, name="far")
        far: Any = procs.spawn("far", Far)
        pids = await far.pid.call()
        assert len(set(pids.values())) == 2 and os.getpid() not in pids.values()

        os.kill(pids[1], signal.SIGKILL)
        failure = await tree.faults.one()
        assert failure.mesh is far and failure.ranks == (1,)
        assert failure.kind is FailureKind.SIGNALED and failure.exit == ExitInfo(signal=9)
        assert failure.detected_by == "agent" and "I was asked" in failure.last_log_lines
        assert await far[0].add.call_one(1) == 1
        await failure.respawn()
        again: ValueMesh[int] = await far.pid.call()
        assert again[0] == pids[0] and again[1] != pids[1]

        refused: Any = procs.spawn("refused", Worker)
        failure = await tree.faults.one()
        await tree.faults.one()  # the other rank
        assert failure.kind is FailureKind.INIT_RAISED
        assert "is not allowed here" in failure.message and "--allow" in failure.message
        await refused.stop(0.0)

        sleepers = await far.start_sleeper.call()
        began = time.monotonic()
        them.agents["node-2"].kill()
        await all_gone([again[1], sleepers[1]])
        assert time.monotonic() - began < 5.0
        failure = await tree.faults.one()
        assert failure.mesh is far and failure.ranks == (1,)
        try:
            await far.add.call(1)
        except MeshError as error:
            assert isinstance(error.failed[1], Died) and not error.ok
        else:
            raise AssertionError("a rank without a process answers")
        assert is_alive(again[0])
        await wait_for(lambda: 1 in procs.failures, "nobody can be asked about it any more")
    assert not is_alive(again[0]) and not is_alive(sleepers[0])


async def ends_with_its_owner_within_the_lease(them: Cluster, tmp_path: Path) -> None:
    with program("hold", them.endpoint, tmp_path / "one", lease_s=1.0) as held:
        await held.until("up")
        held.process.kill()
        began = time.monotonic()
        await all_gone(held.pids(), within_s=10.0)
        assert time.monotonic() - began < 1.0 + 5.0  # a busy machine may be late


async def is_told_of_where_it_cannot_be_stopped(them: Cluster, tmp_path: Path) -> None:
    """A host stops answering while its tree is stopped."""
    with program("stop", them.endpoint, tmp_path / "two", lease_s=2.0) as stopping:
        await stopping.until("up")
        frozen = processes_of_agent(them.agents["node-2"].pid)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            (tmp_path / "two.gate").touch()
            began = time.monotonic()
            assert await stopping.ended() == 1
            assert time.monotonic() - began < 30.0
            assert "NotStopped" in stopping.errors and "far[1]" in stopping.errors
            assert "agent node-2" in stopping.errors and "node-1" not in stopping.errors
            assert "left" not in stopping.noted
            first, second = stopping.pids()[:2]
            await all_gone([first])
            assert is_alive(second), "it could not be told"
        finally:
            for pid in reversed(frozen):
                os.kill(pid, signal.SIGCONT)
        await wait_for(lambda: not is_alive(second), "nobody holds it, and its agent ends it")


async def test_what_a_tree_has_on_other_hosts_is_its_own_whatever_dies(tmp_path):
    async with two_hosts() as them:
        await ends_with_its_owner_within_the_lease(them, tmp_path)
        await is_told_of_where_it_cannot_be_stopped(them, tmp_path)
        await is_called_killed_respawned_and_ends_with_its_agent(them)
