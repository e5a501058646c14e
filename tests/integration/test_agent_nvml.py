"""An agent with NVIDIA cards, and what it says, admits and starts while their driver misbehaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import OperationPlan
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentHome, AgentProcess
from tests.fakes.nvml_library import GIB, LIB_RM_VERSION_MISMATCH, UNKNOWN, FakeNvml
from tests.fakes.overseer import RESERVE, START, Overseer, gone, plan, stage
from tests.fakes.refusals import refused
from tests.harness.waiting import wait_for

A, B = "GPU-aaaa", "GPU-bbbb"
DEADLINE_S = 1.0


async def agent_on(nvml: FakeNvml, home: AgentHome, *devices: str, **changes: Any) -> AgentProcess:
    """An agent of that machine that looks at its cards all the time."""
    settings = {
        "devices": devices,
        "device_deadline_s": DEADLINE_S,
        "device_interval_s": 0.05,
        **changes,
    }
    return await AgentProcess.start(home, env=nvml.env, **settings)


async def refusal(overseer: Overseer, reason: str, p: OperationPlan) -> str:
    """Return the message with which a plan is refused for this reason."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    if reason == "UNKNOWN_DEVICE":
        code = grpc.StatusCode.INVALID_ARGUMENT
    async with refused(code, reason) as found:
        await overseer.take(RESERVE, p)
    return found[0].message


async def used_bytes(overseer: Overseer) -> dict[str, int | None]:
    inventory = await overseer.agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=10)
    return {
        it.device_id: it.used_bytes if it.HasField("used_bytes") else None
        for it in inventory.devices
    }


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if word)


async def test_agent_that_is_told_nothing_registers_all_cards(nvml, overseer, home):
    nvml.card(A, 80 * GIB, GIB)
    nvml.card(B, 24 * GIB, name="NVIDIA L4")

    await agent_on(nvml, home, device_deadline_s=60.0)
    slice_ = await overseer.hears(lambda it: True, "it registers")

    assert len(overseer.registrations) == 1  # not first without cards, and then with them
    assert [(it.device_id, it.kind, it.model, it.index) for it in slice_.devices] == [
        (A, "cuda", "NVIDIA H200", 0),
        (B, "cuda", "NVIDIA L4", 1),
    ]
    assert [it.total_bytes for it in slice_.devices] == [80 * GIB, 24 * GIB]
    assert slice_.devices[0].used_bytes == GIB
    # Another agent of this host sees the same card, and is to be known to.
    assert slice_.devices[0].lock_domain_id == f"{slice_.host_id}/{A}"
    assert not slice_.inventory_unknown


async def test_slices_and_cards_go_together(nvml, overseer, home):
    nvml.card(A)
    nvml.card(B)

    await agent_on(nvml, home, "cpu:0=1GiB", "GPU-b")
    slice_ = await overseer.hears(lambda it: not it.inventory_unknown, "it registers")

    assert [(it.device_id, it.index) for it in slice_.devices] == [("cpu:0", 0), (B, 1)]


async def test_small_changes_of_used_bytes_make_no_registration(nvml, overseer, home):
    nvml.card(A, used_bytes=GIB)
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")

    nvml.says_no_more("card")
    nvml.card(A, used_bytes=GIB + 2**24)  # less than anybody would miss

    async def is_seen() -> bool:
        return await used_bytes(overseer) == {A: GIB + 2**24}

    await wait_for(is_seen, "what is used is read again")
    assert len(overseer.registrations) == 1


async def test_used_bytes_that_moved_much_are_registered(nvml, overseer, home):
    nvml.card(A, used_bytes=GIB)
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")

    nvml.says_no_more("card")
    nvml.card(A, used_bytes=GIB - 2**28)

    await overseer.hears(lambda it: it.devices[0].used_bytes == GIB - 2**28, "it tells")


