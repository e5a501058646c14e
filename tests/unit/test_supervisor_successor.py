"""While a reign lasts: before whom it gives way, and before whom it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stagekeeper.core.ids import Epoch
from stagekeeper.supervisor.endpoint_look import Found, Served, Silent, Stranger
from stagekeeper.supervisor.successor import HigherReign, Successor
from tests.fakes.virtual_clock import VirtualClock

OURS = Epoch(5, "mmm")


class Reign:
    """A reign that looks every 2 s, with everything around it under the test's hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.epoch = OURS
        self.shows: Found = Served("default", OURS)
        self.looked_at: list[float] = []
        self.found: list[HigherReign] = []
        self.chance = 0.5
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.successor = Successor(
            "127.0.0.1:7070",
            "default",
            epoch_of=lambda: self.epoch,
            ask=self._ask,
            look_s=2.0,
            clock=self.clock,
            random=lambda: self.chance,
            on_found=self.found.append,
        )
        self.task = asyncio.create_task(self.successor.run())

    async def _ask(self) -> Found:
        self.looked_at.append(self.clock.monotonic())
        await self.may_answer.wait()
        return self.shows

    async def pass_time(self, seconds: float = 10.0) -> None:
        await self.clock.advance(seconds)


@pytest.fixture
async def reign() -> AsyncIterator[Reign]:
    reign = Reign()
    yield reign
    reign.task.cancel()
    await asyncio.wait({reign.task})


async def test_higher_reign_at_the_endpoint_ends_ours_once(reign):
    await reign.pass_time()
    assert reign.found == []
    reign.shows = Served("default", Epoch(6, "other"))

    await reign.pass_time()

    assert [it.epoch for it in reign.found] == [Epoch(6, "other")]
    assert reign.task.done(), "and nothing is asked afterwards"


@pytest.mark.parametrize(
    ("other", "is_higher"),
    [
        (Epoch(5, "zzz"), True),
        (Epoch(5, "aaa"), False),
        (Epoch(4, "zzz"), False),
        (Epoch(6, "aaa"), True),
    ],
)
async def test_reigns_at_the_endpoint_are_compared_as_pairs(reign, other, is_higher):
    reign.shows = Served("default", other)

    await reign.pass_time()

    assert bool(reign.found) is is_higher


@pytest.mark.parametrize(
    "shows",
    [
        Served("default", Epoch(4, "other")),
        Served("other cluster", Epoch(9, "other")),
        Silent("no answer within 1 s"),
        Stranger("it is a web server"),
    ],
)
async def test_whoever_is_no_higher_reign_ends_nothing_and_is_told_once(reign, shows, capsys):
    reign.shows = shows

    await reign.pass_time(60.0)

    assert reign.found == []
    assert len(reign.looked_at) > 10
    assert capsys.readouterr().out.count("stable endpoint") == 1


async def test_our_own_later_epoch_at_the_endpoint_is_not_another_reign(reign):
    """It was raised while the answer was on its way."""
    reign.shows = Served("default", Epoch(8, OURS.supervisor_id))

    await reign.pass_time()

    assert reign.found == []


async def test_looks_are_jittered(reign):
    for chance, between_s in ((0.0, 1.0), (1.0, 3.0)):
        reign.chance = chance
        await reign.pass_time(20.0)
        assert reign.looked_at[-1] - reign.looked_at[-2] == between_s


# --- a worker has shown a higher reign, and ours has gone above it


async def test_reign_that_was_outbid_is_looked_for_at_once_and_given_way_to(reign):
    await reign.pass_time()
    reign.shows = Served("default", Epoch(7, "other"))
    reign.epoch = Epoch(8, OURS.supervisor_id)
    before = len(reign.looked_at)

    reign.successor.look_at_once(OURS)
    await reign.clock.settle()

    assert len(reign.looked_at) == before + 1
    assert [it.epoch for it in reign.found] == [Epoch(7, "other")]


async def test_reign_that_was_outbid_and_is_not_at_the_endpoint_ends_nothing(reign):
    await reign.pass_time()
    reign.epoch = Epoch(8, OURS.supervisor_id)
    reign.shows = Served("default", reign.epoch)

    reign.successor.look_at_once(OURS)
    await reign.pass_time()
    reign.shows = Served("default", Epoch(7, "other"))
    await reign.pass_time()

    assert reign.found == [], "the endpoint has said since that we reign"


async def test_outbidding_is_judged_by_an_answer_however_late_it_comes(reign):
    reign.shows = Silent("no answer within 1 s")
    reign.epoch = Epoch(8, OURS.supervisor_id)
    reign.successor.look_at_once(OURS)
    await reign.pass_time(60.0)
    looks = len(reign.looked_at)
    assert looks < 40, "and is not asked more often for that"

    reign.shows = Served("default", Epoch(7, "other"))
    await reign.pass_time()

    assert [it.epoch for it in reign.found] == [Epoch(7, "other")]


async def test_outbidding_during_a_look_is_judged_by_the_next_one(reign):
    reign.may_answer.clear()
    await reign.pass_time()
    reign.epoch = Epoch(8, OURS.supervisor_id)
    reign.successor.look_at_once(OURS)
    reign.shows = Served("default", Epoch(7, "other"))

    reign.may_answer.set()
    await reign.clock.settle()

    assert [it.epoch for it in reign.found] == [Epoch(7, "other")]
