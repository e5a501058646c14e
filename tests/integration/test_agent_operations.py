"""An agent with real stage processes, commanded by hand: reserve, start, commit, cancel, stop."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from pathlib import Path

import grpc
import pytest

from stagekeeper.agent import operation_store
from stagekeeper.agent.control_link import ControlLink, LinkError
from stagekeeper.agent.records import RecordStore
from stagekeeper.core.ids import Epoch
from stagekeeper.host.process import identity_of
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2
from stagekeeper.wire.error_details import describe
from tests.fakes.agents import agent_in
from tests.fakes.overseer import COMMIT, RESERVE, START, Overseer, gate, gone, plan, slow, stage

STARTED = types_pb2.OPERATION_STATE_STARTED
COMMITTED = types_pb2.OPERATION_STATE_COMMITTED
ROLLED_BACK = types_pb2.OPERATION_STATE_ROLLED_BACK
READY = types_pb2.SHARD_STATE_READY


async def refused(awaitable) -> tuple[str, str]:
    """Return the reason and the message of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    error = describe(caught.value)
    return error.reason, error.message


async def reserved_bytes(overseer: Overseer) -> dict[str, int]:
    inventory = await overseer.agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=10)
    return {device.device_id: device.reserved_bytes for device in inventory.devices}


# --- the way up


async def test_replica_is_reserved_started_committed_and_reported(overseer, home, agent):
    p = plan(stage("front", "sample_stages:Front", device="cpu:0"), stage("back", device="cpu:0"))

    assert (await overseer.take(RESERVE, p)).state == types_pb2.OPERATION_STATE_RESERVED
    events = await overseer.events(START, p)
    assert events[-1].outcome.state == STARTED
    uncommitted = await overseer.hears(
        lambda it: (
            len(it.replica_states) == 2 and all(shard.state == READY for shard in it.replica_states)
        ),
        "both READY",
    )
    assert not any(shard.committed for shard in uncommitted.replica_states)
    assert (await overseer.take(COMMIT, p)).state == COMMITTED
    await overseer.hears(lambda it: all(s.committed for s in it.replica_states), "committed")

    front, back = overseer.shards["front"], overseer.shards["back"]
    assert front.entry and not back.entry
    assert front.addresses[0].url and {e.name for e in back.endpoints} >= {"echo", "where"}
    assert front.stage_count == 2
    assert front.pid in home.processes and back.pid in home.processes
    assert front.devices[0].reserved_bytes == int(0.3 * 2**30)
    assert await reserved_bytes(overseer) == {"cpu:0": 2 * int(0.3 * 2**30), "cpu:1": 0}


async def test_stages_of_one_card_start_one_after_another_others_side_by_side(
    overseer, home, agent
):
    """startup-11, grouped init"""
    p = plan(
        slow("a0", home, device="cpu:0"),
        slow("a1", home, device="cpu:0"),
        slow("b0", home, device="cpu:1"),
    )
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(
        lambda it: {s.stage_name for s in it.replica_states} == {"a0", "b0"}, "a0 and b0 start"
    )

    gate(home, "b0").touch()
    await overseer.hears(lambda it: overseer.shards["b0"].state == READY, "b0 is READY")
    assert "a1" not in overseer.shards
    gate(home, "a0").touch()
    await overseer.hears(lambda it: "a1" in overseer.shards, "a1 starts after a0")
    gate(home, "a1").touch()

    assert (await starting).state == STARTED


async def test_starts_of_two_operations_do_not_overlap_on_a_card(overseer, home, agent):
    first = plan(slow("a", home, device="cpu:0"), n=1, deployment="one")
    second = plan(slow("b", home, device="cpu:0"), n=2, deployment="two")
    for it in (first, second):
        await overseer.take(RESERVE, it)
    starts = [asyncio.create_task(overseer.take(START, it)) for it in (first, second)]
    await overseer.hears(lambda it: len(it.replica_states) == 1, "one of them starts")
    (held,) = overseer.shards
    gate(home, held).touch()
    other = {"a": "b", "b": "a"}[held]
    await overseer.hears(lambda it: other in overseer.shards, "the other one starts")
    assert overseer.shards[held].state == READY
    gate(home, other).touch()

    assert [(await start).state for start in starts] == [STARTED, STARTED]


