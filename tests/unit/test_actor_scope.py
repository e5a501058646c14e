"""How an owner ends what it owns: one budget for all of it. No process runs."""

from __future__ import annotations

import asyncio
import logging

import pytest

from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning import scope as of_scope
from stagekeeper.actor.owning.scope import Scope
from tests.harness.waiting import wait_for


class Mesh:
    """Ends when it is let, and remembers the budget that it was given."""

    def __init__(self, name: str, *, ends: bool = True) -> None:
        self.mesh_name = name
        self.may_end = asyncio.Event()
        self.asked = asyncio.Event()
        self.budget_s = -1.0
        if ends:
            self.may_end.set()

    def expect_end(self) -> None:
        pass

    async def stop_for_owner(
        self, budget_s: float, failure: MeshFailure | None
    ) -> list[MeshFailure]:
        self.budget_s = budget_s
        self.asked.set()
        await self.may_end.wait()
        return []


def root_scope(*meshes: Mesh) -> Scope:
    scope = Scope(ActorIdentity("i", "", "root", 0, 1, 1, ()))
    for mesh in meshes:
        scope.add(mesh)
    return scope


async def test_meshes_end_in_turn_while_there_is_time():
    first, last = Mesh("first"), Mesh("last", ends=False)
    stopping = asyncio.create_task(root_scope(first, last).stop(3_600, None))
    await asyncio.wait_for(last.asked.wait(), 10)
    assert not first.asked.is_set()
    last.may_end.set()
    assert await asyncio.wait_for(stopping, 10) == []
    assert first.asked.is_set() and 0 < first.budget_s < last.budget_s <= 3_600


async def test_once_the_budget_is_over_what_is_left_ends_at_once(monkeypatch):
    monkeypatch.setattr(of_scope, "_GRACE_S", 0.01)
    meshes = [Mesh(name, ends=False) for name in "abc"]
    stopping = asyncio.create_task(root_scope(*meshes).stop(0.01, None))
    for mesh in meshes:  # none of which has ended
        await asyncio.wait_for(mesh.asked.wait(), 10)
    assert [mesh.budget_s for mesh in meshes[:2]] == [0.0, 0.0]
    for mesh in meshes:
        mesh.may_end.set()
    await asyncio.wait_for(stopping, 10)


async def test_what_would_be_owned_by_one_that_has_ended_is_refused():
    scope = root_scope(Mesh("first"))
    assert await scope.stop(9, None) == []
    with pytest.raises(MeshStopped, match=r"root has ended, .* late is not spawned"):
        scope.add(Mesh("late"))
    assert await scope.stop(9, None) == []


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


async def test_an_owner_that_raises_what_cannot_say_what_it_is_has_not_handled_it():
    scope, told = root_scope(), asyncio.Queue[MeshFailure]()

    async def supervise(failure: MeshFailure) -> object:
        raise Mute

    scope.supervise = supervise
    scope.on_unhandled = lambda failure, error: told.put_nowait(failure)
    scope.open()
    scope.deliver(failure_of(scope.identity, FailureKind.GONE, "gone"))
    failure = await asyncio.wait_for(told.get(), 10)
    assert failure.kind == FailureKind.SUPERVISE_RAISED
    assert failure.path[0].decision.startswith("raised Mute: (its message cannot be read")


async def test_an_end_that_takes_long_says_what_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(of_scope, "_TELL_AFTER_S", 0.0)
    first, last = Mesh("first"), Mesh("last", ends=False)
    with caplog.at_level(logging.WARNING, "stagekeeper.actor"):
        stopping = asyncio.create_task(root_scope(first, last).stop(9, None))
        await wait_for(lambda: caplog.messages, "the end is told of", within_s=10)
        last.may_end.set()
        await stopping
    assert caplog.messages[0].startswith("root waits for the end of last, first, for at most 10 s ")
    assert caplog.messages[0].endswith("killed (a second Ctrl-C does so at once)")
    assert len(caplog.messages) == 1
