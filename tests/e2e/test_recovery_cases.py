"""Cases that users of neighbouring systems reported, by number: the recovery path of one box."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc

from stagekeeper.client import Client
from stagekeeper.v1 import (
    deployment_service_pb2,
    stage_service_pb2,
    stage_service_pb2_grpc,
    types_pb2,
)
from stagekeeper.wire.payload import decode_arguments, encode
from stagekeeper.wire.transport import SERVER_OPTIONS
from tests.e2e.specs import chain, echo
from tests.e2e.traffic import traffic
from tests.fakes.hand_worker import HandWorker, shard
from tests.harness.cluster import Cluster
from tests.harness.roster import roster_written
from tests.harness.waiting import wait_for


async def test_recovery_R1_killed_supervisor_lists_the_same_replicas_again(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    for worker_id in ("node-1", "node-2", "node-3"):
        await cluster.start_agent(worker_id)
    async with cluster.client() as client:
        await client.deploy(echo(replicas=6))
        before, pids = await _stable_listing(client), cluster.stage_processes()
        assert len(pids) == 6

        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        await cluster.start_supervisor()
        await cluster.workers_alive(3, client)

        assert await _stable_listing(client) == before
        assert cluster.stage_processes() == pids
        assert (await client.workers()).registration_count == 3


async def _stable_listing(client: Client) -> list[dict[str, Any]]:
    """Return every replica without the figures that move by themselves."""
    listed = []
    for deployment in (await client.list()).deployments:
        for replica in deployment.replicas:
            for held in replica.shards:
                record = held.record
                listed.append(
                    {
                        "replica": (deployment.name, replica.replica_index, replica.state),
                        "shard": (record.stage_id, record.shard_index, record.shard_count),
                        "worker": held.worker_id,
                        "instance": record.instance_id,
                        "pid": record.pid,
                        "created": record.create_time.ToJsonString(),
                        "abilities": list(record.abilities),
                        "model": (record.model_name, record.model_version),
                        "generation": record.generation.SerializeToString(deterministic=True),
                        "url": record.addresses[0].url,
                    }
                )
    return listed


async def test_recovery_R2_supervisor_at_another_port_is_found_and_the_old_port_left_alone(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent()
    old = await HandWorker(cluster.endpoint).supervisor_address()
    async with cluster.client() as client:
        await cluster.workers_alive(1, client)
        assert cluster.supervisor is not None
        cluster.supervisor.kill()

        knocks = 0

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal knocks
            knocks += 1
            writer.close()

        host, port = old.rsplit(":", 1)
        trap = await asyncio.start_server(count, host, int(port))
        async with trap:
            await cluster.start_supervisor()
            assert await HandWorker(cluster.endpoint).supervisor_address() != old
            await cluster.workers_alive(1, client)
            (worker,) = (await client.workers()).workers
            assert worker.registration_count == 1
            knocks_before = knocks
            for _ in range(3):
                await _next_heartbeat(client)
            assert knocks == knocks_before


async def _next_heartbeat(client: Client) -> None:
    """Return when a worker was silent for a moment and then was heard."""
    longest_s = 0.0

    async def is_heard() -> bool:
        nonlocal longest_s
        silent_s = (await client.workers()).workers[0].silent_for_s
        was_heard = silent_s < longest_s
        longest_s = max(longest_s, silent_s)
        return was_heard

    await wait_for(is_heard, "a heartbeat")


async def test_recovery_R5_agent_before_its_supervisor_waits_and_says_so(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    assert cluster.supervisor is not None
    cluster.supervisor.kill()  # its endpoint is known now, and nobody is there

    agent = await cluster.start_agent(ready=False)
    first = await agent.line(r"^.*attempt=1\b.*$")
    assert cluster.endpoint in first[0]
    assert "error=" in first[0]
    await agent.line(r"attempt=3\b")
    assert agent.is_running

    await cluster.start_supervisor()
    async with cluster.client() as client:
        await cluster.workers_alive(1, client)


async def test_recovery_R5_agent_that_may_not_wait_ends_with_69(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    assert cluster.supervisor is not None
    cluster.supervisor.kill()

    agent = await cluster.start_agent("node-1", "--max-wait=0", ready=False)
    assert await agent.ended() == 69
    assert cluster.endpoint in agent.output
    assert "Traceback" not in agent.output


async def test_recovery_R9_every_recovered_replica_can_be_stopped(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    await cluster.start_agent("node-2")
    async with cluster.client() as client:
        await client.deploy(chain("a"))
        await client.deploy(echo("b"))
        assert len(cluster.stage_processes()) == 4
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        await cluster.start_supervisor()
        for name in ("a", "b"):
            await cluster.all_ready(name, 1, client)
            await client.delete(name)
        await cluster.no_stage_left()
        for worker in (await client.workers()).workers:
            assert [device.reserved_bytes for device in worker.devices] == [0, 0]


async def test_recovery_R14_replica_that_dies_while_its_supervisor_recovers_is_failed(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    # A worker of the roster that is not back yet keeps the new reign in RECOVERING.
    await cluster.start_agent("node-2")
    async with cluster.client() as client:
        await cluster.workers_alive(2, client)
        await client.deploy({**echo(), "placement": {"workers": ["node-1"]}})
        pid = (await client.get("echo")).replicas[0].shards[0].record.pid
        await roster_written(cluster.directory / "s", 2)
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        cluster.agents["node-2"].kill()
        await cluster.start_supervisor("--recovery-window-s=60")
        await cluster.all_ready("echo", 1, client)  # replayed
        assert not (await client.list()).complete  # and not committed to

        os.kill(pid, signal.SIGKILL)
        await cluster.start_agent("node-2")
        await wait_for(lambda: _is_complete(client), "the recovery is over")
        (replica,) = (await client.get("echo")).replicas
        assert replica.state == types_pb2.REPLICA_STATE_FAILED
        assert "SIGKILL" in replica.reason


async def _is_complete(client: Client) -> bool:
    return (await client.list()).complete


class _AnswersWithItsName(stage_service_pb2_grpc.StageServiceServicer):
    """A stage at the edge: says which one it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def Call(self, request: Any, context: Any) -> stage_service_pb2.CallResponse:
        decode_arguments(request.payload)
        answer = encode(self.name, request.payload.content_type)
        return stage_service_pb2.CallResponse(payload=answer)

    def CallStream(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def Connect(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError


async def _serve(name: str) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    stage_service_pb2_grpc.add_StageServiceServicer_to_server(_AnswersWithItsName(name), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_recovery_R23_changed_data_port_is_watched_and_used(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    one, first = await _serve("first")
    two, second = await _serve("second")
    worker = HandWorker(cluster.endpoint).hold(shard("m", url=first))
    await worker.register()
    async with cluster.client() as client:
        assert await client.call("m", "run") == "first"

        changes: list[deployment_service_pb2.WatchDeploymentsResponse] = []

        async def watch() -> None:
            async for change in client.watch():
                changes.append(change)  # noqa: PERF401 - read while it grows

        watching = asyncio.create_task(watch())
        synced = deployment_service_pb2.CHANGE_KIND_SYNCED
        await wait_for(lambda: synced in [change.kind for change in changes], "a snapshot")
        await worker.hold(shard("m", url=second, instance="another")).register()

        def modified() -> bool:
            return any(
                change.kind == deployment_service_pb2.CHANGE_KIND_MODIFIED
                and change.deployment.replicas[0].shards[0].record.addresses[0].url == second
                for change in changes
            )

        await wait_for(modified, "a MODIFIED with the new address")
        watching.cancel()
        await wait_for(
            lambda: set(client.routes.addresses) == {second}, "the client's own routes follow"
        )
        assert await client.call("m", "run") == "second"
    await one.stop(0)
    await two.stop(0)


async def test_recovery_R46_stage_that_holds_the_gil_never_makes_its_agent_suspect(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1", "--busy-after-s=1")
    async with cluster.client() as client:
        await client.deploy(echo())
        states: set[int] = set()

        async def replica_is_busy() -> bool:
            states.add((await client.workers()).workers[0].state)
            record = (await client.get("echo")).replicas[0].shards[0].record
            return record.busy_for_s > 1.0

        holding = asyncio.create_task(client.call("echo", "hold_gil", 5.0, timeout=60.0))
        await wait_for(replica_is_busy, "the replica shows BUSY")

        async def call_is_over() -> bool:
            states.add((await client.workers()).workers[0].state)
            return holding.done()

        await wait_for(call_is_over, "the call that holds the GIL ends", within_s=60.0)
        assert await holding == "held"
        assert states == {types_pb2.WORKER_STATE_ALIVE}


async def test_recovery_U26_a_deployment_reported_ready_is_seen_by_everybody(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        for round_number in range(5):
            name = f"echo-{round_number}"
            await client.deploy(echo(name))
            async with Client(cluster.endpoint) as stranger:
                listed = {one.name: one.state for one in (await stranger.list()).deployments}
                assert listed[name] == types_pb2.DEPLOYMENT_STATE_READY
                assert await stranger.call(name, "echo", "hi") == "hi"


async def test_recovery_U27_names_come_back_exactly_as_they_were_given(cluster: Cluster) -> None:
    names = ["llama-2", "a-rep1", "x-rank0", "模型 ñ-2"]
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        for name in names:
            await client.deploy(echo(name))
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        await cluster.start_supervisor()
        for name in names:
            (replica,) = (await cluster.all_ready(name, 1, client)).replicas
            assert replica.replica_index == 0
            assert await client.call(name, "echo", name) == name
        assert sorted(d.name for d in (await client.list()).deployments) == sorted(names)


async def test_traffic_to_one_replica_does_not_suffer_from_the_death_of_the_other(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    await cluster.start_agent("node-2")
    async with cluster.client() as client:
        await client.deploy(echo(replicas=2))
        victim = (await client.get("echo")).replicas[0].shards[0].record.pid
        async with traffic(client, "echo") as calls:
            os.kill(victim, signal.SIGKILL)
            await calls.more(200)
        assert calls.failures == []
