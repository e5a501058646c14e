"""Cases about who has a say: another cluster, another agent of the same id, an earlier life.

recovery-R13, R22, R26, R28, U21, with real processes.
"""

from __future__ import annotations

import asyncio
import json
import re

import grpc
import pytest

from stagekeeper.client import Client, NoRoom
from stagekeeper.runtime.convert import epoch_from_proto, header_to_proto
from stagekeeper.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    deployment_service_pb2,
    deployment_service_pb2_grpc,
    discovery_service_pb2,
    discovery_service_pb2_grpc,
    stage_service_pb2,
    stage_service_pb2_grpc,
    supervisor_service_pb2,
    types_pb2,
)
from tests.e2e.beats import beats, worker
from tests.e2e.specs import chain, echo
from tests.fakes.hand_worker import HandWorker, channel_to
from tests.fakes.refusals import refused
from tests.harness.cluster import Cluster
from tests.harness.processes import Program
from tests.harness.waiting import wait_for

ALIVE = types_pb2.WORKER_STATE_ALIVE
SUPERSEDED = r"obeys nobody any more"
NOBODY = "127.0.0.1:1"


async def _agent_address(agent: Program) -> str:
    found: re.Match[str] = await agent.line(r"agent ready: .*?(127\.0\.0\.1:\d+)")
    return found[1]


async def _reign(cluster: Cluster) -> types_pb2.Epoch:
    async with channel_to(cluster.endpoint) as channel:
        stub = discovery_service_pb2_grpc.DiscoveryServiceStub(channel)
        answer = await stub.GetSupervisor(discovery_service_pb2.GetSupervisorRequest(), timeout=10)
    return answer.epoch


async def _stop_slot(
    address: str,
    shard: types_pb2.ShardRecord,
    *,
    cluster: str = "default",
    epoch: types_pb2.Epoch,
    incarnation: int,
) -> agent_service_pb2.StopStageResponse:
    """Say to an agent what a supervisor would say to stop a shard."""
    async with channel_to(address) as channel:
        return await agent_service_pb2_grpc.AgentServiceStub(channel).StopStage(
            agent_service_pb2.StopStageRequest(
                header=header_to_proto(cluster, epoch_from_proto(epoch), incarnation),
                deployment=shard.deployment,
                replica_index=shard.replica_index,
                stage_id=shard.stage_id,
                up_to_generation=shard.generation,
                reason="a late clean-up",
            ),
            timeout=20,
        )


async def _echoes(shard: types_pb2.ShardRecord) -> bool:
    """Call a stage directly, as a client that kept its address would."""
    async with channel_to(shard.addresses[0].url) as channel:
        stub = stage_service_pb2_grpc.StageServiceStub(channel)
        answer = await stub.Call(
            stage_service_pb2.CallRequest(
                instance_id=shard.instance_id,
                endpoint="echo",
                payload=types_pb2.Payload(content_type="application/json", text='{"text": "hi"}'),
            ),
            timeout=20,
        )
    return bool(answer.payload.text == '"hi"')


async def _only_shard(client: Client, name: str = "echo") -> types_pb2.ShardRecord:
    return (await client.get(name)).replicas[0].shards[0].record


# --- R13: two clusters share an endpoint by mistake


async def test_recovery_R13_agent_refuses_another_clusters_supervisor_and_keeps_its_stages(
    cluster: Cluster,
) -> None:
    supervisor = await cluster.start_supervisor("--cluster=x")
    agent = await cluster.start_agent("node-1", "--cluster=x")
    async with cluster.client() as client:
        await client.deploy(echo())
        shard = await _only_shard(client)
    pids = cluster.stage_processes()
    supervisor.kill()

    supervisor = await cluster.start_supervisor("--cluster=y", f"--state-dir={cluster.directory}/y")
    await agent.line(r"serves cluster 'y', and this agent belongs to 'x'")
    async with cluster.client() as stranger:
        assert list((await stranger.workers()).workers) == []
        assert list((await stranger.list()).deployments) == []
        with pytest.raises(NoRoom):
            await stranger.deploy(echo())
    assert await _echoes(shard)

    # The other way round: what Y's supervisor would say to this agent, and X's workers to Y.
    address, epoch = await _agent_address(agent), await _reign(cluster)
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_CLUSTER"):
        await _stop_slot(address, shard, cluster="y", epoch=epoch, incarnation=1)
    lost = HandWorker(cluster.endpoint, "of-x", cluster="x")
    verdict = (await lost.heartbeat()).verdict
    assert verdict == supervisor_service_pb2.HEARTBEAT_VERDICT_WRONG_CLUSTER
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_CLUSTER"):
        await lost.register()
    assert agent.is_running
    assert cluster.stage_processes() == pids

    supervisor.kill()
    await cluster.start_supervisor("--cluster=x")
    async with cluster.client() as client:
        await cluster.all_ready("echo", 1, client)
        assert await client.call("echo", "echo", "again") == "again"
    assert cluster.stage_processes() == pids


