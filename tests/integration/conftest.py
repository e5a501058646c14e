"""Fixtures of the tests of one agent: its supervisor by hand, its directory, and itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from stagekeeper.agent.app import Agent
from tests.fakes.agents import AgentHome, agent_in, home_at
from tests.fakes.overseer import Overseer


@pytest.fixture
async def overseer() -> AsyncIterator[Overseer]:
    async with Overseer() as overseer:
        yield overseer


@pytest.fixture
async def home(overseer: Overseer) -> AsyncIterator[AgentHome]:
    async with home_at(overseer.endpoint) as home:
        yield home


@pytest.fixture
async def agent(home: AgentHome) -> AsyncIterator[Agent]:
    async with agent_in(home) as agent:
        yield agent
