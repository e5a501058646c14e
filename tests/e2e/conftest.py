"""Whole clusters for the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.harness.cluster import Cluster
from tests.harness.standing import StandingCluster

LIMIT_S = 300
"""For tests of many processes on a machine that may be busy; a healthy one needs a tenth of it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A cluster of which nothing is started yet and nothing is left afterwards."""
    async with Cluster() as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_cluster(request: pytest.FixtureRequest) -> AsyncIterator[StandingCluster]:
    """One for a module: with agents of its WORKERS, or of node-1 where it has none."""
    cluster = StandingCluster(getattr(request.module, "WORKERS", ("node-1",)))
    async with cluster:
        yield cluster


@pytest.fixture
async def standing(shared_cluster: StandingCluster) -> AsyncIterator[StandingCluster]:
    """A cluster that runs, with nothing deployed, as the test before found it too."""
    await shared_cluster.stand()
    yield shared_cluster
    await shared_cluster.clear()
