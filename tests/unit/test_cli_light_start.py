"""What processes that stay leave out when they start, and have again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from stagekeeper.cli import main
from stagekeeper.cli.exits import ExitCode
from stagekeeper.cli.light_start import all_is_loaded, collecting_nothing


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_until_all_is_loaded() -> None:
    with collecting_nothing():
        assert not gc.isenabled()
        all_is_loaded()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0


def test_verb_that_never_came_to_serve_leaves_collections_as_they_were() -> None:
    assert main.run(["supervisor", "--endpoint=nonsense"]) == ExitCode.USAGE
    assert gc.isenabled()
