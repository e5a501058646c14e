"""Whole clusters for the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.harness.cluster import Cluster

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
