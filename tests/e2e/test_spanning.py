"""Replicas whose stages have shards on two workers: served, seen, deleted, and failing as one."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import pairwise

import grpc
import psutil
import pytest

from stagekeeper.client import DeployFailed, NotFound
from stagekeeper.v1 import stage_service_pb2, stage_service_pb2_grpc, types_pb2
from stagekeeper.wire.transport import CLIENT_OPTIONS
from tests.e2e.spanning import (
    NODES,
    PLACES,
    deployed,
    gang,
    nothing_left,
    places,
    settled,
    shards,
    two_agents,
    whole,
    wide,
)
from tests.fakes.tcp_proxy import DOWN, TcpProxy
from tests.harness.cluster import Cluster
from tests.harness.command_line import command_line
from tests.harness.waiting import wait_for
from tests.harness.wires import WiredCluster

WORKERS = NODES  # of the standing cluster
ONE_CARD = ["cpu:0=1GiB"]


async def test_replica_on_two_workers_serves_is_shown_and_leaves_nothing(standing: Cluster) -> None:
    spec = wide(standing)
    async with standing.client() as client:
        await client.deploy(spec)
        await whole(standing, client, spec)
        assert await places(client) == PLACES
        known = await shards(client)
        assert {place: record.shard_count for place, record in known.items()} == {
            place: 1 if place[0] == "side" else 2 for place in PLACES
        }

        # Calls of clients reach shard 0 of the entry, and of a stage that is named.
        assert await client.call("wide", "where") == {
            "pid": known["front", 0].pid,
            "stage": "front",
            "shard": 0,
        }
        assert (await client.call("wide", "where", stage="back"))["shard"] == 0

        # A shard on the other worker finds its siblings too: shard 0 of each, over there.
        for sibling in ("back", "side"):
            asked = await _asked_directly(known["front", 1], "ask", sibling)
            assert f'"pid":{known[sibling, 0].pid}' in asked.replace(" ", "")

        told = await command_line("status", endpoint=standing.endpoint)
        assert told.code == 0
        for shown in ("front[0]", "front[1]", "back[1]", "side", "5/5", *NODES):
            assert shown in told.out
        held = {
            it.worker_id: [device.reserved_bytes for device in it.devices]
            for it in (await client.workers()).workers
        }
        share = int(0.2 * 1024**3)
        assert held == {"node-1": [2 * share, share], "node-2": [2 * share, 0]}

        await client.delete("wide")
        assert standing.stage_processes() == {}
        await nothing_left(standing, client)
        with pytest.raises(NotFound):
            await client.get("wide")


async def _asked_directly(record: types_pb2.ShardRecord, endpoint: str, text: str) -> str:
    """Call one shard as any gRPC client can, by its address."""
    (url,) = [it.url for it in record.addresses if it.name == "stage"]
    async with grpc.aio.insecure_channel(url, options=CLIENT_OPTIONS) as channel:
        stub = stage_service_pb2_grpc.StageServiceStub(channel)
        request = stage_service_pb2.CallRequest(
            instance_id=record.instance_id,
            endpoint=endpoint,
            payload=types_pb2.Payload(content_type="application/json", text=f'"{text}"'),
        )
        return (await stub.Call(request, timeout=20)).payload.text


async def test_stages_that_share_a_card_start_one_after_another_on_both_workers(
    standing: Cluster,
) -> None:
    gate = standing.directory / "gate"
    spec = wide(standing, front={"gate": str(gate), "gated_shard": 1})
    async with standing.client() as client:
        creation = asyncio.create_task(client.deploy(spec))

        async def first_is_up() -> bool:
            known = await shards(client)
            is_up = types_pb2.SHARD_STATE_READY
            return {it for it in known if known[it].state == is_up} == {("front", 0), ("side", 0)}

        await wait_for(first_is_up, "one shard of the first stage is up")
        assert set(await shards(client)) == {("front", 0), ("front", 1), ("side", 0)}
        assert not any(it.committed for it in (await shards(client)).values())
        with pytest.raises(Exception, match=r"READY|NO_REPLICA"):
            await client.call("wide", "where", timeout=0.5)
        gate.touch()
        await creation
        known = await shards(client)
        first = max(known["front", it].ready_time.ToDatetime() for it in (0, 1))
        second = min(known["back", it].create_time.ToDatetime() for it in (0, 1))
        assert first <= second


async def test_recovery_U31_failed_shard_takes_the_other_worker_down_and_is_the_one_error(
    cluster: Cluster,
) -> None:
    await two_agents(cluster)
    never = str(cluster.directory / "never")
    failing = {"fails": 1, "gate": never, "gated_shard": 0}
    spec = wide(cluster, back=failing)
    async with cluster.client() as client:
        with pytest.raises(DeployFailed) as caught:
            await client.deploy(spec)
        # Shard 0 would have loaded for ever: it was ended, and no other error is told.
        (failure,) = caught.value.failures
        assert failure.worker_id == "node-2"
        for told in ("back", "shard 1", "node-2", "weights of this shard are torn"):
            assert told in failure.message, failure.message
        await nothing_left(cluster, client)
        assert len(await client.failures("wide")) == 1
        undone = {(it.stage_name, it.worker_id) for it in failure.rollback}
        assert {("back", "node-1"), ("front", "node-1"), ("front", "node-2")} <= undone
        assert all(it.cleaned for it in failure.rollback)
        again = wide(cluster)
        await client.delete("wide")
        await client.deploy(again)
        await whole(cluster, client, again)


async def test_worker_that_dies_and_stays_away_takes_the_start_down_on_the_other(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor("--lease-s=2", "--lost-s=3")
    await asyncio.gather(*(cluster.start_agent(node) for node in NODES))
    gate = cluster.directory / "gate"
    spec = wide(cluster, front={"gate": str(gate)})
    async with cluster.client() as client:
        creation = asyncio.create_task(client.deploy(spec))
        await wait_for(lambda: len(cluster.stage_processes()) == 3, "all that may load does")
        cluster.agents["node-2"].kill()
        with pytest.raises(DeployFailed, match="node-2"):
            await creation
        # What it left is its next life's to undo: a machine that is gone is not asked.
        await wait_for(lambda: len(cluster.stage_processes()) <= 1, "the other part is undone")

        async def is_free() -> bool:
            workers = (await client.workers()).workers
            (first,) = [it for it in workers if it.worker_id == "node-1"]
            return not any(it.reserved_bytes for it in first.devices)

        await wait_for(is_free, "nothing is reserved on the worker that is left")
        await cluster.start_agent("node-2")
        await nothing_left(cluster, client)
        gate.touch()
        assert await settled(cluster, client, spec) == types_pb2.DEPLOYMENT_STATE_FAILED


async def test_start_that_nobody_joins_is_undone_on_both_workers_when_its_lease_is_over(
    cluster: Cluster,
) -> None:
    await two_agents(cluster, "--operation-lease-s=2")
    gate = cluster.directory / "gate"
    spec = wide(cluster, front={"gate": str(gate)})
    async with cluster.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        await wait_for(lambda: len(cluster.stage_processes()) == 3, "all that may load does")
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        await cluster.no_stage_left()
        for agent in cluster.agents.values():
            await agent.line("operation_lease_s")
        await cluster.start_supervisor()
        assert not await creation
        deployment = await client.get("wide")
        assert deployment.state == types_pb2.DEPLOYMENT_STATE_FAILED
        assert "no supervisor joined it" in deployment.reason
        gate.touch()
        await settled(cluster, client, spec)


async def test_recovery_U23_start_on_two_workers_is_cancelled_by_a_delete(
    standing: Cluster,
) -> None:
    never = str(standing.directory / "never")
    spec = wide(standing, front={"gate": never})
    async with standing.client() as client:
        creation = asyncio.create_task(deployed(client, spec))
        await wait_for(lambda: len(standing.stage_processes()) == 3, "all that may load does")
        await asyncio.wait_for(client.delete("wide"), 10.0)
        assert not await creation
        await nothing_left(standing, client)
        await client.deploy(wide(standing))


async def test_shard_that_dies_in_service_makes_the_replica_failed_and_deploy_mends_it(
    standing: Cluster,
) -> None:
    spec = wide(standing)
    async with standing.client() as client:
        await client.deploy(spec)
        os.kill((await shards(client))["back", 1].pid, signal.SIGKILL)

        async def is_failed() -> bool:
            return (await client.get("wide")).state == types_pb2.DEPLOYMENT_STATE_FAILED

        await wait_for(is_failed, "the deployment is FAILED")
        reason = (await client.get("wide")).replicas[0].reason
        assert "back" in reason and "node-2" in reason
        await client.deploy(spec)
        await whole(standing, client, spec)


async def test_everything_killed_in_service_is_the_same_replica_again(standing: Cluster) -> None:
    spec = wide(standing)
    async with standing.client() as client:
        await client.deploy(spec)
        before = standing.stage_processes()
        known = await shards(client)
        for program in (standing.supervisor, *standing.agents.values()):
            assert program is not None
            program.kill()
        await two_agents(standing)
        await whole(standing, client, spec)
        assert standing.stage_processes() == before
        after = await shards(client)
        assert {it: after[it].instance_id for it in after} == {
            it: known[it].instance_id for it in known
        }
        # The next agents know where the siblings on the other worker are.
        asked = await _asked_directly(after["front", 1], "ask", "side")
        assert str(after["side", 0].pid) in asked
        await client.delete("wide")
        await nothing_left(standing, client)


async def test_gangs_that_share_cards_start_one_at_a_time_however_many_are_created_at_once(
    cluster: Cluster,
) -> None:
    """Each shard waits for the other one while it has its worker's only card."""
    await two_agents(cluster, devices=ONE_CARD)
    names = ["a", "b", "c", "d"]
    async with cluster.client() as client:
        await asyncio.gather(*(client.deploy(gang(cluster, name)) for name in names))
        known = [(await shards(client, name)).values() for name in names]
        spans = sorted(
            (
                min(it.create_time.ToDatetime() for it in records),
                max(it.ready_time.ToDatetime() for it in records),
            )
            for records in known
        )
        for earlier, later in pairwise(spans):
            assert earlier[1] <= later[0], "two gangs had their cards at the same time"
        assert len(cluster.stage_processes()) == 2 * len(names)


