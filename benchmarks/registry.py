"""The supervisor alone: heartbeats against a no-op rpc, and how long it takes to know all again."""

from __future__ import annotations

import asyncio
import time

from benchmarks.ceiling import METHOD, caller, channel_to, no_op_server, rate
from benchmarks.report import Row, median_of, show
from benchmarks.workers import (
    IN_FLIGHT,
    heartbeat,
    register_all,
    registration,
    routable_replicas,
    worker_address,
)
from stagekeeper.v1 import supervisor_service_pb2, supervisor_service_pb2_grpc
from tests.harness.cluster import Cluster

ROUNDS = 24
ROUND_S = 0.5
WORKERS = 64
HEARTBEAT = "/stagekeeper.v1.SupervisorService/Heartbeat"


async def heartbeats() -> None:
    """Heartbeats per second against a no-op unary rpc with the same bytes, in turns."""
    async with Cluster() as cluster, no_op_server() as bare:
        requests = [registration(number, 8, bare) for number in range(WORKERS)]
        await cluster.start_supervisor()
        address = await worker_address(cluster.endpoint)
        await register_all(address, requests)
        async with channel_to(address) as channel, channel_to(bare) as bare_channel:
            stub = supervisor_service_pb2_grpc.SupervisorServiceStub(channel)
            encoded = [heartbeat(request).SerializeToString() for request in requests]
            reply = await stub.Heartbeat(heartbeat(requests[0]))
            assert reply.verdict == supervisor_service_pb2.HEARTBEAT_VERDICT_OK, reply
            beats = [caller(channel, HEARTBEAT, body) for body in encoded]
            no_ops = [caller(bare_channel, METHOD, body) for body in encoded]
            ours: list[float] = []
            ceiling: list[float] = []
            # Short turns, in both orders: the machine's own ups and downs hit both alike.
            turns = [(no_ops, ceiling), (beats, ours)]
            for _ in range(ROUNDS):
                for calls, rates in turns:
                    rates.append(await rate(calls, in_flight=WORKERS, for_s=ROUND_S))
                turns.reverse()
    ratio = median_of([mine / bare for mine, bare in zip(ours, ceiling, strict=True)])
    show(
        "heartbeats",
        f"{WORKERS} workers in flight, median of {ROUNDS} turns of {ROUND_S} s each, both orders",
        [
            Row(
                "heartbeats/s",
                f"{median_of(ours):,.0f}",
                f"{median_of(ceiling):,.0f} no-op/s",
                f"{ratio:.2f}",
                ">= 0.85",
                ratio >= 0.85,
            )
        ],
    )


async def rebuild() -> None:
    """All slices of a cluster put over real gRPC: the first time, and again."""
    rows = []
    for workers, limit_s in ((100, 1.0), (1_000, 2.0)):
        async with Cluster() as cluster, no_op_server() as bare:
            requests = [registration(number, 8, bare) for number in range(workers)]
            await cluster.start_supervisor()
            address = await worker_address(cluster.endpoint)
            bare_s = await _bare(bare, [request.SerializeToString() for request in requests])
            for label in ("first", "repeated"):
                began = time.perf_counter()
                await register_all(address, requests)
                took_s = time.perf_counter() - began
                assert await routable_replicas(cluster.endpoint) == workers
                rows.append(
                    Row(
                        f"{workers:,} × 8, {label}",
                        f"{took_s:.2f} s",
                        f"{bare_s:.2f} s no-op",
                        f"{took_s / bare_s:.1f} ×",
                        f"<= {limit_s:g} s",
                        took_s <= limit_s,
                    )
                )
    show(
        "rebuild", "RegisterWorker over gRPC, 64 in flight; the ceiling sends the same bytes", rows
    )


async def _bare(address: str, bodies: list[bytes]) -> float:
    """Return how long the same bytes take to a server that does nothing with them."""
    pending = iter(bodies)
    async with channel_to(address) as channel:

        async def sender() -> None:
            for body in pending:
                await caller(channel, METHOD, body)()

        await caller(channel, METHOD, b"")()
        began = time.perf_counter()
        await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))
        return time.perf_counter() - began


async def restart() -> None:
    """From the start of the supervisor's process until every replica is routable again."""
    rows = []
    for workers, limit_s in ((100, 1.0), (1_000, 2.0)):
        async with Cluster() as cluster, no_op_server() as bare:
            requests = [registration(number, 8, bare) for number in range(workers)]
            await cluster.start_supervisor()
            await register_all(await worker_address(cluster.endpoint), requests)
            assert cluster.supervisor is not None
            cluster.supervisor.kill()
            began = time.perf_counter()
            # By its own word: a channel that dials a dead address would add its back-off.
            await cluster.start_supervisor()
            up_s = time.perf_counter() - began
            await register_all(await worker_address(cluster.endpoint), requests)
            while await routable_replicas(cluster.endpoint) < workers:
                pass
            took_s = time.perf_counter() - began
        rows.append(
            Row(
                f"{workers:,} × 8 after kill -9",
                f"{took_s:.2f} s",
                f"{up_s:.2f} s to its ready line",
                "",
                f"<= {limit_s:g} s",
                took_s <= limit_s,
            )
        )
    show("restart", "supervisor process started → all replicas READY in the list", rows)
