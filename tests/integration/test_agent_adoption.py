"""A new agent takes over what a killed one left: held, reported, settled, or never touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace

import grpc
import msgspec

from stagekeeper.agent.records import StageRecord
from stagekeeper.client.channels import StageCaller
from stagekeeper.core.ids import Epoch, InstanceId
from stagekeeper.host.process import boot_id, identity_of
from stagekeeper.runtime.crash_points import VARIABLE
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentProcess, agent_in
from tests.fakes.overseer import RESERVE, START, Overseer, first_life, gone, plan, stage
from tests.fakes.refusals import refused
from tests.harness.processes import a_stranger
from tests.harness.waiting import wait_for

READY = types_pb2.SHARD_STATE_READY
FAILED = types_pb2.SHARD_STATE_FAILED
INTERRUPTED = types_pb2.OPERATION_STATE_INTERRUPTED
ROLLED_BACK = types_pb2.OPERATION_STATE_ROLLED_BACK
COMMITTED = types_pb2.OPERATION_STATE_COMMITTED


async def next_registration(overseer: Overseer):
    """The first registration of an incarnation above the last one's."""
    last = overseer.last.incarnation
    return await overseer.hears(lambda it: it.incarnation > last, "the next life registers")


async def test_stages_outlive_their_agent_and_are_held_again(overseer, home):
    """recovery-R49, startup-24, law L2"""
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a", device="cpu:0"), stage("b")))
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both")
    before = dict(overseer.shards)
    pids = set(home.processes)

    await agent.kill()
    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 2)

        assert set(home.processes) == pids
        # The very first registration of the new life has all of it.
        assert [shard.state for shard in first.replica_states] == [READY, READY]
        for shard in first.replica_states:
            old = before[shard.stage_name]
            assert (shard.pid, shard.instance_id, shard.committed) == (
                old.pid,
                old.instance_id,
                True,
            )
            assert shard.addresses == old.addresses
            assert shard.endpoints == old.endpoints
            assert shard.create_time == old.create_time
        assert first.highest_epoch.number == 1
        assert {d.device_id: d.reserved_bytes for d in first.devices}["cpu:0"] == int(0.3 * 2**30)
        # Held, and not only found.
        assert (await overseer.stop(0)).stopped_count == 1
        assert (await overseer.stop(1)).stopped_count == 1
        assert home.processes == {}


async def test_agent_may_die_any_number_of_times(overseer, home):
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a")))
    pids = set(home.processes)
    for life in range(2, 5):
        await agent.kill()
        agent = await AgentProcess.start(home)
        await overseer.hears(
            lambda it, life=life: it.incarnation == life and it.replica_states[0].state == READY,
            f"life {life} holds it",
        )
    assert set(home.processes) == pids
    await agent.end()
    assert set(home.processes) == pids
    # Nor does it matter where its state directory is: it may be moved meanwhile.
    state_dir = (home.path / "s").rename(home.path / "t")
    async with agent_in(home, state_dir=state_dir):
        await overseer.hears(
            lambda it: it.incarnation == 5 and it.replica_states[0].state == READY,
            "life 5 holds it",
        )
        assert (await overseer.stop(0)).stopped_count == 1
        assert home.processes == {}


async def test_stage_that_cannot_answer_is_adopting_and_then_ready(overseer, home):
    """recovery-R46"""
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a")))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    shard = overseer.shards["a"]
    caller = StageCaller()
    calling = asyncio.create_task(
        caller.call(shard.addresses[0].url, shard.instance_id, "hold_gil", (4.0,), {}, timeout=60)
    )
    await asyncio.sleep(0.3)
    await agent.kill()

    async with agent_in(home, adopt_wait_s=0.5):
        first = next(it for it in overseer.registrations if it.incarnation == 2)
        assert [it.state for it in first.replica_states] == [types_pb2.SHARD_STATE_ADOPTING]
        assert first.replica_states[0].addresses  # known from the record
        await overseer.hears(lambda it: it.replica_states[0].state == READY, "it answers")
    assert await calling == "held"
    await caller.close()