async def test_much_more_that_others_hold_is_registered(nvml, overseer, home):
    """startup-7: so that a plan counts it."""
    nvml.card(A, used_bytes=GIB)
    await agent_on(nvml, home, "cuda")
    slice_ = await overseer.hears(lambda it: it.devices, "it registers")
    assert [it.memory_bytes for it in slice_.devices[0].foreign] == [GIB]

    nvml.says_no_more("card")
    nvml.card(A, used_bytes=7 * GIB)

    await overseer.hears(
        lambda it: [it.memory_bytes for it in it.devices[0].foreign] == [7 * GIB], "it tells"
    )
    assert len(overseer.registrations) <= 3  # how much is used may have been told before


async def test_failed_reading_is_registered_refuses_cards_and_mends(nvml, overseer, home):
    nvml.card(A, used_bytes=GIB)
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")

    nvml.says(f"error nvmlDeviceGetCount {UNKNOWN}")
    slice_ = await overseer.hears(
        lambda it: it.inventory_reason == "nvmlDeviceGetCount: Unknown Error", "it says why"
    )

    assert slice_.inventory_unknown
    # What is held on a card goes on counting, whoever else sees the card.
    assert [(it.device_id, it.total_bytes) for it in slice_.devices] == [(A, 80 * GIB)]
    assert await used_bytes(overseer) == {A: None}
    message = await refusal(overseer, "ADMISSION_REFUSED", plan(stage("a", device=A)))
    assert "nvmlDeviceGetCount: Unknown Error" in message
    assert "it looks again by itself" in message
    reserved = await overseer.take(RESERVE, plan(stage("a"), n=2))
    assert reserved.state == types_pb2.OPERATION_STATE_RESERVED

    nvml.says_no_more("error")
    slice_ = await overseer.hears(lambda it: not it.inventory_unknown, "it sees again")

    assert slice_.inventory_reason == ""
    reserved = await overseer.take(RESERVE, plan(stage("a", device=A), n=3))
    assert reserved.state == types_pb2.OPERATION_STATE_RESERVED


async def test_agent_beats_and_answers_while_the_driver_hangs(nvml, overseer, home):
    nvml.card(A)
    agent = await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")

    nvml.says("hang nvmlDeviceGetMemoryInfo")
    slice_ = await overseer.hears(lambda it: it.inventory_unknown, "it says that it is blind")
    beats = overseer.heartbeat_count
    calls = nvml.calls
    async with asyncio.timeout(10 * overseer.pace_s + 10):
        await wait_for(lambda: overseer.heartbeat_count >= beats + 10, "ten beats later")

    assert slice_.inventory_reason == (
        f"nvmlDeviceGetMemoryInfo has not returned within {DEADLINE_S:g} s"
    )
    assert await used_bytes(overseer) == {A: None}
    assert nvml.calls == calls  # no second call went after the first
    registrations = len(overseer.registrations)
    nvml.says_no_more("hang")
    await overseer.hears(lambda it: not it.inventory_unknown, "it sees again")
    assert len(overseer.registrations) == registrations + 1
    await agent.end()


async def test_agent_ends_in_order_while_the_driver_hangs(nvml, overseer, home):
    nvml.says("hang nvmlInit")
    agent = await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.inventory_unknown, "it registers blind")

    await agent.end()


async def test_next_agent_adopts_while_the_driver_hangs_and_counts_what_is_held(
    nvml, overseer, home
):
    """Law L2 does not wait for a driver."""
    nvml.card(A)
    agent = await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")
    await overseer.bring_up(plan(stage("a", device=A, utilization=0.5)))
    slice_ = await overseer.hears(lambda it: it.replica_states, "it has the stage")
    pid = slice_.replica_states[0].pid
    await agent.kill()

    nvml.says("hang nvmlInit")
    first_life = overseer.last.incarnation
    await agent_on(nvml, home, "cuda")
    slice_ = await overseer.hears(
        lambda it: (
            it.incarnation > first_life
            and it.inventory_unknown
            and [(shard.pid, shard.state) for shard in it.replica_states]
            == [(pid, types_pb2.SHARD_STATE_READY)]
        ),
        "it comes back blind, with its stage",
    )
    assert not slice_.devices

    nvml.says_no_more("hang")
    slice_ = await overseer.hears(lambda it: it.devices, "it sees again")
    assert slice_.devices[0].reserved_bytes == 40 * GIB
    other = plan(stage("b", device=A, utilization=0.6), n=2, deployment="other")
    assert "m replica 0 stage a" in await refusal(overseer, "ADMISSION_REFUSED", other)


