"""The agent's session on virtual time: found, registered, beaten, lost, found again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from stagekeeper.agent import identity
from stagekeeper.agent.authority import Authority
from stagekeeper.agent.connection import AuthorityEnded, SupervisorNotFound
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.session import Session
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.transport import CallFailed
from stagekeeper.agent.worker_slice import WorkerSlice
from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import (
    ClusterName,
    DeploymentName,
    Epoch,
    FailureId,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import Failure, FailureOrigin, WorkerReport
from stagekeeper.runtime.convert import epoch_to_proto
from stagekeeper.v1 import supervisor_service_pb2 as pb
from tests.fakes.supervisor_network import SupervisorNetwork
from tests.fakes.virtual_clock import VirtualClock


def failure(name: str = "f1") -> Failure:
    return Failure(
        failure_id=FailureId(name),
        kind="EXITED",
        origin=FailureOrigin(
            WorkerId("w"),
            DeploymentName("m"),
            ReplicaIndex(0),
            StageId(0),
            "s",
            0,
            InstanceId("i"),
        ),
        message="it ended",
    )


class World:
    """One agent's session, with everything around it under the test's hand."""

    def __init__(self, tmp_path: Path, *, max_wait_s: float | None = None) -> None:
        self.clock = VirtualClock()
        self.network = SupervisorNetwork(self.clock)
        self.chance = 1.0
        self.settings = AgentSettings(
            worker_id=WorkerId("w"),
            state_dir=tmp_path,
            lock_dir=tmp_path,
            max_wait_s=max_wait_s,
        )
        self.identity = AgentIdentity.next_life(
            tmp_path / "identity.json", WorkerId("w"), recorded_incarnation=0
        )
        self.authority = Authority(ClusterName("default"), self.identity)
        self.slice = WorkerSlice("default", self.report)
        self.failures: dict[FailureId, Failure] = {}
        self.settled_operations: list[OperationId] = []
        self.broken: list[tuple[str, BaseException]] = []
        self.session = Session(
            self.settings,
            self.identity,
            self.authority,
            self.slice,
            self,
            transport=self.network,
            clock=self.clock,
            random=lambda: self.chance,
            on_broken=lambda name, error: self.broken.append((name, error)),
        )
        self.task: asyncio.Task[None] | None = None

    def report(self) -> WorkerReport:
        return WorkerReport(
            worker_id=WorkerId("w"),
            host_id=self.identity.host_id,
            incarnation=self.identity.incarnation,
            revision=0,
            agent_address="127.0.0.1:5",
            highest_epoch=self.identity.highest_epoch,
            failures=tuple(self.failures.values()),
        )

    def settle(self, failure_ids, operation_ids) -> None:
        for failure_id in failure_ids:
            self.failures.pop(failure_id, None)
        self.settled_operations += operation_ids

    def unsettled_failures(self) -> tuple[Failure, ...]:
        return tuple(self.failures.values())

    async def run(self) -> None:
        self.task = asyncio.create_task(self.session.run())
        await self.clock.settle()

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
            if not self.task.cancelled():
                self.task.exception()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A session that is not running yet; whatever the test did, nothing of it is left."""
    before = asyncio.all_tasks()
    world = World(tmp_path)
    yield world
    await world.stop()
    assert world.network.open_links == 0
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, "the session left a task behind"


# --- finding a supervisor


async def test_supervisor_is_asked_for_at_the_endpoint_and_registered_with(world):
    await world.run()

    assert world.network.calls == [("find", "endpoint"), ("register", "new:1")]
    assert world.authority.reign == Epoch(1, "aaaa")
    assert world.network.registrations[0].worker_id == "w"


async def test_agent_that_is_first_stays_and_registers_once_a_supervisor_is_there(world):
    """recovery-R5, recovery-R34"""
    world.network.is_up = False
    await world.run()
    await world.clock.advance(300)
    assert world.task is not None and not world.task.done()
    attempts = len(world.network.named("find"))
    assert attempts >= 290  # a wait is never above a second

    world.network.is_up = True
    await world.clock.advance(1.0)

    assert len(world.network.registrations) == 1


