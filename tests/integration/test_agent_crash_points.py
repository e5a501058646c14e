"""The agent killed by a kernel's hand at each hand-off point: the next one settles what is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stagekeeper.core.ids import InstanceId, StageId
from stagekeeper.core.model import OperationPlan, Peer
from stagekeeper.runtime.crash_points import AGENT_POINTS as POINTS
from stagekeeper.runtime.crash_points import VARIABLE
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentHome, AgentProcess, agent_in
from tests.fakes.overseer import COMMIT, RESERVE, START, Overseer, first_life, plan, stage
from tests.harness.waiting import wait_for

COMMITTED = types_pb2.OPERATION_STATE_COMMITTED
ENDED = (COMMITTED, types_pb2.OPERATION_STATE_ROLLED_BACK)

STARTED = types_pb2.OPERATION_STATE_STARTED

IN_A_ROLLBACK = {"rollback-written", "clean-written", "rolled-back"}
IN_A_DEATH = {"failure-spooled", "failed-written"}
ON_THE_WAY_UP = POINTS[: POINTS.index("rollback-written")]
TIMES = ("intent-written#2", "spawned#3", "released#2", "ready-written#2", "starting-written#2")
"""Points in the middle of a start: something is up, something loads, something is missing."""
NOBODY_JOINS = (
    "booked",
    "reserve-written",
    "pid-written",
    "ready-written#2",
    "peers-pushed",
    "commit-half-written",
)
"""Nothing but a booking, a record, a process that was not let go, one up and one missing, all up
without and with the decision."""


def _short(points: Sequence[str], every: Sequence[str]) -> list[Any]:
    """Take some points in the short run; the others are soak."""
    assert set(points) <= set(every)
    return [pytest.param(it, marks=() if it in points else pytest.mark.soak) for it in every]


ELSEWHERE = Peer(StageId(3), "d", 0, InstanceId("elsewhere"), "127.0.0.1:9")
"""A shard on another worker."""


async def drive(overseer: Overseer, point: str) -> None:
    """Do what leads past the point: a start (that fails), a death, a stop."""
    second = "sample_stages:Broken" if point in IN_A_ROLLBACK else "sample_stages:Family"
    p = plan(stage("a", device="cpu:0"), stage("b", second, device="cpu:0"), stage("c"))
    await overseer.bring_up(p)
    await overseer.hears(lambda it: len(it.replica_states) == 3, "all are up")
    if point in IN_A_DEATH:
        os.kill(overseer.shards["b"].pid, signal.SIGKILL)
        await asyncio.sleep(60)
    for stage_id in range(3):
        await overseer.stop(stage_id)


async def killed_at(
    point: str, overseer: Overseer, home: AgentHome, way: Coroutine[Any, Any, object]
) -> None:
    """See an agent be killed at this point while it is led there."""
    agent = await first_life(home, overseer, env={VARIABLE: point})
    driving = asyncio.create_task(way)
    try:
        assert await agent.ended() == -signal.SIGKILL
    finally:
        driving.cancel()
        await asyncio.wait({driving})


@pytest.mark.parametrize("point", [*POINTS, "intent-written#2", "spawned#3", "stop-gone#2"])
async def test_recovery_R49_U13_killed_at_a_point_nothing_is_left_unsettled(
    overseer: Overseer, home: AgentHome, point: str
) -> None:
    """recovery-R49, recovery-R12, recovery-U12, recovery-U13"""
    await killed_at(point, overseer, home, drive(overseer, point))

    async with agent_in(home):
        held = {shard.instance_id for shard in overseer.last.replica_states}
        # Every process that lives is reported, or is being ended.
        await wait_for(lambda: _instances(home) <= held, "no process is unknown")
        for operation in list(overseer.last.operations):
            if operation.state not in ENDED:
                await overseer.cancel(operation.operation_id)
        await overseer.hears(lambda it: not it.operations, "no operation is open")
        await overseer.hears(
            lambda it: all(
                shard.committed and shard.state != types_pb2.SHARD_STATE_STOPPING
                for shard in it.replica_states
            ),
            "what is held is committed",
        )
        for shard in list(overseer.last.replica_states):
            await overseer.stop(shard.stage_id)
        await overseer.hears(lambda it: not it.replica_states, "nothing is held")
        assert home.processes == {}
        assert {device.reserved_bytes for device in overseer.last.devices} == {0}
        assert len(overseer.failures) == len(
            {(it.origin.instance_id) for it in overseer.failures.values()}
        ), "one death was told twice"
        again = plan(stage("a", device="cpu:0"), n=2)
        assert (await overseer.bring_up(again)).state == COMMITTED


PARTS = ((StageId(0), StageId(2)), (StageId(1),))
"""In two calls, as a start that spans workers is stepped."""


async def step_by_step(overseer: Overseer, p: OperationPlan) -> types_pb2.OperationRecord:
    """Say all that leads to a commit, as a supervisor does that may have said it before."""
    record = await overseer.take(RESERVE, p)
    for stage_ids in PARTS:
        record = await overseer.take(START, p, start_stage_ids=stage_ids)
    if record.state not in (STARTED, COMMITTED):
        return record
    return await overseer.take(COMMIT, p, peers=[ELSEWHERE])


# The other half in the short run: `test_spanning_kills` goes on behind every second point.
@pytest.mark.parametrize("point", _short([*ON_THE_WAY_UP[::2], *TIMES], [*ON_THE_WAY_UP, *TIMES]))
async def test_killed_on_the_way_up_the_start_goes_on_and_touches_nothing_that_is_up(
    overseer: Overseer, home: AgentHome, point: str
) -> None:
    """recovery-R11, recovery-R22: a supervisor that says it all again joins, and it serves"""
    p = replace(
        plan(stage("a", device="cpu:0"), stage("b", device="cpu:0"), stage("c")), stage_count=4
    )
    await killed_at(point, overseer, home, step_by_step(overseer, p))
    # What waits on its start pipe, and was never let go, ends by itself.
    left = await asyncio.to_thread(home.spoken)

    async with agent_in(home):
        assert (await step_by_step(overseer, p)).state == COMMITTED
        await overseer.hears(
            lambda it: len(it.replica_states) == 3 and all(s.committed for s in it.replica_states),
            "it serves",
        )
        assert {shard.state for shard in overseer.shards.values()} == {types_pb2.SHARD_STATE_READY}
        assert set(home.processes) == {shard.pid for shard in overseer.shards.values()}
        assert left <= set(home.processes)
        assert overseer.failures == {}
        reserved = {device.device_id: device.reserved_bytes for device in overseer.last.devices}
        assert reserved == {"cpu:0": 2 * int(0.3 * 2**30), "cpu:1": 0}


# One of a kind in the short run: each has been settled in the first test as well.
@pytest.mark.parametrize("point", _short(NOBODY_JOINS, [*ON_THE_WAY_UP, *TIMES]))
async def test_killed_on_the_way_up_and_joined_by_nobody_nothing_is_left(
    overseer: Overseer, home: AgentHome, point: str
) -> None:
    p = plan(stage("a", device="cpu:0"), stage("b", device="cpu:0"), stage("c"))
    p = replace(p, stage_count=4)
    await killed_at(point, overseer, home, step_by_step(overseer, p))

    async with agent_in(home, operation_lease_s=0.5):
        is_committed = point in ("commit-written", "commit-half-written", "committed")
        count = 3 if is_committed else 0
        await overseer.hears(
            lambda it: not it.operations and len(it.replica_states) == count, "it is settled"
        )
        assert len(home.processes) == count
        assert sum(it.reserved_bytes for it in overseer.last.devices) == (
            2 * int(0.3 * 2**30) if is_committed else 0
        )


@pytest.mark.parametrize("point", ["spawned", "pid-written"])
async def test_process_that_was_not_let_go_ends_with_its_agent(
    overseer: Overseer, home: AgentHome, point: str
) -> None:
    """No next agent is needed for that: the pipe ends, and nothing of the stage has run."""
    agent = await first_life(home, overseer, env={VARIABLE: point})
    starting = asyncio.create_task(overseer.bring_up(plan(stage("a"))))
    try:
        assert await agent.ended() == -signal.SIGKILL
        await wait_for(lambda: not home.processes, "it ended by itself")
    finally:
        starting.cancel()
        await asyncio.wait({starting})


def _instances(home: AgentHome) -> set[str]:
    """The instances that processes of this home belong to."""
    found = set()
    for pid in home.processes:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().decode().split("\0")
        except OSError:
            continue
        found |= {
            word.partition("=")[2] for word in words if word.startswith("STAGEKEEPER_INSTANCE_ID=")
        }
    return found


def test_every_point_is_reached_somewhere() -> None:
    """A point that nobody reaches any more would be a test that cannot fail."""
    from pathlib import Path

    import stagekeeper.agent

    folder = Path(stagekeeper.agent.__path__[0])
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    assert [point for point in POINTS if f'reached("{point}")' not in source] == []


async def test_name_that_is_no_point_is_refused(overseer: Overseer, home: AgentHome) -> None:
    agent = await AgentProcess.start(home, env={VARIABLE: "nowhere"})

    assert await agent.ended() == 1