async def test_progress_is_streamed_with_phases(overseer, home, agent):
    p = plan(slow("s", home))
    await overseer.take(RESERVE, p)
    progress = []
    async for event in overseer.stream(START, p):
        if event.HasField("progress"):
            progress.append(event.progress)
            if event.progress.progress.note:
                assert event.progress.phase == types_pb2.PHASE_LOAD
                gate(home, "s").touch()

    assert progress[-1].state == READY
    assert {it.worker_id for it in progress} == {"w"}


async def test_stages_reach_their_siblings_once_committed(overseer, home, agent):
    p = plan(stage("front", "sample_stages:Front"), stage("back", args='{"prefix": "heard "}'))
    await overseer.bring_up(p)
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both")

    from stagekeeper.client.channels import StageCaller

    caller = StageCaller()
    try:
        front = overseer.shards["front"]
        answer = await caller.call(
            front.addresses[0].url, front.instance_id, "ask", ("you",), {}, timeout=20
        )
    finally:
        await caller.close()
    assert answer == "heard you"


# --- saying it twice, saying it late


async def test_repeats_join_and_change_nothing(overseer, home, agent):
    """recovery-R39"""
    p = plan(slow("s", home))
    await overseer.take(RESERVE, p)
    await overseer.take(RESERVE, p)
    starts = [asyncio.create_task(overseer.take(START, p)) for _ in range(3)]
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it starts")
    starts[0].cancel()  # a lost stream changes nothing
    gate(home, "s").touch()

    assert [(await start).state for start in starts[1:]] == [STARTED, STARTED]
    for step in (RESERVE, START):  # the answer was lost, say
        assert (await overseer.take(step, p)).state == STARTED
    commits = await asyncio.gather(*(overseer.take(COMMIT, p) for _ in range(2)))
    assert [it.state for it in commits] == [COMMITTED, COMMITTED]
    assert len(home.processes) == 1
    await overseer.hears(lambda it: not it.operations, "the operation is settled")
    # Settled and forgotten here, and still the same answer to each step.
    for step in (RESERVE, START, COMMIT):
        assert (await overseer.take(step, p)).state == COMMITTED
    assert len(home.processes) == 1


async def test_operation_that_has_not_ended_is_kept_whoever_calls_it_settled(overseer, home, agent):
    overseer.settled_too = ["op-1"]

    assert (await overseer.bring_up(plan(stage("a"), n=1))).state == COMMITTED

    await overseer.hears(lambda it: not it.operations, "now it is settled")


async def test_same_operation_with_another_plan_is_refused(overseer, home, agent):
    await overseer.take(RESERVE, plan(stage("a")))

    reason, message = await refused(overseer.take(RESERVE, plan(stage("b"))))

    assert reason == "BAD_FIELD"
    assert "another plan" in message


async def test_steps_out_of_order_are_refused(overseer, home, agent):
    p = plan(stage("a"))

    assert (await refused(overseer.take(START, p)))[0] == "BAD_FIELD"
    assert (await refused(overseer.take(COMMIT, p)))[0] == "BAD_FIELD"
    await overseer.take(RESERVE, p)
    assert (await refused(overseer.take(COMMIT, p)))[0] == "BAD_FIELD"


async def test_generation_that_is_not_above_the_slots_is_refused_for_good(overseer, home, agent):
    await overseer.bring_up(plan(stage("a"), n=5))
    assert (await refused(overseer.take(RESERVE, plan(stage("a"), n=4))))[0] == "STALE_GENERATION"
    await overseer.stop(0)
    await overseer.hears(lambda it: not it.replica_states and not it.operations, "it is gone")

    same = plan(stage("a"), n=5, operation="another")
    assert (await refused(overseer.take(RESERVE, same)))[0] == "STALE_GENERATION"
    assert (await overseer.bring_up(plan(stage("a"), n=6))).state == COMMITTED


