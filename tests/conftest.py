"""Fixtures of all kinds of tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml_library import FakeNvml, build_library

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background like that, and every program inherits it: none of
    # those that tests start would hear their Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Without bytecode every program that tests start would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder that leaves room for the sockets of a state directory.

    `tmp_path` has the test's name in it, and the machine's say in the rest.
    """
    folder = Path(tempfile.mkdtemp(prefix="sk-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
