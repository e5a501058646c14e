"""Actor trees: how soon an end is known, what a call costs beside a bare stream, spawn and stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.actor_classes import Echo, Witness
from benchmarks.bidi_ceiling import echo_stream
from benchmarks.ceiling import rate
from benchmarks.report import Row, median_of, quantile, show
from stagekeeper.actor import root, this_host, this_proc

KILLS = 20
CASTS = 60
HANGS = 5
ROUNDS = 10
ROUND_CALLS = 400
ROUND_S = 0.5
IN_FLIGHT = 64
BODY = b"x" * 64


async def failures() -> None:
    """From the end of a process to its callers and its owner; a broadcast's error; a hang."""
    rows = []
    async with root():
        # The witness lives in the program's own process; its worker has one of its own.
        witness = this_proc().spawn("witness", Witness)
        to_caller, to_owner = [], []
        for number in range(KILLS):
            holding = asyncio.create_task(witness.hold.call_one())
            pid = await witness.worker_pid.call_one()
            killed_at = _now()
            os.kill(pid, signal.SIGKILL)
            to_caller.append(await holding - killed_at)
            to_owner.append(await _heard(witness, number) - killed_at)
        rows += [
            _latency("SIGKILL → pending caller", to_caller, 0.020, 0.100),
            _latency("SIGKILL → __supervise__", to_owner, 0.020, 0.100),
        ]
        casts, in_place = [], []
        for number in range(CASTS):
            await witness.worker_pid.call_one()
            sent_at = await witness.cast_failing.call_one()
            casts.append(await _heard(witness, KILLS + number) - sent_at)
            _, respawns = await witness.heard.call_one()
            in_place.append(respawns[-1])
        rows += [
            _latency("broadcast error → owner", casts, 0.005, None),
            _latency("respawn in place", in_place, 0.050, None),
        ]
    async with root(lease_s=0.5):
        witness = this_proc().spawn("witness", Witness)
        hangs = []
        for number in range(HANGS):
            pid = await witness.worker_pid.call_one()
            stopped_at = _now()
            os.kill(pid, signal.SIGSTOP)
            hangs.append(await _heard(witness, number) - stopped_at)
        rows.append(_latency("hang → owner, lease 0.5 s", hangs, 0.7, None, unit="s"))
    show(
        "actor failures",
        f"{KILLS} kills, {CASTS} broadcasts, {HANGS} hangs, one after the other; clock of the host",
        rows,
    )


async def actor_calls() -> None:
    """Calls of an actor against a bare bidi stream that echoes the same bytes, in turns."""
    ours_one: list[float] = []
    bare_one: list[float] = []
    ours_many: list[float] = []
    bare_many: list[float] = []
    mesh: list[float] = []
    async with echo_stream() as bare, root():
        workers = this_host().spawn_procs(4).spawn("workers", Echo)
        await workers.ready()
        one = workers[0].echo

        async def call() -> None:
            await one.call_one(BODY)

        async def echo() -> None:
            await bare.call(BODY)

        async def all_four() -> None:
            await workers.echo.call(BODY)

        turns: list[tuple[Callable[[], Awaitable[None]], list[float], list[float]]]
        turns = [(call, ours_one, ours_many), (echo, bare_one, bare_many)]
        for _ in range(ROUNDS):
            for work, one_at_a_time, many in turns:
                one_at_a_time.append(await _mean_s(work, ROUND_CALLS))
                many.append(await rate([work], in_flight=IN_FLIGHT, for_s=ROUND_S))
            mesh.append(await _mean_s(all_four, ROUND_CALLS // 4))
            turns.reverse()
    trip = median_of([mine / bare for mine, bare in zip(ours_one, bare_one, strict=True)])
    share = median_of([bare / mine for mine, bare in zip(ours_many, bare_many, strict=True)])
    show(
        "actor calls",
        f"{len(BODY)} bytes each way, median of {ROUNDS} turns in both orders; the ceiling is one "
        "bidi stream between two processes that echoes, one message an answer",
        [
            Row(
                "call round trip",
                _us(median_of(ours_one)),
                _us(median_of(bare_one)),
                f"{trip:.2f} ×",
                "<= 1.3 ×",
                trip <= 1.3,
            ),
            Row(
                f"calls/s, {IN_FLIGHT} in flight",
                f"{median_of(ours_many):,.0f}",
                f"{median_of(bare_many):,.0f}",
                f"{share:.2f} × the time",
                "<= 1.3 ×",
                share <= 1.3,
            ),
            Row(
                "`call` on a mesh of 4",
                _us(median_of(mesh)),
                _us(median_of(bare_one)),
                f"{median_of(mesh) / median_of(bare_one):.2f} ×",
            ),
        ],
    )


async def spawns() -> None:
    """New processes without torch, and their stop."""
    rows = []
    async with root():
        first = this_host().spawn_procs(1)  # starts the tree's warden too
        await first.ready()
        for count, limit_s in ((1, 0.5), (2, None), (4, None)):
            took, stopped = [], []
            for _ in range(5):
                bare_s = await _bare_start_s()
                began = time.perf_counter()
                procs = this_host().spawn_procs(count)
                workers = procs.spawn("workers", Echo)
                await workers.ready()
                took.append((time.perf_counter() - began, bare_s))
                began = time.perf_counter()
                await workers.stop(5.0)
                await procs.stop(5.0)
                stopped.append(time.perf_counter() - began)
            spawn_s = median_of([mine for mine, _ in took])
            bare = median_of([bare for _, bare in took])
            rows.append(
                Row(
                    f"spawn {count}, actors up",
                    f"{spawn_s:.3f} s",
                    f"{bare:.3f} s to import grpc in a new Python",
                    f"{spawn_s / bare:.1f} ×",
                    "" if limit_s is None else f"<= {limit_s:g} s",
                    None if limit_s is None else spawn_s <= limit_s,
                )
            )
            rows.append(Row(f"stop {count}", f"{median_of(stopped):.3f} s"))
    show("actor spawns", "median of 5; processes without torch", rows)


async def _bare_start_s() -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import grpc.aio")
    await process.wait()
    return time.perf_counter() - began


async def _heard(witness: Witness, number: int) -> float:
    """Return when the witness heard of its failure with this number."""
    async with asyncio.timeout(10.0):
        while True:
            heard, respawns = await witness.heard.call_one()
            if len(heard) > number and len(respawns) > number:
                return heard[number]


async def _mean_s(work: Callable[[], Awaitable[None]], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await work()
    return (time.perf_counter() - began) / count


def _latency(
    what: str, samples: list[float], p50_s: float, p99_s: float | None, *, unit: str = "ms"
) -> Row:
    middle, worst = median_of(samples), quantile(samples, 0.99)
    scale = 1 if unit == "s" else 1_000
    reach = f"p50 <= {p50_s * scale:g} {unit}"
    is_reached = middle <= p50_s
    if p99_s is not None:
        reach += f", p99 <= {p99_s * scale:g} {unit}"
        is_reached = is_reached and worst <= p99_s
    value = f"p50 {middle * scale:.2f}, p99 {worst * scale:.2f} {unit}"
    return Row(what, value, reach=reach, is_reached=is_reached)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
