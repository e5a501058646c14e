"""The laws about death, at random moments: a victim may be starting, adopting or recovering."""

from __future__ import annotations

import random

from tests.e2e.specs import echo
from tests.harness.cluster import Cluster
from tests.harness.random_kills import RandomKills
from tests.harness.steady_load import steady_load

KILLS = 2
OVER_S = 9.0
PER_S = 100.0
CALLS = 900


async def test_L1_L2_everything_killed_at_random_moments_no_call_fails_and_no_stage_restarts(
    cluster: Cluster,
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # what a failure shows, and what it takes to have these moments again
    await cluster.start_supervisor()
    for worker_id in ("node-1", "node-2"):
        await cluster.start_agent(worker_id)
    async with cluster.client() as client:
        await client.deploy(echo(replicas=4))
        pids = cluster.stage_processes()
        kills = RandomKills(cluster, random.Random(seed), over_s=OVER_S)

        async with steady_load(
            cluster.endpoint, "echo", "echo", per_s=PER_S, at_least=CALLS
        ) as load:
            await kills.run(supervisor=KILLS, each_agent=KILLS)
            report = await load.finish()

        assert kills.counts == {"supervisor": KILLS, "node-1": KILLS, "node-2": KILLS}
        assert report.failed == 0, report.errors
        assert report.sent >= CALLS
        await cluster.workers_alive(2, client)
        await cluster.all_ready("echo", 4, client)
        assert cluster.stage_processes() == pids
        # The proof that every stage has an agent again that can end it.
        await client.delete("echo")
        await cluster.no_stage_left()