@pytest.mark.parametrize("killed", ["nobody", "supervisor", "agents"])
async def test_gang_that_waits_for_its_turn_says_so_and_comes_up_after_the_other(
    cluster: Cluster, killed: str
) -> None:
    await two_agents(cluster, devices=ONE_CARD)
    gate = cluster.directory / "gate"
    async with cluster.client() as client:
        first = asyncio.create_task(client.deploy(gang(cluster, "first", gate=str(gate))))
        marks = [cluster.directory / "meet" / f"first.front.{shard}.here" for shard in (0, 1)]
        await wait_for(lambda: all(it.exists() for it in marks), "both shards of the first load")
        second = asyncio.create_task(client.deploy(gang(cluster, "second")))

        async def is_told() -> bool:
            reason = (await client.get("second")).reason
            return "on workers node-1, node-2 after first replica 0" in reason

        await wait_for(is_told, "it is told that the second one waits")
        before = cluster.stage_processes()
        if killed == "supervisor":
            assert cluster.supervisor is not None
            cluster.supervisor.kill()
            await cluster.start_supervisor()
        elif killed == "agents":
            for agent in cluster.agents.values():
                agent.kill()
            await asyncio.gather(*(cluster.start_agent(node, devices=ONE_CARD) for node in NODES))
        await wait_for(is_told, "it is told that the second one waits, still")
        assert cluster.stage_processes() == before
        gate.touch()
        await asyncio.gather(first, second)
        assert before.items() <= cluster.stage_processes().items()
        for name in ("first", "second"):
            await client.delete(name)
        await nothing_left(cluster, client)


