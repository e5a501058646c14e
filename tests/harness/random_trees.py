"""Actors for random trees, and what they write down of their lives.

Every actor notes its birth, each failure it is asked about and what it decided, and its end. From
these notes alone `tree_rules` judges. Decided here: how an actor of a random tree behaves, by its
`Plan`. Invariant: what is noted has happened; what is about to raise is noted before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from stagekeeper.actor import Actor, MeshFailure, StopReport, endpoint, this_host, this_proc
from stagekeeper.actor import program as programs
from stagekeeper.actor.owning.scope import current_scope
from stagekeeper.host import proc_table

Plan = dict[str, Any]
"""How an actor behaves:

journal: where its notes go, `memory` or the path of a file.
name: of its mesh. owner: the actor id of its owner; "root". limit_s: for `__supervise__`.
kind: the class. answer: what its `__supervise__` does.
init: `ok`, `raise`, `raise later` (when it is respawned), `slow`. cleanup: `ok`, `raise`, `slow`.
kids: plans of the meshes that its `__init__` spawns. where: `own`, `here`, `given`. size: ranks.
"""

Note = dict[str, Any]
MOST_LIVES: Final = 3
"""A handler that respawns refuses then, so that trees come to rest."""

MEMORY: list[Note] = []


def note(journal: str, what: str, **more: Any) -> None:
    """Write a note, for good: the process may be killed right behind it."""
    entry = {"what": what, "at": time.monotonic(), **more}
    if journal == "memory":
        MEMORY.append(entry)
        return
    line = json.dumps(entry).encode() + b"\n"
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def notes(journal: str) -> list[Note]:
    """Read all notes, in the order of writing."""
    if journal == "memory":
        return list(MEMORY)
    with open(journal, "rb") as lines:
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def flat(failure: MeshFailure) -> dict[str, Any]:
    """Return what the rules look at."""
    said = _one(failure)
    said["path"] = [[hop.owner, hop.decision] for hop in failure.path]
    said["causes"] = [_one(cause) for cause in failure.causes]
    return said


def _one(failure: MeshFailure) -> dict[str, Any]:
    return {
        "id": failure.id,
        "kind": str(failure.kind),
        "mesh": failure.mesh_name,
        "mesh_id": failure.mesh_id,
        "ranks": list(failure.ranks),
        "lives": list(failure.incarnations),
        "instance_id": failure.instance_id,
        "message": failure.message[:200],
    }


class Oops(Exception):
    """What actors of random trees raise."""


class Branch(Actor):
    """An actor with meshes of its own. Without `__supervise__`: it is in the subclasses."""

    def __init__(self, plan: Plan, given: Any = None) -> None:
        scope = current_scope.get()
        assert scope is not None
        self.plan = plan
        self.identity = scope.identity
        self.meshes: dict[str, Any] = {}
        self.procs: dict[str, Any] = {}
        self.__supervise_limit_s__ = plan["limit_s"]
        life = self.identity.incarnation
        raises = plan["init"] == "raise" or (plan["init"] == "raise later" and life > 1)
        self.note(
            "born",
            mesh_id=self.identity.mesh_id,
            mesh=self.identity.mesh_name,
            rank=self.identity.rank,
            size=self.identity.size,
            life=life,
            owner=plan["owner"],
            path=programs.current_program().tree_path.split("/")[1:],
            pid=os.getpid(),
            ticks=0 if plan["journal"] == "memory" else proc_table.living_start_ticks(os.getpid()),
            raises=raises,
        )
        for kid in plan["kids"]:
            self.spawn_now(kid, given)
        if raises:
            raise Oops(f"{self.identity.name} does not come up")

    def note(self, what: str, **more: Any) -> None:
        note(self.plan["journal"], what, actor=self.identity.actor_id, **more)

    def spawn_now(self, plan: Plan, given: Any) -> Any:
        own = {**plan, "owner": self.identity.actor_id, "journal": self.plan["journal"]}
        mesh, procs = spawn(own, given)
        self.meshes[plan["name"]] = mesh
        if procs is not None:
            self.procs[plan["name"]] = procs
        return mesh

    # --- endpoints

    @endpoint
    async def echo(self, x: int) -> int:
        return x + 1

    @endpoint
    async def nap(self, seconds: float, number: int) -> str:
        self.note("naps", call=number)
        await asyncio.sleep(seconds)
        return "woke"

    @endpoint
    async def boom(self) -> None:
        raise Oops("boom")

    @endpoint
    async def cast_boom(self) -> None:
        self.note("booms")
        raise Oops("boom")

    @endpoint
    async def leave(self) -> None:
        self.note("leaves", process=programs.current_program().instance_id)
        sys.exit(0)

    @endpoint
    async def spawn(self, plan: Plan, given: Any) -> Any:
        return self.spawn_now(plan, given)

    @endpoint
    async def kids(self) -> dict[str, Any]:
        return dict(self.meshes)

    @endpoint
    async def stop_mesh(self, name: str, budget_s: float) -> bool:
        mesh = self.meshes.pop(name, None)
        if mesh is None:
            return False
        self.note("asks", mesh_id=mesh._keeper.mesh_id)
        report = await mesh.stop(budget_s)
        self.note("stopped", **told_of(report, [mesh._keeper.mesh_id]))
        return True

    @endpoint
    async def stop_procs(self, name: str, budget_s: float) -> bool:
        procs = self.procs.pop(name, None)
        if procs is None:
            return False
        places = ids_of(procs)
        self.note("asks", mesh_id=procs._procs.mesh_id, places=places)
        report = await procs.stop(budget_s)
        self.note("stopped", **told_of(report, places))
        return True

    @endpoint
    async def relay(self, other: Any, seconds: float, number: int) -> Any:
        """Call another mesh, and tell how that went."""
        return await outcome_of(other.nap.call(seconds, number))

    async def __cleanup__(self, exc: BaseException | None) -> None:
        self.note("cleans up", of=repr(exc)[:200])
        if self.plan["cleanup"] == "raise":
            raise Oops("cleanup")
        if self.plan["cleanup"] == "slow":
            await asyncio.sleep(30)


class Node(Branch):
    """One that handles failures in its own way."""

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.note("is told", failure=flat(failure))
        answer, decision = self.plan["answer"], "cut off"
        try:
            if answer == "raise":
                decision = "raised"
                raise Oops("in __supervise__")
            if answer in ("sleep", "oversleep"):
                await asyncio.sleep(0.4 if answer == "sleep" else 30)
            if answer == "respawn":
                handled = await self.respawned(failure)
            else:
                handled = answer != "refuse"
            decision = "handled" if handled else "refused"
            return handled
        finally:
            self.note("decides", failure=flat(failure), decision=decision)

    async def respawned(self, failure: MeshFailure) -> bool:
        if max(failure.incarnations, default=0) >= MOST_LIVES:
            return False
        try:
            await failure.respawn()
        except Exception as error:
            self.note(
                "respawn failed",
                mesh_id=failure.mesh_id,
                ranks=sorted(getattr(error, "failed", {})) or list(failure.ranks),
                ids=[found.id for found in _failures_in(error)],
                error=repr(error)[:300],
            )
            return failure.ranks[0] % 2 == 1  # some go on without the rank
        return True


class Plain(Branch):
    """One with plain code, and so a plain handler, which runs in the actor's thread."""

    @endpoint
    def count(self, x: int) -> int:
        return x + 1

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.note("is told", failure=flat(failure))
        decision = {"raise": "raised", "refuse": "refused"}.get(self.plan["answer"], "handled")
        self.note("decides", failure=flat(failure), decision=decision)
        if decision == "raised":
            raise Oops("in __supervise__")
        return decision == "handled"


