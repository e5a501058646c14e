"""The examples of docs/python.md, run as they stand against a real cluster."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from stagekeeper.actor import errors as actor_errors
from stagekeeper.actor.owning.answer_errors import error_of_answer
from stagekeeper.client import errors
from stagekeeper.client.client import Client
from stagekeeper.core.errors import REASONS, Reason
from stagekeeper.runtime.errors import CODES
from stagekeeper.v1 import stage_service_pb2
from stagekeeper.wire.error_details import pack
from tests.harness.cluster import Cluster

_OF_ACTORS = (Reason.ACTOR_FAILED, Reason.ACTOR_STOPPED)

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )


async def test_examples_of_the_document_run(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages, *programs = blocks("python")
    (spec_text,) = blocks("yaml")
    (tmp_path / "translator_stages.py").write_text(stages)
    spec = tmp_path / "spec.yaml"
    spec.write_text(spec_text)
    await cluster.start_supervisor()
    await cluster.start_agent("node-1", f"--pythonpath={tmp_path}")

    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, str(DOCUMENT), "exec"), names)
    examples = {name: it for name, it in names.items() if inspect.iscoroutinefunction(it)}
    last = examples.pop("end")
    assert set(examples) == {"deploy", "call", "look", "fail"}
    async with cluster.client() as client:
        for name, example in examples.items():
            await (example(client, spec) if name == "deploy" else example(client))
        await last(client)
    # Of the errors in `fail` only the first is met; the others would print a line more.
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_errors_of_the_document_are_those_that_there_are() -> None:
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \| `(\w+)`", DOCUMENT.read_text(), re.MULTILINE)
    told = {reason: name for reasons, name in rows for reason in re.findall(r"\w+", reasons)}
    assert set(told) >= set(Reason)
    assert {reason: told[reason] for reason in Reason} == {
        reason: _class_of(reason).__name__ for reason in Reason
    }
    known = {*vars(errors), *vars(actor_errors)}
    assert [name for name in told.values() if name not in known] == []


def _class_of(reason: Reason) -> type[errors.StagekeeperError]:
    if reason in _OF_ACTORS:  # they come over Connect alone
        error = stage_service_pb2.CallError(reason=reason.value)
        if reason is Reason.ACTOR_FAILED:
            error.failure.failure_id = "one"
        return cast("type[errors.StagekeeperError]", type(error_of_answer(error, "mesh", 0)))
    code, nothing = CODES[REASONS[reason]], grpc.aio.Metadata()
    said = grpc.aio.Metadata(*pack(code, "m", reason=reason))
    return type(errors.from_rpc(grpc.aio.AioRpcError(code, nothing, said, details="m"), "x"))


def test_methods_of_the_document_are_those_of_the_client() -> None:
    section = DOCUMENT.read_text().partition("## The client")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    told = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    methods = {
        name
        for name, _ in inspect.getmembers(Client, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }
    assert told == methods
