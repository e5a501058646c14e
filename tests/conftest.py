"""Fixtures of all kinds of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.nvml_library import FakeNvml, build_library


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory) -> Path:
    """The folder of a libnvidia-ml.so.1 that says what a file says."""
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """A machine with a loaded driver and no card yet."""
    fake = FakeNvml(nvml_library, tmp_path)
    fake.write()
    return fake
