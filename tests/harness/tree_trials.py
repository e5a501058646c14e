"""A trial: a random tree, what is done to it in a random order, and every call that was made.

The same trial runs in a loop with made-up processes and on real ones; a `World` is what it does
to processes. Decided here: what may happen to a tree. Invariant: at `rest` all that follows from
what was done has happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stagekeeper.actor import MeshFailure, this_host
from tests.harness import random_trees
from tests.harness.random_trees import Note, Plan, flat, ids_of, note, outcome_of, told_of
from tests.harness.tree_lives import Call, Evidence
from tests.harness.tree_ops import Op
from tests.harness.tree_rules import judge


class World(Protocol):
    """Processes, as a trial meets them."""

    naps_s: tuple[float, float, float]
    """How long calls last: short, for a while, and long."""

    supervise_limit_s: float

    lease_s: float

    has_real_time: bool

    call_limit_s: float
    """How long a call may take whose callee has gone."""

    def learn(self, process: str, pid: int) -> None:
        """Hear of a process in which nobody was born yet."""
        ...

    def kill(self, process: str) -> None: ...

    def freeze(self, process: str) -> None: ...

    def thaw(self, process: str) -> None: ...

    def is_living(self, process: str) -> bool: ...

    def fail_starts(self, count: int) -> None:
        """Have the next processes not come up, where that can be had."""
        ...

    async def quiet(self) -> None:
        """Return when nothing happens any more, as far as can be seen without a long wait."""
        ...

    async def holds(self, check: Callable[[], Awaitable[None]]) -> None:
        """Return when `check` raises nothing, which may take a moment where time is real."""
        ...


@dataclass
class Known:
    """A mesh that the trial can call."""

    mesh: Any
    name: str
    owner: Known | None
    procs: Any = None

    @property
    def mesh_id(self) -> str:
        mesh_id: str = self.mesh._keeper.mesh_id
        return mesh_id


@dataclass
class Trial:
    """Does one list of ops; the code of the tree's root."""

    world: World
    journal: str
    known: dict[str, Known] = field(default_factory=dict)
    given: list[Any] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _numbers: int = 0
    evidence: Evidence = field(default_factory=Evidence)

    def __post_init__(self) -> None:
        self.evidence.lease_s = self.world.lease_s

    def hook(self, failure: MeshFailure) -> None:
        """Take what nobody handled."""
        note(self.journal, "hook", actor="root", failure=flat(failure))

    @property
    def notes(self) -> list[Note]:
        return random_trees.notes(self.journal)

    async def run(self, ops: list[Op]) -> None:
        """Do all, and let the tree come to rest at last."""
        for op in ops:
            await self._do(op)
            await asyncio.sleep(op.pause_s)
        await self.rest()
        note(self.journal, "ends all", actor="root")

    async def finish(self) -> None:
        """After the root's end: nothing is left, and no call waits."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.world.call_limit_s)
        self.evidence.is_over = True
        self.evidence.frozen.clear()
        judge(self.notes, self.calls, self.world.is_living, self.evidence)

    async def rest(self) -> None:
        """Let all come that follows from what was done, and hold the rules against it."""
        await self.world.quiet()
        await self._look(5.0)
        await self.world.holds(self._judge)
        await self.world.holds(self._ask_all)

    async def _judge(self) -> None:
        judge(self.notes, self.calls, self.world.is_living, self.evidence)

    # --- one op

    async def _do(self, op: Op) -> None:
        if op.kind == "spawn":
            assert op.plan is not None
            await self._spawn(op)
        elif op.kind == "procs":
            self.given.append(this_host().spawn_procs(1 + op.arg % 2, name="given"))
        elif op.kind == "kill given":
            self._kill_given(op)
        elif op.kind == "bad start":
            self.world.fail_starts(1)
        elif op.kind == "look":
            await self._look()
        elif op.kind == "rest":
            await self.rest()
        elif op.kind in ("kill", "freeze", "thaw", "leave"):
            await self._hurt(op)
        elif self.known:
            target = self._picked(op)
            if op.kind.startswith("stop"):
                self._stop(target, op)
            elif op.kind == "cut":
                await self._cut(target, op)
            elif op.kind == "stall":
                await self._stall(target, op)
            else:
                self._call(target, op)

    def _picked(self, op: Op) -> Known:
        known = list(self.known.values())
        return known[op.pick % len(known)]

    async def _spawn(self, op: Op) -> None:
        assert op.plan is not None
        owners: list[Known | None] = [None, *self.known.values()]
        owner = owners[op.pick % len(owners)]
        plan = self._named(op.plan)
        given = self.given[op.arg % len(self.given)] if self.given and op.arg % 3 else None
        if owner is None:
            try:
                mesh, procs = random_trees.spawn({**plan, "owner": "root"}, given)
            except RuntimeError as error:
                assert "stopped" in str(error) or "is ending" in str(error), error
                return
            self._learn(Known(mesh, plan["name"], None, procs))
            return
        rank = owner.mesh[owner.mesh.ranks[op.arg % owner.mesh.size]]

        async def spawn() -> None:
            mesh = await rank.spawn.call_one(plan, given)
            self._learn(Known(mesh, plan["name"], owner))

        await self._wait(self._track(owner, spawn(), is_short=True))

    def _named(self, plan: Plan) -> Plan:
        self._numbers += 1
        return {
            **plan,
            "journal": self.journal,
            "limit_s": self.world.supervise_limit_s,
            "name": f"n{self._numbers}",
            "kids": [self._named(kid) for kid in plan["kids"]],
        }

    def _learn(self, known: Known) -> None:
        self.known.setdefault(known.mesh_id, known)

    def _call(self, target: Known, op: Op) -> None:
        mesh = target.mesh
        one = mesh[mesh.ranks[op.arg % mesh.size]]
        self._numbers += 1
        number = self._numbers
        nap_s = self.world.naps_s[op.arg % 3]
        try:
            if op.kind == "call":
                self._track(target, mesh.echo.call(1), is_short=True)
            elif op.kind == "boom":
                self._track(target, one.boom.call_one(), is_short=True)
            elif op.kind == "nap":
                self._track(target, mesh.nap.call(nap_s, number), number=number)
            elif op.kind == "relay":
                other = list(self.known.values())[op.arg % len(self.known)].mesh
                self._track(target, one.relay.call_one(other, nap_s, number), number=number)
            elif op.kind == "cast boom":
                one.cast_boom.broadcast()
            elif op.kind == "cast":
                mesh.echo.broadcast(1)
        except Exception as error:
            assert "stopped" in str(error), error

    def _stop(self, target: Known, op: Op) -> None:
        budget_s = (0.0, 0.3, 2.0)[op.arg % 3]
        if target.owner is not None:
            name = "stop_procs" if op.kind == "stop procs" else "stop_mesh"
            ref = getattr(target.owner.mesh, name)
            self._track(target.owner, ref.call(target.name, budget_s), is_stop=True)
            return
        what, asked = target.mesh, [target.mesh_id]
        if op.kind == "stop procs":
            if target.procs is None:
                return
            what, asked = target.procs, ids_of(target.procs)
            mesh_id = what._procs.mesh_id
            note(self.journal, "asks", actor="root", mesh_id=mesh_id, places=asked)
        else:
            note(self.journal, "asks", actor="root", mesh_id=target.mesh_id)

        async def stop() -> None:
            report = await what.stop(budget_s)
            note(self.journal, "stopped", actor="root", **told_of(report, asked))

        self._track(target, stop(), is_short=True, is_stop=True)

    async def _hurt(self, op: Op) -> None:
        """Signal the process of an actor that was born once, or of one that was frozen."""
        births = [it for it in self.notes if it["what"] == "born" and len(it["path"]) > 1]
        processes = list(dict.fromkeys(it["path"][-1] for it in births))
        processes = [it for it in processes if self.world.is_living(it)]
        if op.kind == "thaw":
            processes = sorted(self.evidence.frozen)
        if not processes:
            return
        process = processes[op.arg % len(processes)]
        if op.kind == "kill":
            note(self.journal, "kills", actor="root", process=process)
            self.evidence.hurt.add(process)
            self.world.kill(process)
        elif op.kind == "freeze":
            self.evidence.frozen.add(process)
            self.evidence.hurt.add(process)
            self.world.freeze(process)
        elif op.kind == "thaw":
            self.evidence.frozen.discard(process)
            self.world.thaw(process)
        elif self.known:
            target = self._picked(op)
            mesh = target.mesh
            one = mesh[mesh.ranks[op.arg % mesh.size]]
            at_root = {it["mesh_id"] for it in self.notes if it["what"] == "born"} - {
                it["mesh_id"] for it in births
            }
            if target.mesh_id not in at_root and not self._may_be_at_root(target.mesh_id):
                self._track(target, one.leave.call_one(), is_short=True)

    def _may_be_at_root(self, mesh_id: str) -> bool:
        """Return whether it is not known that the whole mesh is in processes of its own."""
        return not any(
            it["what"] == "born" and it["mesh_id"] == mesh_id and len(it["path"]) > 1
            for it in self.notes
        )

    async def _cut(self, target: Known, op: Op) -> None:
        """Have a mesh fail, and a moment later do something to who is asked about it."""
        self._call(target, replace(op, kind="cast boom"))
        await asyncio.sleep((0.001, 0.005, 0.05, 0.3)[op.pick % 4])
        if target.owner is not None:
            kind = ("cast boom", "stop", "cast boom", "stop procs")[op.arg % 4]
            if kind == "cast boom":
                self._call(target.owner, replace(op, kind=kind))
            else:
                self._stop(target.owner, replace(op, kind=kind))
        if op.arg % 3:
            self._call(target, replace(op, kind="cast boom", arg=op.arg + 1))
        if op.pick % 3 == 0:
            await self._hurt(replace(op, kind="kill"))

    async def _stall(self, target: Known, op: Op) -> None:
        """Freeze a rank under a call, twice for longer than its lease; perhaps it stays so."""
        if self.world.has_real_time:
            return
        self._call(target, replace(op, kind="nap", arg=2))
        births = [it for it in self.notes if it["what"] == "born" and len(it["path"]) > 1]
        mine = [it["path"][-1] for it in births if it["mesh_id"] == target.mesh_id]
        if not mine:
            return
        process = mine[op.arg % len(mine)]
        self.evidence.hurt.add(process)
        for is_last in (False, True):
            self.world.freeze(process)
            await asyncio.sleep(1.5 * self.world.lease_s)
            if is_last and op.pick % 2:
                self.evidence.frozen.add(process)
                return
            self.world.thaw(process)
            await asyncio.sleep(self.world.lease_s)

    def _kill_given(self, op: Op) -> None:
        """Kill a process that nobody need be in."""
        procs = self.given[op.arg % len(self.given)] if self.given else None
        if procs is None:
            return
        slot = procs._procs._slots[op.pick % procs.size]
        if slot.proc is None or slot.failure is not None or slot.instance_id in self.evidence.hurt:
            return
        note(self.journal, "kills", actor="root", process=slot.instance_id)
        self.evidence.hurt.add(slot.instance_id)
        self.world.learn(slot.instance_id, slot.proc.place.pid)
        self.world.kill(slot.instance_id)

    # --- calls

    def _track(
        self,
        target: Known,
        call: Any,
        *,
        is_short: bool = False,
        is_stop: bool = False,
        number: int = 0,
    ) -> Call:
        task = asyncio.create_task(outcome_of(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        tracked = Call(target.mesh_id, task, number, is_short, is_stop)
        self.calls.append(tracked)
        return tracked

    async def _wait(self, call: Call) -> None:
        await asyncio.wait({call.task}, timeout=0.5)

    async def _look(self, limit_s: float = 0.5) -> None:
        """Learn of the meshes that actors have spawned by themselves."""
        for _ in range(3):
            before = len(self.known)
            calls = []
            for owner in list(self.known.values()):

                async def look(owner: Known = owner) -> None:
                    found = await owner.mesh.kids.call()
                    for kids in found.values():
                        for name, mesh in kids.items():
                            self._learn(Known(mesh, name, owner))

                calls.append(self._track(owner, look(), is_short=True))
            if calls:
                await asyncio.wait([it.task for it in calls], timeout=limit_s)
            if len(self.known) == before:
                return

    async def _ask_all(self) -> None:
        """At rest: every actor that lives answers, and every one that ended is told of as such."""
        await self._judge()
        alive = self.evidence.alive
        for known in list(self.known.values()):
            for rank in known.mesh.ranks:
                actor_ids = self.evidence.latest.get((known.mesh_id, rank))
                if actor_ids is None or self.evidence.may_be_slow(known.mesh_id):
                    continue
                what = f"{known.name}[{rank}] of life {actor_ids}"
                said = await self._asked(known.mesh[[rank]], what)
                if said["died"]:  # perhaps of an earlier life, of which this was the first news
                    said = await self._asked(known.mesh[[rank]], what)
                if actor_ids in alive:
                    assert not said["error"], f"{what} lives, and calls end with {said}"
                else:
                    assert said["error"], f"{what} has ended, and answers"

    async def _asked(self, one: Any, what: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.world.call_limit_s):
                return await outcome_of(one.echo.call_one(1))
        except TimeoutError:
            raise AssertionError(f"{what}: neither answers nor fails") from None
