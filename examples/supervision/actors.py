"""The actors of the story: one that works, and four ways of being its manager."""

from __future__ import annotations

import os

from stagekeeper.actor import Actor, MeshFailure, endpoint, this_host


class Worker(Actor):
    """Divides, and fails when it is asked to."""

    @endpoint
    async def divide(self, a: int, b: int) -> float:
        return a / b

    @endpoint
    async def where(self) -> int:
        return os.getpid()

    @endpoint
    async def spoil(self) -> None:
        raise RuntimeError("a broken shard")


class Manager(Actor):
    """Owns two workers. It has no `__supervise__`: what fails below it fails it too."""

    def __init__(self) -> None:
        self.workers = this_host().spawn_procs(2, name="shards").spawn("workers", Worker)
        self.handled: list[str] = []

    @endpoint
    async def pids(self) -> list[int]:
        return list((await self.workers.where.call()).values())

    @endpoint
    async def spoil_one(self) -> None:
        """Send the second worker a message that nobody waits for, and that raises."""
        self.workers[1].spoil.broadcast()

    @endpoint
    async def stories(self) -> list[str]:
        return self.handled


class Careful(Manager):
    """Absorbs a failure: puts a new worker in the place of the one that failed."""

    async def __supervise__(self, failure: MeshFailure) -> bool:
        assert failure.mesh is self.workers
        await failure.respawn()
        self.handled.append(failure.summary)
        return True


class Refusing(Manager):
    """Says no: this manager fails as well, and its owner is asked."""

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return False


class Clumsy(Manager):
    """Makes it worse: what it raises is a failure of its own, caused by the first one."""

    async def __supervise__(self, failure: MeshFailure) -> bool:
        raise KeyError("the plan for this is missing")


class Director(Actor):
    """Owns a manager of the kind that it is told, and handles whatever comes from it."""

    def __init__(self, kind: str) -> None:
        kinds: dict[str, type[Manager]] = {"refusing": Refusing, "clumsy": Clumsy}
        self.managers = this_host().spawn_procs(1, name="office").spawn("manager", kinds[kind])
        self.handled: list[str] = []

    @endpoint
    async def spoil_one(self) -> None:
        await self.managers.spoil_one.call_one()

    @endpoint
    async def stories(self) -> list[str]:
        return self.handled

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.handled.append(str(failure))
        return True
