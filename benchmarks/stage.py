"""One real agent and one real stage: what a call costs, and what an idle agent costs."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from benchmarks.ceiling import METHOD, caller, channel_to, no_op_server, rate, round_trips
from benchmarks.report import Row, median_of, quantile, show
from stagekeeper.v1 import stage_service_pb2, types_pb2
from tests.harness.cluster import Cluster

CALL = "/stagekeeper.v1.StageService/Call"
COUNT = 6_000
ROUNDS = 24
IDLE_S = 20.0


async def call_round_trip() -> None:
    """`Call` of an async endpoint against a no-op unary rpc with the same bytes."""
    async with Cluster() as cluster, no_op_server() as bare:
        url = await _echo_stage(cluster)
        body = stage_service_pb2.CallRequest(
            endpoint="where",
            payload=types_pb2.Payload(content_type="application/json", text="{}"),
        ).SerializeToString()
        async with channel_to(url) as channel, channel_to(bare) as bare_channel:
            call = caller(channel, CALL, body)
            no_op = caller(bare_channel, METHOD, body)
            await call()
            await no_op()
            mine: list[list[float]] = []
            theirs: list[list[float]] = []
            my_rate: list[float] = []
            their_rate: list[float] = []
            # Short turns, in both orders: the machine's own ups and downs hit both alike.
            turns = [(no_op, theirs, their_rate), (call, mine, my_rate)]
            for _ in range(ROUNDS):
                for send, samples, rates in turns:
                    samples.append(await round_trips(send, COUNT // ROUNDS))
                    rates.append(await rate([send], in_flight=32, for_s=0.25))
                turns.reverse()
    ratio = median_of([median_of(m) / median_of(t) for m, t in zip(mine, theirs, strict=True)])
    every_mine = [one for turn in mine for one in turn]
    every_theirs = [one for turn in theirs for one in turn]
    rate_ratio = median_of([m / t for m, t in zip(my_rate, their_rate, strict=True)])
    show(
        "call",
        f"{COUNT} calls one at a time in {ROUNDS} turns, both orders; JSON; rates in turns too",
        [
            Row(
                "Call round trip, p50",
                f"{median_of(every_mine) * 1e3:.3f} ms",
                f"{median_of(every_theirs) * 1e3:.3f} ms no-op",
                f"{ratio:.2f} ×",
                "<= 1.3 ×",
                ratio <= 1.3,
            ),
            Row(
                "Call round trip, p99",
                f"{quantile(every_mine, 0.99) * 1e3:.3f} ms",
                f"{quantile(every_theirs, 0.99) * 1e3:.3f} ms no-op",
            ),
            Row(
                "calls/s, 32 in flight",
                f"{median_of(my_rate):,.0f}",
                f"{median_of(their_rate):,.0f} no-op/s",
                f"{rate_ratio:.2f}",
            ),
        ],
    )


async def _echo_stage(cluster: Cluster) -> str:
    """Bring up a cluster with one Echo stage; return the stage's address."""
    await cluster.start_supervisor()
    await cluster.start_agent()
    async with cluster.client() as client:
        await client.deploy(
            {"name": "echo", "stages": [{"name": "echo", "entrypoint": "sample_stages:Echo"}]}
        )
        deployment = await client.get("echo")
    url: str = deployment.replicas[0].shards[0].record.addresses[0].url
    return url


async def idle_agent() -> None:
    """Resident memory and processor time of an agent that holds one idle stage."""
    async with Cluster(heartbeat_s=2.0) as cluster:
        await _echo_stage(cluster)
        pid = cluster.agents["node-1"].pid
        await asyncio.sleep(2.0)
        before, began = _cpu_s(pid), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        share = (_cpu_s(pid) - before) / (time.perf_counter() - began)
        memory_mb = _resident_bytes(pid) / 1e6
    show(
        "idle agent",
        f"one stage, heartbeat every 2 s, watched for {IDLE_S:g} s",
        [
            Row("resident memory", f"{memory_mb:.1f} MB", "", "", "<= 64 MB", memory_mb <= 64),
            Row("of one core", f"{share * 100:.2f} %", "", "", "<= 0.5 %", share <= 0.005),
        ],
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no VmRSS of {pid}")
