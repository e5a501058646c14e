"""Turns on an agent's cards: all at once, in order, and nothing is kept by who waits."""

from __future__ import annotations

import asyncio

import pytest

from stagekeeper.agent.cards.card_turns import CardTurns
from stagekeeper.core.ids import DeviceId


class Starter:
    """One that wants some cards."""

    def __init__(self, turns: CardTurns, *cards: str, together_with: str = "") -> None:
        self.has_begun = False
        self._turns = turns
        self._cards = [DeviceId(it) for it in cards]
        self._together_with = together_with
        self._may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def end(self) -> None:
        self._may_end.set()
        await self.task
        await settled()

    async def _run(self) -> None:
        async with self._turns.alone_on(self._cards, together_with=self._together_with):
            self.has_begun = True
            await self._may_end.wait()


async def settled() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def starters(turns: CardTurns, *wanted: str) -> list[Starter]:
    """Ask in this order; each wants the cards that a string names by letters."""
    made = []
    for cards in wanted:
        made.append(Starter(turns, *cards))
        await settled()
    return made


def begun(made: list[Starter]) -> list[bool]:
    return [it.has_begun for it in made]


async def test_a_card_is_for_one_at_a_time_in_the_order_in_which_they_asked() -> None:
    made = await starters(CardTurns(), "a", "a", "a", "b", "")
    assert begun(made) == [True, False, False, True, True]
    await made[0].end()
    assert begun(made) == [True, True, False, True, True]
    await made[1].end()
    assert begun(made) == [True] * 5
    for it in made[2:]:
        await it.end()


async def test_who_waits_for_one_card_keeps_no_other_one_from_anybody() -> None:
    made = await starters(CardTurns(), "b", "ab", "a")
    assert begun(made) == [True, False, True]
    await made[0].end()
    assert begun(made) == [True, False, True]
    await made[2].end()
    assert begun(made) == [True] * 3
    await made[1].end()


async def test_a_wait_that_is_cancelled_takes_nothing_along() -> None:
    turns = CardTurns()
    made = await starters(turns, "a", "a", "a")
    made[1].task.cancel()
    await settled()
    await made[0].end()
    assert begun(made) == [True, False, True]
    await made[2].end()


async def test_a_wait_that_is_cancelled_as_it_is_granted_gives_back() -> None:
    turns = CardTurns()
    async with turns.alone_on([DeviceId("a")]):
        second, third = await starters(turns, "a", "a")
    second.task.cancel()  # it was granted, and has not run since
    with pytest.raises(asyncio.CancelledError):
        await second.task
    await settled()
    assert begun([second, third]) == [False, True]
    await third.end()


async def test_starts_that_are_one_share_their_cards_and_others_wait_for_all_of_them() -> None:
    turns = CardTurns()
    one = [Starter(turns, *cards, together_with="one") for cards in ("a", "ab", "b")]
    await settled()
    (alone,) = await starters(turns, "a")
    two = Starter(turns, "b", together_with="two")
    late = Starter(turns, "a", together_with="one")
    await settled()
    assert begun([*one, alone, two, late]) == [True, True, True, False, False, True]

    for it in one:
        await it.end()
    assert begun([alone, two]) == [False, True]  # the late one still has the first card
    await late.end()
    assert begun([alone, two]) == [True, True]
    await alone.end()
    await two.end()
