"""Whatever is sent to a process of an actor tree is answered, or refused with a reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from stagekeeper.wire.payload import encode_arguments
from tests.harness.fuzzing import LONG, QUICK, Effort, Target
from tests.harness.nonsense import Nonsense, label, methods
from tests.harness.tree_process import TOKEN, Frames, TreeProcess, tree_process
from tests.harness.verdicts import Verdict
from tests.harness.waiting import wait_for

METHODS = methods("tree")
KEPT = "tests.stages.kept_actor:Kept"


class Fuzzed:
    """A process with an actor that has to stay as it is, and a session for what comes and goes."""

    def __init__(self, it: TreeProcess, owner: Frames, kept_id: str) -> None:
        self.it = it
        self.owner = owner
        self.kept_id = kept_id
        self._visits = AsyncExitStack()

    async def visit(self) -> None:
        await self._visits.enter_async_context(self.it.connected("visitor"))

    async def leave(self) -> None:
        """End the visitor's connection, and with it what was made in its name."""
        await self._visits.aclose()

        async def look() -> bool:
            return await self.owner.others() == 0

        await wait_for(look, "what the visitor made has ended")

    async def state(self) -> dict[str, str]:
        told = await self.owner.value(self.kept_id, "told")
        return {"told": str(told), "others": str(await self.owner.others())}

    async def answered(self, verdict: Verdict) -> None:
        await self.leave()
        assert self.it.is_alive
        await self.visit()

    def sound(self, method: MethodDescriptor) -> Message:
        if method.name == "SpawnActor":
            return self.it.spawn_request(
                "visitor", KEPT, main_path="/nowhere.py", stall_after_s=5.0, max_in_flight=10
            )
        if method.name == "Connect":
            return self._connect()
        request: Any = GetMessageClass(method.input_type)()
        for name, value in (
            ("token", TOKEN),
            ("instance_id", self.it.instance_id),
            ("actor_id", "nobody"),
            ("budget_s", 0.1),
            ("mesh_id", "no mesh"),
            ("ended_id", "nobody"),
        ):
            if name in request.DESCRIPTOR.fields_by_name:
                setattr(request, name, value)
        if isinstance(request, actor_pb.StopActorRequest):
            request.failure.CopyFrom(a_failure())
        if isinstance(request, actor_pb.RespawnProcsRequest):
            request.instance_ids.extend(["one", "two"])
        return request

    def _connect(self) -> Message:
        call = pb.CallFrame(
            target_id="nobody",
            endpoint="hear",
            payload=encode_arguments([1], {}),
            timeout_s=5.0,
            sender="root",
        )
        news = pb.RankFailed(mesh_id="no mesh", actor_id="nobody", failure=a_failure())
        return pb.ConnectRequest(
            frames=[
                pb.Frame(hello=self.it.hello("another", lease_s=0.1, beat_s=0.02)),
                pb.Frame(frame_id=1, call=call),
                pb.Frame(failure=news),
                pb.Frame(frame_id=1, cancel=pb.Cancel()),
                pb.Frame(beat=pb.Beat()),
            ]
        )


def a_failure() -> types_pb2.Failure:
    failure = types_pb2.Failure(
        failure_id="f",
        message="why",
        detected_by="a test",
        last_log_lines=["one"],
        remote_traceback="T",
    )
    failure.origin.mesh_name = "workers"
    failure.path.add(owner="root", decision="refused")
    failure.causes.add(failure_id="c", message="because")
    return failure


def would_end_it(request: Nonsense, method: MethodDescriptor) -> bool:
    """Say whether the request, rightly, ends all actors of the process."""
    if method.name != "StopActor":
        return False
    try:
        return not actor_pb.StopActorRequest.FromString(request.data).actor_id
    except Exception:
        return False


@asynccontextmanager
async def fuzzed() -> AsyncIterator[Fuzzed]:
    async with tree_process() as it, it.connected() as owner:
        kept_id = await it.spawn("owner", KEPT, arguments=encode_arguments(["kept"], {}))
        fuzz = Fuzzed(it, owner, kept_id)
        await fuzz.visit()
        yield fuzz
        await fuzz.leave()
        assert await owner.value(kept_id, "echo", "still here") == "still here"
        assert it.is_alive and not owner.news
        assert "Traceback" not in without_undecodable(it.output), it.output[-5_000:]


def without_undecodable(log: str) -> str:
    """Leave out what gRPC writes of frames that it could not read."""
    return "".join(part for part in log.split("\n\n") if "DecodeError" not in part)


async def endure(method: MethodDescriptor, fuzz: Fuzzed, effort: Effort) -> dict[str, int]:
    target = Target(
        fuzz.it.channel,
        method,
        lambda: fuzz.sound(method),
        fuzz.state,
        fuzz.answered,
        is_undone=method.name == "SpawnActor",
        is_sent=lambda request: not would_end_it(request, method),
    )
    return await target.endure(effort)


async def test_nonsense_is_answered_or_refused_with_a_reason_and_changes_nothing():
    async with fuzzed() as fuzz:
        for method in METHODS:
            reasons = await endure(method, fuzz, QUICK)
            print(label(method), reasons)
            if method.name in ("Call", "CallStream"):
                assert set(reasons) == {"NOT_YET"}
                continue
            assert reasons["BAD_FIELD"] > 0 and reasons["BAD_TOKEN"] > 0
            if method.name != "Connect":
                assert reasons["TOO_LARGE"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_much_nonsense_is_answered_or_refused_with_a_reason(method):
    async with fuzzed() as fuzz:
        await endure(method, fuzz, LONG)
