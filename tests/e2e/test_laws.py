"""The laws about death, with real processes: what dies, and what does not notice."""

from __future__ import annotations

import os
import signal

import grpc
import pytest

from stagekeeper.client import NotFound
from stagekeeper.v1 import stage_service_pb2, stage_service_pb2_grpc, types_pb2
from stagekeeper.wire.error_details import unpack
from stagekeeper.wire.transport import CLIENT_OPTIONS
from tests.e2e.specs import chain, echo
from tests.e2e.traffic import traffic
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for


async def test_L1_supervisor_killed_under_load_no_call_fails_and_no_stage_restarts(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    await cluster.start_agent("node-2")
    async with cluster.client() as client:
        await client.deploy(chain(replicas=2))
        before = cluster.stage_processes()
        async with traffic(client, "chain", "ask") as calls:
            for _ in range(2):
                assert cluster.supervisor is not None
                cluster.supervisor.kill()
                await calls.more()
                await cluster.start_supervisor()
                await cluster.all_ready("chain", 2, client)
                await calls.more()
        assert calls.failures == []
        assert cluster.stage_processes() == before
        assert len(before) == 6


async def test_L2_agents_killed_under_load_stages_go_on_and_are_adopted(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    await cluster.start_agent("node-2")
    async with cluster.client() as client:
        await client.deploy(chain(replicas=2))
        before = cluster.stage_processes()
        async with traffic(client, "chain", "ask") as calls:
            for agent in cluster.agents.values():
                agent.kill()
            await calls.more()
            for worker_id in ("node-1", "node-2"):
                agent = await cluster.start_agent(worker_id)
                assert (await agent.line(r"adopted=(\d+)"))[1] == "3"
            await cluster.workers_alive(2, client)
            await cluster.all_ready("chain", 2, client)
            await calls.more()
        assert calls.failures == []
        assert cluster.stage_processes() == before
        # The proof that they were adopted, and not only found: the next agents can stop them.
        await client.delete("chain")
        await cluster.no_stage_left()


async def test_L2_stages_answer_while_nobody_else_is_alive(standing: Cluster) -> None:
    agent = standing.agents["node-1"]
    async with standing.client() as client:
        await client.deploy(echo())
        assert await client.call("echo", "echo", "before") == "before"
        agent.kill()
        assert standing.supervisor is not None
        standing.supervisor.kill()
        async with traffic(client, "echo") as calls:
            await calls.more(200)
        assert calls.failures == []


async def test_L5_deploying_the_same_twice_starts_nothing(standing: Cluster) -> None:
    async with standing.client() as client:
        await client.deploy(echo())
        before = standing.stage_processes()
        await client.deploy(echo())
        assert standing.stage_processes() == before


async def test_L6_call_meant_for_another_instance_is_refused_before_it_runs(
    standing: Cluster,
) -> None:
    async with standing.client() as client:
        await client.deploy(echo())
        record = (await client.get("echo")).replicas[0].shards[0].record
        async with grpc.aio.insecure_channel(
            record.addresses[0].url, options=CLIENT_OPTIONS
        ) as channel:
            stub = stage_service_pb2_grpc.StageServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Call(
                    stage_service_pb2.CallRequest(
                        instance_id="another",
                        endpoint="say",
                        payload=types_pb2.Payload(text='{"line": "it ran"}'),
                    ),
                    timeout=10,
                )
        details = unpack(caught.value)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert details is not None and details.reason == "STALE_ROUTE"
        lines = [line async for line in client.stage_log("echo")]
        assert "it ran" not in lines


async def test_L6_a_replaced_stage_is_found_at_its_new_address(standing: Cluster) -> None:
    async with standing.client() as client, standing.client() as other:
        await client.deploy(echo())
        first = await client.call("echo", "where")
        await other.delete("echo")
        await other.deploy(echo())
        second = await client.call("echo", "where", timeout=20.0)
        assert first["pid"] != second["pid"]


async def test_L4_stage_that_dies_is_failed_with_the_reason_and_deploy_starts_it_anew(
    standing: Cluster,
) -> None:
    async with standing.client() as client:
        await client.deploy(chain())
        pids = {
            shard.record.stage_name: shard.record.pid
            for shard in (await client.get("chain")).replicas[0].shards
        }
        os.kill(pids["side"], signal.SIGKILL)

        async def failed() -> bool:
            replica = (await client.get("chain")).replicas[0]
            return replica.state == types_pb2.REPLICA_STATE_FAILED

        await wait_for(failed, "the replica is FAILED")
        deployment = await client.get("chain")
        assert deployment.state == types_pb2.DEPLOYMENT_STATE_FAILED
        assert "side" in deployment.replicas[0].reason
        assert "signal 9" in deployment.replicas[0].reason or "SIGKILL" in deployment.reason
        (failure,) = await client.failures("chain")
        assert failure.kind == types_pb2.FAILURE_KIND_SIGNALED
        assert failure.exit.signal == signal.SIGKILL
        assert failure.origin.stage_name == "side"

        await client.deploy(chain())
        await standing.all_ready("chain", 1, client)
        assert len(standing.stage_processes()) == 3
        assert await client.call("chain", "ask", "again") == "again"


async def test_L3_failed_start_leaves_nothing_and_says_why(standing: Cluster) -> None:
    from stagekeeper.client import DeployFailed

    spec = chain("broken")
    spec["stages"][2]["entrypoint"] = "sample_stages:Broken"
    async with standing.client() as client:
        with pytest.raises(DeployFailed, match="half downloaded"):
            await client.deploy(spec)
        await standing.no_stage_left()
        deployment = await client.get("broken")
        assert deployment.state == types_pb2.DEPLOYMENT_STATE_FAILED
        assert "LOAD" in deployment.reason
        worker = (await client.workers()).workers[0]
        assert [device.reserved_bytes for device in worker.devices] == [0, 0]
        await client.delete("broken")
        with pytest.raises(NotFound):
            await client.get("broken")
