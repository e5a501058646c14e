"""A mesh of actors, for its owner, over processes that are not there. No process runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.actor_mesh import ActorMeshControl
from stagekeeper.actor.owning.scope import Scope
from stagekeeper.actor.owning.spawn_plan import SpawnPlan
from stagekeeper.actor.place import Place
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload

FAILURE = MeshFailure(id="a-unhandled-1", kind=FailureKind.UNHANDLED, mesh_name="workers")


class Link:
    """To a process that takes no request but, where it is given an answer, that to stop."""

    def __init__(
        self, answer: pb.StopActorResponse | None = None, *, is_silent: bool = False
    ) -> None:
        self._answer = answer
        self.is_silent = is_silent
        self.asked = asyncio.Event()

    async def connected(self) -> None: ...

    @property
    def actors(self) -> Any:
        assert self.is_silent or self._answer is not None, "the process is asked"
        return self

    async def SpawnActor(self, request: pb.SpawnActorRequest) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    async def StopActor(self, request: pb.StopActorRequest, timeout: float) -> Any:
        return self._answer

    def attach(self, caller: object) -> None: ...

    def detach(self, caller: object) -> None: ...


async def place_of(rank: int) -> Place:
    return Place("h:1", "p")


def mesh_of_one(told: list[MeshFailure], link: Link | None = None) -> ActorMeshControl:
    links = SimpleNamespace(existing=lambda _: link or Link(), to=lambda _: link)
    program: Any = SimpleNamespace(token="t", links=links, forget=lambda _: None)
    program.instance_id = "own"
    program.stalled = lambda _: replace(FAILURE, kind=FailureKind.STALLED)
    scope = Scope(ActorIdentity("", "", "root", 0, 1, 1, ()))
    cast(Any, scope).deliver = told.append
    plan = SpawnPlan("workers", "module:Worker", "", Payload())
    return ActorMeshControl(
        program, scope, plan, cast(Any, SimpleNamespace(size=1, place=place_of))
    )


async def test_late_news_of_an_earlier_incarnation_is_not_taken_for_news_of_the_next():
    told: list[MeshFailure] = []
    mesh = mesh_of_one(told)
    (rank,) = mesh.ranks
    rank.actor_id = "a"

    rank.renew()
    mesh.rank_failed(0, "a", FAILURE)

    assert (told, rank.failure) == ([], None)


async def test_a_rank_that_failed_before_it_was_in_its_process_is_not_ended_there():
    mesh = mesh_of_one([])
    (rank,) = mesh.ranks
    rank.place = Place("h:1", "p")
    rank.fail(FAILURE)

    # Without an actor's id the request would end all that are in the process.
    assert await mesh._stops.let_go(rank) is None


@pytest.mark.parametrize(
    ("kind", "is_stuck", "listed"),
    [
        (FailureKind.UNHANDLED, False, "dead"),
        (FailureKind.UNHANDLED, True, "stuck"),
        (FailureKind.CLEANUP_RAISED, False, "clean"),
    ],
)
async def test_a_rank_of_which_only_the_stop_says_that_it_had_failed_is_dead_in_the_report(
    kind, is_stuck, listed
):
    failure = replace(FAILURE, kind=kind)
    answer = pb.StopActorResponse(cleanup_failure=failure_to_proto(failure), is_stuck=is_stuck)
    told: list[MeshFailure] = []
    mesh = mesh_of_one(told, link := Link(answer))
    mesh.ranks[0].up(cast(Any, link), "a", Place("h:1", "p"))

    report = await mesh.stop(1.0)

    lists = {"clean": report.clean, "stuck": report.stuck, "dead": list(report.dead)}
    assert lists == {"clean": [], "stuck": [], "dead": []} | {listed: [0]}
    assert [it.kind for it in told] == [kind] * (kind is FailureKind.UNHANDLED)


async def test_of_a_rank_that_is_to_be_in_a_process_that_is_silent_already_the_owner_is_told():
    told: list[MeshFailure] = []
    mesh = mesh_of_one(told, link := Link(is_silent=True))

    mesh.start()
    await asyncio.wait_for(link.asked.wait(), 10.0)

    assert [(it.kind, it.ranks) for it in told] == [(FailureKind.STALLED, (0,))]
    for start in mesh._starts:
        start.cancel()