async def test_every_attempt_is_told_with_its_error(world, caplog, capsys):
    """recovery-R5"""
    world.network.is_up = False
    await world.run()
    await world.clock.advance(0.31)

    lines = capsys.readouterr().out
    for attempt in (1, 2, 3):
        assert f"attempt={attempt}" in lines
    assert "127.0.0.1:7070" in lines
    assert "connection refused" in lines


async def test_without_time_to_wait_one_attempt_is_made(tmp_path):
    world = World(tmp_path, max_wait_s=0.0)
    world.network.is_up = False

    with pytest.raises(SupervisorNotFound, match=r"127\.0\.0\.1:7070 within 0 s \(1 attempts\)"):
        await world.session.run()


async def test_once_registered_it_waits_for_ever_whatever_max_wait_says(tmp_path):
    world = World(tmp_path, max_wait_s=1.0)
    await world.run()
    world.network.is_up = False

    await world.clock.advance(1_000)

    assert world.task is not None and not world.task.done()
    await world.stop()


async def test_supervisor_of_another_cluster_is_sent_nothing_and_asked_slowly(world):
    """recovery-R13"""
    world.network.cluster = "other"
    await world.run()

    await world.clock.advance(60)

    assert world.network.registrations == []
    assert world.network.links == []
    assert 9 <= len(world.network.named("find")) <= 13
    assert world.authority.reign is None


async def test_recovery_R13_heartbeat_answered_by_another_cluster_ends_the_connection_alone(world):
    """It took the port of our supervisor: nothing is put to it, and our reign is obeyed still."""
    await world.run()
    reign = world.authority.reign
    world.network.answers["heartbeat"] = lambda request: pb.HeartbeatResponse(
        verdict=pb.HEARTBEAT_VERDICT_WRONG_CLUSTER
    )
    world.network.cluster = "other"

    await world.clock.advance(60)

    assert world.task is not None and not world.task.done()
    assert len(world.network.registrations) == 1
    assert len(world.network.heartbeats) == 1
    assert world.network.open_links == 0
    assert world.authority.reign == reign


# --- losing it


async def test_moved_supervisor_is_found_and_the_old_address_never_called_again(world):
    """recovery-R2"""
    await world.run()
    world.network.address = "new:2"
    world.network.epoch = Epoch(2, "bbbb")

    await world.clock.advance(2.0)  # the heartbeat that fails
    mark = len(world.network.calls)
    await world.clock.advance(20)

    assert ("register", "new:2") in world.network.calls[mark : mark + 2]
    assert all(address != "new:1" for _, address in world.network.calls[mark:])
    assert world.authority.reign == Epoch(2, "bbbb")


async def test_failed_heartbeat_drops_link_and_registration_together(world):
    await world.run()
    first = world.session.connection
    assert first is not None
    assert first.is_registered
    world.network.swallows = {"heartbeat"}

    await world.clock.advance(2.0 + 2.0)

    assert world.session.connection is None
    assert not first.is_registered
    assert world.network.links[0].is_closed


@pytest.mark.parametrize("cycles", [1000])
async def test_swallowed_reply_is_recovered_from_any_number_of_times(world, cycles):
    """recovery-R4, recovery-U33"""
    world.network.pace_s = 0.5
    await world.run()

    for cycle in range(cycles):
        world.network.swallows = {"heartbeat"}
        await world.clock.advance(0.5 + 0.5)  # due, and given up
        world.network.swallows = set()
        await world.clock.advance(0.1)  # the longest first wait
        assert len(world.network.registrations) == cycle + 2
        assert world.network.open_links == 1
    assert world.clock.sleeper_count <= 2


async def test_swallowed_registration_is_made_again_when_its_time_is_over(world):
    world.network.swallows = {"register"}
    await world.run()
    await world.clock.advance(world.settings.register_timeout_s + 0.1)
    world.network.swallows = set()
    await world.clock.advance(world.settings.register_timeout_s + 0.2)

    assert world.session.connection is not None
    assert world.session.connection.is_registered
    assert {it.revision for it in world.network.registrations} == {1}


async def test_large_slice_is_given_the_time_that_its_bytes_need(world):
    world.failures = {FailureId("f1"): replace(failure(), message="x" * 640 * 1024)}
    world.network.swallows = {"register"}
    await world.run()

    await world.clock.advance(world.settings.register_timeout_s + 9.0)
    assert len(world.network.registrations) == 1
    await world.clock.advance(2.0)
    assert len(world.network.registrations) == 2


