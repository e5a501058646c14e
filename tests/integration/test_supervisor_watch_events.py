"""Watching what happens: events alone, beside the routes, of one deployment, and from where on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from stagekeeper.client.errors import BadRequest, from_rpc
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import deployment_service_pb2_grpc as pb2_grpc
from stagekeeper.v1 import types_pb2
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import get_deployment, list_deployments, list_workers, reigns
from tests.harness.waiting import wait_for

EVENTS = pb2.WATCH_CONTENT_EVENTS
BOTH = pb2.WATCH_CONTENT_ROUTES_AND_EVENTS


class Watch:
    """One open watch; what it tells as short strings."""

    def __init__(self, call) -> None:
        self._call = call
        self.messages: list[pb2.WatchDeploymentsResponse] = []

    async def next(self) -> str:
        """Return `EVENT WORKER_JOINED`, or `ADDED m`; bookmarks are left out."""
        while True:
            message = await asyncio.wait_for(self._call.read(), 20)
            assert message is not grpc.aio.EOF, "the watch ended"
            if message.kind == pb2.CHANGE_KIND_BOOKMARK:
                continue
            if message.event.kind == pb2.EVENT_KIND_AGENT_UNREACHABLE:
                continue  # there is no agent behind a worker by hand; told whenever that is met
            self.messages.append(message)
            kind = pb2.ChangeKind.Name(message.kind).removeprefix("CHANGE_KIND_")
            if message.kind == pb2.CHANGE_KIND_EVENT:
                assert not message.HasField("deployment")
                what = pb2.EventKind.Name(message.event.kind).removeprefix("EVENT_KIND_")
                return f"{kind} {what}"
            assert not message.HasField("event")
            return f"{kind} {message.deployment.name}".rstrip()

    async def take(self, count: int) -> list[str]:
        return [await self.next() for _ in range(count)]


@asynccontextmanager
async def watching(endpoint: str, **fields):
    async with channel_to(endpoint) as channel:
        call = pb2_grpc.DeploymentServiceStub(channel).WatchDeployments(
            pb2.WatchDeploymentsRequest(**fields)
        )
        yield Watch(call)
        call.cancel()


@pytest.fixture
async def endpoint(tmp_path):
    # Nobody falls silent while a slow machine runs a test.
    async with reigns(tmp_path, registry={"heartbeat_s": 10.0}) as them:
        yield them.endpoint


async def test_events_alone_bring_no_deployment(endpoint):
    worker = HandWorker(endpoint).hold(shard())
    await worker.register()
    async with watching(endpoint, content=EVENTS) as watch:
        assert await watch.take(5) == [
            "EVENT REIGN_BEGAN",
            "EVENT WORKER_JOINED",
            "EVENT REPLICA_CHANGED",
            "EVENT DEPLOYMENT_CHANGED",
            "SYNCED",
        ]
        await worker.hold(shard(state=types_pb2.SHARD_STATE_FAILED, state_reason="dead")).register()
        assert await watch.take(2) == ["EVENT REPLICA_CHANGED", "EVENT DEPLOYMENT_CHANGED"]
        event = watch.messages[-2].event
        assert event.is_warning
        assert (event.deployment, event.replica_index, event.worker_id) == ("m", 0, "")
        assert event.HasField("replica_index")
        assert not event.HasField("stage_id")
        assert event.message.startswith("m replica 0 is FAILED (it was READY)")
        assert "dead" in event.message


async def test_routes_and_events_come_in_one_order(endpoint):
    worker = HandWorker(endpoint)
    async with watching(endpoint, content=BOTH) as watch:
        assert await watch.take(2) == ["EVENT REIGN_BEGAN", "SYNCED"]
        await worker.hold(shard()).register()
        assert await watch.take(4) == [
            "EVENT WORKER_JOINED",
            "EVENT REPLICA_CHANGED",
            "EVENT DEPLOYMENT_CHANGED",
            "ADDED m",
        ]
        numbers = [message.revision.n for message in watch.messages]
        assert numbers == sorted(numbers)


async def test_routes_are_the_default_and_bring_no_event(endpoint):
    worker = HandWorker(endpoint).hold(shard())
    async with watching(endpoint) as watch:
        assert await watch.next() == "SYNCED"
        await worker.register()
        await worker.hold().register()
        assert set(await watch.take(2)) <= {"ADDED m", "REMOVED m"}


async def test_one_deployment_is_watched_without_the_others_and_without_workers(endpoint):
    worker = HandWorker(endpoint).hold(shard("a"), shard("b"))
    await worker.register()
    async with watching(endpoint, content=BOTH, deployment="a") as watch:
        assert await watch.take(4) == [
            "EVENT REPLICA_CHANGED",
            "EVENT DEPLOYMENT_CHANGED",
            "SNAPSHOT a",
            "SYNCED",
        ]
        await worker.hold(shard("b"), shard("c")).register()
        assert await watch.take(3) == [
            "EVENT REPLICA_CHANGED",
            "EVENT DEPLOYMENT_CHANGED",
            "REMOVED a",
        ]
        assert "is gone" in watch.messages[-2].event.message


async def test_last_events_says_how_many_and_of_one_deployment_they_are_its_own(endpoint):
    await HandWorker(endpoint).hold(shard("a"), shard("b")).register()
    for name in ("a", "b"):
        async with watching(endpoint, content=EVENTS, last_events=1, deployment=name) as watch:
            assert await watch.take(2) == ["EVENT DEPLOYMENT_CHANGED", "SYNCED"]
            assert watch.messages[0].event.deployment == name


async def test_resumed_watch_goes_on_where_it_was(endpoint):
    worker = HandWorker(endpoint).hold(shard("a"))
    await worker.register()
    async with watching(endpoint, content=EVENTS) as watch:
        while await watch.next() != "EVENT WORKER_JOINED":
            pass
        joined = watch.messages[-1].revision
    await worker.hold(shard("a"), shard("b")).register()
    async with watching(endpoint, content=EVENTS, after=joined) as watch:
        assert await watch.take(4) == ["EVENT REPLICA_CHANGED", "EVENT DEPLOYMENT_CHANGED"] * 2
        assert [it.event.deployment for it in watch.messages] == ["a", "a", "b", "b"]


async def test_the_same_event_has_the_same_time_for_every_reader(endpoint):
    await HandWorker(endpoint).hold(shard()).register()
    read = []
    for _ in range(2):
        async with watching(endpoint, content=EVENTS) as watch:
            await watch.take(5)
            read.append(watch.messages)
    assert read[0] == read[1]


async def test_bookmark_of_a_reader_that_nothing_concerns_moves_on(endpoint):
    async with channel_to(endpoint) as channel:
        call = pb2_grpc.DeploymentServiceStub(channel).WatchDeployments(
            pb2.WatchDeploymentsRequest(deployment="other")
        )
        await call.read()
        for n in range(3):
            await HandWorker(endpoint, f"w{n}").hold(shard(f"m{n}")).register()
        last = (await list_deployments(endpoint)).revision

        async def has_moved() -> bool:
            message = await call.read()
            assert isinstance(message, pb2.WatchDeploymentsResponse)
            assert message.kind == pb2.CHANGE_KIND_BOOKMARK
            return message.revision.n >= last.n

        await wait_for(has_moved, "a bookmark says how far the log is")
        call.cancel()


async def test_raised_reign_makes_every_earlier_revision_gone_and_keeps_its_events(endpoint):
    worker = HandWorker(endpoint)
    await worker.register()
    seen = (await list_deployments(endpoint)).revision
    async with watching(endpoint, content=EVENTS) as open_watch:
        assert await open_watch.take(3) == ["EVENT REIGN_BEGAN", "EVENT WORKER_JOINED", "SYNCED"]
        worker.slice.highest_epoch.number = seen.epoch.number + 5
        worker.slice.highest_epoch.supervisor_id = "another"
        worker.slice.revision += 1
        await worker.register()
        async with refused(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"):
            await open_watch.next()
    for content in (EVENTS, BOTH, pb2.WATCH_CONTENT_ROUTES):
        async with (
            watching(endpoint, after=seen, content=content) as watch,
            refused(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"),
        ):
            await watch.next()
    async with watching(endpoint, content=EVENTS) as watch:
        assert await watch.take(4) == [
            "EVENT REIGN_BEGAN",
            "EVENT WORKER_JOINED",
            "EVENT EPOCH_RAISED",
            "SYNCED",
        ]
        numbers = [(it.revision.epoch.number, it.revision.n) for it in watch.messages]
        assert numbers == sorted(numbers)


async def test_events_that_were_compacted_are_gone_and_routes_are_not(tmp_path):
    numbers = {"event_log_limit": 3, "heartbeat_s": 10.0}
    async with reigns(tmp_path, registry=numbers) as them:
        seen = (await list_deployments(them.endpoint)).revision
        for n in range(6):
            await HandWorker(them.endpoint, f"w{n}").hold(shard("m", replica=n)).register()
        async with watching(them.endpoint, after=seen) as watch:
            assert (await watch.next()).endswith(" m")
        for content in (EVENTS, BOTH):
            async with (
                watching(them.endpoint, after=seen, content=content) as watch,
                refused(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"),
            ):
                await watch.next()


async def test_every_wrong_field_of_a_watch_is_named_at_once(endpoint):
    wrong = pb2.WatchDeploymentsRequest(
        after=types_pb2.ChangeRevision(n=3),
        content=77,  # type: ignore[arg-type]
        deployment="no such/name",
        last_events=2**31,
    )
    async with channel_to(endpoint) as channel:
        call = pb2_grpc.DeploymentServiceStub(channel).WatchDeployments(wrong)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = from_rpc(caught.value, where="the supervisor")
    assert isinstance(error, BadRequest)
    paths = [path for path, _ in error.violations]
    assert paths == ["after.epoch.supervisor_id", "content", "deployment", "last_events"]


async def test_since_when_and_when_next_reach_the_reader(tmp_path):
    numbers = {"heartbeat_s": 0.1, "lease_s": 600.0, "lost_s": 1200.0}
    async with reigns(tmp_path, registry=numbers) as them:
        worker = HandWorker(them.endpoint).hold(shard())
        await worker.register()
        first = await get_deployment(them.endpoint, "m")
        assert first.HasField("state_time")
        assert first.replicas[0].state_time == first.state_time

        async def is_late() -> bool:
            return (await get_deployment(them.endpoint, "m")).replicas[0].next_action != ""

        await wait_for(is_late, "the worker is late")
        late = (await get_deployment(them.endpoint, "m")).replicas[0]
        assert late.next_action == "worker w1 is late: it is UNREACHABLE unless it is heard"
        assert 0 < late.next_action_in_s < 600
        assert late.state_time == first.state_time
        later = (await get_deployment(them.endpoint, "m")).replicas[0]
        assert later.next_action_in_s < late.next_action_in_s
        (shown,) = (await list_workers(them.endpoint)).workers
        assert "UNREACHABLE in 5" in shown.reason or "UNREACHABLE in 600 s" in shown.reason

        await worker.heartbeat()
        heard = (await get_deployment(them.endpoint, "m")).replicas[0]
        assert not heard.HasField("next_action_in_s") or heard.next_action


async def test_state_that_another_reign_saw_begin_has_no_time(tmp_path):
    async with reigns(tmp_path) as them:
        worker = HandWorker(them.endpoint).hold(shard())
        await worker.register()
        await them.restart()
        await worker.register()
        deployment = await get_deployment(them.endpoint, "m")
        assert deployment.state == types_pb2.DEPLOYMENT_STATE_READY
        assert not deployment.HasField("state_time")
        assert not deployment.replicas[0].HasField("state_time")