async def test_recovery_U13_R14_stage_that_ended_meanwhile_is_failed_and_its_children_are_ended(
    overseer, home
):
    """startup-24, recovery-U13, recovery-R14"""
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a", "sample_stages:Family", device="cpu:0")))
    pids = list(home.processes)
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    await agent.kill()
    main_process = overseer.shards["a"].pid
    os.kill(main_process, signal.SIGKILL)
    await wait_for(lambda: main_process not in home.processes, "it is gone before the next life")

    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 2)
        assert first.replica_states[0].state == FAILED
        assert home.processes == {}
        (failure,) = first.failures
        assert failure.kind == types_pb2.FAILURE_KIND_GONE
        assert failure.detected_by == "adoption"
        assert not failure.exit.HasField("code") and not failure.exit.HasField("signal")
        assert "not known" in failure.message
        assert first.replica_states[0].failure_id == failure.failure_id
        assert {d.device_id: d.reserved_bytes for d in first.devices}["cpu:0"] == 0
        await overseer.stop(0)  # forgets it
        await overseer.hears(lambda it: not it.replica_states, "it is forgotten")
        assert (await overseer.bring_up(plan(stage("a"), n=2))).state == COMMITTED
    assert not set(pids) & set(home.processes)


async def test_failed_stage_stays_failed_over_lives_with_one_failure(overseer, home):
    overseer.settles = False
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a")))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    os.kill(overseer.shards["a"].pid, signal.SIGKILL)
    await overseer.hears(lambda it: it.replica_states[0].state == FAILED, "it is FAILED")
    await agent.kill()

    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 2)
        assert first.replica_states[0].state == FAILED
        assert [it.failure_id for it in first.failures] == list(overseer.failures)
        assert first.failures[0].exit.signal == signal.SIGKILL


async def test_operation_that_cannot_be_read_whole_is_interrupted_held_and_undone_when_cancelled(
    overseer, home
):
    """recovery-R49: its file is one of an earlier release, which had no plan in it."""
    agent = await first_life(home, overseer)
    p = plan(stage("up"), stage("slow", "sample_stages:Slow", args='{"gate": "/never"}'))
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both start")
    await overseer.hears(lambda it: overseer.shards["up"].state == READY, "one is up")
    pids = set(home.processes)
    await agent.kill()
    await asyncio.wait({starting})
    starting.exception()
    (path,) = home.path.glob("s/agents/w/operations/*.json")
    file = json.loads(path.read_bytes())
    path.write_text(json.dumps({name: file[name] for name in ("record", "stage_ids")}))

    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 2)
        assert first.operations[0].state == INTERRUPTED
        assert "STARTING" in first.operations[0].reason
        assert set(home.processes) == pids  # half known is not stopped
        assert not any(shard.committed for shard in first.replica_states)

        record = await overseer.cancel("op-1")

        assert record is not None
        assert record.state == ROLLED_BACK
        assert {entry.stage_id for entry in record.rollback} == {0, 1}
        assert home.processes == {}
        await overseer.hears(lambda it: not it.replica_states and not it.operations, "settled")


async def test_stop_that_was_under_way_goes_on(overseer, home):
    """recovery-R12"""
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a", "sample_stages:Stubborn", stop_budget_s=2.0)))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    os.kill(overseer.shards["a"].pid, signal.SIGSTOP)  # it will not hear a word
    stopping = asyncio.create_task(overseer.stop(0))
    await overseer.hears(
        lambda it: it.replica_states[0].state == types_pb2.SHARD_STATE_STOPPING, "it is stopping"
    )
    await agent.kill()
    await asyncio.wait({stopping})
    stopping.exception()

    async with agent_in(home):
        await overseer.hears(lambda it: it.incarnation == 2 and not it.replica_states, "it is gone")
        assert home.processes == {}
        assert overseer.failures == {}  # it was asked to end


async def test_call_within_the_budget_of_a_stop_is_answered_though_the_agent_dies(overseer, home):
    agent = await first_life(home, overseer, env={VARIABLE: "stop-asked"})
    await overseer.bring_up(plan(stage("a", stop_budget_s=1.0)))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    shard = overseer.shards["a"]
    caller = StageCaller()
    calling = asyncio.create_task(
        caller.call(shard.addresses[0].url, shard.instance_id, "wait", (3.0,), {}, timeout=60)
    )
    await asyncio.sleep(0.3)
    stopping = asyncio.create_task(overseer.stop(0, budget_s=30.0))
    assert await agent.ended() == -signal.SIGKILL
    await asyncio.wait({stopping})
    stopping.exception()

    async with agent_in(home):
        assert await calling == "waited"
        await overseer.hears(lambda it: not it.replica_states, "it is gone")
        assert overseer.failures == {}
    await caller.close()


