"""A stop that is asked for again with less time, and what is reported of one."""

from __future__ import annotations

import asyncio

import pytest

from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.owning.stop_budget import StopBudget
from stagekeeper.actor.owning.stop_report import StopReport


async def test_less_time_is_handed_down_at_once_and_more_is_not():
    budget = StopBudget(1000.0)
    given: list[float] = []
    has_begun = asyncio.Event()

    async def ask(left_s: float) -> str:
        given.append(left_s)
        has_begun.set()
        if left_s > 10:
            await asyncio.Event().wait()
        return "done"

    spending = asyncio.create_task(budget.spend(ask))
    await has_begun.wait()
    for budget_s in (2000.0, 500.0, 5.0):
        budget.shorten(budget_s)
        for _ in range(10):
            await asyncio.sleep(0)

    assert await asyncio.wait_for(spending, 20.0) == "done"
    assert len(given) == 3
    assert 900 < given[0] <= 1000 and 400 < given[1] <= 500 and given[2] <= 5
    assert budget.left_s <= 5


async def test_an_error_is_the_askers_and_a_cancellation_ends_what_is_asked():
    budget = StopBudget(1000.0)
    ended = asyncio.Event()

    async def fail(left_s: float) -> None:
        raise LookupError("no")

    async def wait(left_s: float) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(LookupError):
        await budget.spend(fail)
    spending = asyncio.create_task(budget.spend(wait))
    for _ in range(5):
        await asyncio.sleep(0)
    spending.cancel()
    await asyncio.wait({spending})

    assert spending.cancelled() and ended.is_set()


def test_processes_whose_actors_did_not_end_as_asked_are_not_clean():
    failure = MeshFailure(id="f", kind=FailureKind.INIT_RAISED, mesh_name="b")
    never_up = StopReport(unreachable=[0, 1], name="a")
    dead = StopReport(dead={2: failure}, clean=[0], name="b")

    report = StopReport(clean=[0], actors=[never_up, dead, StopReport(clean=[0], name="c")])

    assert not report.is_clean
    assert str(report) == "1 clean; a unreachable: 0, 1; b 1 dead"
    assert StopReport(clean=[0], actors=[dead]).is_clean
