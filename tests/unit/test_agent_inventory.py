"""The cards as admission and reports see them, while what is read of them changes."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from stagekeeper.agent.cards.devices import CardProcess, CardReading, Reading
from stagekeeper.agent.cards.foreign_figures import ForeignFigures
from stagekeeper.agent.cards.host_memory import HostMemory, parse_devices
from stagekeeper.agent.cards.inventory import Inventory
from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeviceId, OperationId, StageId, WorkerId
from stagekeeper.core.model import (
    Device,
    DeviceClaim,
    ForeignHolder,
    MemoryNeed,
    StageSpec,
    StageStart,
)
from stagekeeper.host.tasks import TaskOwner
from tests.fakes.virtual_clock import VirtualClock

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")
INTERVAL_S = 5.0
GIB = 2**30


def card(
    device_id: DeviceId,
    total_bytes: int = 1_000,
    used_bytes: int | None = 0,
    processes: tuple[CardProcess, ...] | None = (),
    problem: str = "",
) -> CardReading:
    device = Device(device_id, "cuda", "a card", 0, total_bytes, f"host/{device_id}", used_bytes)
    return CardReading(device, processes, problem)


class Cards:
    """A source that finds at each look what the test has put there."""

    def __init__(self, *cards: CardReading, unknown_reason: str = "") -> None:
        self.there = Reading(cards, unknown_reason)
        self._seen = Reading(unknown_reason="not read yet")

    async def look(self) -> float:
        self._seen = self.there
        return INTERVAL_S

    def reading(self, stages: object) -> Reading:
        return self._seen


class World:
    """An inventory of cards, and of whatever else."""

    def __init__(self, *cards: CardReading, **more: Any) -> None:
        self.cards = Cards(*cards)
        self.clock = VirtualClock()
        self.ledger = Ledger()
        self.inventory = Inventory([*more.get("others", ()), self.cards], self.ledger, self.clock)
        self.changes = 0
        self.inventory.on_change = self._changed
        self.owner = TaskOwner("test")

    def _changed(self) -> None:
        self.changes += 1

    async def __aenter__(self) -> World:
        self.inventory.follow(self.owner)
        await self.inventory.read_once(60)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.owner.stop()

    async def find(self, *cards: CardReading, unknown_reason: str = "") -> None:
        """Put these there, and have them found by the next look."""
        self.cards.there = Reading(cards, unknown_reason)
        await self.clock.advance(INTERVAL_S)


def start(need: MemoryNeed, *cards: DeviceId) -> StageStart:
    spec = StageSpec("s", "a:B", devices=tuple(range(len(cards))), memory=need)
    return StageStart(StageId(0), spec, cards)


def refusal(ledger: Ledger, stage: StageStart) -> Refused:
    with pytest.raises(Refused) as refused:
        ledger.admit([stage])
    return refused.value


ALL = start(MemoryNeed(utilization=1.0), A)


async def test_what_was_not_read_yet_is_unknown_and_admits_nothing():
    world = World(card(A))

    assert world.inventory.report(()).unknown_reason == "not read yet"
    assert refusal(world.ledger, ALL).reason is Reason.ADMISSION_REFUSED


async def test_slices_need_no_look_and_come_first():
    slices = HostMemory(parse_devices(("cpu:7=1GiB",), "host/w"))
    async with World(card(A), card(B), others=[slices]) as world:
        devices = world.inventory.report(()).devices

    assert [(it.device_id, it.index) for it in devices] == [("cpu:7", 0), (A, 1), (B, 2)]


@pytest.mark.parametrize(
    ("found", "is_change"),
    [
        ((card(A, used_bytes=900),), False),
        ((card(A, used_bytes=None, processes=None),), False),
        ((card(A), card(B)), True),
        ((card(A, total_bytes=2_000),), True),
        ((card(A, total_bytes=0, problem="broken"),), True),
        ((), True),
    ],
)
async def test_other_cards_are_another_slice_and_other_figures_are_not(found, is_change):
    async with World(card(A)) as world:
        changes = world.changes
        await world.find(*found)

        assert (world.changes > changes) is is_change
        await world.find(*found)
        assert world.changes == changes + is_change


async def test_unknown_and_known_again_are_other_slices_and_another_reason_is_one():
    async with World(card(A)) as world:
        changes = world.changes
        for reason in ("hangs", "hangs", "mismatch", ""):
            await world.find(card(A), unknown_reason=reason)
        assert world.changes == changes + 3


async def test_ledger_follows_what_is_found():
    async with World(card(A)) as world:
        world.ledger.admit([ALL])

        await world.find(card(A), unknown_reason="NVML hangs")
        assert "NVML hangs" in refusal(world.ledger, ALL).message
        world.ledger.admit([start(MemoryNeed(bytes=1))])  # it asks for no card

        await world.find(card(B))
        assert refusal(world.ledger, ALL).reason is Reason.UNKNOWN_DEVICE

        await world.find(card(A, total_bytes=0, problem="GetMemoryInfo: broken"))
        broken = refusal(world.ledger, ALL)
        assert broken.reason is Reason.ADMISSION_REFUSED
        assert "device GPU-a: GetMemoryInfo: broken" in broken.message

        await world.find(card(A, total_bytes=500))
        assert "500 there" in refusal(world.ledger, start(MemoryNeed(bytes=501), A)).message
        world.ledger.admit([start(MemoryNeed(bytes=500), A)])


async def test_claim_does_not_shrink_with_what_is_known_of_its_card():
    async with World(card(A)) as world:
        half = start(MemoryNeed(utilization=0.5), A)
        world.ledger.book(Booking(OperationId("op"), StageId(0)), "s", world.ledger.claims_of(half))

        await world.find(card(A, total_bytes=0, problem="broken"))
        assert [it.reserved_bytes for it in world.ledger.claims_of(half)] == [500]
        assert world.inventory.report(()).devices[0].reserved_bytes == 500
        await world.find()
        assert [it.reserved_bytes for it in world.ledger.claims_of(half)] == [500]
        with pytest.raises(Refused, match="no device GPU-a; it has none"):
            world.ledger.check_still_there(half)
        await world.find(unknown_reason="NVML hangs")
        world.ledger.check_still_there(half)  # nobody knows, so what was admitted goes on

        await world.find(card(A))
        assert "s: 500" in refusal(world.ledger, start(MemoryNeed(bytes=501), A)).message


async def test_agent_goes_on_without_a_driver_that_takes_long():
    class Slow(Cards):
        async def look(self) -> float:
            await asyncio.Event().wait()
            raise AssertionError

    world = World()
    world.inventory = Inventory([Slow()], world.ledger, world.clock)
    world.inventory.follow(world.owner)

    await world.inventory.read_once(0.01)

    assert world.inventory.report(()).unknown_reason == "not read yet"
    await world.owner.stop()


def held(pid: int, instance_id: str = "i-1", *, has_exited: bool = False) -> Any:
    shard = SimpleNamespace(pid=pid, devices=(DeviceClaim(DeviceId("cpu:0"), 5),), memory_bytes=9)
    return SimpleNamespace(
        handle=SimpleNamespace(pid=pid, has_exited=has_exited),
        instance_id=instance_id,
        holds_processes=True,
        shard=shard,
    )


async def test_what_strangers_hold_is_told_when_it_has_moved_by_much_and_not_again_at_once():
    def hog(used_bytes: int) -> CardReading:
        processes = (CardProcess(os.getpid(), used_bytes),)
        return card(A, 100 * GIB, used_bytes, processes)

    def told(world: World) -> list[int]:
        (device,) = world.inventory.report(()).devices
        return [it.memory_bytes for it in device.foreign]

    async with World(hog(8 * GIB)) as world:
        changes = world.changes
        assert told(world) == [8 * GIB]

        await world.find(hog(9 * GIB))  # a hundredth of the card
        assert (told(world), world.changes) == ([8 * GIB], changes)
        await world.find(hog(9 * GIB + 1))
        assert (told(world), world.changes) == ([9 * GIB + 1], changes + 1)
        assert "(python" in str(world.inventory.report(()).devices[0].foreign[0])
        await world.find(card(A, 100 * GIB))
        assert (told(world), world.changes) == ([], changes + 2)


async def test_startup_2_memory_that_a_neighbour_frees_is_noted_and_given_to_the_next():
    """The start that measures meanwhile goes on: `test_stage_memory_account` has its peak."""
    half = start(MemoryNeed(utilization=0.5), A)
    async with World(card(A, 10 * GIB, 7 * GIB, (CardProcess(os.getpid(), 7 * GIB),))) as world:
        assert refusal(world.ledger, half).reason is Reason.ADMISSION_REFUSED
        await world.find(card(A, 10 * GIB))

        world.ledger.admit([half])
        assert world.inventory.report(()).devices[0].foreign == ()


async def test_what_strangers_hold_is_told_every_few_seconds_at_most():
    clock = VirtualClock()
    figures = ForeignFigures(WorkerId("w"), clock)

    def found(used_bytes: int) -> dict[DeviceId, tuple[ForeignHolder, ...]]:
        return {A: (ForeignHolder(7, "p", used_bytes),)}

    assert figures.take_in(found(GIB), {A: GIB})
    await clock.advance(2.9)
    assert not figures.take_in(found(2 * GIB), {A: GIB})
    assert figures.of(A, found(2 * GIB)) == found(GIB)[A]
    await clock.advance(0.2)
    assert figures.take_in(found(2 * GIB), {A: GIB})
    assert figures.of(A, found(2 * GIB)) == found(2 * GIB)[A]


async def test_stages_of_other_workers_are_told_as_they_are_and_make_no_news():
    clock = VirtualClock()
    figures = ForeignFigures(WorkerId("w"), clock)
    theirs = {A: (ForeignHolder(7, "m replica 0 stage a", GIB, WorkerId("w2")),)}

    assert not figures.take_in(theirs, {A: GIB})
    assert figures.of(A, theirs) == theirs[A]
    assert figures.of(A, {}) == ()


def test_memory_of_a_stage_is_that_of_its_slices_and_each_carries_an_even_part():
    source = HostMemory(parse_devices(("cpu:0=1GiB", "cpu:1=1GiB"), ""))
    two = held(7)
    two.shard.devices = tuple(DeviceClaim(DeviceId(it), 1) for it in ("cpu:0", "cpu:1", A))
    two.shard.memory_bytes = 100

    first, second = source.reading([two, held(3)]).cards

    assert (first.device.used_bytes, second.device.used_bytes) == (59, 50)
    assert first.processes == (CardProcess(3, 9), CardProcess(7, 50))


# --- looks that are not due


async def test_look_that_is_wanted_is_made_at_once_and_the_next_one_is_due_as_ever():
    async with World(card(A, used_bytes=1)) as world:
        world.cards.there = Reading((card(A, used_bytes=2),))
        await world.inventory.look_again(60)
        assert world.inventory.report(()).devices[0].used_bytes == 2

        await world.find(card(A, used_bytes=3))
        assert world.inventory.report(()).devices[0].used_bytes == 3


async def test_look_that_had_begun_before_it_was_wanted_does_not_count():
    """It may have read the cards before what is to be seen on them had happened."""
    world = World()
    begun: list[asyncio.Event] = []

    class Slow(Cards):
        async def look(self) -> float:
            begun.append(asyncio.Event())
            await begun[-1].wait()
            return await super().look()

    world.inventory = Inventory([Slow(card(A))], world.ledger, world.clock)
    world.inventory.follow(world.owner)
    await world.clock.settle()
    wanted = asyncio.create_task(world.inventory.look_again(60))
    await world.clock.settle()

    begun[0].set()
    await world.clock.settle()
    assert len(begun) == 2
    assert not wanted.done()
    begun[1].set()

    await asyncio.wait_for(wanted, 5)
    await world.owner.stop()


async def test_look_that_does_not_end_is_waited_for_no_longer_than_wanted():
    world = World()

    class Hangs(Cards):
        async def look(self) -> float:
            await asyncio.Event().wait()
            return 0.0

    world.inventory = Inventory([Hangs(card(A))], world.ledger, world.clock)
    world.inventory.follow(world.owner)
    await world.clock.settle()

    await asyncio.wait_for(world.inventory.look_again(0.01), 5)

    await world.owner.stop()


async def test_without_cards_that_are_looked_at_nothing_is_waited_for():
    inventory = Inventory(
        [HostMemory(parse_devices(("cpu:0=1GiB",), "w"))], Ledger(), VirtualClock()
    )

    await asyncio.wait_for(inventory.look_again(60), 5)
