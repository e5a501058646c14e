"""`up` on a machine with NVIDIA cards: nobody says which, and all agents have the same."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import pytest

from stagekeeper.cli.exits import ExitCode
from tests.fakes.nvml_library import GIB, FakeNvml
from tests.harness.command_line import Up, command_line
from tests.harness.waiting import wait_for

CARD = "GPU-aaaa"


@pytest.fixture
async def up(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Up]:
    """`up` and everything that it starts run on the machine of `nvml`."""
    for name, value in nvml.env.items():
        monkeypatch.setenv(name, value)
    async with Up() as up:
        yield up


def spec(name: str, utilization: float) -> str:
    return (
        f"name: {name}\n"
        "stages:\n"
        f"  - {{name: {name}, entrypoint: 'sample_stages:Echo', devices: [0],\n"
        f"     memory: {{utilization: {utilization}}}}}\n"
    )


async def status(up: Up) -> dict:
    ended = await command_line("status", "--output=json", endpoint=up.endpoint)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


async def test_agents_of_up_share_the_cards_of_the_machine(nvml, up):
    nvml.card(CARD, 80 * GIB, GIB)
    first, second, third = (
        up.spec(spec(f"m{n}", utilization), f"m{n}.yaml")
        for n, utilization in enumerate((0.6, 0.6, 0.3))
    )

    await up.serving(first, agents=2, devices=())
    refused = await command_line("deploy", str(second), endpoint=up.endpoint)
    deployed = await command_line("deploy", str(third), endpoint=up.endpoint)

    # Wherever the second would go, it would be the same card.
    assert refused.code == ExitCode.FAILED
    assert f"device {CARD}" in refused.err
    assert "m0 replica 0 stage" in refused.err
    assert deployed.code == 0, deployed.err
    workers = (await status(up))["workers"]
    assert [[it["device_id"] for it in worker["devices"]] for worker in workers] == [[CARD], [CARD]]
    assert {worker["devices"][0]["used_bytes"] for worker in workers} == {GIB}
    assert sum(worker["devices"][0]["reserved_bytes"] for worker in workers) == 72 * GIB


async def test_up_without_a_driver_takes_slices_and_with_a_failing_one_says_so(nvml, up):
    nvml.unload()
    program = await up.serving(devices=())
    (worker,) = (await status(up))["workers"]
    assert [it["device_id"] for it in worker["devices"]] == ["cpu:0", "cpu:1"]
    program.kill()
    await wait_for(lambda: not up.programs(), "the agent has ended")

    nvml.card(CARD)
    nvml.says("error nvmlInit 18")
    await up.serving(devices=())
    (worker,) = (await status(up))["workers"]
    assert worker["inventory_unknown"]
    assert "version mismatch" in worker["inventory_reason"]
    refused = await command_line("deploy", str(up.spec(spec("m", 0.1))), endpoint=up.endpoint)
    assert refused.code == ExitCode.FAILED
    assert "version mismatch" in refused.err


async def test_startup_7_plan_and_deploy_name_the_processes_that_hold_a_card(nvml, up):
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    nvml.card(CARD, 80 * GIB, 5 * GIB)
    nvml.says(f"process {CARD} {stranger.pid} {5 * GIB}")
    await up.serving(devices=())
    file = str(up.spec(spec("m", 0.95)))

    planned = await command_line("plan", file, endpoint=up.endpoint)
    refused = await command_line("deploy", file, endpoint=up.endpoint)
    stranger.kill()
    await stranger.wait()
    nvml.says_no_more("card", "process")
    nvml.card(CARD, 80 * GIB)

    async def deployed() -> bool:
        return (await command_line("deploy", file, endpoint=up.endpoint)).code == 0

    assert planned.code == refused.code == ExitCode.FAILED
    for said in (planned.out, refused.err):
        assert f"pid {stranger.pid} (python" in said
    assert f"free: {75 * GIB}" in refused.err
    assert f"{76 * GIB}" in refused.err
    await wait_for(deployed, "there is room when the stranger is gone")