async def test_slot_with_live_processes_takes_no_higher_generation(overseer, home, agent):
    await overseer.bring_up(plan(stage("a"), n=1))

    reason, message = await refused(overseer.take(RESERVE, plan(stage("a"), n=2)))

    assert reason == "REPLICA_DRAINING"
    assert "stop it first" in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cluster": "other"}, "WRONG_CLUSTER"),
        ({"epoch": Epoch(0, "old")}, "STALE_EPOCH"),
        ({"epoch": Epoch(99, "unheard")}, "STALE_EPOCH"),
        ({"incarnation": 99}, "STALE_INCARNATION"),
    ],
)
async def test_command_for_another_agent_or_of_another_reign_is_refused(
    overseer, home, agent, change, reason
):
    """recovery-R22"""
    request = agent_pb2.CancelOperationRequest(header=overseer.header(**change))

    assert (await refused(overseer.agent.CancelOperation(request, timeout=10)))[0] == reason


async def test_reserve_that_is_behind_its_cancel_or_its_stop_is_refused(overseer, home, agent):
    assert await overseer.cancel("op-1") is None
    late, after = plan(stage("a"), n=1), plan(stage("a"), n=6)
    assert (await refused(overseer.take(RESERVE, late)))[0] == "STALE_GENERATION"

    assert (await overseer.stop(0, deployment="m", up_to=5)).stopped_count == 0
    late = plan(stage("a"), n=5)
    assert (await refused(overseer.take(RESERVE, late)))[0] == "STALE_GENERATION"
    assert (await overseer.take(RESERVE, after)).state == types_pb2.OPERATION_STATE_RESERVED


async def test_reserve_takes_the_place_of_one_that_started_nothing(overseer, home, agent):
    await overseer.take(RESERVE, plan(stage("a", device="cpu:0", utilization=0.7), n=1))

    second = plan(stage("a", device="cpu:0", utilization=0.8), n=2)
    assert (await overseer.take(RESERVE, second)).state == types_pb2.OPERATION_STATE_RESERVED

    assert await reserved_bytes(overseer) == {"cpu:0": int(0.8 * 2**30), "cpu:1": 0}
    await overseer.hears(lambda it: len(it.operations) == 1, "the first one is settled")


