"""An agent's part of a start that spans workers: a few stages at a time, shards, peers, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from typing import Any

import grpc
import pytest

from stagekeeper.client.channels import StageCaller
from stagekeeper.core.ids import InstanceId, StageId
from stagekeeper.core.model import Peer
from stagekeeper.v1 import types_pb2
from stagekeeper.wire.error_details import describe
from tests.fakes.agents import agent_in
from tests.fakes.overseer import COMMIT, RESERVE, START, Overseer, gate, only, plan, slow, stage
from tests.harness.waiting import wait_for

STARTING = types_pb2.OPERATION_STATE_STARTING
STARTED = types_pb2.OPERATION_STATE_STARTED
COMMITTED = types_pb2.OPERATION_STATE_COMMITTED
ROLLING_BACK = types_pb2.OPERATION_STATE_ROLLING_BACK
ROLLED_BACK = types_pb2.OPERATION_STATE_ROLLED_BACK
READY = types_pb2.SHARD_STATE_READY
ASKED = types_pb2.ROLLBACK_ENDING_ASKED
KILLED = types_pb2.ROLLBACK_ENDING_KILLED
WAS_GONE = types_pb2.ROLLBACK_ENDING_WAS_GONE


async def problems(call) -> str:
    """Return the message of a call that is refused as a bad request."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = describe(caught.value)
    assert error.reason == "BAD_FIELD"
    return error.message


async def reserved_bytes(overseer: Overseer) -> int:
    from stagekeeper.v1 import agent_service_pb2 as agent_pb2

    inventory = await overseer.agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=10)
    return sum(device.reserved_bytes for device in inventory.devices)


# --- some stages at a time


async def test_start_of_some_stages_starts_these_and_the_last_one_starts_the_operation(
    overseer, home, agent
):
    p = plan(stage("a", device="cpu:0"), stage("b", device="cpu:0"), stage("c"))
    await overseer.take(RESERVE, p)

    first = await overseer.take(START, p, **only(0))
    await overseer.hears(lambda it: set(overseer.shards) == {"a"}, "a alone is there")
    second = await overseer.take(START, p, **only(2, 0))
    third = await overseer.take(START, p, **only(1))

    assert (first.state, list(first.up_stage_ids)) == (STARTING, [0])
    assert (second.state, list(second.up_stage_ids)) == (STARTING, [0, 2])
    assert (third.state, list(third.up_stage_ids)) == (STARTED, [0, 1, 2])
    assert len(home.processes) == 3
    assert (await overseer.take(START, p)).state == STARTED  # none named means all
    assert (await overseer.take(COMMIT, p)).state == COMMITTED


async def test_several_starts_are_under_way_at_once_and_each_ends_with_its_own_stages(
    overseer, home, agent
):
    p = plan(slow("a", home), slow("b", home), slow("c", home))
    await overseer.take(RESERVE, p)
    of_a, of_b, again_b = (
        asyncio.create_task(overseer.events(START, p, **only(it))) for it in (0, 1, 1)
    )
    await overseer.hears(lambda it: set(overseer.shards) == {"a", "b"}, "both start")

    gate(home, "b").touch()
    events = await of_b
    outcome = events[-1].outcome
    assert (outcome.state, list(outcome.up_stage_ids)) == (STARTING, [1])
    assert {it.progress.stage_name for it in events if it.HasField("progress")} == {"b"}
    assert (await again_b)[-1].outcome == outcome
    assert not of_a.done()

    gate(home, "a").touch()
    assert list((await of_a)[-1].outcome.up_stage_ids) == [0, 1]
    assert len(home.processes) == 2


async def test_starts_of_two_calls_do_not_overlap_on_a_card(overseer, home, agent):
    p = plan(slow("a", home, device="cpu:0"), slow("b", home, device="cpu:0"))
    await overseer.take(RESERVE, p)
    starts = [asyncio.create_task(overseer.take(START, p, **only(it))) for it in (0, 1)]
    await overseer.hears(lambda it: len(it.replica_states) == 1, "one of them starts")
    (held,) = overseer.shards
    other = {"a": "b", "b": "a"}[held]

    gate(home, held).touch()
    await overseer.hears(lambda it: other in overseer.shards, "the other one starts")
    assert overseer.shards[held].state == READY
    gate(home, other).touch()

    assert {(await start).state for start in starts} <= {STARTING, STARTED}


