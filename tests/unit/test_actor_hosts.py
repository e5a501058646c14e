"""Mistakes in what is spawned, told in the line that makes them. No process runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagekeeper.actor import Actor, endpoint, root
from stagekeeper.actor.hosts import HostMesh, ProcMesh
from stagekeeper.actor.owning.scope import checked_budget_s
from stagekeeper.wire.actor_limits import LONGEST_PEER_WAIT_S


class Worker(Actor):
    def __init__(self, size: int, *, name: str = "") -> None:
        self.size = size

    @endpoint
    async def step(self) -> int:
        return self.size


def procs() -> ProcMesh:
    return ProcMesh(
        cast(Any, None), cast(Any, SimpleNamespace(size=1, mesh_name="p", is_stopping=False))
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'size'; workers is made as Worker[(]size: "),
        ((1, 2), {}, "too many positional arguments"),
        ((1,), {"nmae": "a"}, "unexpected keyword argument 'nmae'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_by_spawn(args, kwargs, said):
    with pytest.raises(TypeError, match=said):
        procs().spawn("workers", cast(Any, Worker), *args, **kwargs)


def test_names_and_numbers_that_are_none_are_told_as_that():
    with pytest.raises(TypeError, match="a mesh's name is text, not 3"):
        procs().spawn(cast(Any, 3), Worker, 1)
    hosts = HostMesh(cast(Any, None), ("here",), cast(Any, None))
    for count in ("2", True, 2.0):
        with pytest.raises(TypeError, match="takes a number of processes"):
            hosts.spawn_procs(cast(Any, count))
    with pytest.raises(ValueError, match="at least 1 process"):
        hosts.spawn_procs(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_in_flight": -1}, "max_in_flight is from 0 to 65,536, not -1"),
        ({"max_in_flight": 1.5}, "max_in_flight is a whole number, not 1.5"),
        ({"stall_after_s": float("nan")}, "stall_after_s is from 0 to 31,536,000, not nan"),
        ({"stall_after_s": "5"}, "stall_after_s is a number of seconds, not '5'"),
        ({"is_group": 1}, "is_group is True or False, not 1"),
    ],
)
def test_options_that_make_no_sense_are_told_as_that(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        procs().options(**options)
    assert procs().options(is_group=True, stall_after_s=5, max_in_flight=0).size == 1


def test_a_budget_is_0_or_more():
    assert checked_budget_s(None) == 10.0 and checked_budget_s(0) == 0.0
    assert checked_budget_s(float("inf")) == LONGEST_PEER_WAIT_S, "what the other end takes"
    with pytest.raises(TypeError, match="a number of seconds, not '5'"):
        checked_budget_s(cast(Any, "5"))
    for budget_s in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="0 seconds or more"):
            checked_budget_s(budget_s)
        with pytest.raises(ValueError, match="0 seconds or more"):
            root(stop_budget_s=budget_s)
