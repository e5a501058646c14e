"""A mesh of actors, for its owner, over processes that are not there. No process runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.actor_mesh import ActorMeshControl
from stagekeeper.actor.owning.scope import Scope
from stagekeeper.actor.owning.spawn_plan import SpawnPlan
from stagekeeper.actor.place import Place
from stagekeeper.v1.types_pb2 import Payload

FAILURE = MeshFailure(id="a-unhandled-1", kind=FailureKind.UNHANDLED, mesh_name="workers")


class Link:
    """To a process that takes no request."""

    is_silent = False

    @property
    def actors(self) -> Any:
        raise AssertionError("the process is asked")


def mesh_of_one(told: list[MeshFailure]) -> ActorMeshControl:
    program: Any = SimpleNamespace(token="t", links=SimpleNamespace(existing=lambda _: Link()))
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
