"""When memory as it is measured is worth a registration: seldom, and never while nothing moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagekeeper.agent.worker_slice import WorkerSlice
from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import DeviceClaim
from tests.worlds import device, report, shard

MIB = 2**20


class Figures:
    """A slice whose report is what the test says, and how often it was to be put."""

    def __init__(self, **figures: Any) -> None:
        self.slice = WorkerSlice("default", lambda: self.report)
        self.changes = 0
        self.slice.on_change = self._changed
        self.are(**figures)
        self.slice.copy()

    def _changed(self) -> None:
        self.changes += 1

    def are(self, *, shard_bytes=None, claim_bytes=None, device_bytes=None) -> None:
        claim = DeviceClaim(DeviceId("GPU-0"), 5, used_bytes=claim_bytes)
        held = shard(memory_bytes=shard_bytes, devices=(claim,))
        card = replace(device(0), used_bytes=device_bytes)
        self.report = report(shards=[held], devices=(card,))


@pytest.mark.parametrize("figure", ["shard_bytes", "claim_bytes", "device_bytes"])
@pytest.mark.parametrize(
    ("told", "now", "is_told"),
    [
        (None, None, False),
        (None, 5, True),
        (5, None, True),
        (0, 16 * MIB, False),
        (0, 16 * MIB + 1, True),
        (100 * MIB, 116 * MIB, False),
        (100 * MIB, 83 * MIB, True),
        (1_000 * MIB, 1_100 * MIB, False),
        (1_000 * MIB, 1_101 * MIB, True),
        (1_000 * MIB, 899 * MIB, True),
    ],
)
def test_only_what_people_would_miss_is_told_anew(figure, told, now, is_told):
    world = Figures(**{figure: told})

    world.are(**{figure: now})
    world.slice.figures_are_read()

    assert world.changes == int(is_told)


def test_what_was_told_is_told_once_and_creeping_adds_up():
    world = Figures(shard_bytes=100 * MIB)
    world.slice.figures_are_read()
    assert world.changes == 0, "nothing has moved"

    for more in range(1, 20):
        world.are(shard_bytes=(100 + more) * MIB)
        world.slice.figures_are_read()
    assert world.changes == 1

    world.slice.copy()
    world.slice.figures_are_read()
    assert world.changes == 1


def test_while_nobody_hears_it_is_wanted_once():
    world = Figures()
    world.are(device_bytes=5)

    world.slice.figures_are_read()
    world.slice.figures_are_read()

    assert world.changes == 1


def test_figures_are_in_no_digest():
    world = Figures(shard_bytes=1, claim_bytes=1, device_bytes=1)
    before = world.slice.copy().digest

    world.are(shard_bytes=2**40, claim_bytes=2**40, device_bytes=2**40)

    assert world.slice.copy().digest == before