async def test_recovery_R49_process_that_was_not_recorded_is_never_touched(overseer, home):
    """recovery-R49 (unrelated children survive), law L8"""
    with a_stranger() as stranger:
        agent = await first_life(home, overseer)
        await overseer.bring_up(plan(stage("a")))
        await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
        await agent.kill()
        (path,) = home.path.glob("s/agents/w/stages/*/record.json")
        record = msgspec.json.decode(path.read_bytes(), type=StageRecord)
        # A record whose pid is another's by now, with the very ticks.
        identity = identity_of(stranger.pid)
        assert identity is not None
        other = path.parent.parent / "other"
        other.mkdir()
        (other / "record.json").write_bytes(
            msgspec.json.encode(
                msgspec.structs.replace(
                    record,
                    shard=replace(record.shard, instance_id=InstanceId("other")),
                    pid=identity.pid,
                    start_ticks=identity.start_ticks,
                )
            )
        )
        async with agent_in(home):
            shards = {it.instance_id: it.state for it in overseer.last.replica_states}
            assert shards == {record.instance_id: READY, "other": FAILED}
            await overseer.stop(0)
        assert identity_of(stranger.pid) == identity
        assert home.processes == {}


async def test_record_of_an_earlier_boot_is_gone_whatever_has_its_pid(overseer, home):
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a")))
    (pid,) = home.processes
    await agent.kill()
    (path,) = home.path.glob("s/agents/w/stages/*/record.json")
    path.write_text(path.read_text().replace(boot_id(), "00000000-earlier-boot"))
    assert identity_of(pid) is not None  # all but the boot speaks for it

    async with agent_in(home):
        assert overseer.last.replica_states[0].state == FAILED


async def test_damaged_record_is_set_aside_and_the_others_are_held(overseer, home):
    """supervision-U16"""
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a"), stage("b")))
    await agent.kill()
    damaged, whole = sorted(home.path.glob("s/agents/w/stages/*/record.json"))
    damaged.write_text("{")
    pids = set(home.processes)

    async with agent_in(home):
        assert len(overseer.last.replica_states) == 1
        assert overseer.last.replica_states[0].instance_id == whole.parent.name
        assert set(home.processes) == pids
        assert (damaged.parent / "record.damaged").exists()


async def test_damaged_record_and_the_process_behind_it_are_told_until_it_has_ended(overseer, home):
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a", "sample_stages:Family"), stage("b")))
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both")
    shard = overseer.shards["a"]
    await agent.kill()
    folder = home.path / "s/agents/w/stages" / shard.instance_id
    (folder / "record.json").write_text("{")

    async with agent_in(home):
        (note,) = overseer.last.notes
        assert f"m/0/a ({shard.instance_id[:8]}) is damaged" in note
        assert str(shard.pid) in note
        assert "--stop m/0/a" in note
    agent = await AgentProcess.start(home)  # it is told by every life
    await overseer.hears(lambda it: it.incarnation == 3 and it.notes, "it is told again")
    for pid, command in home.processes.items():
        if "sleep" in command or pid == shard.pid:
            os.kill(pid, signal.SIGKILL)
    await overseer.hears(lambda it: "no process of it is left" in it.notes[0], "its end is told")
    await agent.kill()

    async with agent_in(home):
        first = next(it for it in overseer.registrations if it.incarnation == 4)
        assert not first.notes
        assert (folder / "stage.log").exists()
        assert [it.stage_name for it in first.replica_states] == ["b"]


async def test_stage_that_was_asked_to_stop_and_ended_unwatched_has_not_failed(overseer, home):
    agent = await first_life(home, overseer, env={VARIABLE: "stop-gone"})
    await overseer.bring_up(plan(stage("a")))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    stopping = asyncio.create_task(overseer.stop(0))
    assert await agent.ended() == -signal.SIGKILL
    await asyncio.wait({stopping})
    stopping.exception()

    async with agent_in(home):
        assert not overseer.last.replica_states
        assert overseer.failures == {}


async def test_incarnation_is_above_the_records_when_the_identity_was_lost(overseer, home):
    agent = await first_life(home, overseer)
    await agent.kill()
    agent = await AgentProcess.start(home)
    await next_registration(overseer)
    await overseer.bring_up(plan(stage("a")))
    await agent.kill()
    (home.path / "s/agents/w/identity.json").unlink()

    async with agent_in(home):
        assert overseer.last.incarnation == 3


async def test_generation_is_that_of_the_records_when_the_generations_were_lost(overseer, home):
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a"), n=4))
    await overseer.hears(lambda it: not it.operations, "the start is settled")
    await agent.kill()
    (home.path / "s/agents/w/generations.json").unlink()

    async with agent_in(home), refused(grpc.StatusCode.ABORTED, "STALE_GENERATION"):
        await overseer.take(RESERVE, plan(stage("a"), n=4, operation="late"))


