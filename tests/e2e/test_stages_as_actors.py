"""Stages of a deployment called like actors, from a tree: over Connect, at every ready replica."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from stagekeeper.actor import MeshError, RemoteError, root
from stagekeeper.client.errors import CallLost, NotFound
from tests.e2e.specs import echo
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.stages.sample_stages import Echo


async def test_deployed_stage_is_called_like_a_mesh_of_actors(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent("node-1")
    async with cluster.client() as client:
        await client.deploy(echo("talk", replicas=2))

    async with root(cluster.endpoint) as tree:
        stage = await tree.stage("talk", "echo", Echo)

        answers = await stage.echo.call("hello")
        assert dict(answers.items()) == {0: "hello", 1: "hello"}
        assert await stage.echo.choose("you") == "you"
        counted = [value async for _, value in stage.count.stream(2)]
        assert sorted(counted) == [0, 0, 1, 1]
        with pytest.raises(MeshError) as caught:
            await stage.fail.call("broken")
        assert set(caught.value.failed) == {0, 1}
        for error in caught.value.failed.values():
            assert isinstance(error, RemoteError) and isinstance(error, ValueError)
            assert error.remote_message == "broken"

        with pytest.raises(NotFound, match="it has: echo"):
            await tree.stage("talk", "nowhere")
        with pytest.raises(AttributeError, match="no endpoint 'nothing'"):
            _ = stage.nothing  # type: ignore[attr-defined]

        # A stage that dies takes its calls with it, and the mesh is what is left.
        where = await stage.where.call()
        waiting = asyncio.create_task(stage.wait.call(600.0))
        await asyncio.sleep(0)
        await stage.echo.call("sent behind it")
        os.kill(int(str(where[0]["pid"])), signal.SIGKILL)
        with pytest.raises(MeshError) as lost:
            await asyncio.wait_for(waiting, 30.0)
        assert isinstance(lost.value.failed[0], CallLost)
        await wait_for(lambda: stage.size == 1, "the dead replica's route is gone")
        assert dict((await stage.echo.call("alone")).items()) == {1: "alone"}
    # The tree is over; the deployment goes on.
    async with cluster.client() as client:
        assert await client.call("talk", "echo", "still here") == "still here"
