"""What is read of a registry beside its views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.ids import ChangeRevision
from tests.worlds import (
    REIGN,
    World,
    desired,
    spec,
)


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_wanted_says_whether_it_survives(durable) -> None:
    world = World(durable=durable)
    world.register()
    world.deploy(spec())

    assert world.view().durable is durable


def test_the_first_snapshot_is_no_change() -> None:
    world = World(desired=[desired()], roster=["w1"])

    assert world.registry.changes_since(ChangeRevision(REIGN, 0)) == []
    assert [it.name for it in world.registry.deployments()] == ["m"]


def test_an_unknown_deployment_has_no_view_and_no_creation() -> None:
    world = World()

    assert world.view("nothing") is None
    assert world.registry.creation_of("nothing").is_settled
    assert world.registry.target_of("nobody") is None


def test_a_worker_is_commanded_in_its_present_life() -> None:
    world = World()
    world.register(incarnation=3)

    target = world.registry.target_of("w1")

    assert target is not None
    assert (target.incarnation, target.address) == (3, "127.0.0.1:7071")
    assert replace(target, incarnation=4) != target
