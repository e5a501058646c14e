"""Cases about what clients may call while a supervisor comes back: recovery-R10, U28."""

from __future__ import annotations

import os
import signal

from stagekeeper.client import Client
from stagekeeper.v1 import types_pb2
from tests.e2e.route_journal import Entry, journal
from tests.e2e.specs import echo
from tests.e2e.traffic import traffic
from tests.harness.cluster import Cluster
from tests.harness.roster import roster_written
from tests.harness.waiting import wait_for

READY = types_pb2.REPLICA_STATE_READY
FAILED = types_pb2.REPLICA_STATE_FAILED


async def _heard_from(entries: list[Entry], reign: int) -> None:
    """Wait until the client has everything from a reign that misses nobody any more."""
    await wait_for(
        lambda: any(it.epoch == reign and it.is_complete for it in entries),
        f"the client has all from reign {reign}",
    )


async def test_recovery_R10_no_revision_after_a_restart_lacks_a_healthy_replica(
    cluster: Cluster,
) -> None:
    supervisor = await cluster.start_supervisor()
    for worker_id in ("node-1", "node-2", "node-3"):
        await cluster.start_agent(worker_id)
    async with cluster.client() as client:
        await client.deploy(echo(replicas=3))
        await wait_for(lambda: len(client.routes.routes("echo", 0)) == 3, "all are routed")
        pids = cluster.stage_processes()
        with journal(client, "echo") as entries:
            async with traffic(client, "echo") as calls:
                for reign in (2, 3):
                    await roster_written(cluster.directory / "s", 3)
                    supervisor.kill()
                    supervisor = await cluster.start_supervisor()
                    await _heard_from(entries, reign)
                    await calls.more()
            healthy = entries[0].instances
            assert len(healthy) == 3
            assert {it.epoch for it in entries} == {0, 2, 3}
            assert [it for it in entries if not it.instances >= healthy] == []
        assert calls.failures == []
        assert cluster.stage_processes() == pids


async def test_recovery_R10_routes_are_kept_while_a_worker_stays_away(cluster: Cluster) -> None:
    """The agent is gone and its stage serves: the new reign cannot know, and withdraws nothing."""
    supervisor = await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    await cluster.start_agent("node-2")
    async with cluster.client() as client:
        await client.deploy(echo(replicas=2))
        await wait_for(lambda: len(client.routes.routes("echo", 0)) == 2, "both are routed")
        with journal(client, "echo") as entries:
            async with traffic(client, "echo") as calls:
                await roster_written(cluster.directory / "s", 2)
                supervisor.kill()
                cluster.agents["node-2"].kill()
                await cluster.start_supervisor()
                await cluster.workers_alive(1, client)
                assert not (await client.list()).complete
                await calls.more()
                await cluster.start_agent("node-2")
                await _heard_from(entries, 2)
                await calls.more()
            assert {it.instances for it in entries} == {entries[0].instances}
            assert len(entries[0].instances) == 2
        assert calls.failures == []


async def test_recovery_U28_one_replica_of_three_stays_the_one_after_a_restart(
    cluster: Cluster,
) -> None:
    supervisor = await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        deployment = await client.deploy(echo(replicas=3))
        await client.synced()
        records = {it.replica_index: it.shards[0].record for it in deployment.replicas}
        for index in (0, 1):
            os.kill(records[index].pid, signal.SIGKILL)
        await wait_for(lambda: _active(client), "only replica 2 is left")
        left = {records[2].instance_id}
        pids = cluster.stage_processes()
        assert list(pids) == [records[2].pid]

        with journal(client, "echo") as entries:
            async with traffic(client, "echo") as calls:
                for reign in (2, 3):
                    supervisor.kill()
                    supervisor = await cluster.start_supervisor()
                    await _heard_from(entries, reign)
                    await wait_for(lambda: _active(client), "replica 2 is active, and no other")
                    await calls.more()
            assert {it.instances for it in entries} == {frozenset(left)}
        assert calls.failures == []
        assert cluster.stage_processes() == pids
        listed = (await client.get("echo")).replicas
        assert [(it.replica_index, it.state) for it in listed] == [
            (0, FAILED),
            (1, FAILED),
            (2, READY),
        ]
        async with Client(cluster.endpoint) as stranger:
            for _ in range(20):
                assert (await stranger.call("echo", "where"))["replica"] == 2


async def _active(client: Client) -> bool:
    """Whether replica 2 alone is READY, and alone is routed to."""
    listed = (await client.get("echo")).replicas
    routed = {route.replica_index for route in client.routes.routes("echo", 0)}
    return routed == {2} == {it.replica_index for it in listed if it.state == READY}
