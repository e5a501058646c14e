"""A program that is the root of an actor tree, to be run to its end: `actor_program MODE JOURNAL`.

What it and its actors do is written to the journal; each mode is one way in which a tree ends.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Awaitable, Callable

import stagekeeper.actor as actor
from stagekeeper.actor import MeshFailure, root, this_host, this_proc
from tests.stages.actor_cases import Broken, Manager, Untidy, Worker, note

JOURNAL = sys.argv[2]


def count_hook(failure: MeshFailure) -> None:
    note(JOURNAL, f"hook {failure.kind}")


async def healthy() -> None:
    """Stop everything in order: some from the leaves, some from the root, some by leaving."""
    actor.unhandled_fault_hook = count_hook
    async with root():
        procs = this_host().spawn_procs(1)
        managers = procs.spawn("managers", Manager, "handle", JOURNAL)
        await managers[0].spawn_more.call_one("extra", 1)
        note(JOURNAL, str(await managers[0].stop_workers.call_one(5)))
        workers = this_proc().spawn("workers", Worker, "leaf", JOURNAL)
        assert await workers.add.call_one(1, 2) == 3
        await workers.stop()
        await managers.stop()
        await procs.spawn("last", Worker, "last", JOURNAL).take.call_one(1)


async def default_hook() -> None:
    """A failure reaches the root, which waits for something else."""
    try:
        async with root():
            note(JOURNAL, "up")
            managers = this_host().spawn_procs(1).spawn("managers", Manager, "refuse", JOURNAL)
            await managers.break_one.call_one()
            await asyncio.sleep(600)
    finally:
        note(JOURNAL, "finally")


async def raising_hook() -> None:
    """The hook itself raises."""

    def hook(failure: MeshFailure) -> None:
        count_hook(failure)
        raise LookupError("the pager is off")

    actor.unhandled_fault_hook = hook
    async with root():
        workers = this_proc().spawn("workers", Worker, "w", JOURNAL)
        workers.fail.broadcast("one")
        await asyncio.sleep(600)


async def leaving_by_exception() -> None:
    """The block is left by an error of the program's own."""
    async with root():
        managers = this_host().spawn_procs(1).spawn("managers", Manager, "handle", JOURNAL, 1, 1)
        await note_pids(managers)
        raise LookupError("the program's own")


async def waiting() -> None:
    """Be killed."""
    async with root():
        managers = this_host().spawn_procs(1).spawn("managers", Manager, "handle", JOURNAL, 1, 1)
        await note_pids(managers)
        note(JOURNAL, "up")
        await asyncio.sleep(600)


async def untidy() -> None:
    """What goes wrong at the very end reaches the hook."""
    actor.unhandled_fault_hook = count_hook
    async with root():
        await this_proc().spawn("untidy", Untidy).add.call_one(1, 2)


async def broken() -> None:
    """Nothing is awaited, and an `__init__` raises."""
    async with root():
        this_proc().spawn("broken", Broken, "/nowhere")
        await asyncio.sleep(600)


async def note_pids(managers: Manager) -> None:
    """Write down the processes of a manager, of its worker, and of what that started."""
    workers = await managers.mesh.call_one()
    grandchild = await workers.start_grandchild.call_one()
    for pid in (
        (await workers.where.call_one())["pid"],
        (await managers.pid.call_one()),
        grandchild,
    ):
        note(JOURNAL, f"pid {pid}")


MODES: dict[str, Callable[[], Awaitable[None]]] = {
    it.__name__: it
    for it in (
        healthy,
        default_hook,
        raising_hook,
        leaving_by_exception,
        waiting,
        untidy,
        broken,
    )
}

if __name__ == "__main__":
    atexit.register(note, JOURNAL, "atexit")
    asyncio.run(MODES[sys.argv[1]]())  # type: ignore[arg-type]
