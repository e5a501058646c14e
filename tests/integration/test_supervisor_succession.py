"""One process through several reigns: it stands by, begins, steps down, and stands by again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from stagekeeper.core.ids import NO_EPOCH, Epoch
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.host.server import AddressTaken
from stagekeeper.runtime.convert import epoch_to_proto
from stagekeeper.supervisor.app import Supervisor
from stagekeeper.supervisor.lifetime import SteppedDown, run
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.standby import Waiting
from stagekeeper.supervisor.state_lock import StateDirTaken, StateLock
from stagekeeper.supervisor.store import FILE_NAME
from stagekeeper.v1 import deployment_service_pb2, deployment_service_pb2_grpc
from stagekeeper.v1 import supervisor_service_pb2_grpc as supervisor_grpc
from tests.fakes.hand_worker import HandWorker, channel_to
from tests.fakes.other_reign import OtherReign
from tests.fakes.refusals import refused
from tests.fakes.supervisors import QUICK, list_workers
from tests.fakes.tcp_proxy import TcpProxy
from tests.harness.waiting import wait_for

LONG_S = 600.0
NINE = Epoch(9, "nine")


class Life:
    """One supervisor process's `run`, in this process, and what it told."""

    def __init__(self, **settings: Any) -> None:
        fields: dict[str, Any] = {
            "endpoint": "127.0.0.1:0",
            "registry": RegistrySettings(**QUICK),  # type: ignore[arg-type]
            "tick_s": 0.05,
            "look_s": 0.1,
            **settings,
        }
        self.reigns: list[Supervisor] = []
        self.waits: list[Waiting] = []
        self.ends: list[SteppedDown] = []
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(
            run(
                SupervisorSettings(**fields),
                stop=self.stop,
                ready=self.reigns.append,
                on_standby=self.waits.append,
                on_stepped_down=self.ends.append,
            )
        )

    async def reign(self, number: int = 1) -> Supervisor:
        """Wait until the nth reign of this process serves."""
        await self._until(lambda: len(self.reigns) >= number, f"reign {number} serves")
        return self.reigns[number - 1]

    async def wait(self, number: int = 1) -> Waiting:
        """Wait until the process stands by for the nth time."""
        await self._until(lambda: len(self.waits) >= number, f"it stands by ({number})")
        return self.waits[number - 1]

    async def over(self, number: int = 1) -> SteppedDown:
        await self._until(lambda: len(self.ends) >= number, f"it stepped down ({number})")
        return self.ends[number - 1]

    async def _until(self, probe: Any, what: str) -> None:
        def look() -> bool:
            if self.task.done():
                self.task.result()
            return bool(probe())

        await wait_for(look, what, within_s=20.0)

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 20)


@asynccontextmanager
async def life(**settings: Any) -> AsyncIterator[Life]:
    it = Life(**settings)
    try:
        yield it
    finally:
        it.stop.set()
        await asyncio.wait({it.task}, timeout=20)
        assert it.task.done(), "it ends when it is told to"


async def read_to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_standby_writes_nothing_and_begins_above_what_it_saw(tmp_path: Path):
    async with (
        OtherReign(NINE) as other,
        life(endpoint=other.endpoint, state_dir=tmp_path / "s") as standby,
    ):
        assert await standby.wait() == Waiting(
            other.endpoint,
            NINE,
            f"a supervisor of cluster 'default' (epoch {NINE}) lives at {other.endpoint}",
        )
        await wait_for(lambda: other.asked >= 3, "it asks again")
        assert not (tmp_path / "s").exists()
        await other.stop()

        reign = await standby.reign()

        assert reign.endpoint == other.endpoint
        assert reign.epoch > NINE
        assert reign.epoch.supervisor_id != NINE.supervisor_id
        assert len(standby.waits) == 1


async def test_successor_without_a_store_of_its_own_does_not_take_nothing_for_everything(tmp_path):
    """A complete list without workers would take their routes from the clients."""
    async with (
        OtherReign(NINE) as other,
        life(endpoint=other.endpoint, state_dir=tmp_path) as standby,
    ):
        await standby.wait()
        await other.stop()
        reign = await standby.reign()
        assert not (await list_workers(reign.endpoint)).complete


async def test_end_while_standing_by_is_in_order_and_leaves_nothing(tmp_path):
    async with (
        OtherReign(NINE) as other,
        life(endpoint=other.endpoint, state_dir=tmp_path / "s") as standby,
    ):
        await standby.wait()
        await standby.end()
        assert standby.reigns == []
        assert not (tmp_path / "s").exists()


