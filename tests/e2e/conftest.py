"""Whole clusters for the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.harness.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A cluster of which nothing is started yet and nothing is left afterwards."""
    async with Cluster() as cluster:
        yield cluster