async def test_late_failure_of_an_old_connection_drops_nothing(world):
    """recovery-R3, recovery-U4"""
    world.failures = {FailureId("f1"): failure()}
    alpha: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    world.network.holds = {"report": alpha}
    await world.run()  # connection 1, with the report α under way on it
    world.network.swallows = {"heartbeat"}
    await world.clock.advance(2.0 + 2.0)
    world.network.swallows = set()
    world.failures = {}
    await world.clock.advance(0.1)
    connection = world.session.connection
    assert connection is not None and connection.generation == 2

    alpha.set_exception(CallFailed("too late"))
    await world.clock.settle()
    await world.clock.advance(10)

    assert world.session.connection is connection
    assert connection.is_registered
    assert len(world.network.registrations) == 2  # one for each connection
    assert len(world.network.heartbeats) >= 5


async def test_dropped_connection_is_freed_without_the_garbage_collector(world):
    """What a failed call's traceback holds, a channel among it, would go on reconnecting."""
    await world.run()
    link = weakref.ref(world.network.links.pop())
    gc.disable()
    try:
        world.network.is_up = False
        await world.clock.advance(5)

        assert link() is None
    finally:
        gc.enable()


async def test_failed_report_drops_its_connection_and_is_made_again_on_the_next(world):
    await world.run()
    world.failures = {FailureId("f1"): failure()}
    world.network.answers["report"] = lambda request: (_ for _ in ()).throw(CallFailed("broken"))

    world.slice.changed()
    await world.clock.settle()
    assert world.network.open_links == 0
    del world.network.answers["report"]
    await world.clock.advance(0.1)

    assert world.session.connection is not None
    assert world.failures == {}  # settled by the second report
    assert len(world.network.reports) == 2


async def test_report_that_breaks_is_told_at_once(world):
    await world.run()
    world.failures = {FailureId("f1"): failure()}
    bug = TypeError("a bug")
    world.network.answers["report"] = lambda request: (_ for _ in ()).throw(bug)

    world.slice.changed()
    await world.clock.settle()

    assert world.broken == [("reports/f1", bug)]


async def test_report_under_way_ends_with_the_session(world):
    world.failures = {FailureId("f1"): failure()}
    world.network.holds = {"report": asyncio.get_running_loop().create_future()}
    await world.run()

    await world.stop()

    assert not [it for it in asyncio.all_tasks() if "f1" in it.get_name()]
    assert world.broken == []


async def test_first_wait_after_a_success_is_short_again(world):
    world.network.is_up = False
    await world.run()
    await world.clock.advance(30)
    world.network.is_up = True
    await world.clock.advance(1.0)
    assert len(world.network.registrations) == 1

    world.network.swallows = {"heartbeat"}
    await world.clock.advance(2.0 + 2.0)
    world.network.swallows = set()
    await world.clock.advance(0.1)

    assert len(world.network.registrations) == 2


async def test_server_that_asks_for_time_is_given_it(world):
    world.network.answers["register"] = lambda request: (_ for _ in ()).throw(
        CallFailed("slow down", code="RESOURCE_EXHAUSTED", reason="SLOW_DOWN", retry_after_s=7.0)
    )
    await world.run()

    await world.clock.advance(6.9)
    assert len(world.network.registrations) == 1
    await world.clock.advance(0.3)
    assert len(world.network.registrations) == 2


# --- verdicts and answers


async def test_heartbeats_follow_the_pace_of_the_server_and_name_the_slice(world):
    world.network.pace_s = 3.0
    await world.run()

    await world.clock.advance(9.1)

    assert len(world.network.heartbeats) == 3
    registered = world.network.registrations[0]
    beat = world.network.heartbeats[0]
    assert (beat.revision, beat.digest) == (registered.revision, registered.digest)
    assert beat.incarnation == registered.incarnation == 1
    assert len(world.network.registrations) == 1


async def test_asked_to_register_it_goes_the_whole_way(world):
    """recovery-R8"""
    await world.run()
    asked = iter([pb.HEARTBEAT_VERDICT_REGISTER])

    def verdict(request):
        answer = pb.HeartbeatResponse(
            verdict=next(asked, pb.HEARTBEAT_VERDICT_OK), next_heartbeat_s=2.0
        )
        answer.epoch.CopyFrom(epoch_to_proto(world.network.epoch))
        return answer

    world.network.answers["heartbeat"] = verdict
    await world.clock.advance(2.0)
    await world.clock.advance(0.1)

    names = [name for name, _ in world.network.calls]
    assert names == ["find", "register", "heartbeat", "find", "register"]
    assert world.network.links[0].is_closed


