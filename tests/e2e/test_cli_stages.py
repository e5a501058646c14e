"""`stagekeeper stages --local` with real processes: its words, and what a cluster makes of it."""

from __future__ import annotations

import json
import re

from stagekeeper.cli.exits import ExitCode
from stagekeeper.v1 import types_pb2
from tests.e2e.specs import chain, echo
from tests.harness.cluster import Cluster
from tests.harness.command_line import Ended, command_line
from tests.harness.waiting import wait_for


async def stages(cluster: Cluster, *argv: str) -> Ended:
    return await command_line("stages", "--local", f"--state-dir={cluster.directory / 'a'}", *argv)


async def test_verb_without_local_says_what_it_needs() -> None:
    ended = await command_line("stages")

    assert ended.code == ExitCode.USAGE
    assert "needs --local" in ended.err
    assert "`stagekeeper status`" in ended.err


async def test_state_directory_of_nobody_is_an_empty_list_and_nothing_can_be_stopped_there(
    cluster: Cluster,
) -> None:
    listed = await stages(cluster)
    assert (listed.code, listed.out) == (
        0,
        f"no agent has kept anything in {cluster.directory / 'a'}\n",
    )
    assert json.loads((await stages(cluster, "-o", "json")).out)["workers"] == []
    assert (await stages(cluster, "--worker-id=x")).code == ExitCode.FAILED
    refused = await stages(cluster, "--stop=m/0")
    assert refused.code == ExitCode.FAILED
    assert "no stage of m/0 is on record" in refused.err
    nothing = await stages(cluster, "--stop-all")
    assert (nothing.code, nothing.out) == (0, "nothing is on record that could be stopped\n")


async def test_stages_without_an_agent_are_listed_and_stopped_and_can_be_deployed_again(
    cluster: Cluster,
) -> None:
    """One long way, since each step needs what the one before it left. supervision-U16"""
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(chain())
        await client.deploy(echo())
        pid = cluster.agents["node-1"].pid
        listed = await stages(cluster)
        assert f"worker node-1: its agent runs (pid {pid})" in listed.out
        refused = await stages(cluster, "--stop-all")
        assert refused.code == ExitCode.FAILED
        assert f"(pid {pid})" in refused.err and "`stagekeeper delete NAME`" in refused.err
        assert len(cluster.stage_processes()) == 4

        cluster.agents["node-1"].kill()
        listed = await stages(cluster)
        assert "worker node-1: no agent runs\n" in listed.out
        assert re.search(
            r"^chain/0/back +COMMITTED +node-1 +\d+ +[0-9a-f]{8} +\d.* MiB +127\.\S+:\d+ +/\S+$",
            listed.out,
            re.M,
        )
        (worker,) = json.loads((await stages(cluster, "-o", "json")).out)["workers"]
        assert {it["pid"] for it in worker["stages"]} == set(cluster.stage_processes())

        one = await stages(cluster, "--stop=chain/0/back")
        assert one.code == ExitCode.DONE, one.err
        assert "chain/0/back: stopped\n" in one.out
        assert "`stagekeeper delete chain` and then `stagekeeper deploy FILE`" in one.out
        assert len(cluster.stage_processes()) == 3
        rest = await stages(cluster, "--stop-all", "-o", "json")
        assert rest.code == ExitCode.DONE, rest.err
        assert [it["stage"] for it in json.loads(rest.out)["stopped"]] == ["front", "side", "echo"]
        assert cluster.stage_processes() == {}

        await cluster.start_agent()

        async def shows_nothing_running() -> bool:
            found = (await client.get("echo")).replicas
            return found[0].state == types_pb2.REPLICA_STATE_PENDING

        await wait_for(shows_nothing_running, "the supervisor knows that nothing runs")
        assert await client.failures() == []
        (node,) = (await client.workers()).workers
        assert {device.reserved_bytes for device in node.devices} == {0}
        for spec in (chain(), echo()):
            deployed = await client.deploy(spec)
            assert deployed.state == types_pb2.DEPLOYMENT_STATE_READY
