"""The examples of docs/actors.md, run as they stand; two processes serve most of them."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stagekeeper.actor as actor
from stagekeeper.actor import FailureKind, MeshFailure, StopReport, root, this_host
from stagekeeper.actor.class_rules import MESH_NAMES
from tests.harness.cluster import Cluster

DOCUMENT = Path(__file__).parents[2] / "docs" / "actors.md"


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )


def output_of(program: str, folder: Path) -> str:
    """Run a program of the document to its end; it prints no warning."""
    command = [sys.executable, program]
    said = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stderr == ""
    return said.stdout


async def test_examples_of_the_document_run(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_tree, crew, *programs = blocks("python")
    (tmp_path / "first_tree.py").write_text(first_tree)
    (tmp_path / "crew.py").write_text(crew)
    monkeypatch.syspath_prepend(tmp_path)
    await cluster.start_supervisor()
    await cluster.start_agent("node-1", f"--pythonpath={tmp_path}", "--allow=crew:*")

    said = await asyncio.to_thread(output_of, "first_tree.py", tmp_path)
    assert [f"$ python first_tree.py\n{said}"] == blocks("console")

    names: dict[str, Any] = {"__name__": "of_the_document"}
    for program in programs:
        exec(compile(program, str(DOCUMENT), "exec"), names)
    examples = {
        name: it
        for name, it in names.items()
        if inspect.iscoroutinefunction(it) and it.__module__ == "of_the_document"
    }
    in_tests = [examples.pop(name) for name in list(examples) if name.startswith("test_")]
    on_a_cluster = examples.pop("on_a_cluster")
    assert set(examples) == {"call", "pass_on", "catch", "stop", "die", "hook"}
    assert len(in_tests) == 1
    hook = actor.unhandled_fault_hook
    async with root():
        procs = this_host().spawn_procs(2)
        for example in examples.values():
            await example(procs)
    assert actor.unhandled_fault_hook is hook
    await on_a_cluster(cluster.endpoint)
    for in_test in in_tests:
        await in_test()


def test_readme_shows_the_same_first_tree() -> None:
    program = blocks("python")[0].removeprefix("# first_tree.py\n")
    assert f"```python\n{program}```\n" in (DOCUMENT.parents[1] / "README.md").read_text()


def rows(heading: str) -> set[str]:
    """Return what stands as code in the first column of the table under a heading, or a word."""
    section = DOCUMENT.read_text().partition(heading)[2]
    table = section[section.index("\n|") :].partition("\n\n")[0]
    return {
        name
        for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)", cell)
    }


def test_tables_of_the_document_have_what_there_is() -> None:
    told = rows("A failure is an end that nobody asked for")
    assert told - {"failure"} == {it.value for it in FailureKind if it.value != "UNSPECIFIED"}
    told = rows("A `MeshFailure` is a value") - {"MeshFailure"}
    there = {name for name in dir(MeshFailure) if not name.startswith("_")}
    there |= set(MeshFailure.__dataclass_fields__)
    of_others = {"at", "attached", "with_hop", "mesh_id", "instance_id", "restarts_tried"}
    assert told == there - of_others
    told = rows("report.is_clean and") - {"StopReport"}
    assert told == set(StopReport.__dataclass_fields__)
    (listed,) = re.findall(
        r"none of the names of a mesh:\n(.*?)\.\n", DOCUMENT.read_text(), re.DOTALL
    )
    assert set(re.findall(r"`(\w+)`", listed)) == MESH_NAMES
    told = rows("## In an actor") - {"context"}
    of_stages = {"deadline", "remaining_s"}
    of_those_who_run = {"place", "cancel", "end"}
    there = {name for name in dir(actor.CallContext) if not name.startswith("_")}
    assert told == there - of_stages - of_those_who_run