async def test_superseded_it_obeys_nobody_and_calls_nobody(world):
    await world.run()
    world.network.answers["heartbeat"] = lambda request: pb.HeartbeatResponse(
        verdict=pb.HEARTBEAT_VERDICT_SUPERSEDED
    )

    await world.clock.advance(2.0)

    assert world.task is not None
    with pytest.raises(AuthorityEnded):
        await world.task
    with pytest.raises(Refused, match="took over"):
        world.authority.check("default", world.network.epoch, 1)


async def test_incarnation_of_a_living_other_agent_is_not_taken(world):
    tried = []

    def refuse(request):
        tried.append(request.incarnation)
        raise CallFailed(
            "another one lives",
            code="ABORTED",
            reason="STALE_INCARNATION",
            metadata={"highest_incarnation": "7"},
            retry_after_s=8.0,
        )

    world.network.answers["register"] = refuse
    await world.run()
    await world.clock.advance(30.0)

    assert set(tried) == {1}
    assert 3 <= len(tried) <= 5


async def test_stale_incarnation_is_raised_above_the_highest_and_registered_again(world):
    def refuse(request):
        if request.incarnation <= 7:
            raise CallFailed(
                "stale",
                code="ABORTED",
                reason="STALE_INCARNATION",
                metadata={"highest_incarnation": "7"},
            )

    world.network.answers["register"] = refuse
    await world.run()
    await world.clock.advance(0.1)

    assert [it.incarnation for it in world.network.registrations] == [1, 8]
    assert world.identity.incarnation == 8


@pytest.mark.parametrize("reason", ["WORKER_ID_IN_USE", "WRONG_CLUSTER"])
async def test_what_only_a_person_can_mend_is_tried_slowly(world, reason):
    world.network.answers["register"] = lambda request: (_ for _ in ()).throw(
        CallFailed("no", reason=reason)
    )
    await world.run()

    await world.clock.advance(60)

    assert 9 <= len(world.network.registrations) <= 13


async def test_epoch_is_on_disk_before_it_is_obeyed(world, tmp_path):
    world.network.epoch = Epoch(9, "zz")
    await world.run()

    assert world.authority.reign == Epoch(9, "zz")
    again = AgentIdentity.next_life(
        tmp_path / "identity.json", WorkerId("w"), recorded_incarnation=0
    )
    assert again.highest_epoch == Epoch(9, "zz")


async def test_reign_that_cannot_be_written_down_is_not_obeyed(world, monkeypatch):
    def disk_is_full(path, data):
        raise OSError("no space left on device")

    monkeypatch.setattr(identity, "write_durably", disk_is_full)

    with pytest.raises(OSError, match="no space left"):
        world.authority.obey(Epoch(9, "zz"))

    assert world.authority.reign is None
    with pytest.raises(Refused, match="not registered yet"):
        world.authority.check("default", Epoch(9, "zz"), 1)


async def test_reign_below_the_highest_obeyed_is_not_obeyed(world):
    world.identity.note_epoch(Epoch(5, "e"))
    world.network.epoch = Epoch(4, "d")

    await world.run()
    await world.clock.advance(4)

    assert world.authority.reign is None
    assert len(world.network.registrations) == 1
    assert world.network.registrations[0].highest_epoch.number == 5


async def test_higher_reign_at_the_endpoint_is_moved_to(world):
    await world.run()
    old = world.network.epoch
    world.network.answers["heartbeat"] = lambda request: pb.HeartbeatResponse(
        verdict=pb.HEARTBEAT_VERDICT_OK, epoch=epoch_to_proto(old), next_heartbeat_s=2.0
    )
    world.network.epoch = Epoch(2, "bbbb")

    await world.clock.advance(2.0 * 10)

    assert world.authority.reign == Epoch(2, "bbbb")
    assert len(world.network.registrations) == 2


