"""Whose turn it is: who is believed to be gone, who is waited for, and who is refused."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from stagekeeper.core.ids import NO_EPOCH, Epoch
from stagekeeper.host.server import AddressTaken
from stagekeeper.supervisor.endpoint_look import Found, Served, Silent, Stranger, Vacant
from stagekeeper.supervisor.predecessor import Foreign, Free, Occupied, Turn, find_predecessor
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.standby import (
    DISPOSSESSED_LOOKS,
    MOST_FAILED_STARTS,
    Standby,
    Waiting,
)
from stagekeeper.supervisor.state_lock import StateDirTaken
from stagekeeper.supervisor.store import EpochLost
from stagekeeper.supervisor.successor import HigherReign
from tests.fakes.virtual_clock import VirtualClock

OWN, STABLE = "127.0.0.1:7070", "127.0.0.1:7777"
FIVE = Epoch(5, "five")
LIVES = Occupied("it lives", FIVE)
SLOW = Occupied("it is slow")
FREE, UNSURE = Free(is_certain=True), Free(is_certain=False)
STRANGE = Foreign("a stranger lives at it")


class Wait:
    """A standby on virtual time whose endpoint shows `shows`, the last of it for ever."""

    def __init__(self, *shows: Any, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.shows: list[Any] = list(shows)
        self.looked_at: list[float] = []
        self.told: list[Waiting] = []
        self.chance = 0.5
        self.settings = SupervisorSettings(endpoint=OWN, look_s=2.0, **settings)
        self.standby = Standby(
            self.settings,
            self._look,
            clock=self.clock,
            random=lambda: self.chance,
            on_standby=self.told.append,
        )

    async def _look(self) -> Any:
        self.looked_at.append(self.clock.monotonic())
        return self.shows.pop(0) if len(self.shows) > 1 else self.shows[0]

    async def turn(self, within_s: float = 60.0) -> Turn | None:
        """Return the turn; None when it has not come after so long."""
        waiting = asyncio.create_task(self.standby.turn())
        try:
            await self.clock.advance(within_s)
            return waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})


@pytest.mark.parametrize("free", [FREE, UNSURE])
async def test_first_of_a_cluster_begins_at_once(free):
    wait = Wait(free)

    assert await wait.turn(0.0) == Turn(NO_EPOCH, is_first=True)
    assert wait.told == []


async def test_living_predecessor_is_waited_for_and_gone_above():
    wait = Wait(LIVES, LIVES, LIVES, FREE)

    assert await wait.turn() == Turn(FIVE, is_first=False)
    assert wait.told == [Waiting(OWN, FIVE, "it lives")], "and that is said once"


@pytest.mark.parametrize("occupied", [LIVES, SLOW])
async def test_predecessor_that_is_not_gone_is_waited_for_however_long(occupied):
    wait = Wait(occupied)

    assert await wait.turn(2_000.0) is None
    assert len(wait.told) == 1


async def test_the_highest_reign_that_was_ever_shown_is_gone_above():
    wait = Wait(Occupied("", Epoch(9, "nine")), LIVES, SLOW, FREE)

    assert await wait.turn() == Turn(Epoch(9, "nine"), is_first=False)


async def test_predecessor_that_never_answered_was_there_all_the_same():
    assert await Wait(SLOW, FREE).turn() == Turn(NO_EPOCH, is_first=False)


async def test_endpoint_that_others_forward_to_has_to_be_vacant_twice_in_a_row():
    wait = Wait(LIVES, UNSURE, SLOW, UNSURE, LIVES, UNSURE, SLOW)
    assert await wait.turn() is None

    assert await Wait(LIVES, UNSURE, UNSURE).turn() == Turn(FIVE, is_first=False)


async def test_looks_come_about_so_often_and_not_all_standbys_look_at_once():
    for chance, between_s in ((0.0, 1.0), (0.5, 2.0), (1.0, 3.0)):
        wait = Wait(LIVES)
        wait.chance = chance
        await wait.turn(within_s=30.0)
        assert wait.looked_at[1] - wait.looked_at[0] == between_s


async def test_stranger_is_refused_at_the_start():
    wait = Wait(STRANGE)

    with pytest.raises(AddressTaken, match="a stranger lives"):
        await wait.turn()


async def test_stranger_where_our_supervisor_was_is_waited_out():
    wait = Wait(LIVES, STRANGE, STRANGE, FREE)

    assert await wait.turn() == Turn(FIVE, is_first=False)


async def test_stranger_after_silence_is_refused():
    """Nobody of ours was ever there."""
    with pytest.raises(AddressTaken):
        await Wait(SLOW, STRANGE).turn()


@pytest.mark.parametrize("occupied", [LIVES, SLOW])
async def test_without_standby_it_is_refused_at_once(occupied):
    wait = Wait(occupied, standby=False)

    with pytest.raises(AddressTaken, match="end that one first"):
        await wait.turn(0.0)


# --- starts that came to nothing, and reigns that ended


async def failed(wait: Wait, error: OSError) -> None:
    failing = asyncio.create_task(wait.standby.start_failed(error))
    await wait.clock.advance(10.0)
    failing.result()


async def test_lost_race_is_a_wait_until_nobody_can_have_won_it():
    taken = AddressTaken("it is taken")
    wait = Wait(FREE)
    for _ in range(MOST_FAILED_STARTS - 1):
        assert await wait.turn()
        await failed(wait, taken)

    with pytest.raises(AddressTaken, match="it is taken"):
        await failed(wait, taken)


async def test_lost_race_with_a_winner_counts_for_nothing():
    wait = Wait(FREE)
    for _ in range(10):
        await failed(wait, AddressTaken("it is taken"))
        wait.shows = [LIVES, FREE]
        assert await wait.turn() == Turn(FIVE, is_first=False)


async def test_reign_that_began_makes_the_races_that_were_lost_before_it_count_for_nothing():
    wait = Wait(FREE)
    for _ in range(MOST_FAILED_STARTS):
        await failed(wait, AddressTaken("it is taken"))
        wait.standby.began()


async def test_owner_of_the_directory_is_waited_for_if_its_place_is_ours_to_inherit():
    wait = Wait(FREE)
    for _ in range(10):
        await failed(wait, StateDirTaken("it is in use", may_pass=True))
    assert [told.why for told in wait.told] == ["it is in use"]
    assert await wait.turn() == Turn(NO_EPOCH, is_first=False)

    with pytest.raises(StateDirTaken):
        await failed(wait, StateDirTaken("it is in use", may_pass=False))


async def test_reign_that_stepped_down_stands_by_and_begins_above_both():
    wait = Wait(LIVES, FREE)
    wait.standby.deposed(Epoch(7, "me"), HigherReign("it is higher", Epoch(8, "other")))

    assert await wait.turn() == Turn(Epoch(8, "other"), is_first=False)
    assert len(wait.told) == 1


async def test_who_lost_its_store_to_a_reign_that_is_nowhere_ends():
    """Two supervisors of one store with two endpoints must not take it from each other for ever."""
    wait = Wait(FREE)
    wait.standby.deposed(FIVE, EpochLost("another one took over"))

    with pytest.raises(EpochLost, match="another one took over"):
        await wait.turn()
    assert len(wait.looked_at) == DISPOSSESSED_LOOKS


async def test_who_lost_its_store_to_a_reign_at_its_endpoint_stands_by():
    six = Occupied("it lives", Epoch(6, "six"))
    wait = Wait(FREE, six, FREE)
    wait.standby.deposed(FIVE, EpochLost("another one took over"))

    assert await wait.turn() == Turn(Epoch(6, "six"), is_first=False)


# --- who is at the endpoint


REFUSED, CLOSED = Vacant(is_refused=True), Vacant(is_refused=False)
OURS, THEIRS = Served("default", FIVE), Served("other", FIVE)
SILENT, STRANGER = Silent("no answer within 1 s"), Stranger("it is a web server")
IN_USE = OSError(errno.EADDRINUSE, "Address already in use")
NOT_HERE = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")


async def outlook(
    looks: dict[str, Found] | Found,
    problem: OSError | None = None,
    *,
    own: str = OWN,
    stable: str = "",
) -> tuple[Any, list[str]]:
    """Return what is seen, and where it was looked."""
    asked: list[str] = []

    async def look(address: str, timeout_s: float) -> Found:
        asked.append(address)
        return looks[address] if isinstance(looks, dict) else looks

    settings = SupervisorSettings(endpoint=own, stable_endpoint=stable)
    seen = await find_predecessor(settings, look=look, listen_problem=lambda _: problem)
    return seen, asked


@pytest.mark.parametrize(
    ("found", "kind", "epoch"),
    [
        (OURS, Occupied, FIVE),
        (SILENT, Occupied, None),
        (THEIRS, Foreign, None),
        (STRANGER, Foreign, None),
    ],
)
@pytest.mark.parametrize("stable", ["", STABLE])
async def test_whoever_is_at_the_stable_endpoint_is_judged_by_what_it_says(
    stable, found, kind, epoch
):
    seen, asked = await outlook(found, stable=stable)

    assert type(seen) is kind
    assert getattr(seen, "epoch", None) == epoch
    assert asked == [stable or OWN], "though our own address is free"


async def test_vacant_endpoint_is_certain_only_where_we_listen_there_ourselves():
    assert await outlook(REFUSED) == (FREE, [OWN])
    assert await outlook(REFUSED, stable=STABLE) == (UNSURE, [STABLE])
    assert await outlook(CLOSED, stable=STABLE) == (UNSURE, [STABLE])


async def test_port_that_the_system_will_choose_is_not_asked():
    assert await outlook(OURS, own="127.0.0.1:0") == (FREE, [])


async def test_address_that_is_held_but_not_listened_at_is_about_to_be():
    seen, _ = await outlook(REFUSED, IN_USE)
    assert isinstance(seen, Occupied)


async def test_address_at_which_something_closes_every_connection_is_a_strangers():
    seen, _ = await outlook(CLOSED, IN_USE)
    assert isinstance(seen, Foreign)
    assert OWN in seen.why


async def test_address_that_is_not_of_this_machine_is_refused():
    seen, _ = await outlook(REFUSED, NOT_HERE)
    assert isinstance(seen, Foreign)
    assert "Cannot assign" in seen.why


async def test_own_address_is_looked_at_too_when_it_is_taken():
    seen, asked = await outlook({STABLE: REFUSED, OWN: OURS}, IN_USE, stable=STABLE)
    assert isinstance(seen, Occupied)
    assert seen.epoch == FIVE
    assert asked == [STABLE, OWN]

    seen, _ = await outlook({STABLE: CLOSED, OWN: THEIRS}, IN_USE, stable=STABLE)
    assert isinstance(seen, Foreign)
    assert "'other'" in seen.why
