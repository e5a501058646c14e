"""Actors for tests of actor trees: each does what a test asks, and writes down what it did."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

from stagekeeper.actor import (
    Actor,
    MeshFailure,
    ProcMesh,
    context,
    endpoint,
    this_host,
    this_proc,
)

GATE_LIMIT_S = 60.0


def note(journal: str, line: str) -> None:
    """Add a line to a file; lines of several processes come whole, in the order of their times."""
    if journal:
        with open(journal, "a") as file:
            file.write(f"{line}\n")


def pass_gate(gate: str) -> None:
    """Block until a file exists."""
    deadline = time.monotonic() + GATE_LIMIT_S
    while gate and not Path(gate).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody opened {gate}")
        time.sleep(0.005)


def block(seconds: float) -> None:
    """Let nothing else run in this thread."""
    time.sleep(seconds)


def start_sleeper() -> int:
    """Start what is no actor, in a session of its own."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def told(failure: MeshFailure) -> dict[str, Any]:
    """Say what a test asks about a failure."""
    return {
        "id": failure.id,
        "kind": str(failure.kind),
        "name": failure.mesh_name,
        "ranks": list(failure.ranks),
        "incarnations": list(failure.incarnations),
        "root": failure.root.id,
        "path": [list(hop) for hop in failure.path],
        "detected_by": failure.detected_by,
        "endpoint": failure.endpoint,
        "sender": failure.sender,
        "message": failure.message,
        "asked": failure.exit is not None and failure.exit.asked,
    }