# --- R28: two agents of one worker id, which cannot see each other's locks


async def _rival(cluster: Cluster, *flags: str, ready: bool = True) -> Program:
    """Start another agent of node-1, as a second installation on the same host would be."""
    return await cluster.start_agent(
        "rival",
        "--worker-id=node-1",
        f"--state-dir={cluster.directory}/b",
        f"--lock-dir={cluster.directory}/m",
        *flags,
        ready=ready,
    )


async def _events(
    cluster: Cluster, kind: deployment_service_pb2.EventKind.ValueType
) -> list[deployment_service_pb2.Event]:
    """Return what happened of one kind, as far as this reign remembers."""
    request = deployment_service_pb2.WatchDeploymentsRequest(
        content=deployment_service_pb2.WATCH_CONTENT_EVENTS
    )
    found = []
    async with channel_to(cluster.endpoint) as channel:
        stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
        async for message in stub.WatchDeployments(request, timeout=20):
            if message.kind == deployment_service_pb2.CHANGE_KIND_SYNCED:
                break
            if message.event.kind == kind:
                found.append(message.event)
    return found


async def _rival_has_lived(cluster: Cluster) -> None:
    """Let the rival live once, so that its next incarnation is 2."""
    rival = await _rival(cluster, f"--endpoint={NOBODY}", "--max-wait=0", ready=False)
    assert await rival.ended() == 69