async def test_stage_that_is_not_of_the_plan_and_fields_of_other_steps_are_refused(
    overseer, home, agent
):
    p = plan(stage("a"))
    peer = Peer(StageId(0), "a", 1, InstanceId("i"), "127.0.0.1:1")
    await overseer.take(RESERVE, p)

    assert "start_stage_ids[1]: 7 is not among" in await problems(
        overseer.take(START, p, **only(0, 7))
    )
    assert "start_stage_ids: are for START alone" in await problems(
        overseer.take(RESERVE, p, **only(0))
    )
    assert "peers: are for COMMIT alone" in await problems(overseer.take(START, p, peers=[peer]))
    own = replace(peer, shard_index=0)
    assert "peers[1]: is there twice" in await problems(overseer.take(COMMIT, p, peers=[peer] * 2))
    assert "peers[0]: is there twice, or is one of" in await problems(
        overseer.take(COMMIT, p, peers=[own])
    )
    assert home.processes == {}


# --- one of them fails


async def test_failure_lets_what_is_in_flight_end_and_undoes_what_every_call_brought_up_in_reverse(
    overseer, home, agent
):
    """recovery-U31, the part of one worker's agent"""
    p = plan(
        stage("first", device="cpu:0"),
        slow("flying", home, device="cpu:0"),
        stage("bad", "sample_stages:Broken", device="cpu:1"),
        stage("never", device="cpu:1"),
        slow("next", home, device="cpu:0"),
    )
    await overseer.take(RESERVE, p)
    assert (await overseer.take(START, p, **only(0))).state == STARTING
    flying = asyncio.create_task(overseer.take(START, p, **only(1, 4)))
    await overseer.hears(lambda it: "flying" in overseer.shards, "it loads")
    failing = asyncio.create_task(overseer.take(START, p, **only(2, 3)))
    await overseer.hears(
        lambda it: it.operations and it.operations[0].state == ROLLING_BACK, "it has failed"
    )

    # Said again, and asked for more: nothing new starts, and nobody is told of an end yet.
    late = asyncio.create_task(overseer.take(START, p, **only(4)))
    await overseer.hears(lambda it: set(overseer.shards) == {"first", "flying"}, "bad is gone")
    assert {shard.state for shard in overseer.shards.values()} == {
        READY,
        types_pb2.SHARD_STATE_STARTING,
    }
    assert not (flying.done() or failing.done() or late.done())
    gate(home, "flying").touch()

    outcomes = [await it for it in (flying, failing, late)]
    assert {it.state for it in outcomes} == {ROLLED_BACK}
    assert [entry.stage_name for entry in outcomes[0].rollback] == ["flying", "first"]
    assert not outcomes[0].up_stage_ids
    assert outcomes[0].failure.origin.stage_name == "bad"
    assert home.processes == {}
    assert await reserved_bytes(overseer) == 0


async def test_stage_that_waits_for_a_card_of_others_does_not_hold_a_rollback_up(
    overseer, home, agent
):
    other = plan(slow("long", home, device="cpu:0"), deployment="other", n=1)
    await overseer.take(RESERVE, other)
    loading = asyncio.create_task(overseer.take(START, other))
    await overseer.hears(lambda it: "long" in overseer.shards, "the other one loads")
    p = plan(stage("bad", "sample_stages:Broken"), stage("waits", device="cpu:0"), n=2)
    await overseer.take(RESERVE, p)

    outcome = await asyncio.wait_for(overseer.take(START, p), 30)

    assert outcome.state == ROLLED_BACK
    assert not loading.done()
    gate(home, "long").touch()
    assert (await loading).state == STARTED


async def test_cancellation_that_lets_finish_waits_for_what_is_in_flight(overseer, home, agent):
    p = plan(stage("up"), slow("slow", home), stage("never"))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p, **only(0))
    starting = asyncio.create_task(overseer.take(START, p, **only(1)))
    await overseer.hears(lambda it: "slow" in overseer.shards, "it loads")

    cancelling = asyncio.create_task(overseer.cancel("op-1", lets_finish=True))
    await overseer.hears(lambda it: it.operations[0].state == ROLLING_BACK, "it is under way")
    assert len(home.processes) == 2
    assert not cancelling.done()
    gate(home, "slow").touch()

    record = await cancelling
    assert record is not None and record.state == ROLLED_BACK
    assert [(it.stage_id, it.was) for it in record.rollback] == [(1, READY), (0, READY)]
    assert (await starting).state == ROLLED_BACK
    assert home.processes == {}


