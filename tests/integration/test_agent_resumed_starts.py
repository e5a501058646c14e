"""The agent dies during a start: its next life goes on with it, once, or undoes all of it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from stagekeeper.host.process import identity_of
from stagekeeper.runtime.crash_points import VARIABLE
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentProcess, agent_in
from tests.fakes.overseer import (
    COMMIT,
    RESERVE,
    START,
    Overseer,
    first_life,
    gate,
    gone,
    only,
    plan,
    slow,
    stage,
)
from tests.harness.waiting import wait_for

RESERVED = types_pb2.OPERATION_STATE_RESERVED
STARTING = types_pb2.OPERATION_STATE_STARTING
STARTED = types_pb2.OPERATION_STATE_STARTED
COMMITTED = types_pb2.OPERATION_STATE_COMMITTED
ROLLED_BACK = types_pb2.OPERATION_STATE_ROLLED_BACK
READY = types_pb2.SHARD_STATE_READY


async def killed(agent: AgentProcess, *pending: asyncio.Task) -> None:
    """Kill the agent, and see the calls to it end."""
    await agent.kill()
    await ended(*pending)


async def ended(*pending: asyncio.Task) -> None:
    if pending:
        await asyncio.wait(pending)
    for task in pending:
        task.exception()


def of_second_life(overseer: Overseer):
    return next(it for it in overseer.registrations if it.incarnation == 2)


async def undone(overseer: Overseer) -> types_pb2.OperationRecord:
    """Wait for the word of the second life that the operation is rolled back."""

    def look() -> types_pb2.OperationRecord | None:
        told = [op for it in overseer.registrations if it.incarnation == 2 for op in it.operations]
        return next((op for op in told if op.state == ROLLED_BACK), None)

    return await wait_for(look, "it is undone")


async def test_stages_that_are_up_or_load_are_waited_for_and_what_is_missing_is_started(
    overseer, home
):
    """recovery-R11, recovery-R22, recovery-R49: joined under the new incarnation, same processes"""
    agent = await first_life(home, overseer)
    p = plan(
        stage("up", device="cpu:0"),
        slow("loads", home, device="cpu:0"),
        stage("later", device="cpu:0"),
        shard=(1, 2),
    )
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: "loads" in overseer.shards, "the second one loads")
    before = dict(overseer.shards)
    await killed(agent, starting)

    async with agent_in(home):
        (record,) = of_second_life(overseer).operations
        assert record.state == STARTING
        reserved = {d.device_id: d.reserved_bytes for d in overseer.last.devices}
        assert reserved["cpu:0"] == 3 * int(0.3 * 2**30)  # the one that is missing counts too
        assert (await overseer.take(RESERVE, p)).state == STARTING
        joined = asyncio.create_task(overseer.take(START, p))
        await overseer.hears(lambda it: list(it.operations[0].up_stage_ids) == [0], "up is up")
        assert set(overseer.shards) == {"up", "loads"}  # "later" is on the same card, and waits
        gate(home, "loads").touch()

        outcome = await joined
        assert (outcome.state, list(outcome.up_stage_ids)) == (STARTED, [0, 1, 2])
        assert (await overseer.take(COMMIT, p)).state == COMMITTED
        await overseer.hears(lambda it: all(s.committed for s in it.replica_states), "committed")
        for name in ("up", "loads"):
            shard = overseer.shards[name]
            assert (shard.pid, shard.instance_id, shard.shard_index, shard.attempt) == (
                before[name].pid,
                before[name].instance_id,
                1,
                0,
            )
        assert len(home.processes) == 3


async def test_nothing_is_started_beside_a_process_whose_record_is_damaged(overseer, home):
    agent = await first_life(home, overseer)
    p = plan(stage("up"), slow("loads", home))
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await wait_for(lambda: len(home.spoken()) == 2, "both were let go")
    await overseer.hears(lambda it: "loads" in overseer.shards, "the second one loads")
    await killed(agent, starting)
    before = set(home.processes)
    folder = home.path / "s/agents/w/stages" / overseer.shards["loads"].instance_id
    (folder / "record.json").write_text("{")

    async with agent_in(home):
        (record,) = of_second_life(overseer).operations
        assert record.state == types_pb2.OPERATION_STATE_INTERRUPTED
        assert "cannot go on" in record.reason
        assert (await overseer.take(START, p)).state == types_pb2.OPERATION_STATE_INTERRUPTED
        assert set(home.processes) == before


async def test_nobody_has_to_join_for_an_operation_to_go_on_but_then_its_lease_undoes_it(
    overseer, home
):
    agent = await first_life(home, overseer)
    p = plan(slow("a", home, device="cpu:0"), stage("b", device="cpu:0"))
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: "a" in overseer.shards, "it loads")
    await killed(agent, starting)
    gate(home, "a").touch()

    async with agent_in(home, operation_lease_s=3.0):
        await overseer.hears(
            lambda it: it.operations and it.operations[0].state == STARTED, "it goes on by itself"
        )
        await overseer.hears(lambda it: not it.replica_states, "it is undone")
        assert home.processes == {}
        assert {it.reserved_bytes for it in overseer.last.devices} == {0}
        assert "operation_lease_s" in {
            op.reason.partition("(")[2].rstrip(")")
            for it in overseer.registrations
            for op in it.operations
        }


async def test_reservation_outlives_its_agent_and_can_be_started(overseer, home):
    agent = await first_life(home, overseer)
    p = plan(stage("a", device="cpu:0"))
    await overseer.take(RESERVE, p)
    await killed(agent)

    async with agent_in(home):
        first = of_second_life(overseer)
        assert first.operations[0].state == RESERVED
        assert {d.device_id: d.reserved_bytes for d in first.devices}["cpu:0"] == int(0.3 * 2**30)
        assert not first.replica_states
        assert (await overseer.bring_up(p)).state == COMMITTED


async def test_only_what_was_asked_for_is_started_by_the_next_life(overseer, home):
    agent = await first_life(home, overseer)
    p = plan(stage("a"), stage("b"))
    await overseer.take(RESERVE, p)
    assert list((await overseer.take(START, p, **only(0))).up_stage_ids) == [0]
    await killed(agent)

    async with agent_in(home):
        await overseer.hears(
            lambda it: it.incarnation == 2 and list(it.operations[0].up_stage_ids) == [0], "a is up"
        )
        assert set(overseer.shards) == {"a"}
        again = await overseer.take(START, p, **only(0))
        assert (again.state, list(again.up_stage_ids)) == (STARTING, [0])
        assert (await overseer.bring_up(p)).state == COMMITTED


async def test_started_operation_is_committed_in_the_next_life_with_the_same_processes(
    overseer, home
):
    agent = await first_life(home, overseer)
    p = plan(stage("a"), stage("b"))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)
    pids = set(home.processes)
    await killed(agent)

    async with agent_in(home):
        (record,) = of_second_life(overseer).operations
        assert (record.state, list(record.up_stage_ids)) == (STARTED, [0, 1])
        assert (await overseer.take(COMMIT, p)).state == COMMITTED
        assert set(home.processes) == pids


@pytest.mark.parametrize("is_up", [True, False])
async def test_stage_that_ended_meanwhile_undoes_the_operation_and_is_told(overseer, home, is_up):
    """recovery-R14, recovery-U13: unwatched, so how it ended is not known"""
    agent = await first_life(home, overseer)
    dies = stage("dies") if is_up else slow("dies", home)
    p = plan(stage("other", "sample_stages:Family", device="cpu:0"), dies)
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(
        lambda it: (
            {"other", "dies"} <= set(overseer.shards)
            and overseer.shards["other"].state == READY
            and (overseer.shards["dies"].state == READY if is_up else overseer.shards["dies"].phase)
        ),
        "both are as far as they are to be",
    )
    await killed(agent, starting)
    os.kill(overseer.shards["dies"].pid, signal.SIGKILL)
    await gone([overseer.shards["dies"].pid])

    async with agent_in(home):
        record = await undone(overseer)
        assert record.failure.kind == types_pb2.FAILURE_KIND_GONE
        assert record.failure.origin.stage_name == "dies"
        assert {entry.stage_name for entry in record.rollback} == {"other", "dies"}
        assert home.processes == {}
        assert list(overseer.failures) == [record.failure.failure_id]
        await overseer.hears(lambda it: not it.replica_states and not it.operations, "settled")


@pytest.mark.parametrize("point", ["intent-written", "spawned", "pid-written"])
async def test_spawn_that_was_never_let_go_is_settled_and_made_anew(overseer, home, point):
    """The next attempt, of the same generation; no second process of the stage was ever let go."""
    agent = await first_life(home, overseer, env={VARIABLE: point})
    p = plan(stage("a", device="cpu:0"))
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    assert await agent.ended() == -signal.SIGKILL
    await ended(starting)

    async with agent_in(home):
        assert (await overseer.bring_up(p)).state == COMMITTED
        await overseer.hears(lambda it: overseer.shards["a"].committed, "it is committed")
        assert overseer.shards["a"].attempt == 1
        assert list(home.processes) == [overseer.shards["a"].pid]
        assert overseer.failures == {}


async def test_start_limit_counts_from_the_spawn_in_an_earlier_life(overseer, home):
    agent = await first_life(home, overseer)
    p = plan(slow("a", home, start_timeout_s=4.0))
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: "a" in overseer.shards, "it loads")
    began = asyncio.get_running_loop().time()
    await killed(agent, starting)
    await asyncio.sleep(3.0)  # a part of its limit passes while no agent lives

    async with agent_in(home):
        outcome = await overseer.take(START, p)
        assert outcome.state == ROLLED_BACK
        assert outcome.failure.kind == types_pb2.FAILURE_KIND_INIT_TIMEOUT
        assert asyncio.get_running_loop().time() - began < 3.0 + 4.0
        assert home.processes == {}


async def test_rollback_goes_on_in_the_next_life_and_its_report_is_whole(overseer, home):
    agent = await first_life(home, overseer, env={VARIABLE: "clean-written"})
    p = plan(stage("a", "sample_stages:Family"), stage("b"), stage("c"))
    await overseer.take(RESERVE, p)
    for stage_id in range(3):
        await overseer.take(START, p, **only(stage_id))
    cancelling = asyncio.create_task(overseer.cancel("op-1"))
    assert await agent.ended() == -signal.SIGKILL
    await ended(cancelling)

    async with agent_in(home):
        record = await undone(overseer)
        entries = record.rollback
        assert [(it.stage_name, it.cleaned) for it in entries] == [
            ("c", True),
            ("b", True),
            ("a", True),
        ]
        assert "cancelled: test" in record.reason
        assert home.processes == {}


async def test_recovery_R39_step_whose_answer_is_lost_is_joined_when_it_is_said_again(
    overseer, home
):
    """The agent has carried it out; only the answer never came."""
    async with agent_in(home):
        p = plan(slow("a", home))
        for step in (RESERVE, START):
            lost = overseer.stream(step, p)
            if step == START:
                await overseer.hears(lambda it: "a" in overseer.shards, "it was carried out")
            lost.cancel()
            again = asyncio.create_task(overseer.take(step, p))
            gate(home, "a").touch()
            assert (await again).operation_id == "op-1"
        assert len(home.processes) == 1
        assert {it.attempt for it in overseer.last.replica_states} == {0}


async def test_agent_that_ends_while_a_stage_loads_with_its_workers_leaves_none(overseer, home):
    """startup-25: in the phase LOAD, with children of its own, one of them in another session"""
    agent = await first_life(home, overseer)
    p = plan(
        stage("up"),
        stage("loads", "sample_stages:Household", args=f'{{"gate": "{gate(home, "x")}"}}'),
    )
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: "up" in overseer.shards, "they start")
    await wait_for(lambda: len(home.processes) == 4, "it has its workers")
    pids = list(home.processes)

    agent.process.terminate()
    assert await agent.ended(10.0) == 0

    await ended(starting)
    assert [pid for pid in pids if identity_of(pid)] == []