async def test_start_that_cannot_be_written_down_is_refused_with_the_cause(
    overseer, home, agent, monkeypatch
):
    p = plan(stage("a", device="cpu:0", utilization=0.5))

    def on_full_disk(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(operation_store, "write_durably", on_full_disk)
        reason, message = await refused(overseer.take(RESERVE, p))

    assert reason == "ADMISSION_REFUSED"
    assert ".json: No space left on device): free some space" in message
    assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": 0}
    await overseer.take(RESERVE, plan(stage("a", device="cpu:0", utilization=0.5), n=2))


async def test_reserve_that_is_refused_leaves_the_one_before_it_alone(overseer, home, agent):
    first = plan(stage("a", device="cpu:0", utilization=0.5), n=1)
    await overseer.take(RESERVE, first)

    too_much = plan(*(stage(it, device="cpu:0", utilization=0.6) for it in "ab"), n=2)
    reason, message = await refused(overseer.take(RESERVE, too_much))

    assert (reason, "m replica 0" in message) == ("ADMISSION_REFUSED", False)
    assert await reserved_bytes(overseer) == {"cpu:0": int(0.5 * 2**30), "cpu:1": 0}
    assert (await overseer.take(START, first)).state == STARTED


# --- what is not let in


async def test_what_does_not_fit_is_refused_with_the_sum_and_books_nothing(overseer, home, agent):
    """recovery-U12, startup-40"""
    await overseer.take(
        RESERVE, plan(stage("a", device="cpu:0", utilization=0.7), deployment="a", n=1)
    )
    too_much = plan(
        stage("b", device="cpu:0", utilization=0.5),
        stage("c", device="cpu:1", utilization=0.5),
        deployment="b",
        n=2,
    )

    reason, message = await refused(overseer.take(RESERVE, too_much))

    assert reason == "ADMISSION_REFUSED"
    assert "device cpu:0" in message and "a replica 0 stage a" in message
    assert await reserved_bytes(overseer) == {"cpu:0": int(0.7 * 2**30), "cpu:1": 0}


async def test_everything_wrong_with_a_plan_is_said_at_once(overseer, home):
    async with agent_in(home, allow=("sample_stages.*",)):
        p = plan(
            stage("a", "no_colon"),
            stage("b", "json:loads"),
            stage("c", "sample_stages_that_are_not_there:Echo"),
            stage("d", "sample_stages:Echo"),
        )
        reason, message = await refused(overseer.take(RESERVE, p))

    assert reason == "BAD_FIELD"
    assert "stages[0].spec.entrypoint" in message and "module:Class" in message
    assert "stages[1].spec.entrypoint" in message and "not allowed" in message
    assert "stages[3]" not in message


async def test_unknown_device_and_module_are_refused_before_anything_starts(overseer, home, agent):
    unknown = await refused(overseer.take(RESERVE, plan(stage("a", device="cpu:7"))))
    missing = await refused(overseer.take(RESERVE, plan(stage("a", "not_there.at_all:X"))))

    assert unknown[0] == "UNKNOWN_DEVICE"
    assert "cpu:0, cpu:1" in unknown[1]
    assert missing[0] == "BAD_FIELD"
    assert "no module not_there" in missing[1]
    assert home.processes == {}


# --- the way down


@pytest.mark.parametrize("how", ["raise", "exit", "memory"])
async def test_startup_11_recovery_U13_U14_failed_start_leaves_no_process_no_claim_and_says_why(
    overseer, home, agent, how
):
    """startup-11, startup-15, recovery-R49, recovery-U11, recovery-U13, recovery-U14"""
    p = plan(
        stage("good", "sample_stages:Family", device="cpu:0"),
        stage("bad", "sample_stages:Broken", args=f'{{"how": "{how}"}}', device="cpu:0"),
        stage("never", device="cpu:0"),
    )

    outcome = await overseer.bring_up(p)

    assert outcome.state == ROLLED_BACK
    assert home.processes == {}
    assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": 0}
    assert [(entry.stage_id, entry.cleaned) for entry in outcome.rollback] == [(0, True)]
    kind = {
        "raise": types_pb2.FAILURE_KIND_INIT_RAISED,
        "exit": types_pb2.FAILURE_KIND_EXITED,
        "memory": types_pb2.FAILURE_KIND_OUT_OF_MEMORY,
    }[how]
    assert outcome.failure.kind == kind
    assert outcome.failure.origin.stage_name == "bad"
    assert outcome.failure.origin.phase == types_pb2.PHASE_LOAD
    assert outcome.failure.last_log_lines
    if how == "raise":
        assert "weights are half downloaded" in outcome.failure.message
        assert "RuntimeError" in outcome.failure.remote_traceback
    assert list(overseer.failures) == [outcome.failure.failure_id]
    await overseer.hears(lambda it: not it.replica_states and not it.operations, "all is settled")

    again = plan(stage("good", device="cpu:0"), stage("bad", device="cpu:0"), n=2)
    assert (await overseer.bring_up(again)).state == COMMITTED


async def test_startup_31_recovery_U13_failed_start_ends_children_in_other_sessions_too(
    overseer, home, agent
):
    """recovery-U13"""
    p = plan(stage("s", "sample_stages:Family", args='{"fail": true}'))

    outcome = await overseer.bring_up(p)

    assert outcome.state == ROLLED_BACK
    assert home.processes == {}


async def test_others_in_flight_end_by_themselves_and_are_then_stopped(overseer, home, agent):
    p = plan(
        stage("bad", "sample_stages:Broken", device="cpu:0"), slow("slow", home, device="cpu:1")
    )
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(
        lambda it: (
            it.operations
            and it.operations[0].state == types_pb2.OPERATION_STATE_ROLLING_BACK
            and "slow" in overseer.shards
        ),
        "the rollback is reported while the other one goes on",
    )
    assert not starting.done()
    gate(home, "slow").touch()

    outcome = await starting
    assert outcome.state == ROLLED_BACK
    assert [entry.stage_id for entry in outcome.rollback] == [1]
    assert home.processes == {}


async def test_startup_13_14_23_start_that_is_not_ready_in_time_fails_at_its_limit_and_is_killed(
    overseer, home, agent
):
    """startup-14, startup-23, recovery-U24"""
    p = plan(slow("s", home, start_timeout_s=1.5))
    await overseer.take(RESERVE, p)
    began = time.monotonic()

    outcome = await overseer.take(START, p)

    assert 1.4 <= time.monotonic() - began <= 1.5 + 5
    assert outcome.state == ROLLED_BACK
    assert home.processes == {}  # before the error is returned
    assert outcome.failure.kind == types_pb2.FAILURE_KIND_INIT_TIMEOUT
    assert "within 1.5 s" in outcome.failure.message
    assert "LOAD" in outcome.failure.message


async def test_startup_29_recovery_R47_start_without_progress_fails_and_one_with_progress_does_not(
    overseer, home, agent
):
    """startup-29, recovery-R47"""
    still = stage(
        "still",
        "sample_stages:Slow",
        args=f'{{"gate": "{gate(home, "still")}", "progress": false}}',
        stall_timeout_s=1.5,
        device="cpu:0",
    )
    moving = slow("moving", home, stall_timeout_s=1.5, device="cpu:1")
    p = plan(still, moving)
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))

    await overseer.hears(lambda it: overseer.failures, "the still one fails")
    await asyncio.sleep(2.0)  # the moving one shows progress for longer than its limit
    assert overseer.shards["moving"].state == types_pb2.SHARD_STATE_STARTING
    gate(home, "moving").touch()

    outcome = await starting
    assert outcome.failure.origin.stage_name == "still"
    assert "no progress for 1.5 s in LOAD" in outcome.failure.message
    assert [entry.stage_id for entry in outcome.rollback] == [1]


