"""recovery-R45: the wall clock of one part jumps by an hour, and nothing follows from it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from stagekeeper.client import Client
from stagekeeper.v1 import types_pb2
from tests.e2e.beats import beats, worker
from tests.e2e.specs import Spec
from tests.e2e.traffic import traffic
from tests.harness.cluster import Cluster
from tests.harness.moved_clock import MovedClock

HOUR_S = 3600
JUMPS_S = (HOUR_S, -HOUR_S)
LEASE_S = 2.0
BEATS_OF_A_LEASE = 4


def _watch(name: str, env: dict[str, str]) -> Spec:
    stage: dict[str, Any] = {"name": "watch", "entrypoint": "sample_stages:Watch"}
    return {"name": name, "replicas": 1, "stages": [{**stage, "env": env} if env else stage]}


# The supervisor's clock is the one that decides most; the others go the same way in the long run.
@pytest.mark.parametrize(
    "part",
    [
        "supervisor",
        pytest.param("agent", marks=pytest.mark.soak),
        pytest.param("stage", marks=pytest.mark.soak),
    ],
)
async def test_recovery_R45_wall_clock_that_jumps_an_hour_changes_no_state(
    cluster: Cluster, part: str
) -> None:
    clock = MovedClock(cluster.directory)
    env = {it: clock.env if it == part else {} for it in ("supervisor", "agent", "stage")}
    await cluster.start_supervisor(f"--lease-s={LEASE_S}", env=env["supervisor"])
    await cluster.start_agent(env=env["agent"])
    async with cluster.client() as client:
        await client.deploy(_watch("steady", env["stage"]))
        await beats(client, 2)
        pids, before = cluster.stage_processes(), await _what_is_held(client)
        states: set[int] = set()

        async with traffic(client, "steady") as calls:
            for offset_s in JUMPS_S:
                clock.move_to(offset_s)
                looking = asyncio.create_task(_look(client, states))
                await beats(client, BEATS_OF_A_LEASE)
                looking.cancel()
                await calls.more()
                assert await _what_is_held(client) == before
                # New work goes on by that clock too; and it is the proof that the clock has moved.
                await client.deploy(_watch(f"new-{offset_s}", env["stage"]))
                shown_s = await _time_shown_by(part, client, f"new-{offset_s}") - time.time()
                assert abs(shown_s - offset_s) < HOUR_S / 4
                await client.delete(f"new-{offset_s}")
                await beats(client, 2)
                before = await _what_is_held(client)

        assert calls.failures == []
        assert states == {types_pb2.WORKER_STATE_ALIVE}
        assert cluster.stage_processes() == pids
        assert (await worker(client)).incarnation == 1


async def _look(client: Client, states: set[int]) -> None:
    while True:
        states.add((await worker(client)).state)
        await asyncio.sleep(0.02)


async def _what_is_held(client: Client) -> tuple[Any, ...]:
    """Return all that a decision taken by the wall clock would have changed."""
    it = await worker(client)
    listed = await client.list()
    return (
        listed.complete,
        (it.incarnation, it.revision, it.registration_count, it.shard_count, it.reason),
        [
            (deployment.name, deployment.state, replica.state, replica.reason, shard.worker_state)
            for deployment in listed.deployments
            for replica in deployment.replicas
            for shard in replica.shards
        ],
    )


async def _time_shown_by(part: str, client: Client, name: str) -> float:
    """Return a time of day that a part has just noted down, in seconds since 1970."""
    if part == "stage":
        return float(await client.call(name, "wall_s"))
    deployment = await client.get(name)
    if part == "supervisor":
        return deployment.create_time.ToNanoseconds() / 1e9
    return deployment.replicas[0].shards[0].record.create_time.ToNanoseconds() / 1e9