async def test_card_whose_memory_cannot_be_read_gets_nothing_new_and_keeps_what_it_has(
    nvml, overseer, home
):
    nvml.card(A)
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")
    await overseer.bring_up(plan(stage("a", device=A, utilization=0.5)))

    nvml.says(f"error nvmlDeviceGetMemoryInfo {UNKNOWN}")
    slice_ = await overseer.hears(lambda it: it.devices[0].total_bytes == 0, "it has no total")

    assert not slice_.inventory_unknown
    assert slice_.devices[0].reserved_bytes == 40 * GIB
    other = plan(stage("b", device=A, utilization=0.1), n=2, deployment="other")
    message = await refusal(overseer, "ADMISSION_REFUSED", other)
    assert f"device {A}: nvmlDeviceGetMemoryInfo: Unknown Error" in message

    nvml.says_no_more("error")
    await overseer.hears(lambda it: it.devices[0].total_bytes == 80 * GIB, "it has its total")
    reserved = await overseer.take(RESERVE, other)
    assert reserved.state == types_pb2.OPERATION_STATE_RESERVED


async def test_card_that_is_gone_since_it_was_reserved_fails_the_start(nvml, overseer, home):
    nvml.card(A)
    nvml.card(B)
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: len(it.devices) == 2, "it registers")
    p = plan(stage("a", device=A))
    await overseer.take(RESERVE, p)

    nvml.says_no_more(f"card {A}")
    await overseer.hears(lambda it: len(it.devices) == 1, "the card is gone")
    outcome = await overseer.take(START, p)

    assert outcome.state == types_pb2.OPERATION_STATE_ROLLED_BACK
    assert f"no device {A}; it has {B}" in outcome.reason
    assert not home.processes
    assert await refusal(overseer, "UNKNOWN_DEVICE", plan(stage("a", device=A), n=2))


async def test_start_that_was_admitted_goes_on_while_the_driver_hangs(nvml, overseer, home):
    nvml.card(A)
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")
    p = plan(stage("a", device=A, utilization=0.5))
    await overseer.take(RESERVE, p)

    nvml.says("hang nvmlDeviceGetCount")
    await overseer.hears(lambda it: it.inventory_unknown, "it says that it is blind")
    outcome = await overseer.take(START, p)

    assert outcome.state == types_pb2.OPERATION_STATE_STARTED


async def test_startup_21_stages_see_their_own_cards_and_no_others(nvml, overseer, home):
    """startup-21: the id of a MIG instance is one like others, and is passed on as it is."""
    mig = "MIG-7c0ffee"
    nvml.card(A)
    nvml.card(B)
    nvml.says(f"mig {B} {mig} {20 * GIB} 0")
    await agent_on(nvml, home, "cuda")
    await overseer.hears(lambda it: it.devices, "it registers")
    p = plan(stage("one", device=A), stage("none"), stage("both", device=A))
    one, none, both = p.stages
    cards = DeviceId(mig), DeviceId(A)
    both = replace(both, spec=replace(both.spec, devices=(0, 1)), device_ids=cards)
    await overseer.bring_up(replace(p, stages=(one, none, both)))
    await overseer.hears(lambda it: len(it.replica_states) == 3, "three stages are there")

    seen = {name: environment(shard.pid) for name, shard in overseer.shards.items()}

    assert {name: it["CUDA_VISIBLE_DEVICES"] for name, it in seen.items()} == {
        "both": f"{mig},{A}",
        "one": A,
        "none": "",
    }
    assert {it["CUDA_DEVICE_ORDER"] for it in seen.values()} == {"PCI_BUS_ID"}


