"""Stages stopped where no agent runs; then the next agent, which finds a consistent world."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

import grpc
import msgspec
import pytest

from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.host_lock import LockHeld
from stagekeeper.agent.local_stages import LocalState, LocalWorker, StageChoice, read_workers
from stagekeeper.agent.local_stop import REASON, LocalStopped, stop_stages
from stagekeeper.agent.records import StageRecord
from stagekeeper.client.channels import StageCaller
from stagekeeper.core.ids import InstanceId, WorkerId
from stagekeeper.host.process import identity_of
from stagekeeper.runtime.crash_points import VARIABLE
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentHome, AgentProcess, agent_in
from tests.fakes.overseer import RESERVE, START, Overseer, first_life, plan, stage
from tests.harness.command_line import own_environment
from tests.harness.processes import a_stranger
from tests.harness.waiting import wait_for

READY = types_pb2.SHARD_STATE_READY
COMMITTED = types_pb2.OPERATION_STATE_COMMITTED
ROLLED_BACK = types_pb2.OPERATION_STATE_ROLLED_BACK
ALL = (StageChoice(),)


def directory_of(home: AgentHome) -> AgentDirectory:
    return AgentDirectory(home.path / "s", WorkerId("w"))


def look(home: AgentHome) -> LocalWorker:
    (worker,) = read_workers(home.path / "s")
    return worker


async def stop(home: AgentHome, *choices: StageChoice, **changes) -> dict[str, LocalStopped]:
    """Stop these; return what became of each, by the names of stages."""
    stopped = await stop_stages(directory_of(home), choices or ALL, **changes)
    return {it.shard.stage_name: it for it in stopped}


async def killed_after(overseer: Overseer, home: AgentHome, *stages, **changes) -> None:
    """An agent that brought these up and was killed then."""
    agent = await first_life(home, overseer, **changes)
    await overseer.bring_up(plan(*stages))
    await overseer.hears(
        lambda it: len(it.replica_states) == len(stages) and not it.operations, "all are up"
    )
    await agent.kill()


async def killed_before_the_commit(overseer: Overseer, home: AgentHome) -> None:
    """An agent that started two stages and was killed then."""
    agent = await first_life(home, overseer)
    await overseer.take(RESERVE, plan(stage("a"), stage("b")))
    await overseer.take(START, plan(stage("a"), stage("b")))
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both")
    await agent.kill()


async def test_one_stage_is_stopped_and_the_next_agent_holds_the_others(overseer, home):
    """recovery-R49, law L4: what was asked for is no failure"""
    await killed_after(overseer, home, stage("a", device="cpu:0"), stage("b"))
    kept = overseer.shards["b"]

    stopped = await stop(home, StageChoice("m", 0, "a"))

    assert {name: (it.is_gone, it.was_undone) for name, it in stopped.items()} == {
        "a": (True, False)
    }
    assert set(home.processes) == {kept.pid}
    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 2)
        assert [(it.stage_name, it.state) for it in first.replica_states] == [("b", READY)]
        assert not first.failures
        assert not first.operations
        assert {it.device_id: it.reserved_bytes for it in first.devices}["cpu:0"] == 0
        with pytest.raises(grpc.aio.AioRpcError, match="generation"):
            await overseer.take(RESERVE, plan(stage("a", device="cpu:0"), operation="late"))
        await overseer.stop(1)
        again = plan(stage("a", device="cpu:0"), stage("b"), n=2)
        assert (await overseer.bring_up(again)).state == COMMITTED
    assert overseer.failures == {}


async def test_all_is_stopped_with_children_in_sessions_of_their_own(overseer, home):
    """startup-24"""
    await killed_after(overseer, home, stage("a", "sample_stages:Family"), stage("b"))
    assert len(home.processes) == 4
    directory_of(home).generations_file.unlink()  # only the records say now what was started

    stopped = await stop(home)

    assert sorted(stopped) == ["a", "b"]
    assert home.processes == {}
    assert look(home).stages == ()
    async with agent_in(home):
        assert not overseer.last.replica_states
        assert overseer.failures == {}
        with pytest.raises(grpc.aio.AioRpcError, match="generation"):
            await overseer.take(RESERVE, plan(stage("b"), operation="late"))


async def test_stage_that_does_not_listen_is_killed_when_its_budget_is_over(overseer, home):
    await killed_after(overseer, home, stage("a", "sample_stages:Stubborn", stop_budget_s=0.5))
    os.kill(overseer.shards["a"].pid, signal.SIGSTOP)

    assert (await stop(home))["a"].is_gone

    assert home.processes == {}


async def test_call_within_the_budget_is_answered(overseer, home):
    await killed_after(overseer, home, stage("a", stop_budget_s=30.0))
    shard = overseer.shards["a"]
    caller = StageCaller()
    calling = asyncio.create_task(
        caller.call(shard.addresses[0].url, shard.instance_id, "hold_gil", (1.0,), {}, timeout=60)
    )
    await asyncio.sleep(0.3)  # nothing tells from outside that it has begun
    await stop(home)

    assert await calling == "held"
    await caller.close()


async def test_living_agent_keeps_its_stages(overseer, home):
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a")))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    pids = set(home.processes)
    records = {
        path: path.read_bytes() for path in home.path.glob("s/agents/w/stages/*/record.json")
    }

    assert look(home).agent_pid == agent.pid
    with pytest.raises(LockHeld) as held:
        await stop(home)

    assert held.value.holder_pid == agent.pid
    assert set(home.processes) == pids
    assert {path: path.read_bytes() for path in records} == records
    await agent.kill()


async def test_agent_that_starts_during_a_stop_is_refused_with_the_holder(overseer, home):
    await killed_after(overseer, home, stage("a", stop_budget_s=60.0))
    pid = overseer.shards["a"].pid
    os.kill(pid, signal.SIGSTOP)
    process = await _stop_command(home)
    await wait_for(lambda: look(home).agent_pid == process.pid, "the stop holds the lock")

    agent = await AgentProcess.start(home)

    assert await agent.ended() != 0
    assert f"is held by process {process.pid}" in (home.path / "agent.log").read_text()
    os.kill(pid, signal.SIGCONT)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    async with agent_in(home):
        assert not overseer.last.replica_states


async def test_start_that_was_not_committed_is_undone_as_a_whole(overseer, home):
    await killed_before_the_commit(overseer, home)
    assert {it.state for it in look(home).stages} == {LocalState.UNCOMMITTED}

    stopped = await stop(home, StageChoice("m", 0, "a"))

    assert {name: (it.is_gone, it.was_undone) for name, it in stopped.items()} == {
        "a": (True, True),
        "b": (True, True),
    }
    assert home.processes == {}
    overseer.settles = False
    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 2)
        assert [(it.state, it.reason) for it in first.operations] == [(ROLLED_BACK, REASON)]
        assert not first.replica_states
        assert not first.failures


async def test_commit_that_was_half_written_is_a_commit(overseer, home):
    agent = await first_life(home, overseer, env={VARIABLE: "commit-written"})
    coming = asyncio.create_task(overseer.bring_up(plan(stage("a"))))
    assert await agent.ended() == -signal.SIGKILL
    await asyncio.wait({coming})
    coming.exception()
    assert [it.state for it in look(home).stages] == [LocalState.COMMITTED]

    stopped = await stop(home)

    assert (stopped["a"].is_gone, stopped["a"].was_undone) == (True, False)
    overseer.settles = False
    async with agent_in(home):
        assert [it.state for it in overseer.last.operations] == [COMMITTED]
        assert overseer.failures == {}


async def test_stage_that_had_ended_by_itself_is_settled_and_its_failure_is_told(overseer, home):
    """law L4: nothing dies silently"""
    await killed_after(overseer, home, stage("a", "sample_stages:Family"))
    pid = overseer.shards["a"].pid
    os.kill(pid, signal.SIGKILL)
    await wait_for(lambda: identity_of(pid) is None, "it is gone")
    assert [it.state for it in look(home).stages] == [LocalState.GONE]

    asked = []
    stopped = await stop(home, on_begin=lambda shard, had_ended: asked.append(had_ended))
    assert asked == [True]
    assert (stopped["a"].is_gone, stopped["a"].had_ended) == (True, True)

    assert home.processes == {}
    async with agent_in(home):
        assert not overseer.last.replica_states
        await wait_for(lambda: overseer.failures, "its end is told")
        (failure,) = overseer.failures.values()
        assert failure.kind == types_pb2.FAILURE_KIND_GONE


async def test_process_with_a_recorded_pid_and_other_ticks_is_not_touched(overseer, home):
    await killed_after(overseer, home, stage("a"))
    with a_stranger() as stranger:
        (path,) = home.path.glob("s/agents/w/stages/*/record.json")
        record = msgspec.json.decode(path.read_bytes(), type=StageRecord)
        identity = identity_of(stranger.pid)
        assert identity is not None
        other = path.parent.parent / "other"
        other.mkdir()
        false = msgspec.structs.replace(
            record,
            shard=replace(record.shard, instance_id=InstanceId("other"), pid=identity.pid),
            pid=identity.pid,
            start_ticks=identity.start_ticks - 1,
        )
        (other / "record.json").write_bytes(msgspec.json.encode(false))

        stopped = await stop_stages(directory_of(home), ALL)

        assert [it.is_gone for it in stopped] == [True, True]
        assert identity_of(stranger.pid) == identity
        assert home.processes == {}


async def test_stage_with_a_damaged_record_is_stopped_by_its_name_with_its_children(overseer, home):
    await killed_after(overseer, home, stage("a", "sample_stages:Family"), stage("b"))
    kept = overseer.shards["b"].pid
    folder = home.path / "s/agents/w/stages" / overseer.shards["a"].instance_id
    (folder / "record.json").write_text("{")
    async with agent_in(home):  # sets it aside, and leaves its processes alone
        assert overseer.last.notes
    assert len(look(home).damaged[0].processes) == 3

    stopped = await stop(home, StageChoice("m", 0, "a"))

    assert stopped["a"].is_gone
    assert set(home.processes) == {kept}
    assert "asked to end" in (folder / "stage.log").read_text()
    assert look(home).damaged == ()
    async with agent_in(home):
        assert [it.stage_name for it in overseer.last.replica_states] == ["b"]
        assert not overseer.last.notes
        assert overseer.failures == {}


async def test_stop_that_is_left_half_way_is_settled_by_the_next_agent(overseer, home):
    """recovery-R12"""
    await killed_after(overseer, home, stage("a", stop_budget_s=2.0), stage("b"))
    pid = overseer.shards["a"].pid
    os.kill(pid, signal.SIGSTOP)  # it will not hear a word
    process = await _stop_command(home)
    await wait_for(
        lambda: any(it.state is LocalState.STOPPING for it in look(home).stages), "it is written"
    )
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 130

    async with agent_in(home):
        await overseer.hears(lambda it: not it.replica_states, "it is gone")
        assert home.processes == {}
        assert overseer.failures == {}


@pytest.mark.parametrize(
    "point", ["stopping-written", "stop-asked", "stop-gone", "stopped", "stop-gone#2"]
)
async def test_stop_that_is_killed_at_a_point_is_settled_by_the_next_agent(overseer, home, point):
    await killed_after(overseer, home, stage("a", "sample_stages:Family"), stage("b"))
    process = await _stop_command(home, env={VARIABLE: point})
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL

    async with agent_in(home):
        await overseer.hears(lambda it: not it.replica_states, "nothing is held")
        assert home.processes == {}
        assert overseer.failures == {}
        assert {it.reserved_bytes for it in overseer.last.devices} == {0}
        assert (await overseer.bring_up(plan(stage("a"), n=2))).state == COMMITTED


@pytest.mark.parametrize("point", ["stop-gone", "rolled-back"])
async def test_undoing_that_is_killed_at_a_point_is_settled_by_the_next_agent(
    overseer, home, point
):
    await killed_before_the_commit(overseer, home)
    process = await _stop_command(home, env={VARIABLE: point})
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL

    async with agent_in(home):
        await overseer.hears(lambda it: not it.replica_states and not it.operations, "settled")
        assert home.processes == {}
        assert overseer.failures == {}


async def _stop_command(
    home: AgentHome, *, env: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start `stagekeeper stages --local --stop-all`."""
    with (home.path / "stop.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "stagekeeper.cli",
            "stages",
            "--local",
            "--stop-all",
            f"--state-dir={home.path / 's'}",
            stdout=log,
            stderr=log,
            env={**own_environment(), **(env or {})},
        )