async def test_cancelled_start_is_undone_at_once(overseer, home, agent):
    """recovery-U23"""
    p = plan(
        stage("up", device="cpu:0"), slow("slow", home, device="cpu:0"), stage("c", device="cpu:0")
    )
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: "slow" in overseer.shards, "the second one starts")

    record = await overseer.cancel("op-1")

    assert record is not None
    assert record.state == ROLLED_BACK
    assert "cancelled: test" in record.reason
    assert [entry.stage_id for entry in record.rollback] == [1, 0]
    assert home.processes == {}
    assert (await starting).state == ROLLED_BACK
    assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": 0}


async def test_cancelling_twice_what_is_unknown_and_what_is_committed_changes_nothing(
    overseer, home, agent
):
    assert await overseer.cancel("never-heard-of") is None
    await overseer.bring_up(plan(stage("a")))

    record = await overseer.cancel("op-1")

    assert record is not None
    assert record.state == COMMITTED
    assert len(home.processes) == 1


async def test_operation_that_no_call_joins_is_rolled_back_when_its_lease_is_over(overseer, home):
    async with agent_in(home, operation_lease_s=1.0):
        p = plan(stage("a", device="cpu:0"))
        await overseer.take(RESERVE, p)
        await overseer.take(START, p)

        await overseer.hears(lambda it: not it.replica_states and not it.operations, "undone")

        assert home.processes == {}
        assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": 0}
        # Committed ones never are.
        await overseer.bring_up(plan(stage("a"), n=2))
        await asyncio.sleep(1.5)
        assert len(home.processes) == 1


async def test_stage_whose_cleanup_failed_is_counted_until_it_is_gone(
    overseer, home, agent, monkeypatch
):
    """recovery-U12"""
    p = plan(stage("a", device="cpu:0"), stage("b", device="cpu:1"))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both are up")
    of_b = overseer.shards["b"].instance_id
    write = RecordStore.write

    def on_full_disk(self, record):
        if record.instance_id == of_b:
            raise OSError("no space left on device")
        write(self, record)

    with monkeypatch.context() as full:
        full.setattr(RecordStore, "write", on_full_disk)
        record = await overseer.cancel("op-1")

    assert record is not None and record.state == ROLLED_BACK
    assert {entry.stage_id: entry.cleaned for entry in record.rollback} == {0: True, 1: False}
    assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": int(0.3 * 2**30)}
    assert (await overseer.stop(1)).stopped_count == 1
    assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": 0}
    assert home.processes == {}


@pytest.mark.parametrize(("deaf_times", "outcome"), [(1, COMMITTED), (1_000, ROLLED_BACK)])
async def test_nothing_is_committed_before_each_stage_knows_its_siblings(
    overseer, home, agent, monkeypatch, deaf_times, outcome
):
    tell = ControlLink.set_peers
    told = []

    async def sometimes(self, peers, timeout_s):
        told.append(len(peers))
        if len(told) <= deaf_times:
            raise LinkError("it does not listen")
        await tell(self, peers, timeout_s)

    monkeypatch.setattr(ControlLink, "set_peers", sometimes)

    record = await overseer.bring_up(plan(stage("a"), stage("b")))

    assert record.state == outcome
    if outcome == COMMITTED:
        assert len(told) >= 3  # two at first, and the deaf one again; more often does no harm
        assert set(told) == {2}
    else:
        assert "could not be told where its siblings are" in record.reason
        assert home.processes == {}