@pytest.mark.parametrize("step", ["RESERVE", "START"])
async def test_recovery_R39_step_whose_answer_is_lost_is_asked_again_and_done_once(
    step: str,
) -> None:
    """The second agent carries the step out, and its answer never arrives."""
    async with WiredCluster() as cluster, TcpProxy() as commands:
        second = await cluster.start_agent("node-2", f"--advertise={commands.url}", ready=False)
        commands.move(f"127.0.0.1:{await _port_of(second.pid)}")
        await cluster.start_supervisor()
        await cluster.start_agent("node-1")
        gate = cluster.directory / "gate"
        spec = wide(cluster, front={"gate": str(gate), "gated_shard": 1})
        async with cluster.client() as client:
            await cluster.workers_alive(2, client)

            async def are_dialled_back() -> bool:
                return all(it.agent_reachable for it in (await client.workers()).workers)

            # The answer to that must not be the one that is lost.
            await wait_for(are_dialled_back, "both agents have answered their supervisor")
            if step == "RESERVE":
                commands.swallow_reply()
            creation = asyncio.create_task(client.deploy(spec))
            if step == "RESERVE":
                await wait_for(lambda: commands.swallowed_replies, "an answer is swallowed")
                await wait_for(lambda: _has_reserved(cluster, "node-2"), "it has reserved")
                assert cluster.stage_processes() == {}
            else:
                await wait_for(
                    lambda: len(cluster.stage_processes()) == 3, "all that may load does"
                )
                commands.stall(DOWN)
                gate.touch()

                async def is_up() -> bool:
                    record = (await shards(client))["front", 1]
                    return record.state == types_pb2.SHARD_STATE_READY

                await wait_for(is_up, "the second agent reports its shard READY")
                assert ("back", 0) not in await shards(client), "nobody was told so"
            before, connections = cluster.stage_processes(), commands.connection_count
            commands.reset()  # what was answered is lost
            commands.release(DOWN)
            gate.touch()
            await creation
            assert commands.connection_count > connections, "it was asked again"
            await whole(cluster, client, spec)
            assert before.items() <= cluster.stage_processes().items()
            await client.delete("wide")
            await nothing_left(cluster, client)


def _has_reserved(cluster: Cluster, node: str) -> bool:
    return any(node in str(it) for it in (cluster.directory / "a").glob("**/operations/*.json"))


async def _port_of(pid: int) -> int:
    def look() -> list[int]:
        connections = psutil.Process(pid).net_connections("tcp")
        return [it.laddr.port for it in connections if it.status == psutil.CONN_LISTEN]

    (port,) = await wait_for(look, "a listening port")
    return int(port)