async def test_mismatched_driver_is_told_although_nobody_asked_for_cards(nvml, overseer, home):
    nvml.card(A)
    nvml.says(f"error nvmlInit {LIB_RM_VERSION_MISMATCH}")

    await agent_on(nvml, home)
    slice_ = await overseer.hears(lambda it: "version mismatch" in it.inventory_reason, "it tells")

    assert slice_.inventory_unknown
    assert not slice_.devices


# --- the memory of what has ended


def listed(nvml: Any, card: str, used_bytes: int, *pids: int) -> None:
    """Have the card count this, and the driver list these processes on it."""
    nvml.says_no_more("card", "process")
    nvml.card(card, used_bytes=used_bytes)
    nvml.says(*(f"process {card} {pid} {GIB}" for pid in pids))


async def reserved_bytes(overseer: Overseer) -> int:
    inventory = await overseer.agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=10)
    return sum(device.reserved_bytes for device in inventory.devices)


async def test_claim_is_free_only_when_the_driver_lists_the_processes_no_more(nvml, overseer, home):
    """recovery-U12: freed when the memory is back; the cards are read for it, though not due."""
    nvml.card(A, used_bytes=GIB)
    await agent_on(nvml, home, "cuda", device_interval_s=600.0, memory_wait_s=60.0)
    await overseer.hears(lambda it: it.devices, "it registers")
    p = plan(stage("a", device=A))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)
    await overseer.hears(lambda it: it.replica_states, "it is up")
    pid = overseer.shards["a"].pid
    listed(nvml, A, 9 * GIB, pid, 1)

    cancelling = asyncio.create_task(overseer.cancel("op-1"))
    await gone([pid])
    seen = len(nvml.calls)
    await wait_for(lambda: len(nvml.calls) > seen + 40, "it looks again and again")
    assert not cancelling.done()
    assert await reserved_bytes(overseer) == int(0.3 * 80 * GIB)
    listed(nvml, A, 2 * GIB, 1)

    record = await cancelling
    assert record is not None
    (entry,) = record.rollback
    assert (entry.cleaned, entry.error) == (True, "")
    assert (entry.memory_before_bytes, entry.memory_after_bytes) == (9 * GIB, 2 * GIB)
    assert await reserved_bytes(overseer) == 0


async def test_memory_that_does_not_come_back_is_waited_for_no_longer_than_set_and_is_told(
    nvml, overseer, home
):
    nvml.card(A)
    await agent_on(nvml, home, "cuda", memory_wait_s=1.0)
    await overseer.hears(lambda it: it.devices, "it registers")
    p = plan(stage("a", device=A))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)
    await overseer.hears(lambda it: it.replica_states, "it is up")
    pid = overseer.shards["a"].pid
    listed(nvml, A, 9 * GIB, pid)

    record = await overseer.cancel("op-1")

    assert record is not None
    (entry,) = record.rollback
    assert entry.cleaned
    assert f"device {A} still counts the memory of {pid} 1 s after their end" in entry.error
    assert entry.memory_after_bytes == 9 * GIB
    assert entry.duration_s >= 1.0
    assert await reserved_bytes(overseer) == 0


async def test_memory_that_nobody_can_tell_is_unknown_and_not_waited_for(nvml, overseer, home):
    nvml.card(A)
    await agent_on(nvml, home, "cuda", memory_wait_s=60.0)
    await overseer.hears(lambda it: it.devices, "it registers")
    p = plan(stage("a", device=A))
    await overseer.take(RESERVE, p)
    await overseer.take(START, p)
    nvml.says(f"error nvmlDeviceGetCount {UNKNOWN}")

    record = await asyncio.wait_for(overseer.cancel("op-1"), 30)

    assert record is not None
    (entry,) = record.rollback
    assert entry.cleaned
    assert not (entry.HasField("memory_before_bytes") or entry.HasField("memory_after_bytes"))
    assert home.processes == {}
