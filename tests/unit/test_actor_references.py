"""What a reference to a mesh of another process makes of its owner's answers. No process runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from stagekeeper.actor.errors import Died, MeshStopped
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.owning.mesh_owner import MeshOwner
from stagekeeper.actor.owning.proc_views import ProcReference
from stagekeeper.actor.owning.references import ReferenceKeeper
from stagekeeper.actor.place import Place
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.error_details import pack
from tests.harness.waiting import wait_for

OWNER = Place("h:1", "owner", 7, "boot")
LIMIT_S = 20.0


def rpc_error(code: grpc.StatusCode, reason: str = "") -> grpc.aio.AioRpcError:
    trailing: Any = pack(code, "what it says", reason) if reason else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="what it says")


UNKNOWN = rpc_error(grpc.StatusCode.NOT_FOUND, "MESH_UNKNOWN")


class FakeLink:
    """To the owner, who answers as told; to anybody else, who is not there."""

    def __init__(self, answers: Answers, place: Place) -> None:
        self.place = place
        self.actors = answers

    async def connected(self) -> None:
        if self.place != OWNER:
            raise ConnectionError("nobody there")


class Answers:
    """What the owner answers: to where the ranks are, and to how one ended."""

    def __init__(self, places: Any, end: Any = None) -> None:
        self.places, self.end = places, end

    async def GetMesh(self, request: pb.GetMeshRequest, *, timeout: float | None = None) -> Any:
        answer = self.end if request.ended_id else self.places
        if callable(answer):
            answer = await answer(list(request.ranks))
        if isinstance(answer, Exception):
            raise answer
        return answer


def program_of(answers: Answers) -> Any:
    def unexplained_end(link: FakeLink) -> MeshFailure:
        return MeshFailure(id="id", kind=FailureKind.GONE, mesh_name="")

    return SimpleNamespace(
        token="t",
        links=SimpleNamespace(to=lambda place: FakeLink(answers, place)),
        on_loop=lambda work: work(),
        check_thread=lambda: None,
        unexplained_end=unexplained_end,
    )


async def error_of_call(answers: Answers) -> BaseException:
    keeper = ReferenceKeeper(program_of(answers), "m", "workers", 1, OWNER)
    with pytest.raises((Died, MeshStopped)) as caught:
        async with asyncio.timeout(LIMIT_S):
            await keeper.ranks[0].call("add", Payload())
    return caught.value


def places_of_one() -> pb.GetMeshResponse:
    place = pb.RankPlace(instance_id="p", address="h:2", actor_id="a", incarnation=1)
    return pb.GetMeshResponse(places=[place])


async def test_a_mesh_that_its_owner_does_not_know_any_more_was_stopped():
    assert isinstance(await error_of_call(Answers(UNKNOWN)), MeshStopped)
    # Stopped after it had said where the ranks are.
    assert isinstance(await error_of_call(Answers(places_of_one(), UNKNOWN)), MeshStopped)
    nowhere = Answers(pb.GetMeshResponse(places=[pb.RankPlace(incarnation=1)]))
    assert isinstance(await error_of_call(nowhere), MeshStopped)
    with pytest.raises(MeshStopped, match="procs was stopped"):
        await ProcReference(program_of(Answers(UNKNOWN)), "m", "procs", 1, OWNER).place(0)
    with pytest.raises(MeshStopped, match="procs was stopped"):
        await ProcReference(program_of(nowhere), "m", "procs", 1, OWNER).place(0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("broke"), FailureKind.OWNER_GONE),
        (rpc_error(grpc.StatusCode.UNAVAILABLE), FailureKind.OWNER_GONE),
        (rpc_error(grpc.StatusCode.CANCELLED), FailureKind.OWNER_GONE),
        (rpc_error(grpc.StatusCode.INTERNAL), FailureKind.GONE),
    ],
)
async def test_only_an_owner_that_cannot_be_asked_is_gone(error, kind):
    found = cast(Died, await error_of_call(Answers(error)))

    assert (found.failure.kind, found.failure.where) == (kind, "workers[0]")
    assert str(error.details() if isinstance(error, grpc.RpcError) else error) in str(found)


async def test_who_cannot_say_how_something_ended_is_no_error():
    for answer in (rpc_error(grpc.StatusCode.UNAVAILABLE), ConnectionError(), pb.GetMeshResponse()):
        owner = MeshOwner(program_of(Answers(None, answer)), "m", "workers", OWNER)
        assert await owner.end_of("a") is None


async def test_a_call_to_one_rank_does_not_wait_for_another_that_does_not_come_up():
    asked: list[list[int]] = []

    async def places(ranks: list[int]) -> pb.GetMeshResponse:
        asked.append(ranks)
        if ranks == [1]:
            await asyncio.Event().wait()
        return pb.GetMeshResponse(
            places=[pb.RankPlace(rank=rank, incarnation=1) for rank in ranks if rank != 1]
        )

    keeper = ReferenceKeeper(program_of(Answers(places)), "m", "workers", 3, OWNER)
    first, waiting = (keeper.ranks[rank].call("add", Payload()) for rank in (0, 1))
    with pytest.raises(MeshStopped):
        await asyncio.wait_for(first, LIMIT_S)
    with pytest.raises(MeshStopped):
        await asyncio.wait_for(keeper.ranks[2].call("add", Payload()), LIMIT_S)

    assert not waiting.done()
    await wait_for(lambda: len(asked) == 3, "the one that is left is asked after")
    assert [0, 1] in asked and [1] in asked and [2] in asked


async def test_ranks_that_the_owner_does_not_know_are_not_asked_after_for_ever():
    error = cast(Died, await error_of_call(Answers(pb.GetMeshResponse())))

    assert "no such rank" in error.failure.message
