"""How the block of a root is left, with an actor in this very process. No process is started."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

import stagekeeper.actor as public
from stagekeeper.actor import (
    Actor,
    MeshFailure,
    UnhandledFault,
    endpoint,
    root,
    this_proc,
    tree_root,
)
from stagekeeper.actor.owning import rank_stops
from stagekeeper.actor.testing import tree


class Messy(Actor):
    @endpoint
    async def step(self) -> int:
        return 1

    def __cleanup__(self, exc: BaseException | None) -> None:
        raise OSError("no space left")


class Kind(Actor):
    @endpoint
    async def step(self) -> int:
        return 1

    @endpoint
    async def fail(self) -> None:
        raise ValueError("not today")


def refuse(failure: MeshFailure) -> None:
    raise UnhandledFault(failure)


class Slow(Actor):
    """Ends when it is cancelled, and not before."""

    def __init__(self, ended: str) -> None:
        self.ended = Path(ended)

    @endpoint
    async def step(self) -> int:
        return 1

    async def __cleanup__(self, exc: BaseException | None) -> None:
        if self.ended.name == "slow":
            await asyncio.sleep(3_600)
        self.ended.touch()


async def test_who_is_cancelled_while_the_tree_ends_leaves_nothing_of_it(monkeypatch, tmp_path):
    for module, name in ((tree_root, "_LAST_S"), (rank_stops, "_GRACE_S")):
        monkeypatch.setattr(module, name, 0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1) as limit, root(stop_budget_s=3_600):
            tidy = this_proc().spawn("tidy", Slow, str(tmp_path / "tidy"))
            slow = this_proc().spawn("slow", Slow, str(tmp_path / "slow"))
            assert await tidy.step.call_one() + await slow.step.call_one() == 2
            limit.reschedule(asyncio.get_running_loop().time() + 0.1)
    assert (tmp_path / "tidy").exists()


async def test_a_process_has_one_root_also_when_two_are_entered_at_once():
    async def enter() -> int:
        async with root():
            return await this_proc().spawn("kind", Kind).step.call_one()

    first, second = await asyncio.gather(enter(), enter(), return_exceptions=True)
    assert first == 1
    assert isinstance(second, RuntimeError) and "there is one root" in str(second)


async def test_a_root_that_was_left_may_be_entered_again(monkeypatch):
    monkeypatch.setattr(public, "unhandled_fault_hook", refuse)
    again = root()
    for _ in range(2):
        with pytest.raises(UnhandledFault):
            async with again:
                this_proc().spawn("kind", Kind).fail.broadcast()
                await asyncio.sleep(60)


async def leave_by(error: BaseException | None, told: list[MeshFailure]) -> None:
    def hook(failure: MeshFailure) -> None:
        told.append(failure)
        raise UnhandledFault(failure)

    before = public.unhandled_fault_hook
    try:
        async with root():
            public.unhandled_fault_hook = hook
            assert await this_proc().spawn("messy", Messy).step.call_one() == 1
            if error is not None:
                raise error
    finally:
        public.unhandled_fault_hook = before


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_an_error_of_a_cleanup_does_not_replace_what_ends_the_program(error, caplog):
    told: list[MeshFailure] = []
    caplog.set_level(logging.WARNING, "stagekeeper.actor")
    with pytest.raises(type(error)) as caught:
        await leave_by(error, told)
    assert caught.value is error and told == []
    assert [it for it in caplog.messages if "no space left" in it]


@pytest.mark.parametrize("error", [None, ValueError("bad")])
async def test_otherwise_it_reaches_the_hook(error):
    told: list[MeshFailure] = []
    with pytest.raises(UnhandledFault):
        await leave_by(error, told)
    assert len(told) == 1 and "no space left" in told[0].summary


async def test_a_test_that_fails_tells_the_failures_of_its_tree_too():
    with pytest.raises(ZeroDivisionError) as caught:
        async with tree():
            assert await this_proc().spawn("messy", Messy).step.call_one() == 1
            raise ZeroDivisionError
    assert "no space left" in "".join(caught.value.__notes__)
    with pytest.raises(AssertionError, match="no space left"):
        async with tree():
            assert await this_proc().spawn("messy", Messy).step.call_one() == 1
