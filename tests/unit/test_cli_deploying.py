"""What `deploy` says while the supervisor waits for its former workers before it starts any."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stagekeeper.cli import deploying
from stagekeeper.cli.deploying import Creation, awaited_line, delete_shown, deploy_shown
from stagekeeper.core.workers import awaited_view
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

LINE = "waiting for workers that were here before the supervisor's start: agent-1 (at most 9 s)"


def recovering(*names: Any) -> pb2.ListWorkersResponse:
    views = [awaited_view(name, 1.0, waits_s=9.0) for name in names]
    return pb2.ListWorkersResponse(
        mode=types.MODE_HOLD,
        hold_reason=types.HOLD_REASON_RECOVERING,
        workers=[
            *(pb2.Worker(worker_id=it.worker_id, reason=it.reason) for it in views),
            pb2.Worker(worker_id="here", incarnation=1, state=types.WORKER_STATE_ALIVE),
        ],
    )


def test_those_that_are_awaited_are_named_with_the_time_that_is_left():
    assert awaited_line(recovering("agent-1")) == LINE
    assert "a, b, c, d and 1 more (at most 9 s)" in awaited_line(recovering(*"abcde"))


def test_whoever_waits_for_nobody_says_nothing():
    assert awaited_line(pb2.ListWorkersResponse(mode=types.MODE_NORMAL)) == ""


class HoldingClient:
    """Its creation is accepted once somebody has asked for the workers."""

    def __init__(self, workers: pb2.ListWorkersResponse) -> None:
        self._workers = workers
        self._asked = asyncio.Event()

    async def workers(self) -> pb2.ListWorkersResponse:
        self._asked.set()
        return self._workers

    async def deploy(self, loaded: Any, *, on_progress: Any, **_: Any) -> pb2.Deployment:
        await self._asked.wait()
        await asyncio.sleep(0)
        on_progress(pb2.CreationAccepted(deployment="m", starting_replicas=[0], durable=True))
        return pb2.Deployment(name="m", replicas=[pb2.Replica()])


@pytest.mark.parametrize(
    ("workers", "is_told"), [(recovering("agent-1"), True), (pb2.ListWorkersResponse(), False)]
)
async def test_a_creation_that_is_held_says_for_whom(workers, is_told, monkeypatch, capsys):
    monkeypatch.setattr(deploying, "_SILENT_FOR_S", 0.0)
    client: Any = HoldingClient(workers)
    loaded: Any = None

    await deploy_shown(client, loaded, Creation("m"))

    told = capsys.readouterr().out.splitlines()
    assert (f"m: {LINE}" in told) is is_told
    assert told[-2] == "m: starting replica 0"


class DeletingClient:
    """What it deletes had a stage on each of two workers, of which one is given up on."""

    async def get(self, name: str) -> pb2.Deployment:
        shards = [pb2.RoutedShard(worker_id=it) for it in ("here", "away")]
        return pb2.Deployment(name=name, replicas=[pb2.Replica(shards=shards)])

    async def delete(self, name: str, *, timeout: float) -> None:
        pass

    async def workers(self) -> pb2.ListWorkersResponse:
        states = {"here": types.WORKER_STATE_ALIVE, "away": types.WORKER_STATE_LOST}
        workers = [pb2.Worker(worker_id=it, state=states[it]) for it in states]
        return pb2.ListWorkersResponse(workers=workers)


async def test_a_deletion_says_what_may_run_on_where_nobody_could_be_told(capsys):
    client: Any = DeletingClient()

    await delete_shown(client, "m")

    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if "may run on" in line] == [
        "m: 1 stage may run on: worker away is LOST; they are stopped when it is back, or by "
        "`stagekeeper stages --local` there"
    ]
    assert told[-1] == "m: deleted"
