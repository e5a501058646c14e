"""Watching deployments: a snapshot, then each change, for as long as the reader listens."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import grpc

from stagekeeper.v1 import deployment_service_pb2, deployment_service_pb2_grpc, types_pb2
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import list_deployments, reigns

KIND = deployment_service_pb2.ChangeKind
BOOKMARK = deployment_service_pb2.CHANGE_KIND_BOOKMARK


class Watch:
    """One open watch, read a message at a time."""

    def __init__(self, call) -> None:
        self._call = call

    async def next(self, *, skip_bookmarks: bool = True):
        while True:
            message = await asyncio.wait_for(self._call.read(), 20)
            assert message is not grpc.aio.EOF, "the watch ended"
            if message.kind != BOOKMARK or not skip_bookmarks:
                return message

    async def names(self, count: int) -> list[tuple[str, str]]:
        messages = [await self.next() for _ in range(count)]
        return [
            (KIND.Name(it.kind).removeprefix("CHANGE_KIND_"), it.deployment.name) for it in messages
        ]


@asynccontextmanager
async def watching(endpoint: str, after=None):
    async with channel_to(endpoint) as channel:
        call = deployment_service_pb2_grpc.DeploymentServiceStub(channel).WatchDeployments(
            deployment_service_pb2.WatchDeploymentsRequest(after=after)
        )
        yield Watch(call)
        call.cancel()


async def test_snapshot_is_whole_and_ends_with_synced(endpoint):
    await HandWorker(endpoint).hold(shard("b"), shard("a")).register()
    async with watching(endpoint) as watch:
        assert await watch.names(2) == [("SNAPSHOT", "a"), ("SNAPSHOT", "b")]
        synced = await watch.next()
        assert synced.kind == deployment_service_pb2.CHANGE_KIND_SYNCED
        assert synced.complete
        assert not synced.HasField("deployment")
        assert synced.revision == (await list_deployments(endpoint)).revision


async def test_each_change_is_sent_with_what_it_led_to(endpoint):
    worker = HandWorker(endpoint)
    async with watching(endpoint) as watch:
        assert await watch.names(1) == [("SYNCED", "")]
        await worker.hold(shard("m")).register()
        assert await watch.names(1) == [("ADDED", "m")]
        await worker.hold(shard("m", state=types_pb2.SHARD_STATE_FAILED)).register()
        modified = await watch.next()
        assert modified.kind == deployment_service_pb2.CHANGE_KIND_MODIFIED
        assert modified.deployment.replicas[0].state == types_pb2.REPLICA_STATE_FAILED
        await worker.hold().register()
        assert await watch.names(1) == [("REMOVED", "m")]


async def test_address_changed_in_place_is_a_change(endpoint):
    worker = HandWorker(endpoint).hold(shard(url="127.0.0.1:1000"))
    await worker.register()
    async with watching(endpoint) as watch:
        await watch.names(2)
        await worker.hold(shard(url="127.0.0.1:2000")).register()
        modified = await watch.next()
        assert modified.kind == deployment_service_pb2.CHANGE_KIND_MODIFIED
        (routed,) = modified.deployment.replicas[0].shards
        assert routed.record.addresses[0].url == "127.0.0.1:2000"


async def test_registration_that_says_nothing_new_is_no_change(endpoint):
    worker = HandWorker(endpoint).hold(shard())
    await worker.register()
    before = (await list_deployments(endpoint)).revision
    await worker.register()
    assert (await list_deployments(endpoint)).revision == before


async def test_resumed_watch_gets_what_came_after_and_no_snapshot(endpoint):
    worker = HandWorker(endpoint).hold(shard("a"))
    await worker.register()
    seen = (await list_deployments(endpoint)).revision
    for url in ("127.0.0.1:10", "127.0.0.1:20", "127.0.0.1:30"):
        await worker.hold(shard("a", url=url), shard("b", url=url)).register()
    async with watching(endpoint, after=seen) as watch:
        first, second = await watch.next(), await watch.next()
        assert {first.deployment.name, second.deployment.name} == {"a", "b"}
        for message in (first, second):
            (routed,) = message.deployment.replicas[0].shards
            assert routed.record.addresses[0].url == "127.0.0.1:30"
        assert first.revision.n < second.revision.n
        bookmark = await watch.next(skip_bookmarks=False)
        assert bookmark.kind == BOOKMARK
        assert bookmark.revision == second.revision


async def test_bookmarks_say_that_the_supervisor_is_there(endpoint):
    async with watching(endpoint) as watch:
        synced = await watch.next()
        for _ in range(2):
            bookmark = await watch.next(skip_bookmarks=False)
            assert bookmark.kind == BOOKMARK
            assert bookmark.complete
            assert bookmark.revision == synced.revision


async def test_revision_of_another_reign_is_gone(tmp_path):
    async with reigns(tmp_path) as them:
        await HandWorker(them.endpoint).hold(shard()).register()
        seen = (await list_deployments(them.endpoint)).revision
        await them.restart()
        worker = HandWorker(them.endpoint)
        for port in range(1, 6):
            await worker.hold(shard(url=f"127.0.0.1:{port}")).register()
        now = (await list_deployments(them.endpoint)).revision
        assert now.n >= seen.n, "it is the reign alone that tells the positions apart"
        async with (
            watching(them.endpoint, after=seen) as watch,
            refused(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"),
        ):
            await watch.next()


async def test_compacted_revision_is_gone(tmp_path):
    async with reigns(tmp_path, registry={"change_log_limit": 3}) as them:
        worker = HandWorker(them.endpoint)
        await worker.hold(shard()).register()
        seen = (await list_deployments(them.endpoint)).revision
        for port in range(1, 6):
            await worker.hold(shard(url=f"127.0.0.1:{port}")).register()
        async with (
            watching(them.endpoint, after=seen) as watch,
            refused(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"),
        ):
            await watch.next()


async def test_reader_that_does_not_read_holds_nobody_up(endpoint):
    """Its window fills; registrations and other watches go on, and later it gets fewer messages."""
    note = "x" * 60_000
    worker = HandWorker(endpoint).hold(shard(state_reason=note))
    await worker.register()
    async with watching(endpoint) as slow, watching(endpoint) as quick:
        await slow.names(2)
        await quick.names(2)
        for port in range(1, 101):
            await worker.hold(shard(state_reason=note, url=f"127.0.0.1:{port}")).register()
        last = (await list_deployments(endpoint)).revision
        while (await quick.next()).revision.n < last.n:
            pass
        received = 0
        while True:
            message = await slow.next()
            received += 1
            if message.revision.n == last.n:
                break
        (routed,) = message.deployment.replicas[0].shards
        assert routed.record.addresses[0].url == "127.0.0.1:100"
        assert received < 100


async def test_list_is_incomplete_until_the_workers_are_back(tmp_path):
    async with reigns(tmp_path) as them:
        workers = [
            HandWorker(them.endpoint, f"w{index}").hold(shard(replica=index)) for index in range(2)
        ]
        for worker in workers:
            await worker.register()
        await them.restart()
        async with watching(them.endpoint) as watch:
            synced = await watch.next()
            assert not synced.complete
            await workers[0].register()
            added = await watch.next()
            assert added.kind == deployment_service_pb2.CHANGE_KIND_ADDED
            assert not (await list_deployments(them.endpoint)).complete
            await workers[1].register()
            while not (await watch.next(skip_bookmarks=False)).complete:
                pass
            assert (await list_deployments(them.endpoint)).complete


async def test_watches_are_ended_first_so_that_a_stop_is_quick(tmp_path):
    async with reigns(tmp_path) as them, watching(them.endpoint) as watch:
        await watch.next()
        began = time.monotonic()
        await them.stop()
        assert time.monotonic() - began < 2.0
        async with refused(grpc.StatusCode.UNAVAILABLE, "DRAINING"):
            while await watch.next(skip_bookmarks=False):
                pass