async def test_recovery_R13_supervisor_of_another_cluster_at_the_endpoint_is_refused(tmp_path):
    async with (
        OtherReign(NINE, cluster="other") as other,
        life(endpoint=other.endpoint, state_dir=tmp_path / "s") as second,
    ):
        with pytest.raises(AddressTaken, match=r"'other' .*, lives at .* is of 'default'"):
            await asyncio.wait_for(second.task, 20)
        assert second.waits == []
        assert not (tmp_path / "s").exists()


async def test_supervisor_that_may_not_wait_is_refused_at_once(tmp_path):
    async with (
        OtherReign(NINE) as other,
        life(endpoint=other.endpoint, standby=False) as second,
    ):
        with pytest.raises(AddressTaken, match="lives at"):
            await asyncio.wait_for(second.task, 20)


async def test_standby_at_another_address_waits_though_its_own_is_free(tmp_path):
    async with (
        OtherReign(NINE) as other,
        TcpProxy(other.endpoint) as proxy,
        life(stable_endpoint=proxy.url, state_dir=tmp_path / "s") as standby,
    ):
        assert (await standby.wait()).endpoint == proxy.url
        proxy.stall()  # slow is not dead
        count = proxy.connection_count
        await wait_for(lambda: proxy.connection_count >= count + 3, "it asks on")
        assert standby.reigns == []
        assert not (tmp_path / "s").exists()
        proxy.move("127.0.0.1:1", reset_old=True)
        proxy.release()

        assert (await standby.reign()).epoch > NINE


# --- stepping down


async def test_higher_reign_at_the_stable_endpoint_ends_ours_and_is_waited_for(tmp_path):
    async with (
        TcpProxy() as proxy,
        life(stable_endpoint=proxy.url, state_dir=tmp_path) as first,
    ):
        reign = await first.reign()
        proxy.move(reign.endpoint)
        worker = HandWorker(reign.endpoint)
        await worker.register()
        async with channel_to(reign.endpoint) as channel, channel_to(reign.worker_address) as w:
            stub = deployment_service_pb2_grpc.DeploymentServiceStub(channel)
            watch = stub.WatchDeployments(deployment_service_pb2.WatchDeploymentsRequest())
            await watch.read()
            async with OtherReign(NINE) as other:
                proxy.move(other.endpoint)

                over = await first.over()

                assert over.endpoint == proxy.url
                assert over.epoch == reign.epoch
                assert str(NINE) in over.why
                async with refused(grpc.StatusCode.UNAVAILABLE, "DRAINING"):
                    await read_to_its_end(watch)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await supervisor_grpc.SupervisorServiceStub(w).RegisterWorker(
                        worker.slice, timeout=5
                    )
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert (await first.wait()).epoch == NINE

            proxy.move("127.0.0.1:1")
            assert (await first.reign(2)).epoch > NINE


async def test_lower_reign_at_the_stable_endpoint_ends_nothing(tmp_path):
    async with (
        TcpProxy() as proxy,
        OtherReign(Epoch(0, "lower")) as other,
        life(stable_endpoint=proxy.url) as first,
    ):
        reign = await first.reign()
        proxy.move(other.endpoint)

        await wait_for(lambda: other.asked >= 5, "it looks on")

        assert first.ends == []
        assert (await list_workers(reign.endpoint)).epoch.number == reign.epoch.number


async def test_supervisor_that_may_not_wait_ends_before_a_higher_reign(tmp_path):
    async with (
        TcpProxy() as proxy,
        OtherReign(NINE) as other,
        life(stable_endpoint=proxy.url, standby=False) as first,
    ):
        await first.reign()
        proxy.move(other.endpoint)
        with pytest.raises(AddressTaken, match="lives at"):
            await asyncio.wait_for(first.task, 20)


async def test_reign_that_a_worker_shows_and_that_lives_is_looked_for_at_once_and_given_way_to(
    tmp_path,
):
    """On paper ours is the higher one from then on; they would outbid each other for ever."""
    async with (
        TcpProxy() as proxy,
        OtherReign(NINE) as other,
        life(stable_endpoint=proxy.url, look_s=LONG_S, state_dir=tmp_path) as first,
    ):
        reign = await first.reign()
        proxy.move(reign.endpoint)
        worker = HandWorker(reign.endpoint)
        worker.slice.highest_epoch.CopyFrom(epoch_to_proto(NINE))
        address = await worker.supervisor_address()
        proxy.move(other.endpoint)

        async with channel_to(address) as channel:
            answer = await supervisor_grpc.SupervisorServiceStub(channel).RegisterWorker(
                worker.slice, timeout=10
            )
        assert answer.epoch.number == NINE.number + 1

        over = await first.over()
        assert over.epoch.number == NINE.number + 1
        assert (await first.wait()).epoch == NINE


