"""Actors on another host, behind a network that fails: what goes on, what is lost, what ends.

The far process is a child of the test, with another boot's id and no agent, reached through a
proxy; so what ends it here is its own word that nobody of its tree was heard of.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.actor import Died
from stagekeeper.actor.connection.link import Link
from stagekeeper.actor.failure import ExitInfo, FailureKind
from stagekeeper.actor.hosts import HostMesh
from stagekeeper.actor.owning.proc_places import ProcEnd
from stagekeeper.actor.place import Place
from stagekeeper.actor.program import Program
from stagekeeper.client.errors import CallLost
from stagekeeper.host.proc_launch import LaunchedProc, launch, own_pythonpath
from stagekeeper.host.proc_line import ProcLaunch
from stagekeeper.host.process import identity_of
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.payload import encode_arguments
from tests.fakes.tcp_proxy import TcpProxy
from tests.harness.actor_trees import Tree, a_root
from tests.harness.tree_process import tree_process
from tests.harness.waiting import wait_for
from tests.stages.kept_actor import Far

ELSEWHERE = "the boot of another host"
KEPT = "tests.stages.kept_actor:Kept"
LEASE_S = 1.2


class FarProc:
    """A process whose owner hears of it over the network alone."""

    def __init__(self, launched: LaunchedProc, address: str) -> None:
        self.launched = launched
        self.place = Place(address, launched.instance_id, launched.handle.pid, ELSEWHERE)
        self._is_asked = asyncio.Event()

    async def ended(self) -> ProcEnd:
        """Return how it ended when its owner has asked for that; else nobody says so."""
        await self._is_asked.wait()
        return ProcEnd(ExitInfo.of(await self.launched.gone()), "agent")

    async def end(self, budget_s: float) -> bool:
        await self.launched.end(budget_s)
        self._is_asked.set()
        return True

    async def kill(self) -> None:
        await self.end(0.0)


class FarSource:
    def __init__(self, program: Program, proxy: TcpProxy, log: Path) -> None:
        self._program = program
        self._proxy = proxy
        self._log = log
        self.proc: FarProc | None = None

    async def start(self, index: int, instance_id: str, name: str) -> FarProc:
        program = self._program
        spec = ProcLaunch(
            instance_id=instance_id,
            name=name,
            tree_path=f"{program.tree_path}/{instance_id}",
            token=program.token,
            listen_host="127.0.0.1",
            lease_s=program.lease_s,
            boot_id=ELSEWHERE,
            owner="a test",
            pythonpath=own_pythonpath(),
        )
        launched = await launch(
            spec, env=os.environ, cwd=Path("/"), log_path=self._log, start_timeout_s=60
        )
        self._proxy.move(launched.address)
        self.proc = FarProc(launched, self._proxy.url)
        return self.proc

    async def close(self) -> None:
        """There is nothing."""


class World:
    def __init__(self, tree: Tree, proxy: TcpProxy, source: FarSource, far: Any) -> None:
        self.tree = tree
        self.proxy = proxy
        self.far = far
        self._source = source

    @property
    def launched(self) -> LaunchedProc:
        assert self._source.proc is not None
        return self._source.proc.launched


@asynccontextmanager
async def far_actor(tmp_path: Path) -> AsyncIterator[World]:
    async with TcpProxy() as proxy, a_root(lease_s=LEASE_S) as tree:
        source = FarSource(tree.program, proxy, tmp_path / "log")
        hosts = HostMesh(tree.program, ("far",), lambda count, name: source)
        far = hosts.spawn_procs(1, name="far").spawn("far", Far, str(tmp_path / "journal"))
        assert await far.add.call_one(1) == 1
        yield World(tree, proxy, source, far)


async def test_a_connection_that_comes_back_within_the_lease_goes_on_where_it_was(tmp_path):
    async with far_actor(tmp_path) as it:
        under_way = asyncio.ensure_future(it.far.wait.call_one(600))
        gate = tmp_path / "gate"
        doomed = it.far[0]
        await it.far.add.call_one(1)

        before = it.proxy.connection_count
        it.proxy.refuse()
        it.proxy.reset()
        with pytest.raises(CallLost, match="may have run"):
            await under_way
        meanwhile = asyncio.ensure_future(it.far.add.call_one(1))
        doomed.fail_when.broadcast(str(gate))
        await asyncio.sleep(LEASE_S / 5)  # some dials in vain
        await it.proxy.accept_again()
        assert await meanwhile == 3, "it is the same actor, and what was not sent waits"
        assert it.proxy.connection_count > before

        it.proxy.refuse()
        it.proxy.reset()
        gate.touch()
        await asyncio.sleep(LEASE_S / 5)
        await it.proxy.accept_again()
        failure = await it.tree.faults.one()
        assert failure.kind is FailureKind.BROADCAST_RAISED, "told although nobody was there"
        it.proxy.reset()
        with pytest.raises(Died):
            await it.far.add.call_one(1)
        assert not it.tree.faults.waiting, "told again, and known"


@pytest.mark.parametrize("how", ["broken", pytest.param("half-open", marks=pytest.mark.soak)])
async def test_away_for_longer_than_the_lease_is_gone_at_both_ends(tmp_path, how):
    async with far_actor(tmp_path) as it:
        sleeper = await it.far.start_sleeper.call_one()
        began = time.monotonic()
        if how == "broken":
            it.proxy.refuse()
            it.proxy.reset()
        else:
            it.proxy.loses_new = True
            it.proxy.lose_established()
        failure = await it.tree.faults.one()
        assert failure.mesh is it.far
        lasted_s = time.monotonic() - began
        if how == "broken":
            assert failure.kind is FailureKind.GONE
            with pytest.raises(Died):
                await it.far.add.call_one(1)
        else:
            assert failure.kind is FailureKind.STALLED
        assert lasted_s > LEASE_S / 2

        status = await asyncio.wait_for(it.launched.gone(), 20)
        assert ExitInfo.of(status) == ExitInfo(code=0), "nobody of its tree was heard of"
        assert identity_of(sleeper) is None
        journal = (tmp_path / "journal").read_text()
        assert "the owner of far[0] is gone" in journal


async def test_who_comes_back_hears_its_news_once_and_too_late_that_its_actors_have_ended():
    broken: list[str] = []
    news: list[pb.RankFailed] = []
    async with tree_process() as it, TcpProxy(it.launched.address) as proxy, it.connected("stays"):
        link = Link(
            Place(proxy.url, it.instance_id, boot_id=ELSEWHERE),
            it.hello("away", lease_s=LEASE_S, boot_id=ELSEWHERE),
            lease_s=60.0,
            on_failure=news.append,
            on_silence=lambda *_: None,
            on_broken=lambda _, why: broken.append(why),
            comes_back_s=60.0,
        )
        link.open()
        await link.connected()
        one, two, three = [await it.spawn("away", KEPT) for _ in range(3)]
        link.cast(one, "fail", encode_arguments([], {}), "root")
        await wait_for(lambda: news, "the first news")
        before = proxy.connection_count
        proxy.reset()
        await wait_for(lambda: proxy.connection_count > before, "it dials anew")
        await link.connected()
        link.cast(two, "fail", encode_arguments([], {}), "root")
        await wait_for(lambda: news[-1].actor_id == two, "the second news, behind the first again")
        assert [it.actor_id for it in news] == [one, two] and not broken

        proxy.refuse()
        proxy.reset()
        async with it.connected("looks") as looks:

            async def has_ended() -> bool:
                return (await looks.call(three, "told")).HasField("error")

            await wait_for(has_ended, "the lease is over there")
        await proxy.accept_again()
        await wait_for(lambda: broken, "the link is given up")
        assert "longer than its lease" in broken[0]
