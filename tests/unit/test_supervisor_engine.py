"""The engine and those who read it: what is written before anything starts, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest

from stagekeeper.core.commands import SaveRoster, StartOperation, Work, Write
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.events import DeploymentRequested, WorkerRegistered
from stagekeeper.core.ids import ChangeRevision, Epoch, WorkerId
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.store import EpochLost, MemoryStore, StoreFailed
from stagekeeper.supervisor.watchers import Watchers
from stagekeeper.v1 import deployment_service_pb2
from tests.fakes.virtual_clock import VirtualClock
from tests.worlds import World, replica_shards, report, shard, spec


class BookedStore(MemoryStore):
    """Notes writes into `book`, or fails at them."""

    def __init__(self, book: list[Any]) -> None:
        self.book = book
        self.error: StoreFailed | None = None

    def write(self, epoch: Epoch, writes: Sequence[Write]) -> None:
        if self.error is not None:
            raise self.error
        self.book += writes

    def write_roster(self, epoch: Epoch, worker_ids: Iterable[WorkerId]) -> None:
        self.book.append(SaveRoster(tuple(worker_ids)))


class Office:
    """An engine whose store and whose executor write into one book."""

    def __init__(self, **world: Any) -> None:
        self.book: list[Any] = []
        self.failed: list[Exception] = []
        self.store = BookedStore(self.book)
        self.clock = VirtualClock()
        world_of = World(now=self.clock.monotonic(), **world)
        self.engine = Engine(
            world_of.registry,
            self.store,
            self.clock,
            carry_out=self._carry_out,
            on_failed=self.failed.append,
        )

    def _carry_out(self, work: Work) -> None:
        self.book.append(work)

    def register(self, worker: str = "w1", shards: Iterable[Any] = ()) -> None:
        self.engine.handle(WorkerRegistered(report(worker, shards), b"1"))

    def deploy(self) -> None:
        self.engine.handle(DeploymentRequested(spec(), 1.0))


def kinds(book: Iterable[Any]) -> list[str]:
    return [type(entry).__name__ for entry in book]


def test_what_cannot_be_written_starts_nothing():
    office = Office()
    office.register()
    office.book.clear()
    office.store.error = StoreFailed("the disk is full")

    with pytest.raises(Refused) as caught:
        office.deploy()

    assert caught.value.reason is Reason.DRAINING
    assert office.book == []
    assert len(office.failed) == 1, "and the supervisor ends"


def test_reign_that_is_over_takes_in_writes_and_starts_nothing():
    office = Office()
    office.register()
    office.book.clear()
    office.engine._carry(WorkerRegistered(report("w1"), b"1"), [SaveRoster((WorkerId("w9"),))])

    office.engine.step_down(RuntimeError("a higher reign lives"))

    with pytest.raises(Refused, match="a higher reign lives") as caught:
        office.deploy()
    assert caught.value.reason is Reason.DRAINING
    with pytest.raises(Refused):
        office.register("w2")
    office.engine.tick(0.0)
    office.engine.end()
    office.engine.step_down(RuntimeError("again"))
    assert office.book == []
    assert [str(why) for why in office.failed] == ["a higher reign lives"]
    assert [it.worker_id for it in office.engine.registry.workers(0.0)] == ["w1"]


def test_reign_that_lost_its_store_steps_down():
    office = Office()
    office.register()
    office.store.error = EpochLost("another one took over")

    with pytest.raises(Refused, match="steps down"):
        office.deploy()

    assert [type(why) for why in office.failed] == [EpochLost]


def test_intent_and_roster_are_written_before_anything_starts():
    office = Office()
    office.register()
    office.book.clear()

    office.deploy()

    assert kinds(office.book) == ["SaveDeployment", "SaveOperation", "SaveRoster", "StartOperation"]
    assert office.book[2] == SaveRoster((WorkerId("w1"),))
    office.engine.tick(0.0)
    assert kinds(office.book[4:]) == [], "and once is enough"


def test_roster_that_waits_for_a_tick_is_written_before_anything_starts():
    """The registry has handed it out already, and the store has not seen it."""
    office = Office()
    office.register()
    office.engine._carry(WorkerRegistered(report("w1"), b"1"), [SaveRoster((WorkerId("w9"),))])
    office.book.clear()

    started = StartOperation(None, None)  # type: ignore[arg-type]
    office.engine._carry(WorkerRegistered(report("w1"), b"1"), [started])

    assert office.book == [SaveRoster((WorkerId("w9"),)), started]


def test_worker_that_comes_with_shards_is_on_the_roster_by_the_next_tick():
    office = Office()
    office.register("w1", [shard()])
    office.engine.tick(0.0)
    office.register("w2", [shard(replica=1)])

    office.engine.tick(0.0)

    assert office.book[-1] == SaveRoster((WorkerId("w1"), WorkerId("w2")))


def watchers(office: Office) -> Watchers:
    messages = DeploymentMessages(office.engine.registry, office.clock)
    return Watchers(office.engine, messages, office.clock, bookmark_s=5.0, slow_reader_s=30.0)


def view_of(message: deployment_service_pb2.WatchDeploymentsResponse) -> tuple[str, bool]:
    kind = deployment_service_pb2.ChangeKind.Name(message.kind).removeprefix("CHANGE_KIND_")
    return kind, message.complete


async def read_until_complete(office: Office, stream: AsyncIterator[Any]) -> list:
    """Read on, while time goes by, until everything is said to be complete."""
    told: list[tuple[str, bool]] = []
    while not told or not told[-1][1]:
        message = asyncio.ensure_future(anext(stream))
        await office.clock.advance(1.0)
        told.append(view_of(await asyncio.wait_for(message, 20)))
    return told


async def test_reader_that_is_slow_is_not_told_that_an_old_snapshot_is_complete():
    office = Office(roster=["w1", "w2"])
    office.register("w1", replica_shards(stages=1))
    stream = watchers(office).follow(None)
    assert view_of(await anext(stream)) == ("SNAPSHOT", False)

    office.register("w2", [shard("other", 0)])  # while the snapshot lies in a full pipe
    assert office.engine.registry.is_complete

    told = await read_until_complete(office, stream)
    assert told[0] == ("SYNCED", False)
    assert ("ADDED", False) in told, "the deployment that came meanwhile"
    assert told[-1] == ("BOOKMARK", True)


async def test_reader_that_is_slow_gets_all_changes_before_it_is_told_that_they_are_complete():
    office = Office(roster=["w1", "w2"])
    office.register("w1", replica_shards(stages=1))
    epoch = office.engine.registry.epoch
    stream = watchers(office).follow(ChangeRevision(epoch, 0))
    assert view_of(await anext(stream)) == ("ADDED", False)

    office.register("w2", [shard("other", 0)])

    told = await read_until_complete(office, stream)
    assert ("ADDED", False) in told, "the deployment that came meanwhile"
    assert told[-1] == ("BOOKMARK", True)
