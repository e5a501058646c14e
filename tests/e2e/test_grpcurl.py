"""An operator with grpcurl at 3 a.m.: the real program against real processes."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

from stagekeeper.cli.starter import write_starter
from tests.e2e.specs import echo
from tests.harness.cluster import Cluster

GRPCURL = Path(sys.executable).parent / "grpcurl"

CODE_OFFSET = 64
"""grpcurl ends with 64 + the gRPC code."""
ABORTED = 10
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4

README = Path(__file__).parents[2] / "README.md"


async def grpcurl(*arguments: str) -> tuple[int, str, str]:
    """Run grpcurl in plaintext; return its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        str(GRPCURL),
        "-plaintext",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_list_and_describe_show_the_contract(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    code, out, err = await grpcurl(cluster.endpoint, "list")
    assert code == 0, err
    assert {
        "grpc.health.v1.Health",
        "stagekeeper.v1.DeploymentService",
        "stagekeeper.v1.DiscoveryService",
    } <= set(out.split())
    code, out, err = await grpcurl(cluster.endpoint, "describe", "stagekeeper.v1.DeploymentService")
    assert code == 0, err
    assert "rpc CreateDeployment" in out
    assert "returns ( stream .stagekeeper.v1.CreateDeploymentResponse )" in out


async def test_health_is_served_on_every_port(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
        worker_address = await _worker_address(cluster.endpoint)
        agent_address = (await client.workers()).workers[0].agent_address
        stage_address = (await client.get("echo")).replicas[0].shards[0].record.addresses[0].url
    for address in (cluster.endpoint, worker_address, agent_address, stage_address):
        code, out, err = await grpcurl(address, "grpc.health.v1.Health/Check")
        assert code == 0, err
        assert json.loads(out) == {"status": "SERVING"}


async def _worker_address(endpoint: str) -> str:
    code, out, err = await grpcurl(endpoint, "stagekeeper.v1.DiscoveryService/GetSupervisor")
    assert code == 0, err
    answer = json.loads(out)
    address = answer.get("worker_address") or answer["workerAddress"]
    assert isinstance(address, str)
    return address


async def test_register_worker_by_hand_lists_half_a_replica_for_what_it_is(
    cluster: Cluster,
) -> None:
    await cluster.start_supervisor()
    shards = [
        {
            "deployment": "m",
            "stage_id": stage,
            "stage_name": f"s{stage}",
            "stage_count": 3,
            "shard_count": 1,
            "generation": {"epoch": {"number": 1, "supervisor_id": "earlier"}, "n": 1},
            "operation_id": "op",
            "committed": True,
            "instance_id": f"i{stage}",
            "state": "SHARD_STATE_READY",
            "addresses": [
                {"name": "stage", "protocol": "ADDRESS_PROTOCOL_GRPC", "url": "127.0.0.1:9"}
            ],
        }
        for stage in (2, 0)
    ]
    slice_of_worker = {
        "cluster": "default",
        "worker_id": "by-hand",
        "host_id": "h",
        "incarnation": 1,
        "revision": 1,
        "agent_address": "127.0.0.1:1",
        "replica_states": shards,
    }
    code, out, err = await grpcurl(
        "-d",
        json.dumps(slice_of_worker),
        await _worker_address(cluster.endpoint),
        "stagekeeper.v1.SupervisorService/RegisterWorker",
    )
    assert code == 0, err
    assert "epoch" in json.loads(out)
    code, out, err = await grpcurl(
        "-d", '{"name": "m"}', cluster.endpoint, "stagekeeper.v1.DeploymentService/GetDeployment"
    )
    assert code == 0, err
    assert '"REPLICA_STATE_PARTIAL"' in out
    assert "2 of 3" in out


async def test_call_with_json_and_an_error_that_explains_itself(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(echo())
        url = (await client.get("echo")).replicas[0].shards[0].record.addresses[0].url
    method = "stagekeeper.v1.StageService/Call"
    request = {"endpoint": "echo", "payload": {"text": '{"text": "good morning"}'}}
    code, out, err = await grpcurl("-d", json.dumps(request), url, method)
    assert code == 0, err
    assert json.loads(json.loads(out)["payload"]["text"]) == "good morning"

    stale = {**request, "instance_id": "yesterday's"}
    code, out, err = await grpcurl("-d", json.dumps(stale), url, method)
    assert code == CODE_OFFSET + ABORTED
    assert "google.rpc.ErrorInfo" in err
    assert "STALE_ROUTE" in err


async def test_bad_request_lists_every_wrong_field(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    spec = {"spec": {"name": "a/b", "stages": [{"name": "", "entrypoint": "nonsense"}]}}
    code, out, err = await grpcurl(
        "-d",
        json.dumps(spec),
        cluster.endpoint,
        "stagekeeper.v1.DeploymentService/CreateDeployment",
    )
    assert code == CODE_OFFSET + INVALID_ARGUMENT, out
    assert "google.rpc.BadRequest" in err
    for path in ("name", "stages[0].name", "stages[0].entrypoint"):
        assert f'"{path}"' in err or f"spec.{path}" in err


async def test_lines_of_the_readme_say_what_they_promise(cluster: Cluster, tmp_path: Path) -> None:
    write_starter(tmp_path)
    await cluster.start_supervisor()
    await cluster.start_agent("node-1", f"--pythonpath={tmp_path}")
    async with cluster.client() as client:
        view = await client.deploy(tmp_path / "spec.yaml")
    (stage,) = (s for s in view.replicas[0].shards if s.record.stage_name == "greeter")
    real = {"127.0.0.1:7070": cluster.endpoint, "127.0.0.1:43213": stage.record.addresses[0].url}
    # Each line of the README, by its last word, with what it has to answer.
    wanted = {
        "stagekeeper.v1.DeploymentService/ListDeployments": '"hello"',
        "stagekeeper.v1.StageService/Call": "Hello, Ada!",
        "stagekeeper.v1.DeploymentService/WatchDeployments": "EVENT_KIND_START_ENDED",
        "stagekeeper.v1.DeploymentService/PlanDeployment": '"plan_id"',
        "stagekeeper.v1.DeploymentService": "rpc PlanDeployment",
        "stagekeeper.v1.PlanDeploymentRequest": ".stagekeeper.v1.DeploymentSpec spec = 1",
    }
    lines = re.findall(r"^\$ grpcurl -plaintext ((?:.*\\\n)*.*)$", README.read_text(), re.MULTILINE)
    for line in lines:
        words = [real.get(word, word) for word in shlex.split(line.replace("\\\n", ""))]
        is_endless = words[-1].endswith("/WatchDeployments")
        code, out, err = await grpcurl(*(("-max-time", "3") if is_endless else ()), *words)
        assert code == (CODE_OFFSET + DEADLINE_EXCEEDED if is_endless else 0), err
        assert wanted.pop(words[-1]) in out
    assert wanted == {}


async def test_description_of_a_single_method_is_not_served(cluster: Cluster) -> None:
    await cluster.start_supervisor()
    method = "stagekeeper.v1.DeploymentService.PlanDeployment"
    code, _, err = await grpcurl(cluster.endpoint, "describe", method)
    assert code != 0 and "Symbol not found" in err, "say so in the README: it works by now"
