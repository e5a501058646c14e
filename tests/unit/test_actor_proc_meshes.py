"""A mesh of processes, for its owner, over a source that starts nothing. No process runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagekeeper.actor.errors import MeshStopped
from stagekeeper.actor.failure import ExitInfo, FailureKind, MeshFailure
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.proc_places import ProcEnd, ProcFailed
from stagekeeper.actor.owning.procs import ProcMeshControl
from stagekeeper.actor.owning.scope import Scope
from stagekeeper.actor.place import Place

LIMIT_S = 20.0


class FakeProc:
    """A process that is up until it is asked to end."""

    def __init__(self, instance_id: str) -> None:
        self.place = Place("h:1", instance_id, 7, "boot")
        self._ended = asyncio.Event()

    async def ended(self) -> ProcEnd:
        await self._ended.wait()
        return ProcEnd(ExitInfo(code=0), "pidfd")

    async def end(self, budget_s: float) -> bool:
        self._ended.set()
        return True

    async def kill(self) -> None:
        self._ended.set()


class FakeSource:
    """Starts fake processes; those whose start is to raise do."""

    def __init__(self, error: Exception | None = None, *, hangs: bool = False) -> None:
        self.error = error
        self.hangs = hangs
        self._failing = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """Have a start that hangs raise."""
        self.error = error
        self._failing.set()

    async def start(self, index: int, instance_id: str, name: str) -> FakeProc:
        if self.error is not None:
            raise self.error
        if self.hangs:
            await self._failing.wait()
            assert self.error is not None
            raise self.error
        return FakeProc(instance_id)

    async def close(self) -> None:
        return None


class Owner:
    """Who owns the mesh, and what it is told."""

    def __init__(self, source: FakeSource) -> None:
        self.told: list[MeshFailure] = []
        program: Any = SimpleNamespace(
            token="t",
            links=SimpleNamespace(existing=lambda instance_id: None),
            holds_rank_in=lambda instance_id: False,
            forget=lambda mesh_id, ends=None: None,
        )
        self.scope = Scope(ActorIdentity("a", "", "root", 0, 1, 1, ()))
        cast(Any, self.scope).deliver = self.told.append
        self.mesh = ProcMeshControl(program, self.scope, "procs", 1, source)
        self.scope.add(self.mesh)
        self.mesh.start()

    async def place(self) -> Place:
        async with asyncio.timeout(LIMIT_S):
            return await self.mesh.place(0)


async def test_a_start_that_goes_wrong_in_an_unforeseen_way_is_a_failure_as_others_are():
    owner = Owner(FakeSource(OSError(24, "Too many open files")))

    with pytest.raises(ProcFailed) as caught:
        await owner.place()

    failure = caught.value.failure
    assert (failure.kind, failure.where) == (FailureKind.INIT_RAISED, "procs[0]")
    assert "OSError: [Errno 24] Too many open files" in failure.message
    assert [told.id for told in owner.told] == [failure.id]


async def test_processes_that_were_asked_to_end_take_nothing_new_and_that_is_no_failure():
    for source in (FakeSource(), FakeSource(hangs=True), FakeSource(OSError("no"))):
        owner = Owner(source)
        if source.error is None and not source.hangs:
            assert (await owner.place()).pid == 7
        elif source.error is not None:
            with pytest.raises(ProcFailed):
                await owner.place()
        told = len(owner.told)
        waiting = asyncio.create_task(owner.place())
        await asyncio.sleep(0)

        await owner.mesh.stop(LIMIT_S)

        assert owner.mesh.is_stopping
        with pytest.raises(MeshStopped, match="procs was stopped"):
            await owner.place()
        if source.hangs:
            with pytest.raises(MeshStopped):
                await waiting
        await asyncio.wait({waiting})
        assert waiting.exception() is None or source.hangs or source.error
        assert len(owner.told) == told


async def test_a_start_that_fails_after_its_end_was_asked_for_is_no_failure():
    source = FakeSource(hangs=True)
    owner = Owner(source)
    await asyncio.sleep(0)  # the start is under way
    owner.mesh.expect_end()

    source.fail(ProcFailed(MeshFailure(id="one", kind=FailureKind.INIT_RAISED, mesh_name="procs")))

    with pytest.raises(MeshStopped):
        await owner.place()
    assert owner.told == []
