"""A mesh of actors, for its owner, over processes that are not there. No process runs."""

from __future__ import annotations

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

    is_silent = False

    def __init__(self, answer: pb.StopActorResponse | None = None) -> None:
        self._answer = answer

    @property
    def actors(self) -> Any:
        assert self._answer is not None, "the process is asked"
        return self

    async def StopActor(self, request: pb.StopActorRequest, timeout: float) -> Any:
        return self._answer

    def attach(self, caller: object) -> None: ...

    def detach(self, caller: object) -> None: ...


def mesh_of_one(told: list[MeshFailure], link: Link | None = None) -> ActorMeshControl:
    links = SimpleNamespace(existing=lambda _: link or Link())
    program: Any = SimpleNamespace(token="t", links=links, forget=lambda _: None)
    scope = Scope(ActorIdentity("", "", "root", 0, 1, 1, ()))
    cast(Any, scope).deliver = told.append
    plan = SpawnPlan("workers", "module:Worker", "", Payload())
    return ActorMeshControl(program, scope, plan, cast(Any, SimpleNamespace(size=1)))


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