async def test_lease_waits_while_a_call_is_joined(overseer, home):
    async with agent_in(home, operation_lease_s=0.5):
        p = plan(slow("s", home))
        await overseer.take(RESERVE, p)
        starting = asyncio.create_task(overseer.take(START, p))
        await overseer.hears(lambda it: len(it.replica_states) == 1, "it starts")
        await asyncio.sleep(1.0)
        gate(home, "s").touch()

        assert (await starting).state == STARTED
        assert (await overseer.take(COMMIT, p)).state == COMMITTED


async def test_stage_that_dies_before_the_commit_undoes_its_operation(overseer, home, agent):
    p = plan(stage("a"), stage("b"))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both are up")
    pids = list(home.processes)

    overseer.settles = False  # nor does the agent forget it before it is asked
    os.kill(overseer.shards["b"].pid, signal.SIGKILL)
    await gone(pids)

    outcome = await overseer.take(COMMIT, p)
    assert outcome.state == ROLLED_BACK or outcome.state == types_pb2.OPERATION_STATE_ROLLING_BACK
    await overseer.hears(
        lambda it: not it.replica_states and [op.state for op in it.operations] == [ROLLED_BACK],
        "undone",
    )
    assert len(overseer.failures) == 1


# --- stops


async def test_stop_ends_processes_frees_memory_and_forgets(overseer, home, agent):
    """recovery-R9"""
    await overseer.bring_up(plan(stage("a", "sample_stages:Family", device="cpu:0")))
    assert len(home.processes) == 3

    answer = await overseer.stop(0)

    assert answer.stopped_count == 1
    assert home.processes == {}
    assert await reserved_bytes(overseer) == {"cpu:0": 0, "cpu:1": 0}
    await overseer.hears(lambda it: not it.replica_states, "nothing is held")
    assert overseer.failures == {}
    assert (await overseer.stop(0)).stopped_count == 0


async def test_stop_of_a_stubborn_stage_kills_when_its_budget_is_over(overseer, home, agent):
    """recovery-U25"""
    await overseer.bring_up(plan(stage("a", "sample_stages:Stubborn")))
    began = time.monotonic()

    answer = await overseer.stop(0, budget_s=1.0)

    assert answer.killed
    assert time.monotonic() - began < 1.0 + 5
    assert home.processes == {}


async def test_stop_spares_newer_generations(overseer, home, agent):
    await overseer.bring_up(plan(stage("a"), n=5))

    assert (await overseer.stop(0, up_to=4)).stopped_count == 0
    assert len(home.processes) == 1
    assert (await overseer.stop(0, up_to=5)).stopped_count == 1


async def test_second_stop_joins_and_a_shorter_budget_brings_the_end_nearer(overseer, home, agent):
    await overseer.bring_up(plan(stage("a", "sample_stages:Echo", stop_budget_s=60.0)))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
    shard = overseer.shards["a"]

    from stagekeeper.client.channels import StageCaller

    caller = StageCaller()
    calling = asyncio.create_task(
        caller.call(shard.addresses[0].url, shard.instance_id, "hold_gil", (3.0,), {}, timeout=60)
    )
    await asyncio.sleep(0.5)
    first = asyncio.create_task(overseer.stop(0))
    await overseer.hears(
        lambda it: overseer.shards["a"].state == types_pb2.SHARD_STATE_STOPPING, "it is stopping"
    )
    began = time.monotonic()
    second = await overseer.stop(0, budget_s=0.0)
    assert time.monotonic() - began < 2.5
    assert second.stopped_count == (await first).stopped_count == 1
    assert identity_of(shard.pid) is None
    calling.cancel()
    await caller.close()


async def test_stop_of_a_slot_that_is_starting_undoes_its_operation(overseer, home, agent):
    p = plan(stage("up"), slow("slow", home))
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: len(it.replica_states) == 2, "both start")

    await overseer.stop(1)

    assert (await starting).state == ROLLED_BACK
    assert home.processes == {}


