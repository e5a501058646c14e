"""Which programs an agent lets be started."""

from __future__ import annotations

import pytest

from stagekeeper.agent.entrypoints import Entrypoints
from stagekeeper.core.command_stage import CommandSpec
from stagekeeper.core.model import StageSpec


def problems(program: str, *allow: str) -> str:
    stage = StageSpec("s", command=CommandSpec((program,)))
    found = [*Entrypoints(allow, ()).stage_problems(stage)]
    assert all(field == "command.argv[0]" for field, _ in found)
    return " ".join(problem for _, problem in found)


@pytest.mark.parametrize(
    ("program", "pattern"),
    [
        ("sh", "*"),
        ("sh", "command:sh"),
        ("/bin/sh", "command:/bin/*"),
        ("/bin/sh", "command:*"),
    ],
)
def test_a_program_that_a_pattern_names_is_allowed(program: str, pattern: str) -> None:
    assert problems(program, "x.*", pattern) == ""


@pytest.mark.parametrize(
    ("program", "pattern"),
    [
        ("/bin/sh", "command:sh"),
        ("sh", "command:/bin/sh"),
        ("/opt/x.Server", "*.Server"),  # meant for classes
        ("sh", "c*"),
        ("sh", "command.sh"),
    ],
)
def test_a_program_that_no_pattern_names_is_not(program: str, pattern: str) -> None:
    assert f"--allow 'command:{program}'" in problems(program, pattern)


def test_a_program_that_is_not_there_is_told_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "its PATH has none of that name (/nowhere)" in problems("sh", "*")
    assert "there is no such file" in problems("/nowhere/sh", "*")