class Mute(Branch):
    """One without a handler."""


CLASSES: Final[dict[str, type[Branch]]] = {"Node": Node, "Plain": Plain, "Mute": Mute}


def spawn(plan: Plan, given: Any) -> tuple[Any, Any]:
    """Spawn a mesh by its plan; return it, and its processes where they are its own."""
    procs = None
    if plan["where"] == "here":
        place = this_proc()
    elif plan["where"] == "given" and given is not None:
        place = given
    else:
        place = procs = this_host().spawn_procs(plan["size"], name=f"p-{plan['name']}")
    mesh: Any = place.spawn(plan["name"], CLASSES[plan["kind"]], plan, given)
    return mesh, procs


def ids_of(procs: Any) -> list[str]:
    """Return which processes are in a mesh of one's own."""
    return [procs._procs.instance_id_of(rank) for rank in range(procs.size)]


def told_of(report: StopReport, asked: list[str]) -> Note:
    """Return what the rules look at."""
    return {
        "report": str(report),
        "cleanup": [flat(it) for it in report.cleanup],
        "overdue": asked if report.unreachable else [],
    }


async def outcome_of(call: Any) -> dict[str, Any]:
    """Await a call to a mesh, and say what came of it."""
    said: dict[str, Any] = {"error": "", "died": []}
    try:
        await call
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"[:200]
        said["died"] = [flat(failure) for failure in _failures_in(error)]
    return said


def _failures_in(error: BaseException) -> Iterator[MeshFailure]:
    failure = getattr(error, "failure", None)
    if isinstance(failure, MeshFailure):
        yield failure
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _failures_in(one)
