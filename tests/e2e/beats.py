"""Heartbeats as a measure of how long something has held: beats are waited for, never seconds."""

from __future__ import annotations

from stagekeeper.client import Client
from stagekeeper.v1 import deployment_service_pb2
from tests.harness.waiting import wait_for


async def worker(client: Client, worker_id: str = "node-1") -> deployment_service_pb2.Worker:
    """Return one worker as it is listed."""
    return next(it for it in (await client.workers()).workers if it.worker_id == worker_id)


async def beats(client: Client, count: int, worker_id: str = "node-1") -> None:
    """Return when a worker was silent for a moment and then heard, so many times."""
    for number in range(count):
        longest_s = 0.0

        async def is_heard() -> bool:
            nonlocal longest_s
            silent_s = (await worker(client, worker_id)).silent_for_s
            was_heard = silent_s < longest_s
            longest_s = max(longest_s, silent_s)
            return was_heard

        await wait_for(is_heard, f"heartbeat {number + 1} of {worker_id}")
