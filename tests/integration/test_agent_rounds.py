"""An agent looks after its stages while no supervisor is there to hear of it."""

from __future__ import annotations

import asyncio

import grpc

from stagekeeper.client.channels import StageCaller
from stagekeeper.v1 import agent_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from stagekeeper.v1.agent_service_pb2_grpc import AgentServiceStub
from tests.fakes.agents import agent_in, home_at
from tests.fakes.overseer import Overseer, plan, stage
from tests.harness.waiting import wait_for


async def test_stage_becomes_busy_and_stalled_while_the_supervisor_is_away():
    async with (
        Overseer() as overseer,
        home_at(overseer.endpoint) as home,
        agent_in(home, busy_after_s=0.5, stall_after_s=1.5) as agent,
    ):
        await overseer.bring_up(plan(stage("a")))
        await overseer.hears(lambda it: len(it.replica_states) == 1, "it is up")
        shard = overseer.shards["a"]
        await overseer.leave()
        caller = StageCaller()
        calling = asyncio.create_task(
            caller.call(
                shard.addresses[0].url, shard.instance_id, "hold_gil", (4.0,), {}, timeout=60
            )
        )

        async with grpc.aio.insecure_channel(agent.address) as channel:

            async def held() -> types_pb2.ShardRecord:
                answer = await AgentServiceStub(channel).ListStages(pb.ListStagesRequest())
                return answer.shards[0]

            async def is_stalled() -> bool:
                it = await held()
                return it.state == types_pb2.SHARD_STATE_STALLED and it.HasField("busy_for_s")

            async def is_ready_again() -> bool:
                it = await held()
                return it.state == types_pb2.SHARD_STATE_READY and not it.HasField("busy_for_s")

            await wait_for(is_stalled, "it is STALLED")
            await wait_for(is_ready_again, "it is READY again")
        assert await calling == "held"
        await caller.close()
