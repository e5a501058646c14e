"""What the callers and the owner of a mesh are told of its ranks' failures. No process runs."""

from __future__ import annotations

from typing import Any

import pytest

from stagekeeper.actor.errors import Died
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.rank_failures import RankFailures
from stagekeeper.actor.owning.ranks import ActorRank
from stagekeeper.v1.types_pb2 import Payload


class Keeper:
    mesh_id = "m"
    mesh_name = "workers"

    def check_thread(self) -> None:
        return None

    def on_loop(self, work: Any) -> None:
        work()

    def sought(self, rank: ActorRank) -> None:
        return None

    def lost(self, rank: ActorRank, link: Any, calls: Any) -> None:
        raise AssertionError("no rank has a link")

    def undelivered(self, rank: ActorRank, endpoint: str, sender: str) -> None:
        raise AssertionError("the mesh does that")


class Mesh:
    """One rank that is on its way, its failures, and what its owner is told."""

    def __init__(self) -> None:
        self.rank = ActorRank(Keeper(), 0)
        self.told: list[FailureKind] = []
        self.last: MeshFailure | None = None
        self.failures = RankFailures(self._identity, self._tell)

    def _identity(self, rank: ActorRank, actor_id: str) -> ActorIdentity:
        return ActorIdentity(actor_id, "m", "workers", rank.rank, 1, rank.incarnation, ("root",))

    def _tell(self, failure: MeshFailure) -> None:
        self.told.append(failure.kind)
        self.last = failure

    def settle(self, *kinds: FailureKind, number: int = 1) -> None:
        for kind in kinds:
            id_ = f"a-{kind}-{number}"
            failure = MeshFailure(id=id_, kind=kind, mesh_name="workers", ranks=(0,))
            self.failures.settle(self.rank, failure)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


async def test_callers_hear_of_an_end_before_the_owner_and_the_owner_once_per_incarnation(mesh):
    call = mesh.rank.call("add", Payload())
    are_told: list[bool] = []
    mesh.failures.tell = lambda failure: are_told.append(call.done())

    mesh.settle(FailureKind.GONE, FailureKind.SIGNALED, FailureKind.STALLED)

    assert are_told == [True]
    assert isinstance(call.exception(), Died)
    mesh.rank.renew()
    mesh.settle(FailureKind.GONE)
    assert len(are_told) == 2


async def test_a_stall_is_told_once_each_time_and_the_end_after_it_as_well(mesh):
    stalled = FailureKind.STALLED
    mesh.settle(stalled, stalled)
    mesh.settle(stalled, number=2)
    mesh.settle(stalled, FailureKind.GONE)
    mesh.settle(stalled, number=3)

    assert mesh.told == [stalled, stalled, FailureKind.GONE]


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [(FailureKind.GONE, False), (FailureKind.STALLED, False), (FailureKind.UNHANDLED, True)],
)
async def test_who_ends_a_rank_is_told_of_no_end_but_of_what_was_not_handled_in_it(
    mesh, kind, is_told
):
    mesh.failures.owner_knows(mesh.rank)

    mesh.settle(kind, kind)

    assert mesh.told == [kind] * is_told


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [
        (FailureKind.GONE, False),
        (FailureKind.STALLED, False),
        (FailureKind.UNDELIVERABLE, False),
        (FailureKind.CLEANUP_RAISED, True),
        (FailureKind.UNHANDLED, True),
        (FailureKind.BROADCAST_RAISED, True),
    ],
)
async def test_an_end_that_was_asked_for_is_no_news_but_what_nobody_else_hears_of_is(
    mesh, kind, is_told
):
    mesh.failures.expect_end()

    mesh.settle(kind)

    assert mesh.told == [kind] * is_told


async def test_messages_that_wait_without_an_answer_are_told_of_after_the_end_by_the_first(mesh):
    mesh.rank.cast("set", Payload())
    mesh.rank.cast("get", Payload())

    mesh.settle(FailureKind.GONE)

    assert mesh.told == [FailureKind.GONE, FailureKind.UNDELIVERABLE]
    assert mesh.last is not None and mesh.last.endpoint == "set"
    assert [cause.kind for cause in mesh.last.causes] == [FailureKind.GONE]


def test_of_many_messages_that_are_not_delivered_one_line_is_logged(mesh, caplog):
    mesh.failures.expect_end()
    for _ in range(3):
        mesh.failures.undelivered(mesh.rank, "step", "root")
    assert len(caplog.messages) == 1 and "step from root was for workers[0]" in caplog.text
    assert not mesh.told
