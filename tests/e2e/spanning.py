"""What the tests of replicas on two workers share: their cluster, the deployment, what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from stagekeeper.client import Client, NotFound, StagekeeperError
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import Spec
from tests.harness.cluster import DEVICES, Cluster
from tests.harness.waiting import wait_for

NODES = ("node-1", "node-2")

PLACES = {
    ("front", 0): "node-1",
    ("front", 1): "node-2",
    ("back", 0): "node-1",
    ("back", 1): "node-2",
    ("side", 0): "node-1",
}
"""The shards of `wide`, and where they lie on two empty workers."""

Env = Mapping[str, str] | None


def wide(cluster: Cluster, name: str = "wide", **args: Mapping[str, Any]) -> Spec:
    """A replica on two workers: two stages share a card on both, one has a card of the first.

    Args:
        cluster: its directory is where shards meet.
        name: of the deployment.
        args: stage name → further arguments of that stage (see `spanning_stages.Gang`).
    """
    folder = cluster.directory / "meet"
    folder.mkdir(exist_ok=True)

    def gang(stage: str, device: int, shard_count: int) -> dict[str, Any]:
        return {
            "name": stage,
            "entrypoint": "spanning_stages:Gang",
            "args": {"folder": str(folder), **args.get(stage, {})},
            "devices": [device],
            "memory": {"utilization": 0.2},
            "shard_count": shard_count,
        }

    stages = [gang("front", 0, 2), gang("back", 0, 2), gang("side", 1, 1)]
    return {"name": name, "entry": "front", "stages": stages}


def pair(cluster: Cluster, **args: Mapping[str, Any]) -> Spec:
    """As `wide`, without the stage that lies on one worker alone: two processes on each."""
    spec = wide(cluster, "wide", **args)
    return {**spec, "stages": spec["stages"][:2]}


def gang(cluster: Cluster, name: str, **args: Any) -> Spec:
    """A replica of one stage, with a shard on the first card of each of two workers."""
    spec = wide(cluster, name, front=args)
    return {"name": name, "stages": spec["stages"][:1]}


async def two_agents(
    cluster: Cluster,
    *flags: str,
    devices: Sequence[str] = DEVICES,
    supervisor: Env = None,
    agents: Mapping[str, Env] | None = None,
) -> None:
    """Start a supervisor and two agents.

    Args:
        cluster: of which nothing runs yet.
        flags: of the agents.
        devices: of each of them.
        supervisor: added to its environment.
        agents: worker id → what is added to the environment of its agent.
    """
    await cluster.start_supervisor(env=dict(supervisor or {}))
    of = agents or {}
    await asyncio.gather(
        *(
            cluster.start_agent(node, *flags, devices=devices, env=dict(of.get(node) or {}))
            for node in NODES
        )
    )


async def deployed(client: Client, spec: Spec) -> bool:
    """Deploy; whether it came up is for the caller to like or not."""
    try:
        await client.deploy(spec, timeout=60.0)
    except StagekeeperError:
        return False
    return True


async def shards(
    client: Client, name: str = "wide"
) -> dict[tuple[str, int], types_pb2.ShardRecord]:
    """Return what is known of the shards of the only replica."""
    (replica,) = (await client.get(name)).replicas
    found = {(it.record.stage_name, it.record.shard_index): it for it in replica.shards}
    assert len(found) == len(replica.shards), "a shard is there twice"
    return {place: it.record for place, it in found.items()}


async def places(client: Client, name: str = "wide") -> dict[tuple[str, int], str]:
    (replica,) = (await client.get(name)).replicas
    return {(it.record.stage_name, it.record.shard_index): it.worker_id for it in replica.shards}


async def whole(cluster: Cluster, client: Client, spec: Spec) -> None:
    """See that the only deployment serves: a call over both workers, and no process too many."""
    name = spec["name"]
    await cluster.all_ready(name, 1, client)
    known = await shards(client, name)
    assert set(known) == {
        (stage["name"], shard) for stage in spec["stages"] for shard in range(stage["shard_count"])
    }
    for record in known.values():
        assert record.committed and record.state == types_pb2.SHARD_STATE_READY
    assert {it.pid for it in known.values()} == set(cluster.stage_processes())
    assert len({it.operation_id for it in known.values()}) == 1
    answer = await client.call(name, "ask", "back", timeout=20.0)
    assert answer["pid"] == known["back", 0].pid


async def nothing_left(cluster: Cluster, client: Client) -> None:
    """See that both workers are here, with no process and no reservation."""
    await cluster.no_stage_left()

    async def is_free() -> bool:
        workers = (await client.workers()).workers
        assert {it.worker_id for it in workers} == set(NODES)
        is_alive = all(it.state == types_pb2.WORKER_STATE_ALIVE for it in workers)
        held = sum(device.reserved_bytes for it in workers for device in it.devices)
        return held == 0 and is_alive

    await wait_for(is_free, "nothing is reserved on either worker")


async def decided(client: Client, name: str = "wide") -> int:
    """Wait until a deployment is READY or FAILED; return which."""

    async def look() -> int:
        state = (await client.get(name)).state
        ends = (types_pb2.DEPLOYMENT_STATE_READY, types_pb2.DEPLOYMENT_STATE_FAILED)
        return state if state in ends else 0

    return int(await wait_for(look, f"{name} is READY or FAILED"))


async def is_gone(client: Client, name: str = "wide") -> bool:
    try:
        await client.get(name)
    except NotFound:
        return True
    return False


async def settled(
    cluster: Cluster, client: Client, spec: Spec, *, again: Spec | None = None
) -> int:
    """See a deployment whole or not at all, and then through another life; return which it was.

    Args:
        cluster: has both agents and a supervisor again.
        client: of it.
        spec: what was deployed.
        again: what is deployed then, if not the same.
    """
    name = spec["name"]
    state = await decided(client, name)
    if state == types_pb2.DEPLOYMENT_STATE_READY:
        await whole(cluster, client, spec)
    else:
        assert (await client.get(name)).reason
        await nothing_left(cluster, client)
    if again is not None:
        await client.delete(name)
    await client.deploy(again or spec)
    await whole(cluster, client, spec)
    await client.delete(name)
    await nothing_left(cluster, client)
    return state
