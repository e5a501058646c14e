"""Readers that take nothing: they are cut, hold nothing, are told so, and recover by listing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from stagekeeper.client import Client
from stagekeeper.supervisor.pulse import Pulse
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import deployment_service_pb2_grpc as pb2_grpc
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import Reigns, list_deployments, reigns
from tests.fakes.tcp_proxy import DOWN, TcpProxy
from tests.harness.waiting import wait_for

NAMES = [f"big-{n}" for n in range(12)]
REPLICAS = 5
NOTE = "x" * 240_000
"""Twelve deployments of 1.2 MB: more than windows and the kernel's buffers take in together."""


class Listeners:
    """How many readers the supervisor holds."""

    def __init__(self) -> None:
        self.count = 0

    def spy(self, pulse: Pulse) -> contextlib.AbstractContextManager[object]:
        @contextlib.contextmanager
        def counted() -> Iterator[object]:
            self.count += 1
            try:
                with subscribe(pulse) as event:
                    yield event
            finally:
                self.count -= 1

        return counted()


subscribe = Pulse.subscribe


@pytest.fixture
def listeners(monkeypatch: pytest.MonkeyPatch) -> Listeners:
    them = Listeners()
    monkeypatch.setattr(Pulse, "subscribe", lambda pulse: them.spy(pulse))
    return them


async def put(worker: HandWorker, url: str) -> None:
    """Report everything big, at another address."""
    shards = [
        shard(name, replica=index, url=url, state_reason=NOTE)
        for name in NAMES
        for index in range(REPLICAS)
    ]
    await worker.hold(*shards).register()


async def next_of(call: Any) -> pb2.WatchDeploymentsResponse:
    message = await call.read()
    assert message is not grpc.aio.EOF
    return message


def slow(tmp_path, limit_s: float = 0.4) -> contextlib.AbstractAsyncContextManager[Reigns]:
    return reigns(tmp_path, slow_reader_s=limit_s)


async def test_reader_that_takes_nothing_is_cut_and_told_to_list_again(tmp_path, listeners):
    async with slow(tmp_path) as them:
        await put(HandWorker(them.endpoint), "127.0.0.1:10")
        async with channel_to(them.endpoint) as channel:
            stub = pb2_grpc.DeploymentServiceStub(channel)
            call = stub.WatchDeployments(pb2.WatchDeploymentsRequest())
            first = await next_of(call)
            assert first.deployment.name == "big-0"
            assert listeners.count == 1

            await wait_for(lambda: listeners.count == 0, "nothing is held for the reader")

            received = 1
            async with refused(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"):
                while await call.read() is not grpc.aio.EOF:
                    received += 1
            assert received < len(NAMES)
            again = stub.WatchDeployments(pb2.WatchDeploymentsRequest())
            kinds = [(await next_of(again)).kind for _ in range(len(NAMES) + 1)]
            assert kinds[-1] == pb2.CHANGE_KIND_SYNCED
            again.cancel()


async def test_reader_that_takes_its_time_is_not_cut(tmp_path, listeners):
    async with slow(tmp_path, 2.0) as them:
        await put(HandWorker(them.endpoint), "127.0.0.1:10")
        async with TcpProxy(them.endpoint) as proxy:
            proxy.limit(4_000_000, DOWN)  # all of it takes longer than one message may
            async with channel_to(proxy.url) as channel:
                stub = pb2_grpc.DeploymentServiceStub(channel)
                call = stub.WatchDeployments(pb2.WatchDeploymentsRequest())
                kinds = [(await next_of(call)).kind for _ in range(len(NAMES) + 1)]
                assert kinds[-1] == pb2.CHANGE_KIND_SYNCED
                call.cancel()


async def test_program_that_pauses_in_its_watch_gets_a_new_snapshot(tmp_path, listeners):
    async with slow(tmp_path) as them:
        await put(HandWorker(them.endpoint), "127.0.0.1:10")
        async with (
            Client(them.endpoint, watch_at_once=False) as client,
            contextlib.aclosing(client.watch()) as changes,
        ):
            first = await anext(changes)
            assert first.kind == pb2.CHANGE_KIND_SNAPSHOT
            await wait_for(lambda: listeners.count == 0, "the reader is cut")

            seen: list[str] = []
            while (message := await anext(changes)).kind != pb2.CHANGE_KIND_SYNCED:
                seen.append(message.deployment.name)
            assert set(seen[-len(NAMES) :]) == set(NAMES)


async def test_client_whose_routes_are_stalled_and_cut_loses_none_and_catches_up(
    tmp_path, listeners
):
    async with slow(tmp_path) as them, TcpProxy(them.endpoint) as proxy:
        worker = HandWorker(them.endpoint)
        await put(worker, "127.0.0.1:10")
        async with Client(proxy.url) as client:
            assert await client.synced(20)
            lost: list[str] = []

            def look() -> dict[str, int]:
                routes = {name: len(client.routes.routes(name, 0)) for name in NAMES}
                lost.extend(name for name, count in routes.items() if count != REPLICAS)
                return routes

            watch = client._watch
            tell = watch.tell
            watch.tell = lambda: (look(), tell())  # type: ignore[method-assign,assignment]

            proxy.stall(DOWN)
            await put(worker, "127.0.0.1:20")
            await wait_for(lambda: listeners.count == 0, "the stalled reader is cut")
            look()
            proxy.release(DOWN)

            def is_caught_up() -> bool:
                return all(
                    route.url == "127.0.0.1:20"
                    for name in NAMES
                    for route in client.routes.routes(name, 0)
                )

            await wait_for(is_caught_up, "the client has the new addresses")
            assert not lost
            assert len(proxy.accepted_at) == 1, "and that over one connection"
            assert len((await list_deployments(them.endpoint)).deployments) == len(NAMES)