async def test_urgent_cancellation_ends_at_once_what_an_earlier_one_let_finish(
    overseer, home, agent
):
    """Another shard of the stage has failed: this one may wait for it in a collective."""
    p = plan(stage("up"), slow("slow", home))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p, **only(0))
    starting = asyncio.create_task(overseer.take(START, p, **only(1)))
    await overseer.hears(
        lambda it: "slow" in overseer.shards and overseer.shards["slow"].phase, "it loads"
    )
    patient = asyncio.create_task(overseer.cancel("op-1", lets_finish=True))
    await overseer.hears(lambda it: it.operations[0].state == ROLLING_BACK, "it is under way")

    record = await overseer.cancel("op-1")

    assert record is not None and record == await patient
    assert [(it.stage_id, it.was, it.phase) for it in record.rollback] == [
        (1, types_pb2.SHARD_STATE_STARTING, types_pb2.PHASE_LOAD),
        (0, READY, types_pb2.PHASE_UNSPECIFIED),
    ]
    assert (await starting).state == ROLLED_BACK
    assert home.processes == {}


# --- the report of a rollback


async def test_startup_36_rollback_tells_what_was_up_how_it_ended_and_the_memory(
    overseer, home, agent
):
    """startup-36: the report shows the difference"""
    p = plan(
        stage("kind", device="cpu:0"),
        stage("stubborn", "sample_stages:Stubborn", device="cpu:1"),
        stage("dead", device="cpu:1"),
    )
    await overseer.take(RESERVE, p)
    await overseer.take(START, p, **only(0))
    await overseer.take(START, p, **only(1))
    await overseer.take(START, p, **only(2))
    await overseer.hears(lambda it: len(it.replica_states) == 3, "all are up")

    os.kill(overseer.shards["stubborn"].pid, signal.SIGSTOP)  # it will not hear a word
    os.kill(overseer.shards["dead"].pid, signal.SIGKILL)
    done = await overseer.has_heard(
        lambda it: it.operations and it.operations[0].state == ROLLED_BACK, "it is rolled back"
    )

    (record,) = done.operations
    entries = {entry.stage_name: entry for entry in record.rollback}
    assert list(entries) == ["dead", "stubborn", "kind"]  # the last one up comes first
    assert [entry.ending for entry in entries.values()] == [WAS_GONE, KILLED, ASKED]
    assert [entry.was for entry in entries.values()] == [types_pb2.SHARD_STATE_FAILED, READY, READY]
    assert {entry.worker_id for entry in entries.values()} == {"w"}
    assert all(entry.cleaned and not entry.error for entry in entries.values())
    assert entries["stubborn"].duration_s > 2.5  # its budget
    kind = entries["kind"]
    assert kind.memory_before_bytes > 10 * 2**20  # a Python process
    assert kind.HasField("memory_after_bytes") and kind.memory_after_bytes == 0
    assert record.failure.origin.stage_name == "dead"
    assert await reserved_bytes(overseer) == 0


async def test_memory_of_a_stage_without_cards_is_not_told(overseer, home, agent):
    p = plan(stage("a"))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)

    record = await overseer.cancel("op-1")

    assert record is not None
    (entry,) = record.rollback
    assert not (entry.HasField("memory_before_bytes") or entry.HasField("memory_after_bytes"))


# --- shards, and their siblings elsewhere


async def call(overseer: Overseer, name: str, endpoint: str, *args: object) -> Any:
    shard = overseer.shards[name]
    caller = StageCaller()
    try:
        return await caller.call(
            shard.addresses[0].url, shard.instance_id, endpoint, args, {}, timeout=20
        )
    finally:
        await caller.close()


async def test_shard_knows_which_part_it_is_and_is_reported_as_such(overseer, home, agent):
    p = plan(stage("a"), shard=(1, 2))
    await overseer.bring_up(p)
    await overseer.hears(lambda it: overseer.shards["a"].committed, "it is committed")

    assert (overseer.shards["a"].shard_index, overseer.shards["a"].shard_count) == (1, 2)
    assert (await call(overseer, "a", "where"))["shard"] == [1, 2]
    (path,) = home.path.glob("s/agents/w/stages/*/record.json")
    assert json.loads(path.read_text())["shard"]["shard_index"] == 1


