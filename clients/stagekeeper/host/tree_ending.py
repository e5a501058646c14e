"""Ending a part of an actor tree from an event loop, which goes on meanwhile.

Decided here: only that each look at the table of processes happens in a thread; `tree_sweep` knows
the rest.
"""

from __future__ import annotations

import asyncio

from stagekeeper.host.tree_sweep import Member, Sweep, pauses_s


async def end_tree(work: Sweep, *, deadline_s: float) -> set[Member]:
    """Kill everything at or below a place until nothing is left of it.

    Cancelling it leaves the rest alive.

    Returns:
        Everybody who was killed.

    Raises:
        TimeoutError: something still lives, with its pids.
    """
    await asyncio.to_thread(work.look)
    for pause_s in pauses_s(work, deadline_s):
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(work.look)
    return work.killed