async def test_stop_of_an_older_generation_leaves_a_start_alone(overseer, home, agent):
    p = plan(slow("s", home), n=5)
    await overseer.take(RESERVE, p)
    starting = asyncio.create_task(overseer.take(START, p))
    await overseer.hears(lambda it: len(it.replica_states) == 1, "it starts")

    assert (await overseer.stop(0, up_to=4)).stopped_count == 0
    gate(home, "s").touch()

    assert (await starting).state == STARTED


# --- the agent's own end


async def test_agent_that_ends_undoes_what_is_uncommitted_and_leaves_the_rest(overseer, home):
    """startup-25"""
    async with agent_in(home) as agent:
        await overseer.bring_up(plan(stage("kept"), deployment="kept", n=1))
        p = plan(stage("family", "sample_stages:Family"), slow("slow", home), deployment="new", n=2)
        await overseer.take(RESERVE, p)
        starting = asyncio.create_task(overseer.take(START, p))
        await overseer.hears(
            lambda it: {"family", "slow"} <= set(overseer.shards), "the new one starts"
        )
        began = time.monotonic()
        await agent.stop()
        assert time.monotonic() - began < 10
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError, ValueError)):
        outcome = await starting
        assert outcome.state == ROLLED_BACK
        raise ValueError("it was told in time")
    assert list(home.processes) == [overseer.shards["kept"].pid]
    assert ROLLED_BACK in {op.state for it in overseer.registrations for op in it.operations}


# --- logs and lists


async def test_log_is_read_followed_and_kept_for_the_next_instance(overseer, home, agent):
    await overseer.bring_up(plan(stage("a"), n=1))
    request = agent_pb2.ReadStageLogRequest(deployment="m", last_lines=100)
    first = [m async for m in overseer.agent.ReadStageLog(request, timeout=10)]
    assert any("READY at" in line for m in first for line in m.lines)
    followed = overseer.agent.ReadStageLog(
        agent_pb2.ReadStageLogRequest(deployment="m", last_lines=1, follow=True), timeout=30
    )
    following = asyncio.create_task(_collect(followed))
    await overseer.stop(0)
    lines = await following  # ends by itself with the process
    assert any("asked to end" in line for line in lines)

    await overseer.bring_up(plan(stage("a"), n=2))
    previous = agent_pb2.ReadStageLogRequest(deployment="m", previous=True)
    (message,) = [m async for m in overseer.agent.ReadStageLog(previous, timeout=10)]
    assert message.instance_id == first[0].instance_id
    assert any("asked to end" in line for line in message.lines)


async def _collect(stream) -> list[str]:
    return [line async for message in stream for line in message.lines]


async def test_log_of_a_stage_that_never_was_is_unknown(overseer, home, agent):
    request = agent_pb2.ReadStageLogRequest(deployment="nobody")

    assert (await refused(_collect(overseer.agent.ReadStageLog(request, timeout=10))))[
        0
    ] == "STAGE_UNKNOWN"


async def test_draining_a_worker_is_not_built_and_says_what_to_do(overseer, home, agent):
    call = overseer.agent.DrainWorker(agent_pb2.DrainWorkerRequest(), timeout=10)

    reason, message = await refused(call)

    assert reason == "NOT_YET"
    assert "delete the deployments" in message


async def test_environment_and_budget_of_a_stage_come_from_lists(overseer, home, agent):
    """startup-38, startup-39"""
    p = plan(
        stage("a", device="cpu:1", utilization=0.25, env=(("MINE", "yes"),)),
    )
    import os

    os.environ["STAGEKEEPER_TEST_LEAK"] = "leaked"
    try:
        await overseer.bring_up(p)
    finally:
        del os.environ["STAGEKEEPER_TEST_LEAK"]
    (pid,) = home.processes
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    variables = dict(word.split("=", 1) for word in words if word)
    assert variables["MINE"] == "yes"
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "STAGEKEEPER_TEST_LEAK" not in variables
    launch = next(home.path.glob("s/agents/w/stages/*/launch.json")).read_text()
    assert f'"budget_bytes": {2**28}' in launch