async def test_heartbeat_that_another_reign_answers_registers_with_it_at_once(world):
    """It took the address of ours, and knows this worker already: nobody asks for anything."""
    await world.run()
    world.network.epoch = Epoch(2, "bbbb")

    await world.clock.advance(2.1)

    assert world.network.named("find") == ["endpoint", "endpoint"]
    assert world.authority.reign == Epoch(2, "bbbb")


async def test_recovery_R13_higher_reign_of_another_cluster_at_the_endpoint_is_not_moved_to(world):
    await world.run()
    ours = world.network.epoch
    world.network.answers["heartbeat"] = lambda request: pb.HeartbeatResponse(
        verdict=pb.HEARTBEAT_VERDICT_OK, epoch=epoch_to_proto(ours), next_heartbeat_s=2.0
    )
    world.network.cluster, world.network.epoch = "other", Epoch(9, "zz")

    await world.clock.advance(2.0 * 20)

    assert len(world.network.named("find")) > 2
    assert world.network.open_links == 1, "whoever answers our heartbeats is kept"
    assert world.authority.reign == ours


async def test_endpoint_that_is_away_disturbs_no_session(world):
    await world.run()
    world.network.answers["find"] = lambda request: (_ for _ in ()).throw(CallFailed("away"))

    await world.clock.advance(60)

    assert len(world.network.registrations) == 1
    assert len(world.network.named("find")) > 2


# --- the slice


async def test_change_registers_at_once_and_many_changes_register_once(world):
    await world.run()

    for _ in range(5):
        world.slice.changed()
    await world.clock.settle()

    assert len(world.network.registrations) == 2
    assert world.network.registrations[1].revision == world.slice.revision
    assert len(world.network.links) == 1  # over the connection that is there


async def test_change_during_a_registration_makes_one_more(world):
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    world.network.holds = {"register": held}
    await world.run()
    world.slice.changed()
    world.slice.changed()

    held.set_result(None)
    await world.clock.settle()

    assert [it.revision for it in world.network.registrations] == [1, 3]


async def test_change_while_the_supervisor_is_away_is_in_the_next_registration(world):
    await world.run()
    world.network.is_up = False
    world.slice.changed()
    await world.clock.advance(5)
    world.network.is_up = True
    world.network.registrations.clear()

    await world.clock.advance(1)

    assert [it.revision for it in world.network.registrations] == [2]


async def test_settled_operations_and_failures_are_passed_on(world):
    world.failures = {FailureId("f1"): failure("f1")}
    world.network.answers["register"] = lambda request: pb.RegisterWorkerResponse(
        epoch=epoch_to_proto(world.network.epoch),
        next_heartbeat_s=2.0,
        settled_failure_ids=[it.failure_id for it in request.failures],
        settled_operation_ids=["op-1"],
    )

    await world.run()

    assert world.failures == {}
    assert world.settled_operations == ["op-1"]
    assert world.network.reports == []  # the registration told it already


async def test_refused_entry_is_told_and_changes_nothing_else(world, capsys):
    """recovery-R58"""
    world.network.answers["register"] = lambda request: pb.RegisterWorkerResponse(
        epoch=epoch_to_proto(world.network.epoch),
        next_heartbeat_s=2.0,
        refused=[pb.RefusedEntry(index=3, reason="BAD_FIELD", message="bad shard")],
    )

    await world.run()
    await world.clock.advance(10)

    assert "bad shard" in capsys.readouterr().out
    assert len(world.network.registrations) == 1
    assert len(world.network.heartbeats) >= 4


async def test_stopping_it_leaves_no_link_and_no_task(world):
    world.failures = {FailureId("f1"): failure()}
    world.network.holds = {"report": asyncio.get_running_loop().create_future()}
    await world.run()

    await world.stop()

    assert world.network.open_links == 0


async def test_failure_that_is_refused_for_good_is_dropped_and_loses_no_connection(world):
    """An earlier release may have spooled what this supervisor does not take."""

    def refuse(request):
        raise CallFailed("too long", code="INVALID_ARGUMENT", reason="BAD_FIELD")

    world.network.answers["report"] = refuse
    await world.run()
    connection = world.session.connection
    world.failures[FailureId("f")] = failure("f")
    world.slice.changed()

    await world.clock.advance(20)

    assert world.session.connection is connection
    assert world.failures == {}
    assert len(world.network.reports) == 1
