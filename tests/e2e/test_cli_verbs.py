"""The verbs that ask, against real processes: what they print and how they end."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from stagekeeper.cli.exits import ExitCode
from stagekeeper.cli.serving import MOST_FILES
from tests.harness.cluster import Cluster
from tests.harness.command_line import command_line, own_environment
from tests.harness.waiting import wait_for

NOBODY = "127.0.0.1:9"
SPEC = """\
name: echo
replicas: {replicas}
entry: back
stages:
  - {{name: front, entrypoint: "sample_stages:Front", devices: [0], memory: {{bytes: 64MiB}}}}
  - {{name: back, entrypoint: "sample_stages:Echo", devices: [1], memory: {{bytes: 64MiB}}}}
"""
SLOW = """\
name: slow
stages:
  - {{name: only, entrypoint: "sample_stages:Slow", args: {{gate: "{gate}"}}}}
"""


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as made:
        await made.start_supervisor()
        await made.start_agent()
        yield made


def write(cluster: Cluster, text: str, name: str = "spec.yaml") -> str:
    path = cluster.directory / name
    path.write_text(text)
    return str(path)


async def test_deployment_is_made_called_read_and_deleted(cluster: Cluster) -> None:
    """One long way through the verbs, since each needs what the one before it made."""
    end = cluster.endpoint
    spec = write(cluster, SPEC.format(replicas=2))

    made = await command_line("deploy", spec, endpoint=end)
    assert made.code == ExitCode.DONE, made.err
    assert "echo: starting replicas 0, 1\n" in made.out
    assert re.search(r"0/front on node-1: READY", made.out)
    assert re.search(r"echo: READY, 2 replicas, in \d", made.out)

    again = await command_line("deploy", spec, endpoint=end)
    assert (again.code, again.out) == (0, "echo: READY, 2 replicas: nothing to do\n")

    other = write(cluster, SPEC.format(replicas=1), "other.yaml")
    refused = await command_line("deploy", other, endpoint=end)
    assert refused.code == ExitCode.FAILED
    assert "delete it, then deploy" in refused.err
    assert "`stagekeeper delete echo`" in refused.err

    keywords = await command_line("call", "echo", "echo", '{"text": "a"}', endpoint=end)
    assert (keywords.code, keywords.out) == (0, '"a"\n')
    by_stage = await command_line("call", "echo", "ask", '"b"', "--stage=front", endpoint=end)
    assert by_stage.out == '"b"\n'
    by_id = await command_line("call", "echo", "ask", '"b"', "--stage=0", endpoint=end)
    assert by_id.out == '"b"\n'
    values = await command_line("call", "echo", "count", "3", endpoint=end)
    assert values.out == "0\n1\n2\n"

    raised = await command_line("call", "echo", "fail", '"no"', endpoint=end)
    assert raised.code == ExitCode.FAILED
    assert "ValueError: no" in raised.err
    assert "Traceback" not in raised.err
    shown = await command_line("call", "echo", "fail", '"no"', "--debug", endpoint=end)
    assert "sample_stages.py" in shown.err
    unknown = await command_line("call", "echo", "nope", endpoint=end)
    assert unknown.code == ExitCode.FAILED
    assert "echo" in unknown.err

    for replica in (0, 1):  # one of the two takes each call
        await command_line("call", "echo", "say", f'"line {replica}"', endpoint=end)
    logs = await command_line("logs", "echo", endpoint=end)
    assert logs.code == ExitCode.DONE
    assert re.search(r"^[01]/back +\| line 0$", logs.out, re.M)
    one = await command_line("logs", "echo", "--stage=back", "--replica=0", "-n1", endpoint=end)
    assert len(one.out.splitlines()) == 1
    assert "|" not in one.out
    previous = await command_line("logs", "echo", "--previous", endpoint=end)
    assert previous.code == ExitCode.FAILED
    assert "previous" in previous.err

    status = await command_line("status", endpoint=end)
    assert f"supervisor {end}  NORMAL  epoch 1/" in status.out
    assert re.search(r"^echo/1/back +READY +node-1 +\d+ ", status.out, re.M)
    document = json.loads((await command_line("status", "-o", "json", endpoint=end)).out)
    pids = {
        stage["pid"]
        for replica in document["deployments"][0]["replicas"]
        for stage in replica["stages"]
    }
    assert pids == set(cluster.stage_processes())

    gone = await command_line("delete", "echo", endpoint=end)
    assert gone.code == ExitCode.DONE
    assert gone.out.endswith("echo: deleted\n")
    assert cluster.stage_processes() == {}
    twice = await command_line("delete", "echo", endpoint=end)
    assert twice.code == ExitCode.FAILED
    assert "nothing is known of a deployment 'echo'" in twice.err


async def test_failed_stage_is_started_again_by_the_same_deploy_and_keeps_its_log(
    cluster: Cluster,
) -> None:
    spec = write(cluster, SPEC.format(replicas=1))
    await command_line("deploy", spec, endpoint=cluster.endpoint)
    await command_line("call", "echo", "say", '"before"', endpoint=cluster.endpoint)
    await command_line("call", "echo", "die", endpoint=cluster.endpoint)

    async def is_failed() -> bool:
        shown = await command_line("status", endpoint=cluster.endpoint)
        return bool(re.search(r"^echo/0 +FAILED +1/2 .*exit.*next: ", shown.out, re.M))

    await wait_for(is_failed, "status shows the failed replica, why, and what next")
    again = await command_line("deploy", spec, endpoint=cluster.endpoint)

    assert again.code == ExitCode.DONE, again.err
    assert "echo: starting replica 0\n" in again.out
    previous = await command_line(
        "logs", "echo", "--stage=back", "--previous", endpoint=cluster.endpoint
    )
    assert "before" in previous.out.splitlines()


async def test_ctrl_c_leaves_the_creation_running_and_delete_cancels_it(standing: Cluster) -> None:
    spec = write(standing, SLOW.format(gate=standing.directory / "gate"))
    deploy = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stagekeeper.cli", "deploy", spec),
        f"--endpoint={standing.endpoint}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=own_environment(),
    )
    assert deploy.stdout is not None
    await asyncio.wait_for(deploy.stdout.readline(), 30)

    deploy.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(deploy.communicate(), 30)

    assert deploy.returncode == ExitCode.INTERRUPTED
    assert b"the creation of 'slow' goes on" in err
    assert len(err.splitlines()) == 1
    await wait_for(standing.stage_processes, "its stage goes on starting")

    gone = await command_line("delete", "slow", endpoint=standing.endpoint)
    assert gone.code == ExitCode.DONE
    assert standing.stage_processes() == {}


async def test_deploy_that_does_not_fit_prints_the_sum(standing: Cluster) -> None:
    spec = write(standing, SPEC.format(replicas=1).replace("64MiB", "8GiB"))

    refused = await command_line("deploy", spec, endpoint=standing.endpoint)

    assert refused.code == ExitCode.FAILED
    assert "cpu:0" in refused.err
    assert "8" in refused.err


async def test_status_works_while_the_agent_is_down(standing: Cluster) -> None:
    standing.agents["node-1"].kill()

    async def is_shown() -> bool:
        shown = await command_line("status", endpoint=standing.endpoint)
        return shown.code == 0 and bool(re.search(r"^node-1 +SUSPECT ", shown.out, re.M))

    await wait_for(is_shown, "status shows the silent worker")


async def test_followed_log_ends_with_ctrl_c(standing: Cluster) -> None:
    spec = write(standing, SPEC.format(replicas=1))
    await command_line("deploy", spec, endpoint=standing.endpoint)
    logs = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stagekeeper.cli", "logs", "echo", "-f", "--stage=back"),
        f"--endpoint={standing.endpoint}",
        stdout=asyncio.subprocess.PIPE,
        env=own_environment(),
    )
    assert logs.stdout is not None
    await asyncio.wait_for(logs.stdout.readline(), 30)

    await command_line("call", "echo", "say", '"followed"', endpoint=standing.endpoint)

    async def until_seen(stream: asyncio.StreamReader) -> None:
        while (await stream.readline()).strip() != b"followed":
            pass

    await asyncio.wait_for(until_seen(logs.stdout), 30)
    logs.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(logs.wait(), 30) == ExitCode.INTERRUPTED


async def test_nobody_at_the_endpoint_has_its_own_code(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(replicas=1))
    asked = (["status"], ["deploy", str(spec)], ["call", "a", "b"], ["logs", "a"])

    # All at once: each of them looks for somebody for some seconds.
    for ended in await asyncio.gather(*(command_line(*it, endpoint=NOBODY) for it in asked)):
        assert ended.code == ExitCode.UNREACHABLE
        assert NOBODY in ended.err
        assert "stagekeeper up FILE" in ended.err
        assert len(ended.err.splitlines()) == 1


async def test_supervisor_and_agent_end_in_order_when_asked(cluster: Cluster) -> None:
    agent, supervisor = cluster.agents["node-1"], cluster.supervisor
    assert supervisor is not None

    agent.send(signal.SIGTERM)
    assert await agent.ended() == ExitCode.DONE
    supervisor.send(signal.SIGINT)
    assert await supervisor.ended() == ExitCode.DONE
    assert "Traceback" not in agent.output + supervisor.output


async def test_supervisor_may_have_more_connections_than_a_shell_gives_it_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Cluster() as cluster:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        try:
            supervisor = await cluster.start_supervisor()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        given, _ = psutil.Process(supervisor.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert given == (MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES))


async def test_agent_that_finds_nobody_gives_up_when_told_to(short_folder: Path) -> None:
    ended = await command_line(
        "agent",
        "--max-wait=0.5",
        f"--state-dir={short_folder}",
        f"--lock-dir={short_folder / 'l'}",
        endpoint=NOBODY,
    )

    assert ended.code == ExitCode.UNREACHABLE
    assert ended.out == ""
    assert ended.err.splitlines()[-1].startswith("stagekeeper: ")


async def test_second_agent_of_one_worker_id_is_refused_with_the_holders_pid(
    standing: Cluster,
) -> None:
    ended = await command_line(
        "agent",
        "--worker-id=node-1",
        f"--state-dir={standing.directory / 'b'}",
        f"--lock-dir={standing.directory / 'l'}",
        endpoint=standing.endpoint,
    )

    assert ended.code == ExitCode.FAILED
    assert str(standing.agents["node-1"].pid) in ended.err
    assert "--worker-id" in ended.err
