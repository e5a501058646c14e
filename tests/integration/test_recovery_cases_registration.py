"""Cases about what workers put: much of it, some of it wrong, a little of it after a restart.

recovery-R38, R58, U35, with a real supervisor and workers made by hand.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from stagekeeper.client import Client
from stagekeeper.v1 import supervisor_service_pb2, supervisor_service_pb2_grpc, types_pb2
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.stage_server import Endpoint, StageServer
from tests.fakes.supervisors import (
    SupervisorProcess,
    get_deployment,
    list_deployments,
    list_workers,
    reigns,
)
from tests.harness.waiting import wait_for

OK = supervisor_service_pb2.HEARTBEAT_VERDICT_OK
READY = types_pb2.REPLICA_STATE_READY
MIB = 1 << 20

# --- R38: a very big slice in one message

SHARDS = 20_000
STAGES = 8
MOST_GROWTH_BYTES = 64 * MIB
HEARTBEAT_TIMEOUT_S = 10.0
"""Five times what an agent gives one: the machine may be busy."""


def _big_worker(endpoint: str) -> HandWorker:
    """Build a worker with as many shards as a registration may hold, none like the other."""
    claim = types_pb2.DeviceClaim(
        device_id="GPU-0f5a2b1c-4d8e-9f00-1122-334455667788", reserved_bytes=1 << 33
    )
    return HandWorker(endpoint, "big").hold(
        *(
            shard(
                "qwen3-omni",
                replica=number // STAGES,
                stage=number % STAGES,
                of=STAGES,
                instance=uuid.uuid4().hex,
                model_version="30B-A3B",
                devices=[claim],
                url=f"10.1.2.3:{20_000 + number}",
            )
            for number in range(SHARDS)
        )
    )


async def test_recovery_R38_slice_of_20000_shards_is_taken_while_others_are_heard(tmp_path) -> None:
    supervisor = SupervisorProcess(tmp_path)
    await supervisor.start()
    try:
        other = HandWorker(supervisor.endpoint, "other").hold(shard("other"))
        await other.register()
        big = _big_worker(supervisor.endpoint)
        assert supervisor.process is not None
        before = _resident_bytes(supervisor.process.pid)
        async with channel_to(supervisor.worker_address) as channel:
            stub = supervisor_service_pb2_grpc.SupervisorServiceStub(channel)
            # The second time is the dearer one: for a moment the supervisor holds both.
            for _ in range(2):
                is_over = asyncio.Event()
                beating = asyncio.create_task(_beat(other, is_over))
                reply = await stub.RegisterWorker(big.slice, timeout=30)
                is_over.set()
                assert not reply.refused
                assert await beating >= 2
        highest = _resident_bytes(supervisor.process.pid, "VmHWM:")
        assert highest - before < MOST_GROWTH_BYTES, f"{(highest - before) / MIB:.1f} MiB"
        (worker, _) = (await list_workers(supervisor.endpoint)).workers
        assert (worker.worker_id, worker.shard_count) == ("big", SHARDS)
        replicas = (await get_deployment(supervisor.endpoint, "qwen3-omni")).replicas
        assert sum(it.state == READY for it in replicas) == SHARDS // STAGES
    finally:
        await supervisor.kill()


async def _beat(worker: HandWorker, is_over: asyncio.Event) -> int:
    """Send heartbeats without a pause, and count them."""
    count = 0
    async with channel_to(await worker.supervisor_address()) as channel:
        stub = supervisor_service_pb2_grpc.SupervisorServiceStub(channel)
        request = supervisor_service_pb2.HeartbeatRequest(
            cluster=worker.slice.cluster,
            worker_id=worker.slice.worker_id,
            incarnation=worker.slice.incarnation,
            revision=worker.slice.revision,
            digest=worker.slice.digest,
        )
        while not is_over.is_set():
            reply = await stub.Heartbeat(request, timeout=HEARTBEAT_TIMEOUT_S)
            assert reply.verdict == OK
            count += 1
    return count


def _resident_bytes(pid: int, which: str = "VmRSS:") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {which} of {pid}")


# --- R58: one record that is wrong


async def test_recovery_R58_wrong_record_is_refused_alone_and_stops_nothing_else(tmp_path) -> None:
    async with reigns(tmp_path) as supervisor:
        endpoint = supervisor.endpoint
        wrong = shard("wrong", stage=7, of=2)
        worker = HandWorker(endpoint).hold(shard("a"), wrong, shard("b"))

        for _ in range(3):  # and told each time, with its place
            reply = await worker.register()
            (verdict,) = reply.refused
            assert (verdict.index, verdict.reason) == (1, "SHARD_OUT_OF_RANGE")
            assert "'wrong'" in verdict.message
            assert (await worker.heartbeat()).verdict == OK

        listed = (await list_deployments(endpoint)).deployments
        assert [(it.name, it.replicas[0].state) for it in listed] == [("a", READY), ("b", READY)]
        (shown,) = (await list_workers(endpoint)).workers
        assert shown.state == types_pb2.WORKER_STATE_ALIVE
        assert "1 of its shards were refused" in shown.reason

        # What changes beside it is taken, and so is the record once it is right.
        await worker.hold(shard("a", n=2), wrong, shard("c")).register()
        listed = (await list_deployments(endpoint)).deployments
        assert [it.name for it in listed] == ["a", "c"]
        assert listed[0].replicas[0].shards[0].record.generation.n == 2
        mended = shard("wrong", stage=0, of=1)
        assert not (await worker.hold(shard("a", n=2), mended, shard("c")).register()).refused
        listed = (await list_deployments(endpoint)).deployments
        assert [it.name for it in listed] == ["a", "c", "wrong"]


# --- U35: three of a hundred are back

REPLICAS = 100
BACK = (3, 50, 99)


async def _ran(*_: object) -> str:
    return "ran"


class _EveryInstance(StageServer):
    """Passes for any instance, so that a hundred replicas need one server."""

    async def _admit(self, request: Any, context: Any) -> Endpoint:
        self.instance_id = request.instance_id
        return await super()._admit(request, context)


async def test_recovery_U35_of_100_replicas_clients_keep_all_until_the_window_closes(
    tmp_path,
) -> None:
    stage = _EveryInstance("", {"run": _ran})
    await stage.start()
    try:
        async with (
            reigns(tmp_path, registry={"recovery_window_s": 5.0}) as supervisor,
            Client(supervisor.endpoint) as client,
        ):
            workers = [
                HandWorker(supervisor.endpoint, f"w{number}").hold(
                    shard(replica=number, instance=f"i{number}", url=stage.url)
                )
                for number in range(REPLICAS)
            ]
            for worker in workers:
                await worker.register()
            everybody = {f"i{number}" for number in range(REPLICAS)}
            await wait_for(lambda: _routed(client) == everybody, "all are routed")
            seen = _note_routes(client)

            await supervisor.restart()
            for number in BACK:
                await workers[number].register()
            listed = await list_deployments(supervisor.endpoint)
            assert not listed.complete
            assert sum(it.state == READY for it in listed.deployments[0].replicas) == len(BACK)
            assert await client.call("m", "run", timeout=20) == "ran"
            await wait_for(
                lambda: any(not is_complete for _, is_complete in seen),
                "the client has heard of it",
            )
            await wait_for(lambda: client.routes.is_complete, "the window is over")

            assert all(routes == everybody for routes, is_complete in seen if not is_complete)
            assert _routed(client) == {f"i{number}" for number in BACK}
            assert await client.call("m", "run", timeout=20) == "ran"
    finally:
        await stage.stop()


def _routed(client: Client) -> set[str]:
    return {route.instance_id for route in client.routes.routes("m", 0)}


def _note_routes(client: Client) -> list[tuple[set[str], bool]]:
    """Note the routes as they are after every change that the client hears of."""
    seen: list[tuple[set[str], bool]] = []
    apply = client.routes.apply

    def apply_and_note(message) -> None:
        apply(message)
        seen.append((_routed(client), client.routes.is_complete))

    client.routes.apply = apply_and_note  # type: ignore[method-assign]
    return seen
