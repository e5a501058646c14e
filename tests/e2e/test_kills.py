"""Kill any process in any phase: the next start finds and settles what is left.

Each test kills one process at one hand-off point, starts it again, and asks for the same end: the
deployment is either served whole or FAILED with a reason and without a process or a reservation
left; and it can be deployed and deleted again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from stagekeeper.client import Client, DeployFailed, NotFound, StagekeeperError
from stagekeeper.core.states import Phase
from stagekeeper.runtime.crash_points import VARIABLE as KILL_AT
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import Spec, chain, echo
from tests.harness.standing import StandingCluster
from tests.harness.waiting import wait_for

START_POINTS = (
    "booked",
    "reserve-written",
    "starting-written",
    "intent-written",
    "spawned",
    "pid-written",
    "released",
    "ready-written",
    "started-written",
    "peers-pushed",
    "commit-written",
    "commit-half-written",
    "committed",
    # The second stage's turn: the first one lives by then.
    "intent-written#2",
    "spawned#2",
    "ready-written#3",
)
ROLLBACK_POINTS = ("rollback-written", "stopping-written", "stop-gone", "rolled-back")
STOP_POINTS = ("stopping-written", "stop-asked", "stop-gone", "stopped", "stopping-written#2")
FAILURE_POINTS = ("failure-spooled", "failed-written")
CREATION_POINTS = (
    "desired-written",
    "operation-reserved",
    "operation-started",
    "operation-committed",
)


# `test_agent_crash_points` takes an agent through all of them; here is one of each kind.
SHORT_START_POINTS = (
    "reserve-written",
    "spawned",
    "pid-written",
    "peers-pushed",
    "commit-half-written",
    "ready-written#3",
)


@pytest.fixture
def cluster(standing: StandingCluster) -> StandingCluster:
    """Each test leaves a supervisor and an agent that nothing happens to."""
    return standing


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(it, marks=() if it in SHORT_START_POINTS else pytest.mark.soak)
        for it in START_POINTS
    ],
)
async def test_agent_killed_during_a_start(cluster: StandingCluster, point: str) -> None:
    await cluster.restart_agent("node-1", env={KILL_AT: point})
    async with cluster.client() as client:
        creation = asyncio.create_task(_deployed(client, chain()))
        await _killed_agent_comes_back(cluster)
        await creation
        await _settled(cluster, client, chain())


@pytest.mark.parametrize("point", ROLLBACK_POINTS)
async def test_agent_killed_during_a_rollback(cluster: StandingCluster, point: str) -> None:
    spec = chain()
    spec["stages"][2]["entrypoint"] = "sample_stages:Broken"
    await cluster.restart_agent("node-1", env={KILL_AT: point})
    async with cluster.client() as client:
        creation = asyncio.create_task(_deployed(client, spec))
        await _killed_agent_comes_back(cluster)
        assert not await creation
        await _nothing_left(cluster, client)
        assert (await client.get("chain")).state == types_pb2.DEPLOYMENT_STATE_FAILED


@pytest.mark.parametrize("point", STOP_POINTS)
async def test_agent_killed_during_a_stop(cluster: StandingCluster, point: str) -> None:
    await cluster.restart_agent("node-1", env={KILL_AT: point})
    async with cluster.client() as client:
        await client.deploy(chain())
        await client.delete("chain", wait=False)
        await _killed_agent_comes_back(cluster)
        await wait_for(lambda: _is_gone(client, "chain"), "the deployment is gone")
        await _nothing_left(cluster, client)


@pytest.mark.parametrize("point", FAILURE_POINTS)
async def test_agent_killed_while_it_records_a_failure(
    cluster: StandingCluster, point: str
) -> None:
    await cluster.restart_agent("node-1", env={KILL_AT: point})
    name = f"echo-{point}"  # failures of a name are kept when it is deleted
    async with cluster.client() as client:
        await client.deploy(echo(name))
        os.kill((await client.get(name)).replicas[0].shards[0].record.pid, signal.SIGKILL)
        await _killed_agent_comes_back(cluster)

        async def is_failed() -> bool:
            return (await client.get(name)).state == types_pb2.DEPLOYMENT_STATE_FAILED

        await wait_for(is_failed, "the deployment is FAILED")
        failures = await client.failures(name)
        assert len({failure.failure_id for failure in failures}) == len(failures) == 1
        await _settled(cluster, client, echo(name))


@pytest.mark.parametrize("phase", list(Phase))
async def test_supervisor_killed_while_a_stage_is_in_a_phase(
    cluster: StandingCluster, phase: Phase
) -> None:
    async with cluster.client() as client:
        creation = asyncio.create_task(_deployed(client, _gated(cluster)))
        await _reach(cluster, phase)
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        pids = cluster.stage_processes()
        await cluster.start_supervisor()
        _open_gates(cluster)
        assert await creation, "the next supervisor goes on with it"
        assert cluster.stage_processes() == pids
        await _settled(cluster, client, _gated(cluster))


@pytest.mark.parametrize("point", CREATION_POINTS)
async def test_supervisor_killed_during_a_creation(cluster: StandingCluster, point: str) -> None:
    supervisor = await cluster.restart_supervisor(env={KILL_AT: point})
    async with cluster.client() as client:
        await cluster.workers_alive(1, client)
        creation = asyncio.create_task(_deployed(client, chain()))
        assert await supervisor.ended() == -signal.SIGKILL
        await cluster.start_supervisor()
        await creation
        await _settled(cluster, client, chain())


async def test_supervisor_killed_when_a_deletion_was_written(cluster: StandingCluster) -> None:
    # The first wish is the creation, the second says that it is over, the third is the deletion.
    supervisor = await cluster.restart_supervisor(env={KILL_AT: "desired-written#3"})
    async with cluster.client() as client:
        await cluster.workers_alive(1, client)
        await client.deploy(chain())
        deletion = asyncio.create_task(client.delete("chain"))
        assert await supervisor.ended() == -signal.SIGKILL
        await cluster.start_supervisor()
        await asyncio.wait([deletion])
        await wait_for(lambda: _is_gone(client, "chain"), "the deployment is gone")
        await _nothing_left(cluster, client)


@pytest.mark.parametrize("phase", list(Phase))
async def test_stage_killed_in_a_phase(cluster: StandingCluster, phase: Phase) -> None:
    name = f"gated-{phase.lower()}"  # as above
    async with cluster.client() as client:
        creation = asyncio.create_task(client.deploy(_gated(cluster, name)))
        await _reach(cluster, phase)
        (pid,) = cluster.stage_processes()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeployFailed, match=f"{phase}"):
            await creation
        await _nothing_left(cluster, client)
        (failure,) = await client.failures(name)
        assert failure.origin.phase == types_pb2.Phase.Value(f"PHASE_{phase}")
        assert failure.exit.signal == signal.SIGKILL


async def test_everything_killed_in_the_middle_of_a_start(cluster: StandingCluster) -> None:
    agent = cluster.agents["node-1"]
    async with cluster.client() as client:
        creation = asyncio.create_task(_deployed(client, _gated(cluster)))
        await _reach(cluster, Phase.MEASURE)
        agent.kill()
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        pids = cluster.stage_processes()
        await cluster.start_supervisor()
        await cluster.start_agent()
        _open_gates(cluster)
        assert await creation, "it goes on under the next ones"
        assert cluster.stage_processes() == pids, "and nothing is loaded twice"
        await _settled(cluster, client, _gated(cluster))


async def test_delete_goes_on_after_its_supervisor_was_killed(cluster: StandingCluster) -> None:
    async with cluster.client() as client:
        await client.deploy(chain())
        await client.delete("chain", wait=False)
        assert cluster.supervisor is not None
        cluster.supervisor.kill()
        await cluster.start_supervisor()
        await wait_for(lambda: _is_gone(client, "chain"), "the deployment is gone")
        await _nothing_left(cluster, client)


async def _deployed(client: Client, spec: Spec) -> bool:
    """Deploy; whether it came up is for the caller to like or not."""
    try:
        await client.deploy(spec, timeout=60.0)
    except StagekeeperError:
        return False
    return True


def _open_gates(cluster: StandingCluster) -> None:
    """Let the gated stage through all of its phases."""
    for each in Phase:
        (_gates(cluster) / f"{each}.open").touch()


async def _killed_agent_comes_back(cluster: StandingCluster) -> None:
    assert await cluster.agents["node-1"].ended() == -signal.SIGKILL
    await cluster.start_agent()


async def _settled(cluster: StandingCluster, client: Client, spec: Spec) -> None:
    """See the deployment whole or not at all, and then through another life."""
    name = spec["name"]

    async def is_decided() -> bool:
        deployment = await client.get(name)
        return deployment.state in (
            types_pb2.DEPLOYMENT_STATE_READY,
            types_pb2.DEPLOYMENT_STATE_FAILED,
        )

    await wait_for(is_decided, "the deployment is READY or FAILED")
    deployment = await client.get(name)
    if deployment.state == types_pb2.DEPLOYMENT_STATE_FAILED:
        assert deployment.reason
    else:
        assert len(cluster.stage_processes()) == len(spec["stages"])
    await client.deploy(spec)
    assert len(cluster.stage_processes()) == len(spec["stages"])
    await client.delete(name)
    await _nothing_left(cluster, client)


async def _nothing_left(cluster: StandingCluster, client: Client) -> None:
    await cluster.no_stage_left()

    async def is_free() -> bool:
        (worker,) = (await client.workers()).workers
        held = sum(device.reserved_bytes for device in worker.devices)
        return held == 0 and worker.state == types_pb2.WORKER_STATE_ALIVE

    await wait_for(is_free, "nothing is reserved")


async def _is_gone(client: Client, name: str) -> bool:
    try:
        await client.get(name)
    except NotFound:
        return True
    return False


def _gates(cluster: StandingCluster) -> Path:
    return cluster.directory / "gates"


def _gated(cluster: StandingCluster, name: str = "gated") -> Spec:
    _gates(cluster).mkdir(exist_ok=True)
    return {
        "name": name,
        "stages": [
            {
                "name": "gated",
                "entrypoint": "sample_stages:Gated",
                "args": {"gates": str(_gates(cluster))},
                "devices": [0],
                "memory": {"utilization": 0.5},
            }
        ],
    }


async def _reach(cluster: StandingCluster, phase: Phase) -> None:
    """Open the gates before `phase` and wait until the stage stands in it."""
    for earlier in list(Phase)[: list(Phase).index(phase)]:
        (_gates(cluster) / f"{earlier}.open").touch()
    reached = _gates(cluster) / f"{phase}.reached"
    await wait_for(reached.exists, f"the stage is in {phase}")
