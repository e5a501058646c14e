"""What the cases about starts share: deployments, what is left of them, how long they may take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stagekeeper.client import Client
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import Spec
from tests.harness.cluster import Cluster
from tests.harness.processes import processes_naming
from tests.harness.waiting import wait_for


def patience_s(reached_in_s: float) -> float:
    """How long a test waits for what the product should reach in so many seconds."""
    return max(5.0, 5 * reached_in_s)


def stage(
    name: str,
    entrypoint: str,
    *,
    devices: Sequence[int] = (0,),
    utilization: float = 0.3,
    **more: Any,
) -> dict[str, Any]:
    return {
        "name": name,
        "entrypoint": entrypoint,
        "devices": list(devices),
        "memory": {"utilization": utilization},
        **more,
    }


def deployment(name: str, *stages: dict[str, Any]) -> Spec:
    return {"name": name, "stages": list(stages)}


def slow(name: str, gate: Path, **more: Any) -> Spec:
    """One stage that loads until its gate is opened."""
    return deployment(name, stage(name, "sample_stages:Slow", args={"gate": str(gate)}, **more))


def processes_of(cluster: Cluster) -> dict[int, str]:
    """The processes of all stages, what they started included: they name the agents' state."""
    programs = {
        program.pid for program in (cluster.supervisor, *cluster.agents.values()) if program
    }
    found = processes_naming(str(cluster.directory / "a"))
    return {pid: command for pid, command in found.items() if pid not in programs}


async def reserved_bytes(client: Client) -> list[int]:
    """What is reserved on each card of every worker."""
    workers = (await client.workers()).workers
    return [device.reserved_bytes for worker in workers for device in worker.devices]


async def used_bytes(client: Client) -> list[int]:
    workers = (await client.workers()).workers
    return [device.used_bytes for worker in workers for device in worker.devices]


async def nothing_reserved(client: Client) -> None:
    async def look() -> bool:
        return not any(await reserved_bytes(client))

    await wait_for(look, "nothing is reserved")


async def in_load(client: Client, name: str) -> None:
    async def look() -> bool:
        shards = [shard.record for it in (await client.get(name)).replicas for shard in it.shards]
        return any(shard.phase == types_pb2.PHASE_LOAD and shard.pid for shard in shards)

    await wait_for(look, f"{name} loads")
