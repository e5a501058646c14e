"""Events as a program reads them: each once, over restarts, resets and raised reigns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from stagekeeper.client import BadRequest, Client, Gap, SupervisorUnreachable
from stagekeeper.v1 import deployment_service_pb2 as pb2
from tests.fakes.hand_worker import HandWorker, shard
from tests.fakes.supervisors import Reigns, reigns
from tests.fakes.tcp_proxy import TcpProxy
from tests.harness.waiting import wait_for


class Reader:
    """Follows events in a task; `told` has their kinds, and gaps as `-- AWAY`."""

    def __init__(self, client: Client, name: str = "", **choice: int) -> None:
        self.told: list[str] = []
        self.events: list[pb2.Event] = []
        self._client = client
        self._name = name
        self._choice = choice
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        def on_gap(gap: Gap) -> None:
            self.told.append(f"-- {gap.name}")

        events = self._client.events(self._name, follow=True, on_gap=on_gap, **self._choice)
        async for event in events:
            if event.kind != pb2.EVENT_KIND_AGENT_UNREACHABLE:
                self.events.append(event)
                self.told.append(pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_"))

    def has(self, message: str) -> bool:
        return any(event.message == message for event in self.events)

    async def until(self, *last: str) -> None:
        """Wait until these were told last."""
        await wait_for(lambda: self.told[-len(last) :] == list(last), f"{last} was told last")


@asynccontextmanager
async def reading(endpoint: str, name: str = "", **choice: int) -> AsyncIterator[Reader]:
    async with Client(endpoint, watch_at_once=False) as client:
        reader = Reader(client, name, **choice)
        try:
            yield reader
        finally:
            reader.task.cancel()
            await asyncio.gather(reader.task, return_exceptions=True)


@pytest.fixture
async def them(tmp_path: Path) -> AsyncIterator[Reigns]:
    async with reigns(tmp_path, registry={"heartbeat_s": 10.0}) as running:
        yield running


async def test_last_events_are_read_and_the_reading_ends(them):
    await HandWorker(them.endpoint).hold(shard()).register()
    async with Client(them.endpoint, watch_at_once=False) as client:
        kinds = [event.kind async for event in client.events()]
        assert kinds[:4] == [
            pb2.EVENT_KIND_REIGN_BEGAN,
            pb2.EVENT_KIND_WORKER_JOINED,
            pb2.EVENT_KIND_REPLICA_CHANGED,
            pb2.EVENT_KIND_DEPLOYMENT_CHANGED,
        ]
        newest = [event.kind async for event in client.events("m", last=1)]
        assert newest == [pb2.EVENT_KIND_DEPLOYMENT_CHANGED]
        assert [event async for event in client.events(last=0)] == []
        with pytest.raises(BadRequest):
            _ = [event async for event in client.events("no such/name")]


async def test_nobody_at_the_endpoint_is_said_at_once_also_when_following():
    async with Client("127.0.0.1:1", patience_s=0.1, watch_at_once=False) as client:
        for follow in (False, True):
            with pytest.raises(SupervisorUnreachable):
                _ = [event async for event in client.events(follow=follow)]


async def test_following_goes_on_over_a_restart_and_says_what_is_gone(them):
    worker = HandWorker(them.endpoint).hold(shard())
    await worker.register()
    async with reading(them.endpoint) as reader:
        await reader.until("DEPLOYMENT_CHANGED")
        await worker.hold(shard(), shard("n")).register()
        await reader.until("REPLICA_CHANGED", "DEPLOYMENT_CHANGED")

        await them.stop()
        await reader.until("-- AWAY")
        await them.start()
        await reader.until("-- AWAY", "-- OTHER_REIGN", "REIGN_BEGAN")
        await worker.register()
        await wait_for(lambda: "HOLD_ENDED" in reader.told, "the reign goes on")
        assert reader.told.count("REIGN_BEGAN") == 2


async def test_connection_that_breaks_loses_no_event_and_repeats_none(them):
    worker = HandWorker(them.endpoint)
    async with TcpProxy(them.endpoint) as proxy, reading(proxy.url) as reader:
        await reader.until("REIGN_BEGAN")
        for n in range(5):
            await worker.hold(*(shard(f"m{k}") for k in range(n + 1))).register()
            proxy.reset()
            ready = f"m{n} replica 0 is READY"
            await wait_for(partial(reader.has, ready), f"{ready} was told")
        told = [event.message for event in reader.events if event.HasField("replica_index")]
        assert told == [f"m{n} replica 0 is READY" for n in range(5)]
        assert "-- OTHER_REIGN" not in reader.told
        assert "-- BEHIND" not in reader.told


async def test_raised_reign_repeats_no_event(them):
    worker = HandWorker(them.endpoint)
    await worker.register()
    async with reading(them.endpoint) as reader:
        await reader.until("REIGN_BEGAN", "WORKER_JOINED")
        worker.slice.highest_epoch.number = 77
        worker.slice.highest_epoch.supervisor_id = "another"
        worker.slice.revision += 1
        await worker.register()
        await wait_for(lambda: "EPOCH_RAISED" in reader.told, "the raise was told")
        await HandWorker(them.endpoint, "w2").register()
        await wait_for(lambda: "w2" in str(reader.events), "and what came after")
        told = [it for it in reader.told if not it.startswith("--")]
        assert told == ["REIGN_BEGAN", "WORKER_JOINED", "EPOCH_RAISED", "WORKER_JOINED"]


async def test_reigns_that_keep_nothing_have_one_number_and_are_told_apart():
    async with (
        reigns(None, registry={"heartbeat_s": 10.0}) as them,
        reading(them.endpoint) as reader,
    ):
        await reader.until("REIGN_BEGAN")
        for _ in range(4):
            await them.restart()
            await reader.until("-- AWAY", "-- OTHER_REIGN", "REIGN_BEGAN")
        assert reader.told.count("REIGN_BEGAN") == 5