async def test_reign_that_a_worker_shows_and_that_is_gone_ends_nothing(tmp_path):
    async with life(state_dir=tmp_path) as first:
        reign = await first.reign()
        worker = HandWorker(reign.endpoint)
        worker.slice.highest_epoch.CopyFrom(epoch_to_proto(NINE))

        assert (await worker.register()).epoch.number == NINE.number + 1

        assert (await worker.heartbeat()).epoch.number == NINE.number + 1
        assert first.ends == []


async def test_store_that_another_reign_took_is_given_up_and_the_reign_waited_for(tmp_path):
    async with (
        TcpProxy() as proxy,
        OtherReign(NINE) as other,
        life(stable_endpoint=proxy.url, look_s=0.1, state_dir=tmp_path) as first,
    ):
        reign = await first.reign()
        proxy.move(reign.endpoint)
        proxy.stall()  # it shall hear of it from the store alone
        with sqlite3.connect(tmp_path / FILE_NAME) as store:
            store.execute("UPDATE epoch SET number = 9, supervisor_id = 'nine'")

        async with refused(grpc.StatusCode.UNAVAILABLE, "DRAINING") as details:
            worker = HandWorker(reign.endpoint)
            worker.slice.highest_epoch.CopyFrom(epoch_to_proto(Epoch(3, "x")))
            await worker.register()  # raises the epoch, which is written down first
        assert "another one took over" in details[0].message
        assert "another one took over" in (await first.over()).why

        proxy.move(other.endpoint, reset_old=True)
        proxy.release()
        await wait_for(lambda: other.asked >= 2, "it looks who took over")
        await first.wait()
        await other.stop()
        assert (await first.reign(2)).epoch > NINE
        with sqlite3.connect(tmp_path / FILE_NAME) as store:
            assert store.execute("SELECT number FROM epoch").fetchone()[0] > 9


# --- races


async def test_of_two_that_begin_at_once_one_reigns_and_the_other_stands_by(tmp_path):
    async with OtherReign(NINE) as other:
        settings = {"endpoint": other.endpoint, "look_s": 0.1}
        async with (
            life(state_dir=tmp_path, **settings) as one,
            life(state_dir=tmp_path, **settings) as two,
            life(state_dir=tmp_path / "own", **settings) as three,
        ):
            lives = (one, two, three)
            for standby in lives:
                await standby.wait()
            await other.stop()

            await wait_for(lambda: sum(len(it.reigns) for it in lives) == 1, "one reigns")
            winner = next(it for it in lives if it.reigns)
            losers = [it for it in lives if it is not winner]
            epoch = winner.reigns[0].epoch
            await winner.end()
            await wait_for(lambda: sum(len(it.reigns) for it in losers) == 1, "the next one does")

            (second,) = [it.reigns[0] for it in losers if it.reigns]
            # One with a store of its own may not have seen the short reign: then its number is the
            # same, and the pairs are told apart by the supervisors' ids.
            assert second.epoch.number >= epoch.number
            assert second.epoch != epoch


async def test_owner_of_the_state_directory_with_the_same_endpoint_is_waited_for(tmp_path):
    async with OtherReign(NINE) as other:
        endpoint = other.endpoint
        await other.stop()
        lock = StateLock(tmp_path, endpoint)  # it is starting, or ending
        try:
            async with life(endpoint=endpoint, state_dir=tmp_path) as standby:
                assert "in use by another supervisor" in (await standby.wait()).why
                lock.release()
                assert (await standby.reign()).epoch > NO_EPOCH
        finally:
            lock.release()


async def test_owner_of_the_state_directory_with_another_endpoint_is_no_predecessor(tmp_path):
    lock = StateLock(tmp_path, "127.0.0.1:9")
    try:
        async with OtherReign(NINE) as other:
            endpoint = other.endpoint
        async with life(endpoint=endpoint, state_dir=tmp_path) as second:
            with pytest.raises(StateDirTaken, match=r"of endpoint .*:9\)"):
                await asyncio.wait_for(second.task, 20)
            assert second.waits == []
    finally:
        lock.release()


async def test_address_for_workers_that_a_stranger_has_is_told(tmp_path):
    async with OtherReign(NINE) as stranger, life(listen=stranger.endpoint) as first:
        with pytest.raises(AddressTaken, match="cannot listen at"):
            await asyncio.wait_for(first.task, 20)
