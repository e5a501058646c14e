"""Sets of processes for actors on a clock of their own: leases, repeats, ends. No process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from stagekeeper.agent.procs import proc_sets
from stagekeeper.agent.procs.held_proc import ProcEnd, ProcUp
from stagekeeper.agent.procs.proc_set import News, ProcSet
from stagekeeper.agent.procs.proc_sets import ProcSets
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import InstanceId
from stagekeeper.core.model import ExitInfo
from stagekeeper.core.procs import ProcsWanted
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.proc_launch import ProcNotStarted
from stagekeeper.host.process import ExitStatus
from stagekeeper.host.tasks import TaskOwner
from tests.fakes.virtual_clock import VirtualClock

LEASE_S = 10.0
INCARNATION = 7
A, B, C = (InstanceId(it * 32) for it in "abc")


class FakeProc:
    """Ends when it is killed, or when the test says so."""

    def __init__(self, number: int) -> None:
        self.address, self.pid, self.was_killed = f"h:{number}", number, False
        self.handle = self
        self.is_stubborn = False
        self._ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    def ends(self, **how: int) -> None:
        if not self._ended.done():
            self._ended.set_result(ExitStatus(**how))

    def kill(self) -> None:
        self.was_killed = True
        self.ends(signal=9)

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    gone = wait

    async def end(self, budget_s: float) -> ExitStatus:
        if not self.is_stubborn:
            self.ends(code=0)
        return await self.wait()

    def close(self) -> None:
        self.kill()


class FakeStarter:
    """Starts processes that are up when the test lets them."""

    boot_id = "boot"

    def __init__(self, tmp_path: Any) -> None:
        self.started: dict[InstanceId, FakeProc] = {}
        self.forgotten: list[InstanceId] = []
        self.lets_up = asyncio.Event()
        self.lets_up.set()
        self.refuses = ""
        self.is_late = False
        self._tmp_path = tmp_path

    async def start(self, wanted: ProcsWanted, instance_id: InstanceId) -> FakeProc:
        assert instance_id not in self.started, "an instance id is started once"
        self.started[instance_id] = FakeProc(len(self.started) + 1)
        await self.lets_up.wait()
        if self.refuses:
            raise ProcNotStarted(self.refuses, is_late=self.is_late)
        return self.started[instance_id]

    async def sweep(self, instance_id: InstanceId) -> None:
        pass

    def log_path(self, instance_id: InstanceId) -> Any:
        return self._tmp_path / instance_id

    def forget(self, instance_id: InstanceId) -> None:
        self.forgotten.append(instance_id)


class Sets:
    """The sets of one agent, and streams of their owner."""

    def __init__(self, tmp_path: Any) -> None:
        self.clock, self.starter = VirtualClock(), FakeStarter(tmp_path)
        self.failures: list[BaseException] = []
        self.tasks = TaskOwner("test", lambda _, error: self.failures.append(error))
        self.sets = ProcSets(
            ("*",), INCARNATION, cast(Any, self.starter), self.tasks, self.clock, OomWitness()
        )

    def hold(self, *ids: InstanceId, **fields: Any) -> Stream:
        found, named = self.sets.join(wanted(*ids, **fields))
        return Stream(found, named)

    async def settle(self) -> None:
        await self.clock.settle()


class Stream:
    """An open stream: it holds, and collects what it is told."""

    def __init__(self, found: ProcSet, named: Any) -> None:
        self.set = found
        self.told: list[News] = []
        self.task = asyncio.create_task(self._read(named))

    async def _read(self, named: Any) -> None:
        with self.set.held():
            async for news in self.set.news(named):
                self.told.append(news)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    @property
    def ends(self) -> dict[InstanceId, ProcEnd]:
        return {it: news for it, news in self.told if isinstance(news, ProcEnd)}

    @property
    def ups(self) -> dict[InstanceId, ProcUp]:
        return {it: news for it, news in self.told if isinstance(news, ProcUp)}


def wanted(*ids: InstanceId, **fields: Any) -> ProcsWanted:
    sound = ProcsWanted(procs_id="set", token="secret", instance_ids=ids, lease_s=LEASE_S)
    return replace(sound, **fields)


@pytest.fixture
async def it(tmp_path) -> AsyncIterator[Sets]:
    it = Sets(tmp_path)
    yield it
    await it.tasks.stop()
    assert not it.failures


async def test_lease_runs_from_the_last_streams_end_and_a_repeat_stops_it(it):
    first, second = it.hold(A), it.hold(A)
    await it.settle()
    await first.leave()
    await it.clock.advance(5 * LEASE_S)
    assert it.sets.live_count == 1, "somebody still holds it"
    await second.leave()
    await it.clock.advance(LEASE_S - 0.001)
    third = it.hold(A, incarnation=INCARNATION)
    await it.clock.advance(5 * LEASE_S)
    assert third.ups == {A: ProcUp("h:1", 1)} and not third.ends
    await third.leave()
    await it.clock.advance(LEASE_S - 0.001)
    assert it.sets.live_count == 1
    await it.clock.advance(0.001)
    assert it.sets.live_count == 0 and it.starter.started[A].was_killed
    for late in (wanted(A, incarnation=INCARNATION), wanted(A), wanted(B)):
        with pytest.raises(Refused) as refused:
            it.sets.join(late)
        assert refused.value.reason is Reason.PROCS_UNKNOWN
    assert it.starter.forgotten == [A]


async def test_process_that_is_killed_on_its_way_never_comes_up(it):
    it.starter.lets_up.clear()
    stream = it.hold(A)
    other = it.hold(B)
    stream.set.kill("as asked")  # no start has even begun
    await it.settle()
    assert stream.task.done() and other.task.done()
    stream = it.hold(A, procs_id="next")
    await it.settle()
    stream.set.kill("as asked")  # this one has
    it.starter.lets_up.set()
    await it.settle()
    assert not stream.ups and not other.ups and set(it.starter.started) == {A}
    assert stream.ends[A].exit is not None and stream.ends[A].exit.asked
    assert stream.task.done() and other.task.done() and it.sets.live_count == 0


async def test_processes_end_one_by_one_and_whoever_asked_need_not_stay(it):
    stream = it.hold(A, B)
    await it.settle()
    await it.sets.end(wanted(A, C, ends=True, end_budget_s=1.0))
    assert stream.ends[A].exit == ExitInfo(code=0, asked=True)
    asking = asyncio.create_task(it.sets.end(wanted(B, ends=True)))
    await asyncio.sleep(0)
    asking.cancel()
    await it.settle()
    assert stream.ends[B].exit == ExitInfo(signal=9, asked=True)
    late = it.hold(C)
    await it.settle()
    assert "forgotten" in late.ends[C].reason and not stream.task.done()


async def test_set_that_is_ending_takes_nothing_new(it):
    it.hold(A)
    await it.settle()
    it.starter.started[A].is_stubborn = True
    ending = asyncio.create_task(it.sets.end(wanted(ends=True, end_budget_s=9.0)))
    await it.settle()
    with pytest.raises(Refused) as refused:
        it.sets.join(wanted(B))
    assert refused.value.reason is Reason.PROCS_UNKNOWN and not ending.done()
    it.starter.started[A].kill()
    await ending
    assert set(it.starter.started) == {A}


async def test_end_before_the_first_request_keeps_that_out(it):
    await it.sets.end(wanted(ends=True))
    with pytest.raises(Refused):
        it.sets.join(wanted(A))
    assert not it.starter.started


async def test_process_that_does_not_come_up_is_told_and_its_place_is_filled(it):
    it.starter.refuses = "no"
    stream = it.hold(A)
    await it.settle()
    assert stream.ends == {A: ProcEnd(reason="no")} and not stream.task.done()
    it.starter.refuses = ""
    again = it.hold(A, B)
    await it.settle()
    assert again.ends == stream.ends and set(again.ups) == {B}
    other = it.hold(B)
    await it.settle()
    assert it.starter.forgotten == [A] and set(other.ups) == {B}
    late = it.hold(A)
    await it.settle()
    assert "forgotten" in late.ends[A].reason and set(it.starter.started) == {A, B}
    it.starter.refuses, it.starter.is_late = "no", True
    slow = it.hold(C)
    await it.settle()
    assert slow.ends == {C: ProcEnd(reason="no", is_late=True)}


async def test_whoever_comes_with_another_token_or_for_another_life_changes_nothing(it):
    stream = it.hold(A)
    await it.settle()
    for wrong, reason in (
        (wanted(B, token="other"), Reason.NOT_ALLOWED),
        (wanted(B, incarnation=INCARNATION - 1), Reason.STALE_INCARNATION),
        (wanted(B, A, procs_id="another"), Reason.BAD_FIELD),
        (wanted(B, procs_id="another", incarnation=INCARNATION), Reason.PROCS_UNKNOWN),
    ):
        with pytest.raises(Refused) as refused:
            it.sets.join(wrong)
        assert refused.value.reason is reason
    with pytest.raises(Refused):
        await it.sets.end(wanted(token="other", ends=True))
    await it.settle()
    assert set(it.starter.started) == {A} and not stream.ends
    it.hold(C, procs_id="another")  # it was not made by what was refused


async def test_agent_runs_no_more_processes_than_it_may(it, monkeypatch):
    monkeypatch.setattr(proc_sets, "MOST_AGENT_PROCS", 2)
    stream = it.hold(A, B)
    await it.settle()
    with pytest.raises(Refused) as refused:
        it.sets.join(wanted(B, C))
    assert refused.value.reason is Reason.ADMISSION_REFUSED
    it.hold(B, A)  # a repeat needs no room
    it.starter.started[A].ends(code=1)
    await it.settle()
    assert stream.ends[A].exit is not None and stream.ends[A].exit.code == 1
    assert set(it.starter.started) == {A, B}
    third = it.hold(C)
    await it.settle()
    assert set(third.ups) == {C}, "there is room again"


async def test_agents_end_is_an_orderly_end_of_all(it):
    streams = [it.hold(A), it.hold(B, procs_id="another")]
    await it.settle()
    await it.sets.stop(1.0)
    await it.settle()
    for stream in streams:
        (end,) = stream.ends.values()
        assert end.exit is not None and (end.exit.code, end.exit.asked) == (0, True)
        assert "agent" in end.reason and stream.task.done()