async def test_shard_that_fails_is_named_in_the_error(overseer, home, agent):
    """recovery-U31: the error names the shard"""
    p = plan(stage("a", "sample_stages:Broken"), shard=(1, 2))

    outcome = await overseer.bring_up(p)

    assert outcome.state == ROLLED_BACK
    assert "stage a shard 1 of 2 raised in LOAD" in outcome.failure.message
    assert outcome.failure.origin.shard_index == 1


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        ((2, 2), "shard_index: 2 is not below shard_count 2"),
        ((0, 5_000), "shard_count: 5000 is not from 1 to"),
    ],
)
async def test_shard_that_cannot_be_is_refused(overseer, home, agent, shard, problem):
    p = plan(stage("a"))
    (start,) = p.stages
    index, count = shard
    wrong = replace(p, stages=(replace(start, shard_index=index, shard_count=count),))

    assert problem in await problems(overseer.take(RESERVE, wrong))


def back_at(url: str, instance_id: str) -> Peer:
    return Peer(StageId(1), "back", 0, InstanceId(instance_id), url)


async def test_peers_of_other_workers_are_told_kept_and_told_again(overseer, home):
    """A repeated COMMIT moves them, and the next life of the agent still knows them."""
    async with agent_in(home):
        # Stands for another worker's: what is in another deployment is no sibling of its own.
        for n, prefix in ((1, "one "), (2, "two ")):
            other = plan(
                stage(prefix.strip(), args=f'{{"prefix": "{prefix}"}}'), deployment=f"d{n}", n=n
            )
            await overseer.bring_up(other)
        await overseer.hears(lambda it: len(it.replica_states) == 2, "both are there")
        one, two = (
            back_at(it.addresses[0].url, it.instance_id)
            for it in (overseer.shards["one"], overseer.shards["two"])
        )
        front = plan(stage("front", "sample_stages:Front"), n=3)
        p = replace(front, stage_count=2)
        await overseer.take(RESERVE, p)
        await overseer.take(START, p)

        assert (await overseer.take(COMMIT, p, peers=[one])).state == COMMITTED
        await overseer.hears(lambda it: "front" in overseer.shards, "it is there")
        assert await call(overseer, "front", "ask", "x") == "one x"
        await overseer.hears(lambda it: not it.operations, "the operation is settled")
        assert (await overseer.take(COMMIT, p, peers=[two])).state == COMMITTED
        assert await call(overseer, "front", "ask", "x") == "two x"

    async with agent_in(home):
        pushes = asyncio.create_task(overseer.take(COMMIT, p, peers=[one]))
        assert (await pushes).state == COMMITTED
        assert await call(overseer, "front", "ask", "x") == "one x"


async def test_shards_need_no_turn_to_load(overseer, home):
    """One that waited for a turn, while others wait for it elsewhere, would close a circle."""
    p = plan(slow("a", home), slow("b", home), shard=(0, 2))
    async with agent_in(home, max_loads=1):
        await overseer.take(RESERVE, p)
        starting = asyncio.create_task(overseer.take(START, p))
        await wait_for(lambda: len(home.spoken()) == 2, "both load at once")
        gate(home, "a").touch()
        gate(home, "b").touch()
        assert (await starting).state == STARTED


async def test_next_life_of_the_agent_tells_a_stage_its_peers_again(overseer, home, monkeypatch):
    from stagekeeper.agent.control_link import ControlLink

    told: list[tuple[str, ...]] = []
    tell = ControlLink.set_peers

    async def noted(self, peers, timeout_s):
        await tell(self, peers, timeout_s)
        told.append(tuple(peer.stage_name for peer in peers))

    monkeypatch.setattr(ControlLink, "set_peers", noted)
    elsewhere = back_at("127.0.0.1:9", "elsewhere")
    p = replace(plan(stage("front")), stage_count=2)
    async with agent_in(home):
        await overseer.take(RESERVE, p)
        await overseer.take(START, p)
        await overseer.take(COMMIT, p, peers=[elsewhere])
        assert set(told) == {("front", "back")}
        await overseer.hears(lambda it: not it.operations, "the operation is settled")
    told.clear()

    async with agent_in(home):
        await wait_for(lambda: told, "it is told again")
        assert set(told) == {("front", "back")}
