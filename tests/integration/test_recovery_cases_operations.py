"""Cases about starts whose agent is another one by the time: the call to the old one ends.

recovery-R22, with a real supervisor and an agent without processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from stagekeeper.client import Client, DeployFailed
from stagekeeper.v1 import agent_service_pb2
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker
from tests.fakes.supervisors import reigns, spec
from tests.harness.waiting import wait_for


class DeafAgent(FakeAgent):
    """Takes a start, says nothing more, and lives on."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.may_start.clear()
        self.is_pending = False

    async def InitStage(
        self, request: agent_service_pb2.InitStageRequest, context: Any
    ) -> AsyncIterator[agent_service_pb2.InitStageResponse]:
        self.is_pending = True
        try:
            async for response in super().InitStage(request, context):
                yield response
        finally:
            self.is_pending = False


async def test_recovery_R22_call_to_an_earlier_life_ends_when_the_next_registers(tmp_path) -> None:
    async with (
        AsyncExitStack() as stack,
        reigns(tmp_path) as supervisor,
        Client(supervisor.endpoint) as client,
    ):
        old = DeafAgent(supervisor.endpoint)
        stack.push_async_callback(old.stop)
        await old.start()
        creation = asyncio.create_task(client.deploy(spec(), timeout=60))
        await wait_for(lambda: "START m/0" in old.calls, "the start is under way")

        # It knows nothing of the operation (its state directory is another one): there is nothing
        # to cancel either.
        await HandWorker(supervisor.endpoint, incarnation=2).register()

        with pytest.raises(DeployFailed, match="restarted while it was under way"):
            await asyncio.wait_for(creation, 5)
        await wait_for(lambda: not old.is_pending, "the call to the old agent ended", within_s=5)
        assert [call for call in old.calls if "COMMIT" in call or "CANCEL" in call] == []