async def test_recovery_R28_newer_agent_owns_the_worker_and_the_older_one_stops_nothing(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    old = await cluster.start_agent()
    await _rival_has_lived(cluster)
    async with cluster.client() as client:
        await client.deploy(echo("of-old"))
        shard, pids = await _only_shard(client, "of-old"), cluster.stage_processes()

        new = await _rival(cluster)
        await old.line(SUPERSEDED)

        owner = await _at_rest(client)
        assert (owner.incarnation, owner.state) == (2, ALIVE)
        assert owner.agent_address == await _agent_address(new)
        await beats(client, 4)
        assert (await worker(client)).registration_count == owner.registration_count
        assert old.is_running
        assert cluster.stage_processes() == pids
        assert await _echoes(shard)
        # Its authority is over: not even its own reign may stop anything through it.
        address, epoch = await _agent_address(old), await _reign(cluster)
        async with refused(grpc.StatusCode.ABORTED, "STALE_INCARNATION"):
            await _stop_slot(address, shard, epoch=epoch, incarnation=1)

        # Its operator finds it in the events, too.
        (told,) = await _events(cluster, deployment_service_pb2.EVENT_KIND_WORKER_SUPERSEDED)
        assert told.is_warning
        assert told.worker_id == "node-1"
        assert "incarnation 1" in told.message

        await client.deploy(echo("of-new"))
        assert await client.call("of-new", "echo", "hi") == "hi"
    assert pids.items() < cluster.stage_processes().items()


async def test_recovery_R28_older_agent_waits_until_the_newer_ones_lease_is_over(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor("--lease-s=3")
    await _rival_has_lived(cluster)
    new = await _rival(cluster)
    async with cluster.client() as client:
        await client.deploy(echo())
        pids, before = cluster.stage_processes(), await _at_rest(client)

        old = await cluster.start_agent(ready=False)
        await old.line(r"incarnation 1 from .* and incarnation 2 at .* was heard")
        await beats(client, 8)

        assert _identity(await worker(client)) == _identity(before)
        await cluster.all_ready("echo", 1, client)
        assert cluster.stage_processes() == pids

        new.kill()
        await old.line(r"registered .*incarnation=3")
        owner = await worker(client)
        assert (owner.incarnation, owner.state) == (3, ALIVE)
        assert cluster.stage_processes() == pids, "the new one's stages outlive it all the same"


async def _at_rest(client: Client) -> deployment_service_pb2.Worker:
    """Return the worker once nothing is left to be settled: two beats without a registration."""
    while True:
        before = await worker(client)
        await beats(client, 2)
        now = await worker(client)
        if _identity(before) == _identity(now):
            return now


def _identity(it: deployment_service_pb2.Worker) -> tuple[int, int, str, int, int]:
    """Return what tells whether anybody registered in a worker's name."""
    return (it.incarnation, it.revision, it.agent_address, it.shard_count, it.registration_count)


async def test_recovery_R28_higher_incarnation_owns_after_every_restart_of_the_supervisor(
    cluster: Cluster,
) -> None:
    supervisor = await cluster.start_supervisor()
    await _rival_has_lived(cluster)
    await _rival(cluster)
    old = await cluster.start_agent(ready=False)
    await old.line(r"incarnation 2 at .* was heard")
    async with cluster.client() as client:
        await client.deploy(echo())
        pids = cluster.stage_processes()
        for _ in range(2):
            supervisor.kill()
            supervisor = await cluster.start_supervisor()

            async def is_owned() -> bool:
                return (await worker(client)).incarnation == 2

            await wait_for(is_owned, "the higher incarnation owns the worker")
            await cluster.all_ready("echo", 1, client)
            settled = await _at_rest(client)
            await beats(client, 4)
            assert _identity(await worker(client)) == _identity(settled)
            assert settled.incarnation == 2
        assert cluster.stage_processes() == pids
    assert old.is_running


# --- R26: a clean-up that was meant for an earlier life


async def test_recovery_R26_stop_of_an_earlier_life_is_refused_by_the_next_one(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    agent = await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
        shard, pids = await _only_shard(client), cluster.stage_processes()
        agent.kill()
        agent = await cluster.start_agent()
        await cluster.all_ready("echo", 1, client)

        address, epoch = await _agent_address(agent), await _reign(cluster)
        async with refused(grpc.StatusCode.ABORTED, "STALE_INCARNATION"):
            await _stop_slot(address, shard, epoch=epoch, incarnation=1)
        assert cluster.stage_processes() == pids
        assert await client.call("echo", "echo", "hi") == "hi"

        # And one of this life that is late: the slot has a newer start by the time.
        await client.delete("echo")
        await client.deploy(echo())
        pids = cluster.stage_processes()
        late = await _stop_slot(address, shard, epoch=epoch, incarnation=2)
        assert late.stopped_count == 0
        assert cluster.stage_processes() == pids
        assert await client.call("echo", "echo", "hi") == "hi"


# --- R22: a start whose agent is in another life by the time


async def test_recovery_R22_creation_is_joined_under_the_next_life_of_its_agent(
    cluster: Cluster,
) -> None:
    gate = cluster.directory / "gate"
    slow = {
        "name": "slow",
        "stages": [
            {"name": "slow", "entrypoint": "sample_stages:Slow", "args": {"gate": str(gate)}}
        ],
    }
    await cluster.start_supervisor()
    agent = await cluster.start_agent()
    async with cluster.client() as client:
        creation = asyncio.create_task(client.deploy(slow, timeout=120.0))
        pids = await wait_for(cluster.stage_processes, "the stage is loading")
        agent.kill()
        await cluster.start_agent()
        gate.touch()

        await asyncio.wait_for(creation, 30.0)
        assert cluster.stage_processes() == pids, "nothing was loaded twice"
        assert await client.call("slow", "echo", "hi") == "hi"


# --- U21: the same worker id, elsewhere


async def test_recovery_U21_worker_that_returns_elsewhere_is_the_same_with_its_replicas(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor("--lease-s=4")
    agent = await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(chain())
        pids, before = cluster.stage_processes(), await _at_rest(client)
        agent.kill()
        _move_elsewhere(cluster, "another-host")

        agent = await cluster.start_agent(ready=False)
        await agent.line(r"worker node-1 is held by host")
        assert _identity(await worker(client)) == _identity(before), "nothing was replaced"
        await agent.line(r"registered .*incarnation=2")

        deployment = await cluster.all_ready("chain", 1, client)
        after = await worker(client)
        assert [it.worker_id for it in (await client.workers()).workers] == ["node-1"]
        assert (after.incarnation, after.state, after.shard_count) == (2, ALIVE, 3)
        assert after.agent_address != before.agent_address
        assert {it.worker_id for it in deployment.replicas[0].shards} == {"node-1"}
        assert cluster.stage_processes() == pids
        assert await client.call("chain", "ask", "hi") == "hi"


def _move_elsewhere(cluster: Cluster, host_id: str) -> None:
    """Make the agent's state that of a volume which another host has mounted."""
    path = cluster.directory / "a" / "agents" / "node-1" / "identity.json"
    identity = json.loads(path.read_text())
    path.write_text(json.dumps({**identity, "host_id": host_id}))
