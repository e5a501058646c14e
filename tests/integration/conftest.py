"""Fixtures of the tests of one agent (its supervisor by hand, its directory, itself), of those of
one supervisor, whose agents each test makes as it needs them, and of those of actor trees."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stagekeeper.actor import ProcMesh
from stagekeeper.agent.app import Agent
from tests.fakes.agents import AgentHome, agent_in, home_at
from tests.fakes.overseer import Overseer
from tests.fakes.supervisors import Reigns, reigns
from tests.harness.actor_trees import Tree, a_root


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


# --- actor trees: one root a module, which its tests share and leave as they found it


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def root_tree(request: pytest.FixtureRequest) -> AsyncIterator[Tree]:
    """A root with PROC_COUNT processes of the module, and its LEASE_S where it has one."""
    lease = {"lease_s": request.module.LEASE_S} if hasattr(request.module, "LEASE_S") else {}
    async with a_root(**lease) as tree:
        await tree.shared(request.module.PROC_COUNT)
        yield tree


@pytest_asyncio.fixture(loop_scope="module")
async def tree(root_tree: Tree) -> AsyncIterator[Tree]:
    yield root_tree
    await root_tree.clear()


@pytest.fixture
def procs(tree: Tree) -> ProcMesh:
    assert tree.procs is not None
    return tree.procs
