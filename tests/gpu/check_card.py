"""Checks everything that needs a real NVIDIA card, on a real cluster, in less than four minutes.

One command, which needs no pytest: `bash tests/gpu/run.sh`. Each check prints its numbers and `ok`
or `FAILED`; the exit code is 1 when one failed. `--rehearse` runs the same on a slice of RAM,
without what only a card has: for whoever changes this file on a machine without one.

Checked: the inventory against nvidia-smi, and CUDA_VISIBLE_DEVICES; a TorchStage's phases with real
allocations and a CUDA graph; two stages that share the card and start together; memory back to the
baseline after a rollback, after a SIGKILL of a stage and of the agent, and after a delete.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final

from stagekeeper.client import Client, DeployFailed
from stagekeeper.v1 import types_pb2
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for

MIB: Final = 2**20
GIB: Final = 2**30
BACK_WITHIN_BYTES: Final = 64 * MIB
LIMIT_S: Final = 235.0

Spec = dict[str, Any]


class Check:
    """One run: the cluster, what was found, and what failed."""

    def __init__(self, *, rehearses: bool) -> None:
        self.rehearses = rehearses
        self.devices = ["cpu:0=6GiB"] if rehearses else ["cuda"]
        self.cluster = Cluster()
        self.failed: list[str] = []
        self.baseline_bytes = used_bytes(self)
        self._began = time.monotonic()

    def holds(self, what: str, is_so: bool, **facts: object) -> None:
        said = "  ".join(f"{name}={value}" for name, value in facts.items())
        print(f"  {'ok    ' if is_so else 'FAILED'}  {what}  {said}".rstrip(), flush=True)
        if not is_so:
            self.failed.append(what)

    async def step(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] {name}", flush=True)
        try:
            await run()
        except Exception:
            traceback.print_exc()
            self.holds(f"{name}: no error", False)


def smi(fields: str) -> list[list[str]]:
    """Ask nvidia-smi; one row a card."""
    ended = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [[cell.strip() for cell in line.split(",")] for line in ended.stdout.splitlines()]


def smi_list() -> str:
    ended = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    return ended.stdout


def used_bytes(check: Check) -> int:
    """What is used of the first card, by anybody, as nvidia-smi has it."""
    return 0 if check.rehearses else int(smi("memory.used")[0][0]) * MIB


async def is_back(check: Check, after: str) -> None:
    async def look() -> bool:
        return used_bytes(check) - check.baseline_bytes <= BACK_WITHIN_BYTES

    try:
        await wait_for(look, "the memory is back", within_s=20.0)
    except AssertionError:
        pass
    found = used_bytes(check)
    check.holds(
        f"memory is back to the baseline after {after}",
        found - check.baseline_bytes <= BACK_WITHIN_BYTES,
        baseline_mib=check.baseline_bytes // MIB,
        now_mib=found // MIB,
    )


def holding(name: str, **args: Any) -> Spec:
    return {
        "name": name,
        "entrypoint": "gpu_stages:Holds",
        "devices": [0],
        "memory": {"bytes": "2GiB", "reserve": "768MiB"},
        "args": args,
    }


def spec(name: str, *stages: Spec, **more: Any) -> Spec:
    return {"name": name, "stages": list(stages), **more}


# --- the checks


async def inventory(check: Check, client: Client) -> None:
    (worker,) = (await client.workers()).workers
    check.holds("the inventory is known", not worker.inventory_unknown, why=worker.inventory_reason)
    if check.rehearses:
        return
    rows = smi("uuid,name,memory.total")
    if all(it.device_id.startswith("GPU-") for it in worker.devices):
        check.holds(
            "uuids, names and totals are those of nvidia-smi, in its order",
            [(it.device_id, it.model, it.total_bytes // MIB) for it in worker.devices]
            == [(uuid, model, int(total)) for uuid, model, total in rows],
            cards=len(rows),
        )
    else:  # MIG: instances, which this query does not list
        listed = smi_list()
        check.holds(
            "each card or instance is one that nvidia-smi lists",
            all(it.device_id in listed for it in worker.devices),
            cards=len(worker.devices),
        )
    smi_used = [int(row[0]) * MIB for row in smi("memory.used")]
    seen = [it.used_bytes for it in worker.devices]
    near = [abs(a - b) < 2 * GIB for a, b in zip(smi_used, seen, strict=False)]
    check.holds(
        "what is used is near what nvidia-smi has (which leaves out what the driver reserves)",
        all(near),
        smi_mib=[it // MIB for it in smi_used],
        seen_mib=[it // MIB for it in seen],
    )


async def hidden_cards(check: Check, client: Client) -> None:
    if check.rehearses:
        return
    first = smi("uuid")[0][0]
    for number, (value, expected) in enumerate(
        [("-1", []), (first, [first]), (first[:12], [first])]
    ):
        worker_id = f"hidden-{number}"
        agent = await check.cluster.start_agent(
            worker_id, devices=[], env={"CUDA_VISIBLE_DEVICES": value}
        )
        found = {it.worker_id: it for it in (await client.workers()).workers}[worker_id]
        seen = [it.device_id for it in found.devices]
        check.holds(f"CUDA_VISIBLE_DEVICES={value} is obeyed", seen == expected, seen=seen)
        agent.kill()


async def phases(check: Check, client: Client) -> None:
    before = used_bytes(check)
    await client.deploy(spec("one", holding("only")), timeout=90)
    facts: Any = await client.call("one", "facts")
    product: Any = await client.call("one", "product", 3.0)
    check.holds("the product is right", abs(product - 3.0) < 1e-3, product=product)
    (shard,) = (await client.get("one")).replicas[0].shards
    measured = shard.record.measured_memory
    budget = 2 * GIB
    check.holds(
        "weights are what was allocated",
        512 * MIB <= measured.weights_bytes <= 512 * MIB + 64 * MIB + check.rehearses * 512 * MIB,
        weights_mib=measured.weights_bytes // MIB,
    )
    check.holds(
        "the peak is weights and batch, and little more",
        1024 * MIB <= measured.peak_bytes <= 1024 * MIB + 512 * MIB,
        peak_mib=measured.peak_bytes // MIB,
    )
    check.holds(
        "what is left is the budget less the peak, and all of it became blocks",
        facts["left_bytes"] == budget - measured.peak_bytes
        and facts["blocks"] == facts["left_bytes"] // (16 * MIB),
        left_mib=facts["left_bytes"] // MIB,
        blocks=facts["blocks"],
    )
    if check.rehearses:
        return
    check.holds(
        "there is a graph, measured and within the reserve, and the stage sees one card",
        facts["has_graph"] and facts["visible"] == 1 and measured.graph_bytes < 768 * MIB,
        graph_mib=measured.graph_bytes // MIB,
        card=facts["card"],
    )
    grown = used_bytes(check) - before
    check.holds(
        "the card shows that much more, and no more than was reserved",
        1900 * MIB <= grown <= 2 * GIB + 768 * MIB,
        grown_mib=grown // MIB,
    )
    await whose(check, client, shard.record.pid)


async def whose(check: Check, client: Client, pid: int) -> None:
    """A stage is no stranger to its own agent, or, in a container, said to be unknown."""

    async def look() -> bool:
        (card, *_) = next(
            it for it in (await client.workers()).workers if it.worker_id == "node-1"
        ).devices
        held = {(it.pid, it.name): it.memory_bytes // MIB for it in card.foreign}
        print(f"          used_mib={card.used_bytes // MIB} foreign_mib={held}", flush=True)
        return card.used_bytes > GIB and pid not in {it.pid for it in card.foreign}

    await wait_for(look, "the stage's memory is seen as its own", within_s=15.0)
    check.holds("the stage is not among the strangers of its card", True, pid=pid)


async def together(check: Check, client: Client) -> None:
    async def lefts(name: str) -> list[int]:
        found = [await client.call(name, "facts", stage=stage) for stage in ("a", "b")]
        return [int(it["left_bytes"]) for it in found]

    two = [holding("a"), holding("b")]
    await client.deploy(spec("serial", *two), timeout=90)
    serial = await lefts("serial")
    await client.delete("serial")
    await client.deploy(spec("together", *two, overlap_loads=True), timeout=90)
    found = await lefts("together")
    check.holds(
        "two stages that start together get what a serial start gives them, within 1 %",
        all(abs(a - b) <= 0.01 * a for a, b in zip(serial, found, strict=True)),
        serial_mib=[it // MIB for it in serial],
        together_mib=[it // MIB for it in found],
    )
    await client.delete("together")


async def rollback(check: Check, client: Client) -> None:
    broken = spec("broken", holding("good"), holding("bad", fails=True))
    try:
        await client.deploy(broken, timeout=90)
        check.holds("a start that fails is told", False)
    except DeployFailed as failed:
        check.holds("a start that fails is told", "weights on the card" in str(failed))
    await is_back(check, "a rollback")


async def kills(check: Check, client: Client) -> None:
    await client.deploy(spec("killed", holding("only")), timeout=90)
    pid = await pid_of(client, "killed")
    check.cluster.agents["node-1"].kill()
    await check.cluster.start_agent("node-1", devices=check.devices)

    async def is_adopted() -> bool:
        return await pid_of(client, "killed") == pid and await state_of(client, "killed") == READY

    await wait_for(is_adopted, "the next agent has the stage", within_s=30.0)
    product: Any = await client.call("killed", "product", 5.0)
    check.holds("a SIGKILL of the agent leaves the stage serving", abs(product - 5.0) < 1e-3)
    os.kill(pid, signal.SIGKILL)

    async def has_failed() -> bool:
        return await state_of(client, "killed") == types_pb2.SHARD_STATE_FAILED

    await wait_for(has_failed, "the death is told", within_s=15.0)
    await is_back(check, "a SIGKILL of the stage")
    await client.delete("killed")


READY: Final = types_pb2.SHARD_STATE_READY


async def record_of(client: Client, name: str) -> Any:
    (shard,) = (await client.get(name)).replicas[0].shards
    return shard.record


async def pid_of(client: Client, name: str) -> int:
    return int((await record_of(client, name)).pid)


async def state_of(client: Client, name: str) -> int:
    return int((await record_of(client, name)).state)


async def run(check: Check) -> None:
    await check.cluster.start_supervisor()
    await check.cluster.start_agent("node-1", "--device-interval-s=0.5", devices=check.devices)
    async with check.cluster.client() as client:

        async def deleted() -> None:
            await client.delete("one")
            await is_back(check, "a delete")

        await check.step("inventory", lambda: inventory(check, client))
        await check.step("phases of a TorchStage", lambda: phases(check, client))
        await check.step("delete", deleted)
        await check.step("two stages on one card", lambda: together(check, client))
        await check.step("rollback", lambda: rollback(check, client))
        await check.step("SIGKILL", lambda: kills(check, client))
        await check.step("hidden cards", lambda: hidden_cards(check, client))


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on a slice of RAM")
    check = Check(rehearses=parser.parse_args().rehearse)
    began = time.monotonic()
    if not check.rehearses:
        print(f"nvidia-smi: {smi('name,driver_version,memory.total')}")
    try:
        async with asyncio.timeout(LIMIT_S), check.cluster:
            await run(check)
            await is_back(check, "all of it")
    except TimeoutError:
        check.failed.append(f"all of it took more than {LIMIT_S:g} s")
    took_s = time.monotonic() - began
    print(f"{'FAILED: ' + '; '.join(check.failed) if check.failed else 'all ok'}, {took_s:.0f} s")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
