"""An agent whose cards tell errors: what runs there, what is admitted, what is reported."""

from __future__ import annotations

import grpc

from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentProcess
from tests.fakes.nvml_library import FakeNvml
from tests.fakes.overseer import RESERVE, Overseer, gone, plan, stage
from tests.fakes.refusals import refused

A, B = "GPU-aaaa", "GPU-bbbb"


async def agent_on(nvml: FakeNvml, home, overseer: Overseer) -> AgentProcess:
    for uuid in (A, B):
        nvml.card(uuid)
    lives = len({it.incarnation for it in overseer.registrations})
    agent = await AgentProcess.start(home, env=nvml.env, devices=(), device_interval_s=0.05)
    await overseer.hears(
        lambda it: it.devices and len({r.incarnation for r in overseer.registrations}) > lives,
        "it registers",
    )
    return agent


async def test_sick_card_fails_what_runs_there_and_gets_nothing_new_until_the_next_agent(
    nvml, overseer: Overseer, home
):
    agent = await agent_on(nvml, home, overseer)
    await overseer.bring_up(plan(stage("a", device=A, utilization=0.5)))
    await overseer.bring_up(plan(stage("b", device=B, utilization=0.5), n=2, deployment="other"))
    slice_ = await overseer.hears(lambda it: len(it.replica_states) == 2, "both are there")
    pids = {shard.stage_name: shard.pid for shard in slice_.replica_states}

    nvml.says(f"event {A} 79")
    slice_ = await overseer.hears(
        lambda it: overseer.shards["a"].state == types_pb2.SHARD_STATE_FAILED and overseer.failures,
        "what ran on the card has failed",
    )
    (failure,) = overseer.failures.values()
    await gone([pids["a"]])

    assert failure.kind == types_pb2.FAILURE_KIND_DEVICE_FAILED
    assert failure.detected_by == "nvml"
    assert f"is ended: card {A} is sick: XID 79" in failure.message
    assert [bool(it.sick_reason) for it in slice_.devices] == [True, False]
    assert overseer.shards["b"].state == types_pb2.SHARD_STATE_READY
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    async with refused(code, "ADMISSION_REFUSED") as found:
        await overseer.take(RESERVE, plan(stage("c", device=A), n=3, deployment="new"))
    assert f"device {A} is sick: XID 79" in found[0].message

    # Whoever has reset the card starts the agent anew, which has its stages all the same.
    nvml.says_no_more("event")
    await agent.end()
    await agent_on(nvml, home, overseer)
    assert [it.sick_reason for it in overseer.last.devices] == ["", ""]
    assert overseer.shards["b"].pid == pids["b"]
    reserved = await overseer.take(RESERVE, plan(stage("c", device=A), n=4, deployment="newer"))
    assert reserved.state == types_pb2.OPERATION_STATE_RESERVED


async def test_error_of_a_program_fails_the_stage_that_is_alone_on_the_card(
    nvml, overseer: Overseer, home
):
    await agent_on(nvml, home, overseer)
    await overseer.bring_up(plan(stage("a", device=A, utilization=0.5)))
    await overseer.hears(lambda it: it.replica_states, "it is there")
    pid = overseer.shards["a"].pid

    nvml.says(f"process {A} {pid} 1000")
    nvml.says(f"event {A} 31")
    slice_ = await overseer.hears(
        lambda it: overseer.shards["a"].state == types_pb2.SHARD_STATE_FAILED and overseer.failures,
        "it has failed",
    )

    (failure,) = overseer.failures.values()
    assert failure.kind == types_pb2.FAILURE_KIND_DEVICE_FAILED
    assert f"XID 31 (an illegal memory access) of card {A}" in failure.message
    assert [it.sick_reason for it in slice_.devices] == ["", ""]
    await gone([pid])
