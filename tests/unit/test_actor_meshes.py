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

    def call(self, caller: object, call: asyncio.Future[Payload], *_: object) -> None:
        call.set_result(Payload())

    async def StopActor(self, request: pb.StopActorRequest, timeout: float = 0.0) -> Any:
        return self._answer

    def attach(self, caller: object) -> None: ...

    def detach(self, caller: object) -> None: ...


async def place_of(rank: int) -> Place:
    return Place("h:1", "p")


def a_mesh(told: list[MeshFailure], link: Link | None = None, *, size: int = 1) -> ActorMeshControl:
    links = SimpleNamespace(existing=lambda _: link or Link(), to=lambda _: link)
    program: Any = SimpleNamespace(token="t", links=links, forget=lambda _: None)
    program.instance_id = "own"
    program.stalled = lambda _: replace(FAILURE, kind=FailureKind.STALLED)
    scope = Scope(ActorIdentity("", "", "root", 0, 1, 1, ()))
    cast(Any, scope).deliver = told.append
    plan = SpawnPlan("workers", "module:Worker", "", Payload())
    return ActorMeshControl(
        program, scope, plan, cast(Any, SimpleNamespace(size=size, place=place_of))
    )


async def test_late_news_of_an_earlier_incarnation_is_not_taken_for_news_of_the_next():
    told: list[MeshFailure] = []
    mesh = a_mesh(told)
    (rank,) = mesh.ranks
    rank.actor_id = "a"

    rank.renew()
    mesh.rank_failed(0, "a", FAILURE)

    assert (told, rank.failure) == ([], None)


async def test_a_rank_that_failed_before_it_was_in_its_process_is_not_ended_there():
    mesh = a_mesh([])
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
    mesh = a_mesh(told, link := Link(answer))
    mesh.ranks[0].up(cast(Any, link), "a", Place("h:1", "p"))

    report = await mesh.stop(1.0)

    lists = {"clean": report.clean, "stuck": report.stuck, "dead": list(report.dead)}
    assert lists == {"clean": [], "stuck": [], "dead": []} | {listed: [0]}
    assert [it.kind for it in told] == [kind] * (kind is FailureKind.UNHANDLED)


async def test_of_a_rank_that_is_to_be_in_a_process_that_is_silent_already_the_owner_is_told():
    told: list[MeshFailure] = []
    mesh = a_mesh(told, link := Link(is_silent=True))

    mesh.start()
    await asyncio.wait_for(link.asked.wait(), 10.0)

    assert [(it.kind, it.ranks) for it in told] == [(FailureKind.STALLED, (0,))]
    for start in mesh._starts:
        start.cancel()


async def test_where_a_rank_is_can_be_asked_while_another_one_is_on_its_way():
    mesh = a_mesh([], size=3)
    mesh.ranks[1].up(cast(Any, Link()), "b", Place("h:1", "p"))
    mesh.ranks[2].fail(FAILURE)

    assert [(it.rank, it.actor_id) for it in await mesh.places([0, 1])] == [(1, "b")]

    asked = [asyncio.create_task(mesh.places(ranks)) for ranks in ([0], [])]
    await asyncio.sleep(0)
    mesh.ranks[2].renew()  # it is nowhere now, which is no end of it
    mesh.ranks[0].up(cast(Any, Link()), "a", Place("h:1", "p"))
    assert [it.actor_id for it in await asyncio.wait_for(asked[0], 10.0)] == ["a"]
    await asyncio.wait(asked[1:], timeout=0.05)
    assert not asked[1].done()
    mesh.ranks[2].up(cast(Any, Link()), "c", Place("h:1", "p"))
    assert [it.actor_id for it in await asyncio.wait_for(asked[1], 10.0)] == ["a", "b", "c"]


async def test_what_the_late_end_of_an_earlier_life_says_is_nothing_of_the_next():
    told: list[MeshFailure] = []
    answer = pb.StopActorResponse(cleanup_failure=failure_to_proto(FAILURE))
    mesh = a_mesh(told, Link(answer))
    (rank,) = mesh.ranks
    place, rank.actor_id = Place("h:1", "p"), "a"

    rank.renew()
    await mesh._stops.end_late(rank, place, "a")

    assert (told, rank.failure) == ([], None)
    rank.actor_id = "b"
    await mesh._stops.end_late(rank, place, "b")
    assert told == [rank.failure]
