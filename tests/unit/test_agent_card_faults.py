"""Whom an error of a card ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from stagekeeper.agent.cards import card_faults
from stagekeeper.agent.cards.card_faults import CardFaults
from stagekeeper.agent.cards.devices import CardFault
from stagekeeper.agent.cards.ledger import Ledger
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeviceId, StageId
from stagekeeper.core.model import Device, DeviceClaim, MemoryNeed, StageSpec, StageStart
from stagekeeper.host.tasks import TaskOwner

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")


class World:
    """Stages by name, with the cards that they claim and the pids that are theirs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stages: list[Any] = []
        self.pids: dict[int, str] = {}
        self.listed: dict[DeviceId, frozenset[int]] = {}
        self.by_the_next_look: dict[DeviceId, frozenset[int]] = {}
        self.sick: dict[DeviceId, str] = {}
        self.failed: list[tuple[str, str, str]] = []
        self.killed: list[str] = []
        self.owner = TaskOwner("test")
        monkeypatch.setattr(
            card_faults, "is_of_stage", lambda pid, stage: self.pids.get(pid) == stage.name
        )
        monkeypatch.setattr(card_faults, "kill_processes", self._kill)
        me: Any = self  # it stands in for the inventory, and for `Deaths`
        self.faults = CardFaults(self.stages, me, me, self.owner, look_s=1.0)

    @property
    def by_id(self) -> dict[DeviceId, Device]:
        return {
            it: Device(it, "cuda", "", 0, 80, sick_reason=self.sick.get(it, "")) for it in (A, B)
        }

    def listed_on(self, ids: Iterable[DeviceId]) -> dict[DeviceId, frozenset[int]]:
        return {it: self.listed.get(it, frozenset()) for it in ids}

    async def look_again(self, within_s: float) -> None:
        self.listed |= self.by_the_next_look

    def declare(self, stage: Any, kind: str, message: str, *, seen_by: str) -> None:
        stage.failure = message
        self.failed.append((stage.name, kind, seen_by))

    async def _kill(self, stage: Any) -> None:
        self.killed.append(stage.name)

    def stage(self, name: str, *cards: DeviceId, pids: tuple[int, ...] = (), **more: Any) -> None:
        shard = SimpleNamespace(devices=tuple(DeviceClaim(it, 1) for it in cards), pid=7)
        fields = {"handle": object(), "holds_processes": True, "is_asked": False, "failure": None}
        made = SimpleNamespace(name=name, instance_id=name, shard=shard, **(fields | more))
        self.stages.append(made)
        self.pids |= dict.fromkeys(pids, name)


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


async def ended(world: World) -> list[str]:
    await asyncio.sleep(0)
    assert world.killed == [name for name, *_ in world.failed]
    await world.owner.stop()
    return world.killed


async def test_sick_card_fails_each_stage_that_has_it_once_and_no_other(world):
    world.stage("both", A, B)
    world.stage("one", A)
    world.stage("other", B)
    world.stage("none")
    world.stage("ending", A, is_asked=True)
    world.stage("failed", A, failure="before")
    world.stage("gone", A, holds_processes=False)
    world.faults.look()
    assert world.failed == []

    world.sick[A] = "XID 79"
    for _ in range(3):
        world.faults.look()

    assert world.failed == [("both", "DEVICE_FAILED", "nvml"), ("one", "DEVICE_FAILED", "nvml")]
    assert "card GPU-a is sick: XID 79" in world.stages[0].failure
    assert await ended(world) == ["both", "one"]


async def test_error_of_a_program_ends_the_stage_whose_process_was_named(world):
    world.stage("a", A, pids=(1, 2))
    world.stage("b", A, pids=(3,))
    world.stage("c", B, pids=(4,))
    world.listed[A] = frozenset({1, 2, 3, 99})

    for pid in (99, 4, 3):  # a stranger's, one of another card, and b's
        world.faults.met(CardFault((A,), "XID 31", pid))

    assert await ended(world) == ["b"]
    assert world.stages[1].failure.endswith("XID 31")


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ({1, 2}, {1}, ["a"]),  # all of them are its
        (set(), {1}, ["a"]),
        ({1, 99}, {1}, []),  # a stranger met it, maybe, and ended of it
        ({1}, {1, 99}, []),
        ({0}, {0}, []),  # of another pid namespace
        (set(), set(), []),  # nobody can tell
    ],
)
async def test_error_of_an_unnamed_program_ends_a_stage_that_is_alone_on_the_card(
    world, before, after, names
):
    world.stage("a", A, pids=(1, 2))
    world.stage("elsewhere", B, pids=(3,))
    world.listed[A] = frozenset(before)
    world.by_the_next_look[A] = frozenset(after)

    world.faults.met(CardFault((A,), "XID 31"))
    await asyncio.sleep(0)

    assert await ended(world) == names


async def test_error_of_an_unnamed_program_ends_nobody_where_two_stages_have_the_card(world):
    world.stage("a", A, pids=(1,))
    world.stage("b", A)
    world.listed[A] = frozenset({1})

    world.faults.met(CardFault((A,), "XID 31"))
    await asyncio.sleep(0)

    assert await ended(world) == []


# --- what a sick card is chosen for


def start(*cards: DeviceId) -> StageStart:
    spec = StageSpec("s", "a:B", devices=tuple(range(len(cards))), memory=MemoryNeed(0.1))
    return StageStart(StageId(0), spec, cards)


def test_sick_card_gets_nothing_new_nor_what_was_reserved_on_it_before():
    well = Device(A, "cuda", "", 0, 1_000), Device(B, "cuda", "", 1, 1_000)
    ledger = Ledger(well)
    ledger.admit([start(A, B)])
    ledger.cards_are(
        (Device(A, "cuda", "", 0, 1_000, sick_reason="XID 79 (it has fallen off)"), well[1])
    )

    for refused in (
        lambda: ledger.admit([start(B, A)]),
        lambda: ledger.check_still_there(start(A)),
    ):
        with pytest.raises(Refused, match="device GPU-a is sick: XID 79") as error:
            refused()
        assert error.value.reason is Reason.ADMISSION_REFUSED
    ledger.admit([start(B)])
    ledger.check_still_there(start(B))
