"""Fixtures of the tests of one agent (its supervisor by hand, its directory, itself), and of those
of one supervisor, whose agents each test makes as it needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stagekeeper.agent.app import Agent
from tests.fakes.agents import AgentHome, agent_in, home_at
from tests.fakes.overseer import Overseer
from tests.fakes.supervisors import Reigns, reigns


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


@pytest.fixture
async def them(tmp_path: Path) -> AsyncIterator[Reigns]:
    async with reigns(tmp_path) as reign:
        yield reign


@pytest.fixture
async def endpoint(them: Reigns) -> str:
    return them.endpoint