class Worker(Actor):
    """Answers, waits, raises, ends its process."""

    def __init__(self, tag: str = "worker", journal: str = "") -> None:
        self.tag = tag
        self.journal = journal
        self.seen: list[int] = []
        self.given_up = 0

    @endpoint
    async def add(self, x: int, y: int) -> int:
        return x + y

    @endpoint
    async def take(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    async def taken(self) -> list[int]:
        return self.seen

    @endpoint
    async def where(self) -> dict[str, Any]:
        own = context()
        return {
            "pid": os.getpid(),
            "rank": own.rank,
            "size": own.size,
            "mesh": own.mesh_name,
            "incarnation": own.incarnation,
            "owner": own.owner,
            "owner_path": list(own.owner_path),
        }

    @endpoint
    async def nap(self, seconds: float) -> str:
        note(self.journal, f"{self.tag} naps")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            note(self.journal, f"{self.tag} woken")
            raise
        return "slept"

    @endpoint
    async def naps_given_up(self) -> int:
        return self.given_up

    @endpoint
    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    @endpoint
    async def fail(self, message: str) -> None:
        raise ValueError(message)

    @endpoint
    async def fail_at(self, rank: int, seconds: float = 0.0) -> int:
        """Raise at one rank; answer at the others, later."""
        if context().rank == rank:
            raise ValueError(f"not at {rank}")
        await asyncio.sleep(seconds)
        return context().rank

    @endpoint
    async def fail_with_a_cause(self) -> None:
        try:
            await self.look_up("the key")
        except KeyError as error:
            raise OSError(5, "the disk") from error

    @endpoint
    async def look_up(self, key: str) -> str:
        return {"a": "b"}[key]

    @endpoint
    async def leave(self, code: int) -> None:
        sys.exit(code)

    @endpoint
    async def leave_on(self, number: int) -> int:
        """End with code 0 at a signal, as many a handler does."""
        signal.signal(number, lambda *_: sys.exit(0))
        return os.getpid()

    @endpoint
    async def stop_the_loop(self, seconds: float) -> None:
        """Block the event loop of the whole process."""
        block(seconds)

    @endpoint
    async def start_grandchild(self) -> int:
        """Start what is no actor, in a session of its own."""
        return start_sleeper()

    @endpoint
    async def ask(self, mesh: Worker, x: int, y: int) -> list[int]:
        """Call a mesh that somebody else owns."""
        return list((await mesh.add.call(x, y)).values())

    @endpoint
    async def nap_elsewhere(self, mesh: Worker, seconds: float) -> str:
        """Wait for a mesh that somebody else owns; say how that ended."""
        try:
            return str(await mesh.nap.call_one(seconds))
        except Exception as error:
            return f"{type(error).__name__} {getattr(error, 'failure_id', '')}"

    @endpoint
    async def tell(self, mesh: Worker, number: int) -> None:
        mesh.take.broadcast(number)

    @endpoint
    async def steps(self, name: str, count: int) -> None:
        """Do pairs of steps with an await after each pair."""
        for _ in range(count):
            note(self.journal, f"{name} in")
            block(0.001)
            note(self.journal, f"{name} out")
            await asyncio.sleep(0)

    async def __cleanup__(self, exc: BaseException | None) -> None:
        note(self.journal, f"cleanup {self.tag}: {exc if exc is None else type(exc).__name__}")


class PlainWorker(Actor):
    """Its endpoints are plain methods, which run one after the other in a thread."""

    def __init__(self, journal: str = "") -> None:
        self.journal = journal

    @endpoint
    def work(self, name: str, gate: str = "") -> str:
        note(self.journal, f"{name} begins")
        pass_gate(gate)
        note(self.journal, f"{name} ends")
        return name

    @endpoint
    def block_in_c(self, seconds: float) -> str:
        """Stay in a C function that lets other threads run."""
        ctypes.CDLL(None).usleep(int(seconds * 1_000_000))
        return "back"

    @endpoint
    def ask(self, mesh: Worker, x: int, y: int) -> int:
        """Wait in plain code for another actor."""
        return int(context().wait(mesh.add.call_one(x, y), 30))

    @endpoint
    def fail(self, message: str) -> None:
        raise ValueError(message)

    @endpoint
    async def fail_beside(self) -> None:
        """Raise while plain code runs."""
        raise ValueError("beside")

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    def leave(self, code: int) -> None:
        sys.exit(code)

    @endpoint
    def thread(self) -> int:
        return threading.get_ident()


class Spring(Actor):
    """Yields without end, and never waits for anything of its own accord."""

    def __init__(self, journal: str = "") -> None:
        self.journal = journal
        self.count = 0

    @endpoint
    async def pour(self) -> AsyncIterator[int]:
        try:
            while True:
                self.count += 1
                yield self.count
        finally:
            note(self.journal, "pour ends")

    @endpoint
    def pour_plainly(self) -> Iterator[int]:
        try:
            while True:
                self.count += 1
                yield self.count
        finally:
            note(self.journal, "pour_plainly ends")

    @endpoint
    async def made(self) -> int:
        return self.count

    @endpoint
    def plain(self) -> str:
        return "plain"


class Broken(Actor):
    """Cannot be made, until a file exists."""

    def __init__(self, gate: str) -> None:
        if not Path(gate).exists():
            raise LookupError("there is no weight file")

    @endpoint
    async def add(self, x: int, y: int) -> int:
        return x + y


class Untidy(Actor):
    """Raises, or hangs, in its `__cleanup__`."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs

    @endpoint
    async def add(self, x: int, y: int) -> int:
        return x + y

    async def __cleanup__(self, exc: BaseException | None) -> None:
        if self.hangs:
            await asyncio.sleep(600)
        raise OSError("the device is busy")


class Manager(Actor):
    """Owns workers, and decides about their failures as it is told.

    Args:
        decision: handle, respawn, refuse, nothing, raise, hold (until `release`; then handle).
        count: how many meshes of workers.
        procs: how many processes it starts for each; 0: its own process.
    """

    __supervise_limit_s__ = 30.0

    def __init__(
        self,
        decision: str = "handle",
        journal: str = "",
        count: int = 1,
        procs: int = 0,
        is_group: bool = False,
    ) -> None:
        self.decision = decision
        self.journal = journal
        self.told: list[dict[str, Any]] = []
        self.in_hand = 0
        self.most_in_hand = 0
        self.released = asyncio.Event()
        self.more: list[Any] = []
        self.meshes: list[Worker] = [
            self.spawn(f"workers{number or ''}", procs, is_group) for number in range(count)
        ]

    def spawn(self, name: str, procs: int, is_group: bool = False) -> Any:
        home = this_host().spawn_procs(procs) if procs else this_proc()
        return home.options(is_group=is_group).spawn(name, Worker, name, self.journal)

    @endpoint
    async def ping(self) -> str:
        return "pong"

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def mesh(self, number: int = 0) -> Worker:
        return self.meshes[number]

    @endpoint
    async def stop_it(self, mesh: Any) -> None:
        """Stop what somebody else owns."""
        await mesh.stop()

    @endpoint
    async def stop_own(self) -> None:
        await cast(Any, self.meshes[0]).stop()

    @endpoint
    async def spawn_more(self, name: str, procs: int = 0) -> Worker:
        """Spawn in an endpoint."""
        mesh = self.spawn(name, procs)
        self.more.append(mesh)
        return mesh

    @endpoint
    async def spawn_in(self, procs: ProcMesh) -> None:
        """Spawn in processes of somebody else."""
        self.meshes.append(procs.spawn("guest", Worker, "guest", self.journal))

    @endpoint
    async def spawn_group_in(self, procs: ProcMesh) -> Any:
        """Spawn ranks that need each other in processes of somebody else."""
        mesh: Any = procs.options(is_group=True).spawn("guests", PlainWorker, self.journal)
        self.more.append(mesh)
        return mesh

    @endpoint
    async def break_one(self, number: int = 0) -> None:
        """Make a mesh of workers fail, without waiting for anything."""
        self.meshes[number].fail.broadcast(f"break {number}")

    @endpoint
    async def wait_for_one(self, number: int = 0) -> str:
        """Wait for a worker that fails meanwhile; write down when this is told."""
        try:
            return str(await self.meshes[number][0].nap.call_one(600))
        except Exception as error:
            note(self.journal, f"caller {getattr(error, 'failure_id', error)}")
            raise

    @endpoint
    async def stop_workers(self, budget_s: float) -> str:
        return str(await self.meshes[0].stop(budget_s))

    @endpoint
    async def failures_told(self) -> list[dict[str, Any]]:
        return self.told

    @endpoint
    async def concurrency(self) -> int:
        return self.most_in_hand

    @endpoint
    async def release(self) -> None:
        self.released.set()

    async def __supervise__(self, failure: MeshFailure) -> Any:
        facts = told(failure)
        facts["is_own_mesh"] = any(failure.mesh is mesh for mesh in (*self.meshes, *self.more))
        self.told.append(facts)
        note(self.journal, f"handler {failure.id}")
        self.in_hand += 1
        self.most_in_hand = max(self.most_in_hand, self.in_hand)
        try:
            return await self.decide(failure)
        except asyncio.CancelledError:
            note(self.journal, "handler cancelled")
            raise
        finally:
            self.in_hand -= 1

    async def decide(self, failure: MeshFailure) -> Any:
        match self.decision:
            case "handle":
                return True
            case "respawn":
                await failure.respawn()
                return True
            case "refuse":
                return False
            case "raise":
                raise RuntimeError("no idea what to do")
            case "hold":
                await self.released.wait()
                return True
        return None

    async def __cleanup__(self, exc: BaseException | None) -> None:
        note(self.journal, f"cleanup manager: {exc if exc is None else type(exc).__name__}")


class HastyManager(Manager):
    """Has little time to decide."""

    __supervise_limit_s__ = 0.2


class BriefManager(Manager):
    """Decides in plain code, though its endpoints are async: within the loop, at once."""

    def __supervise__(self, failure: MeshFailure) -> Any:
        self.told.append({**told(failure), "thread": threading.current_thread().name})
        return self.decision == "handle"


class Careless(Actor):
    """Owns a manager, and says nothing about failures."""

    def __init__(self, decision: str = "refuse", journal: str = "") -> None:
        self.managers = this_proc().spawn("managers", Manager, decision, journal)

    @endpoint
    async def break_below(self) -> None:
        self.managers.break_one.broadcast()

    @endpoint
    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PlainManager(Actor):
    """All plain: its `__supervise__` runs between its endpoints."""

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.worker = this_proc().spawn("worker", Worker)

    @endpoint
    def mesh(self) -> Worker:
        return self.worker

    @endpoint
    def work(self, name: str, gate: str = "") -> None:
        note(self.journal, f"{name} begins")
        pass_gate(gate)
        note(self.journal, f"{name} ends")

    def __supervise__(self, failure: MeshFailure) -> bool:
        note(self.journal, f"handler {failure.kind}")
        return True