async def test_highest_reign_is_remembered_and_a_lower_one_is_not_obeyed(overseer, home):
    overseer.epoch = Epoch(7, "seven")
    agent = await first_life(home, overseer)
    await wait_for(lambda: overseer.heartbeat_count, "the answer, which names the reign, was read")
    await agent.kill()
    overseer.epoch = Epoch(6, "six")

    agent = await AgentProcess.start(home)
    last = await next_registration(overseer)
    assert (last.highest_epoch.number, last.highest_epoch.supervisor_id) == (7, "seven")
    await wait_for(
        lambda: b"older than 7/seven" in (home.path / "agent.log").read_bytes(), "it refuses"
    )
    await agent.kill()


async def test_second_agent_of_a_worker_id_is_refused_with_the_holder(overseer, home):
    agent = await first_life(home, overseer)

    second = await AgentProcess.start(home, state_dir=str(home.path / "other"))
    assert await second.ended() != 0

    log = (home.path / "agent.log").read_text()
    assert f"worker id 'w' is held by process {agent.pid}" in log
    third = await AgentProcess.start(home, lock_dir=str(home.path / "other-locks"))
    assert await third.ended() != 0
    assert "state dir" in (home.path / "agent.log").read_text()
    await agent.kill()


async def test_death_of_a_stage_is_known_at_once_and_told_whole(overseer, home):
    """startup-12, supervision-U26"""
    async with agent_in(home):
        await overseer.bring_up(plan(stage("a", "sample_stages:Family")))
        await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
        pids = list(home.processes)
        began = time.monotonic()
        os.kill(overseer.shards["a"].pid, signal.SIGKILL)
        await overseer.hears(lambda it: it.replica_states[0].state == FAILED, "it is FAILED")
        assert time.monotonic() - began < 5
        await gone(pids)
        await wait_for(lambda: overseer.failures, "the failure is told")
        (failure,) = overseer.failures.values()
        assert failure.kind == types_pb2.FAILURE_KIND_SIGNALED
        assert (failure.exit.signal, failure.exit.out_of_memory) == (9, False)
        assert failure.detected_by == "pidfd"
        assert any("READY at" in line for line in failure.last_log_lines)
        await overseer.hears(lambda it: not it.failures, "it is settled")
        await overseer.stop(0)
        await overseer.hears(lambda it: not it.replica_states, "FAILED is forgotten by a stop")


async def test_unasked_exit_with_code_zero_is_a_failure(overseer, home):
    """supervision-U17"""
    async with agent_in(home):
        await overseer.bring_up(plan(stage("a")))
        await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
        os.kill(overseer.shards["a"].pid, signal.SIGTERM)  # not by its agent
        await wait_for(lambda: overseer.failures, "the failure is told")
        (failure,) = overseer.failures.values()
        assert failure.kind == types_pb2.FAILURE_KIND_EXITED
        assert failure.exit.code == 0


async def test_failure_is_kept_until_a_supervisor_settles_it(overseer, home):
    overseer.settles = False
    agent = await first_life(home, overseer)
    await overseer.bring_up(plan(stage("a")))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    os.kill(overseer.shards["a"].pid, signal.SIGKILL)
    await overseer.hears(lambda it: it.failures, "it is told")
    await agent.kill()
    overseer.settles = True

    async with agent_in(home):
        await overseer.hears(lambda it: it.incarnation == 2 and not it.failures, "settled")
    assert list(home.path.glob("s/agents/w/failures/*")) == []


async def test_stage_without_a_sign_of_life_is_busy_and_then_stalled_and_ready_again(
    overseer, home
):
    """recovery-R46, supervision-U14"""
    async with agent_in(home, busy_after_s=0.5, stall_after_s=2.5):
        await overseer.bring_up(plan(stage("a")))
        await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
        shard = overseer.shards["a"]
        caller = StageCaller()
        calling = asyncio.create_task(
            caller.call(
                shard.addresses[0].url, shard.instance_id, "hold_gil", (5.0,), {}, timeout=60
            )
        )
        busy = await overseer.hears(
            lambda it: it.replica_states[0].HasField("busy_for_s"), "it is BUSY"
        )
        assert busy.replica_states[0].state == READY
        await overseer.hears(
            lambda it: it.replica_states[0].state == types_pb2.SHARD_STATE_STALLED, "it is STALLED"
        )
        await overseer.hears(
            lambda it: (
                it.replica_states[0].state == READY
                and not it.replica_states[0].HasField("busy_for_s")
            ),
            "it is READY again",
        )
        assert await calling == "held"
        await caller.close()
        assert overseer.failures == {}
