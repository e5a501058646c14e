"""Calls while the supervisor and the agents are killed again and again, beside calls in peace.

Everything is real: processes, SIGKILL, gRPC, a client in a process of its own. The same load runs
without kills first, in the same cluster, as the ceiling.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

from benchmarks.report import Row, show
from tests.harness.cluster import Cluster
from tests.harness.random_kills import RandomKills
from tests.harness.steady_load import LoadReport, steady_load

SEED_ENV = "BENCHMARK_SEED"
"""Repeats a run's moments; without it each run has its own."""

PER_S = 500.0
CALLS = 100_000
CALLS_IN_PEACE = 20_000
SUPERVISOR_KILLS = 20
KILLS_OF_EACH_AGENT = 10
AGENTS = ("node-1", "node-2")
REPLICAS = 4
SHARE_WITH_KILLS = 0.95
"""Of the time that the calls take; whoever was killed last comes back under load too."""


async def recovery_load() -> None:
    """A steady load over kills of the supervisor and of every agent, against the load alone."""
    seed = int(os.environ.get(SEED_ENV) or random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed} (to have these moments again: {SEED_ENV}={seed})")
    async with Cluster() as cluster:
        await cluster.start_supervisor()
        for worker_id in AGENTS:
            await cluster.start_agent(worker_id)
        async with cluster.client() as client:
            stage = {"name": "echo", "entrypoint": "sample_stages:Echo"}
            await client.deploy({"name": "echo", "replicas": REPLICAS, "stages": [stage]})
        pids = cluster.stage_processes()
        peace = await _load(cluster, CALLS_IN_PEACE)
        kills = RandomKills(cluster, random.Random(seed), over_s=SHARE_WITH_KILLS * CALLS / PER_S)
        began = time.perf_counter()
        storm = await _load(cluster, CALLS, kills)
        print(f"{time.perf_counter() - began:.0f} s with kills")
        await _all_are_back(cluster)
        is_untouched = cluster.stage_processes() == pids
    for error in storm.errors:
        print(f"failed: {error}")
    show(
        "recovery load",
        f"{PER_S:g} calls/s are due, 2 agents × {REPLICAS // 2} replicas; the ceiling is the same "
        f"load without kills before ({peace.sent:,} calls); seed {seed}",
        _rows(storm, peace, kills, len(pids), is_untouched),
    )


async def _load(cluster: Cluster, at_least: int, kills: RandomKills | None = None) -> LoadReport:
    async with steady_load(
        cluster.endpoint, "echo", "echo", per_s=PER_S, at_least=at_least
    ) as load:
        if kills is not None:
            await kills.run(supervisor=SUPERVISOR_KILLS, each_agent=KILLS_OF_EACH_AGENT)
        return await load.finish()


async def _all_are_back(cluster: Cluster) -> None:
    async with cluster.client() as client:
        await cluster.workers_alive(len(AGENTS), client)
        await cluster.all_ready("echo", REPLICAS, client)


def _rows(
    storm: LoadReport, peace: LoadReport, kills: RandomKills, stage_count: int, is_untouched: bool
) -> Sequence[Row]:
    killed = ", ".join(f"{count} × {name}" for name, count in sorted(kills.counts.items()))
    rows = [
        Row(
            "calls", f"{storm.sent:,}", f"{peace.sent:,}", "", f">= {CALLS:,}", storm.sent >= CALLS
        ),
        Row("failed", f"{storm.failed}", f"{peace.failed}", "", "0", storm.failed == 0),
        Row("attempts beyond the first", f"{storm.retried}", f"{peace.retried}"),
        Row("SIGKILLs", killed, "none"),
        Row(
            "stage processes",
            f"{stage_count}, " + ("the same pids" if is_untouched else "OTHER PIDS"),
            "",
            "",
            "untouched",
            is_untouched,
        ),
        _rate_row(storm, peace),
    ]
    for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
        mine, theirs = storm.quantile_s(share), peace.quantile_s(share)
        rows.append(
            Row(
                f"latency from when it was due, {name}",
                f"{mine * 1e3:.1f} ms",
                f"{theirs * 1e3:.1f} ms",
                f"{mine / theirs:.1f} ×",
            )
        )
    return rows


def _rate_row(storm: LoadReport, peace: LoadReport) -> Row:
    mine, theirs = storm.sent / storm.took_s, peace.sent / peace.took_s
    return Row("calls/s", f"{mine:.0f}", f"{theirs:.0f}", f"{mine / theirs:.2f}")
