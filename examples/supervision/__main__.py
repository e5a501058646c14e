"""`python -m examples.supervision`: who hears of a failure, and what each owner can do about it.

Ends with exit status 1 on purpose: the last chapter is a failure that nobody handles.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import stagekeeper.actor
from examples.supervision.actors import Careful, Director, Manager, Worker
from stagekeeper.actor import Died, MeshFailure, root, this_host

_LIMIT_S = 30.0


def chapter(title: str) -> None:
    print(f"\n── {title}", flush=True)


def tell(text: str) -> None:
    print("\n".join(f"   {line}" for line in text.splitlines()), flush=True)


async def until_told(stories: Callable[[], Awaitable[list[str]]]) -> str:
    """Return the first story that an owner has to tell."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            told = await stories()
            if told:
                return told[0]
            await asyncio.sleep(0.01)


async def error_to_its_caller() -> None:
    chapter("1. An error of a call goes to its caller, and to nobody else")
    worker = this_host().spawn_procs(1).spawn("worker", Worker)
    try:
        await worker.divide.call_one(1, 0)
    except ZeroDivisionError as error:
        tell(f"except ZeroDivisionError: {error}")
    tell(f"the actor lives on: 6 / 3 = {await worker.divide.call_one(6, 3):g}")


async def manager_that_absorbs() -> None:
    chapter("2. A process is killed; its manager respawns it in place")
    manager = this_host().spawn_procs(1).spawn("careful", Careful)
    before = await manager.pids.call_one()
    os.kill(before[1], signal.SIGKILL)
    tell(await until_told(manager.stories.call_one))
    after = await manager.pids.call_one()
    tell(f"worker 0 is process {after[0]}, as before; worker 1 was {before[1]}, is {after[1]}")


async def manager_that_refuses() -> None:
    chapter("3. A manager refuses: it fails too, and its owner handles that")
    director = this_host().spawn_procs(1).spawn("director", Director, "refusing")
    await director.spoil_one.call_one()
    tell(await until_told(director.stories.call_one))


async def manager_that_raises() -> None:
    chapter("4. A manager's own handler raises: a new failure, with the old one as its cause")
    director = this_host().spawn_procs(1).spawn("director", Director, "clumsy")
    await director.spoil_one.call_one()
    tell(await until_told(director.stories.call_one))


async def hook_that_handles() -> None:
    chapter("5. Nobody below handles it: the hook does")
    heard: asyncio.Future[MeshFailure] = asyncio.get_running_loop().create_future()
    before = stagekeeper.actor.unhandled_fault_hook
    stagekeeper.actor.unhandled_fault_hook = heard.set_result
    manager = this_host().spawn_procs(1).spawn("manager", Manager)
    await manager.spoil_one.call_one()
    failure = await asyncio.wait_for(heard, _LIMIT_S)
    stagekeeper.actor.unhandled_fault_hook = before
    tell(str(failure))
    try:
        await manager.pids.call_one()
    except Died as error:
        tell(f"who calls the failed manager is told the same: failure {error.failure_id}")


async def default_hook() -> None:
    chapter("6. Nobody handles it, and the hook is the default: the program ends as by Ctrl-C")
    worker = this_host().spawn_procs(1).spawn("worker", Worker)
    try:
        worker.spoil.broadcast()
        await asyncio.sleep(_LIMIT_S)
    finally:
        tell("finally blocks run")


async def main() -> None:
    async with root():
        await error_to_its_caller()
        await manager_that_absorbs()
        await manager_that_refuses()
        await manager_that_raises()
        await hook_that_handles()
        await default_hook()


if __name__ == "__main__":
    asyncio.run(main())
