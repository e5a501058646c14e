"""What the documents name exists: tests, files, verbs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_every_test_that_is_named_exists(document: Path) -> None:
    missing = []
    for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", document.read_text()):
        path = ROOT / "tests" / file
        if not path.exists() or not re.search(rf"def {name}\(", path.read_text()):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_guarantees_name_a_test_on_every_line_of_their_tables() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| law ", "| fence "))
    ]
    assert len(rows) >= 18
    assert [row for row in rows if "::test_" not in row] == []


def test_state_diagrams_are_drawn_from_the_tables() -> None:
    path = ROOT / "tools" / "draw_states.py"
    spec = importlib.util.spec_from_file_location("draw_states", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "states.md").read_text() == module.document(), (
        "docs/states.md is stale: run python tools/draw_states.py"
    )
