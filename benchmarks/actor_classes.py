"""The actors that the benchmarks spawn."""

from __future__ import annotations

import asyncio
import os
import time

from stagekeeper.actor import Actor, MeshFailure, endpoint, this_host


class Echo(Actor):
    """Answers at once."""

    @endpoint
    async def echo(self, value: bytes) -> bytes:
        return value

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def fail(self) -> None:
        raise ValueError("as asked")


class Witness(Actor):
    """Owns one worker, and notes when it hears of its failures; respawns it then."""

    def __init__(self) -> None:
        self._heard_at: list[float] = []
        self._respawn_s: list[float] = []
        self._workers = this_host().spawn_procs(1).spawn("worker", Echo)

    @endpoint
    async def worker_pid(self) -> int:
        return await self._workers.pid.call_one()

    @endpoint
    async def cast_failing(self) -> float:
        """Broadcast what raises; return the time at which it was sent."""
        sent = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._workers.fail.broadcast()
        return sent

    @endpoint
    async def hold(self) -> float:
        """Wait for an answer that never comes; return when that was known."""
        try:
            await self._workers.nap.call_one(3_600.0)
        except Exception:
            return time.clock_gettime(time.CLOCK_MONOTONIC)
        raise AssertionError("the nap ended")

    @endpoint
    async def heard(self) -> tuple[list[float], list[float]]:
        """Return when failures were heard of, and how long each respawn took."""
        return self._heard_at, self._respawn_s

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self._heard_at.append(time.clock_gettime(time.CLOCK_MONOTONIC))
        began = time.perf_counter()
        await failure.respawn()
        self._respawn_s.append(time.perf_counter() - began)
        return True
