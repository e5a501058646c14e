"""A program at the root of a tree on a cluster: `cluster_program.py MODE ENDPOINT JOURNAL LEASE_S`.

Notes `pid N` for each of its actors and what they start, then `up`. `hold` stays until it is
killed; `stop` leaves when the file JOURNAL.gate is there.
"""

from __future__ import annotations

import asyncio
import sys

from stagekeeper.actor import root
from tests.stages.actor_cases import note, pass_gate
from tests.stages.kept_actor import Far


async def main() -> None:
    mode, endpoint, journal, lease_s = sys.argv[1:]
    async with root(endpoint, lease_s=float(lease_s), stop_budget_s=1.0) as tree:
        hosts = await tree.hosts()
        far = hosts.spawn_procs(1, name="far").spawn("far", Far)
        for pid in (await far.pid.call()).values():
            note(journal, f"pid {pid}")
        for pid in (await far.start_sleeper.call()).values():
            note(journal, f"pid {pid}")
        note(journal, "up")
        if mode == "hold":
            await asyncio.Event().wait()
        await asyncio.to_thread(pass_gate, f"{journal}.gate")
    note(journal, "left")


if __name__ == "__main__":
    asyncio.run(main())
