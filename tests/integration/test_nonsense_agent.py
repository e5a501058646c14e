"""Whatever is sent to an agent is answered, or refused with a reason, and its stages go on."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagekeeper.runtime.convert import plan_to_proto
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2
from tests.fakes.agents import AgentHome, AgentProcess, home_at
from tests.fakes.hand_worker import channel_to
from tests.fakes.overseer import RESERVE, Overseer, plan, stage
from tests.harness.fuzzing import LONG, QUICK, Effort, Target
from tests.harness.nonsense import label, methods
from tests.harness.verdicts import Verdict
from tests.harness.waiting import wait_for

METHODS = methods("agent")
KEPT = "kept"


class Held:
    """An agent in a process of its own, with a committed stage that must not notice anything."""

    def __init__(self, home: AgentHome, overseer: Overseer, process: AgentProcess) -> None:
        self.home = home
        self.overseer = overseer
        self.process = process
        self._numbers = itertools.count(10)

    def sound(self, method: MethodDescriptor) -> Message:
        """Make a command that would be taken and touches another deployment than the one held."""
        number = next(self._numbers)
        request: Any = GetMessageClass(method.input_type)()
        if isinstance(request, agent_pb2.InitStageRequest):
            what = stage("s", device="cpu:1", start_timeout_s=60.0, stop_budget_s=1.0)
            made = plan(what, n=number, deployment=f"d{number}", operation=f"op-{number}")
            request = plan_to_proto(made, self.overseer.header(), RESERVE)
            request.model.name = "Qwen3"
            request.model.abilities.append("chat")
            request.stages[0].restart_ages_s.append(3.0)
            request.stages[0].spec.env["LEVEL"] = "3"
            return request
        if "header" in request.DESCRIPTOR.fields_by_name:
            request.header.CopyFrom(self.overseer.header())
        if isinstance(request, agent_pb2.CancelOperationRequest):
            request.operation_id = f"op-{number}"
        if isinstance(request, agent_pb2.StopStageRequest):
            request.deployment, request.budget_s = "nobody", 1.0
            request.up_to_generation.epoch.number = self.overseer.epoch.number
            request.up_to_generation.n = 1
        if isinstance(request, agent_pb2.SpawnProcsRequest):
            # An end, so that what is answered starts no process; all fields are looked at first.
            request.cluster, request.procs_id, request.token = "default", f"set-{number}", "t"
            request.instance_ids.append(f"{number:032x}")
            request.end_budget_s = 0.5
            request.lease_s, request.name, request.owner = 0.05, "workers", "the test"
            request.environment["LEVEL"] = "3"
            request.ends = True
        if isinstance(request, agent_pb2.ReadStageLogRequest):
            request.deployment, request.last_lines = KEPT, 3
        return request

    async def state(self) -> dict[str, str]:
        """Everything that anybody can read, and what is on disk, but what time alone changes."""
        agent = self.overseer.agent
        listed = await agent.ListStages(agent_pb2.ListStagesRequest(), timeout=20)
        inventory = await agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=20)
        for shard in listed.shards:
            for field in ("memory_bytes", "progress", "busy_for_s", "restart_ages_s"):
                shard.ClearField(field)
            for claim in shard.devices:
                claim.ClearField("used_bytes")
        for device in inventory.devices:
            device.ClearField("used_bytes")
        revision = self.overseer.last.revision
        disk = {str(path): path.read_bytes() for path in self._files()}
        return {
            "stages": str(listed),
            "inventory": str(inventory),
            "disk": str(disk),
            "reported": str(revision),
        }

    def _files(self) -> list[Path]:
        agent = self.home.path / "s" / "agents" / "w"
        patterns = ("operations/*", "failures/*", "stages/*/record.json", "identity.json")
        return sorted(path for pattern in patterns for path in agent.glob(pattern))

    async def answered(self, verdict: Verdict) -> None:
        """Undo what was reserved; the stage that is held, and its process, are as they were."""
        outcome = getattr(verdict.answer, "outcome", None)
        if outcome is not None and outcome.operation_id:
            await self.overseer.cancel(outcome.operation_id)
            await wait_for(self._is_settled, "what was reserved is undone and settled")
        (shard,) = await self._shards()
        assert shard.state == types_pb2.SHARD_STATE_READY and shard.committed
        assert shard.pid in self.home.processes

    async def _is_settled(self) -> bool:
        listed = await self.overseer.agent.ListStages(agent_pb2.ListStagesRequest(), timeout=20)
        return not listed.operations and not self.overseer.last.operations

    async def _shards(self) -> list[types_pb2.ShardRecord]:
        listed = await self.overseer.agent.ListStages(agent_pb2.ListStagesRequest(), timeout=20)
        return list(listed.shards)


@asynccontextmanager
async def held() -> AsyncIterator[Held]:
    async with Overseer() as overseer, home_at(overseer.endpoint) as home:
        process = await AgentProcess.start(home)
        await wait_for(lambda: overseer.registrations, "the agent registers")
        made = plan(stage("s", device="cpu:0"), deployment=KEPT)
        outcome = await overseer.bring_up(made)
        assert outcome.state == types_pb2.OPERATION_STATE_COMMITTED
        it = Held(home, overseer, process)
        await overseer.hears(
            lambda slice_: [s.committed for s in slice_.replica_states] == [True], "committed"
        )
        await wait_for(it._is_settled, "the start is settled")
        yield it
        await process.end()


def _without_undecodable(log: str) -> str:
    """Leave out what gRPC writes of frames that it could not read."""
    return "".join(part for part in log.split("\n\n") if "DecodeError" not in part)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def agent() -> AsyncIterator[Held]:
    """One for all rpcs: what any of them did to it, the next would meet."""
    async with held() as it:
        yield it


async def endure(method: MethodDescriptor, effort: Effort, it: Held) -> dict[str, int]:
    log = it.home.path / "agent.log"
    read = log.stat().st_size
    async with channel_to(it.overseer.last.agent_address) as channel:
        target = Target(
            channel, method, lambda: it.sound(method), it.state, it.answered, is_undone=True
        )
        reasons = await target.endure(effort)
    wrote = log.read_bytes()[read:].decode(errors="replace")
    assert "bug" not in wrote and "Traceback" not in _without_undecodable(wrote), wrote[-5_000:]
    return reasons


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_nonsense_is_answered_or_refused_with_a_reason_and_changes_nothing(method, agent):
    reasons = await endure(method, QUICK, agent)
    print(label(method), reasons)
    assert reasons["TOO_LARGE"] > 0
    if method.input_type.fields and method.name != "DrainWorker":
        assert reasons["BAD_FIELD"] > 0


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("method", METHODS, ids=label)
async def test_much_nonsense_is_answered_or_refused_with_a_reason(method, agent):
    await endure(method, LONG, agent)
