"""Two agents on one host with the same cards: one ledger, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from stagekeeper.core.model import OperationPlan
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentHome, AgentProcess, home_at
from tests.fakes.nvml_library import GIB, FakeNvml
from tests.fakes.overseer import RESERVE, START, Overseer, plan, stage
from tests.fakes.refusals import refused
from tests.harness.waiting import wait_for

CARD, SPARE = "GPU-aaaa", "GPU-bbbb"
RESERVED = types_pb2.OPERATION_STATE_RESERVED


@dataclass
class Worker:
    """One agent of the host, and a supervisor by hand that commands it alone."""

    worker_id: str
    overseer: Overseer
    home: AgentHome
    nvml: FakeNvml
    agent: AgentProcess | None = None

    async def start(self, **changes: Any) -> None:
        lives = len({it.incarnation for it in self.overseer.registrations})
        self.agent = await AgentProcess.start(
            self.home,
            env={**self.nvml.env, **changes.pop("env", {})},
            **{
                "worker_id": self.worker_id,
                "endpoint": self.overseer.endpoint,
                "devices": ["cuda"],
                "device_deadline_s": 20.0,
                "device_interval_s": 0.2,
                **changes,
            },
        )
        await wait_for(
            lambda: len({it.incarnation for it in self.overseer.registrations}) > lives,
            f"{self.worker_id} registers",
        )

    async def kill(self) -> None:
        assert self.agent is not None
        await self.agent.kill()

    async def admits(self, p: OperationPlan) -> bool:
        """Try to reserve; False when there is no room."""
        try:
            return (await self.overseer.take(RESERVE, p)).state == RESERVED
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
            return False

    async def has_room(self, p: OperationPlan) -> None:
        """Reserve, once what holds the memory is really gone: a process may take a while to end."""

        async def look() -> bool:
            return await self.admits(p)

        await wait_for(look, "there is room")

    async def refusal(self, p: OperationPlan) -> str:
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADMISSION_REFUSED") as found:
            await self.overseer.take(RESERVE, p)
        return found[0].message


@pytest.fixture
async def host(nvml: FakeNvml) -> AsyncIterator[tuple[Worker, Worker]]:
    """Two workers of one host; their agents do not run yet."""
    nvml.card(CARD)
    nvml.card(SPARE)
    async with Overseer() as one, Overseer() as other, home_at(one.endpoint) as home:
        yield Worker("w1", one, home, nvml), Worker("w2", other, home, nvml)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def on_card(utilization: float, n: int = 1, *, name: str = "m", card: str = CARD) -> OperationPlan:
    made = stage("a", device=card, utilization=utilization)
    return plan(made, n=n, deployment=name, operation=f"{name}-{n}")


async def test_startup_40_what_one_agent_reserved_starts_or_runs_counts_for_the_other(host):
    one, other = host
    await asyncio.gather(one.start(), other.start())
    p = on_card(0.7)
    assert await one.admits(p)

    reserved = await other.refusal(on_card(0.5, name="b"))
    await one.overseer.bring_up(p)
    runs = await other.refusal(on_card(0.5, name="b"))
    assert await other.admits(on_card(0.3, name="c"))
    assert await other.admits(on_card(1.0, name="d", card=SPARE))
    await one.overseer.stop()
    assert await other.admits(on_card(0.7, name="b", n=2))

    for message in (reserved, runs):
        assert f"device {CARD}: " in message
        assert f"m replica 0 stage a (worker w1): {int(0.7 * 80 * GIB)}" in message
        assert "it fits with stage 0 at utilization 0.3" in message


async def test_two_deployments_created_at_once_never_both_take_the_last_bytes(host):
    one, other = host
    await asyncio.gather(one.start(device_interval_s=60.0), other.start(device_interval_s=60.0))

    for n in range(1, 41):
        plans = [on_card(0.6, n, name=name) for name in ("a", "b")]
        won = await asyncio.gather(one.admits(plans[0]), other.admits(plans[1]))

        assert sorted(won) == [False, True]
        for it, p, has_won in zip(host, plans, won, strict=True):
            if has_won:
                await it.overseer.cancel(p.operation_id)


async def test_stage_of_a_killed_agent_counts_for_the_other_until_it_ends(host):
    one, other = host
    await asyncio.gather(one.start(), other.start())
    await one.overseer.bring_up(on_card(0.7))
    await one.overseer.hears(lambda it: it.replica_states, "it has its stage")
    pid = one.overseer.shards["a"].pid

    await one.kill()
    message = await other.refusal(on_card(0.5, name="b"))
    os.kill(pid, signal.SIGKILL)

    assert f"m replica 0 stage a (worker w1): {int(0.7 * 80 * GIB)}" in message
    await one.home.nothing_runs()
    await other.has_room(on_card(1.0, name="b", n=2))


async def test_next_life_of_an_agent_has_its_claims_again(host):
    one, other = host
    await asyncio.gather(one.start(), other.start())
    p = on_card(0.7)
    await one.overseer.bring_up(p)
    await one.kill()

    await one.start()
    await one.overseer.hears(lambda it: it.replica_states, "it has its stage again")

    assert "(worker w1)" in await other.refusal(on_card(0.5, name="b"))
    assert one.overseer.last.devices[0].reserved_bytes == int(0.7 * 80 * GIB)
    await one.overseer.stop()
    assert await other.admits(on_card(1.0, name="b", n=2))


@pytest.mark.parametrize("point", ["booked", "reserve-written", "spawned", "pid-written"])
async def test_agent_killed_at_a_step_of_a_start_leaves_no_bytes_behind(host, point):
    """Before its stage runs nothing of it counts; and its next life goes on, or undoes it."""
    one, other = host
    await asyncio.gather(
        one.start(env={"STAGEKEEPER_TEST_KILL_AT": point}, operation_lease_s=1.0), other.start()
    )
    bringing_up = asyncio.create_task(one.overseer.bring_up(on_card(0.7)))
    try:
        assert one.agent is not None
        assert await one.agent.ended() == -signal.SIGKILL
    finally:
        bringing_up.cancel()
        await asyncio.wait({bringing_up})
    await one.home.nothing_runs()  # what waited on its start pipe has ended

    await other.has_room(on_card(0.6, name="b"))
    await one.start(operation_lease_s=1.0)

    # It finds its bytes taken, or is not joined: nothing is left in either case.
    await one.overseer.hears(
        lambda it: not it.operations and not it.replica_states, "nothing of it is left"
    )
    await wait_for(lambda: one.overseer.last.devices[0].reserved_bytes == 0, "its ledger says so")
    assert await other.admits(on_card(0.4, name="c"))


async def test_recovery_U12_failed_starts_leave_every_byte_free(host):
    one, other = host
    await asyncio.gather(one.start(), other.start())

    for n in range(1, 6):
        broken = stage("a", "sample_stages:Broken", device=CARD, utilization=1.0)
        p = plan(broken, n=n, operation=f"op-{n}")
        await one.overseer.take(RESERVE, p)
        outcome = await one.overseer.take(START, p)
        assert outcome.state == types_pb2.OPERATION_STATE_ROLLED_BACK

    assert await other.admits(on_card(1.0, name="b"))
    await other.overseer.cancel("b-1")
    assert await one.admits(on_card(1.0, n=9))


async def test_startup_7_refusal_names_free_wanted_and_the_pids_that_hold_the_rest(host, stranger):
    one, _ = host
    one.nvml.card(CARD, used_bytes=6 * GIB)
    one.nvml.says(f"process {CARD} {stranger.pid} {5 * GIB}")
    await one.start()

    message = await one.refusal(on_card(0.95))

    assert f"device {CARD}: " in message
    assert f"stage 0: 0.95 × {80 * GIB} = {76 * GIB}" in message
    assert f"pid {stranger.pid} (python" in message
    assert f"): {5 * GIB} (5 GiB); others (pids unknown): {GIB} (1 GiB); " in message
    assert f"free: {74 * GIB} (74 GiB);" in message
    assert "it fits with stage 0 at utilization 0.925" in message
    assert not one.home.processes
    # The supervisor is told, so that a plan says the same.
    devices = {it.device_id: it for it in one.overseer.last.devices}
    held = {it.pid: it.memory_bytes for it in devices[CARD].foreign}
    assert held == {stranger.pid: 5 * GIB, 0: GIB}
    assert await one.admits(on_card(0.925, n=2))


async def test_startup_4_stage_is_not_counted_as_its_own_stranger_and_more_than_it_reserved_counts(
    host,
):
    one, other = host
    await asyncio.gather(one.start(), other.start())
    await one.overseer.bring_up(on_card(0.3))
    await one.overseer.hears(lambda it: it.replica_states, "it has its stage")
    pid = one.overseer.shards["a"].pid
    one.nvml.says(f"process {CARD} {pid} {24 * GIB}")
    one.nvml.card(CARD, used_bytes=24 * GIB)

    assert await other.admits(on_card(0.7, name="b"))
    await other.overseer.cancel("b-1")
    one.nvml.says_no_more(f"process {CARD}", f"card {CARD}")
    one.nvml.says(f"process {CARD} {pid} {40 * GIB}")
    one.nvml.card(CARD, used_bytes=40 * GIB)
    theirs = await other.refusal(on_card(0.7, name="b", n=2))
    own = await one.refusal(on_card(0.7, name="b", n=2))

    assert f"(worker w1) (reserved {24 * GIB}, uses more): {40 * GIB}" in theirs
    assert f"m replica 0 stage a (reserved {24 * GIB}, uses more): {40 * GIB}" in own

    def beyond(slice_: Any) -> list[tuple[int, int]]:
        holders = [holder for it in slice_.devices for holder in it.foreign]
        return [(it.pid, it.memory_bytes) for it in holders if it.worker_id == "w1"]

    await one.overseer.hears(lambda it: beyond(it) == [(pid, 16 * GIB)], "the excess is told")


async def test_startup_43_pids_of_another_namespace_are_said_to_be_unknown_and_count(host):
    one, _ = host
    one.nvml.card(CARD, used_bytes=40 * GIB)
    one.nvml.says(f"process {CARD} {2**22 + 7} {40 * GIB}")
    await one.start()

    message = await one.refusal(on_card(0.6))

    assert f"others (pids unknown): {40 * GIB}" in message
    assert await one.admits(on_card(0.5, n=2))


async def test_startup_43_card_of_which_the_driver_lists_nobody_counts_what_is_used(host):
    one, _ = host
    one.nvml.says("error nvmlDeviceGetComputeRunningProcesses 3")
    one.nvml.card(CARD, used_bytes=40 * GIB)
    await one.start()

    assert f"others (pids unknown): {40 * GIB}" in await one.refusal(on_card(0.6))
    await one.overseer.bring_up(on_card(0.5, n=2))
    # As much as it reserved may be its own by now.
    one.nvml.card(CARD, used_bytes=70 * GIB)
    other = await one.refusal(on_card(0.2, name="b"))
    assert f"others (pids unknown): {30 * GIB}" in other


async def test_startup_42_totals_belong_to_uuids_whatever_the_order_of_the_cards(host):
    one, other = host
    await one.start()
    one.nvml.says_no_more("card")
    one.nvml.card(SPARE, 10 * GIB)
    one.nvml.card(CARD, 80 * GIB)
    await one.overseer.hears(
        lambda it: it.devices[0].device_id == SPARE, "the cards have changed places"
    )
    await other.start()

    for worker in host:
        totals = {it.device_id: it.total_bytes for it in worker.overseer.last.devices}
        assert totals == {CARD: 80 * GIB, SPARE: 10 * GIB}
    big = stage("a", device=SPARE, utilization=0.9)
    assert await one.admits(plan(big))
    message = await other.refusal(on_card(0.2, name="b", card=SPARE))
    assert f"device {SPARE}: {9 * GIB + 2 * GIB} bytes needed (11 GiB), {10 * GIB} there" in message


async def test_startup_6_private_temporary_folders_do_not_part_the_ledger(host, tmp_path):
    one, other = host
    for it in host:
        (tmp_path / it.worker_id).mkdir()
    await asyncio.gather(*(it.start(env={"TMPDIR": str(tmp_path / it.worker_id)}) for it in host))
    domains = [[it.lock_domain_id for it in w.overseer.last.devices] for w in host]
    assert domains[0] == domains[1]
    assert await one.admits(on_card(0.6))

    assert await other.refusal(on_card(0.6, name="b"))
    assert await other.admits(on_card(0.4, name="b", n=2))


async def test_slices_of_ram_of_two_agents_are_different_cards(host):
    one, other = host
    await asyncio.gather(one.start(devices=["cpu:0=1GiB"]), other.start(devices=["cpu:0=1GiB"]))

    assert await one.admits(on_card(1.0, card="cpu:0"))
    assert await other.admits(on_card(1.0, card="cpu:0", name="b"))
    assert await one.refusal(on_card(0.1, card="cpu:0", n=2, name="c"))


async def test_startup_39_full_card_is_a_refusal_and_no_other_card_is_touched(host, stranger):
    one, _ = host
    one.nvml.card(CARD, used_bytes=80 * GIB)
    one.nvml.says(f"process {CARD} {stranger.pid} {80 * GIB}")
    await one.start()

    message = await one.refusal(on_card(0.1))

    assert f"device {CARD}" in message
    assert SPARE not in message
    assert "free: 0; no cut of one stage's utilization is enough" in message
    inventory = await one.overseer.agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=10)
    assert {it.device_id: it.reserved_bytes for it in inventory.devices} == {CARD: 0, SPARE: 0}


async def test_memory_that_came_free_a_moment_ago_can_be_had(host):
    """Cards are read anew for each reservation, not counted as they were a while ago."""
    one, _ = host
    one.nvml.card(CARD, used_bytes=60 * GIB)
    await one.start(device_interval_s=600.0)
    assert await one.refusal(on_card(0.9))

    one.nvml.says_no_more(f"card {CARD}")
    one.nvml.card(CARD)

    assert await one.admits(on_card(0.9, n=2))


async def test_ledger_that_somebody_holds_refuses_and_names_him_and_the_agent_goes_on(host):
    one, _ = host
    await one.start()
    lock = one.home.path / "l" / "ledger.lock"
    holder = subprocess.Popen(  # noqa: ASYNC220
        [
            sys.executable,
            "-c",
            "import fcntl, sys; it = open(sys.argv[1], 'r+'); fcntl.lockf(it, fcntl.LOCK_EX); "
            "print('held', flush=True); input()",
            str(lock),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        reserving = asyncio.create_task(one.refusal(on_card(0.1)))
        beats = one.overseer.heartbeat_count
        message = await reserving
        assert f"held by process {holder.pid}" in message
        assert one.overseer.heartbeat_count > beats
    finally:
        await asyncio.to_thread(holder.communicate, b"\n")

    assert await one.admits(on_card(0.1, n=2))
