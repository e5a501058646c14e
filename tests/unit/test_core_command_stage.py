"""Programs as stages in a spec: templates, what is wrong with them, what a plan would execute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.client import parse_spec
from stagekeeper.core.command_stage import (
    GRPC,
    HTTP,
    LOG,
    PLAIN_NAMES,
    PORT_NAMES,
    TCP,
    CommandPlace,
    CommandSpec,
    DrainSpec,
    Probe,
    names_in,
)
from stagekeeper.core.errors import Refused
from stagekeeper.core.model import MemoryNeed, StageSpec
from stagekeeper.core.spec_check import check_spec, is_same_wish
from stagekeeper.runtime.convert import spec_from_proto, spec_to_proto
from tests.worlds import spec

HTTP_ONLY = CommandSpec(("serve", "--port", "{port:http}"), ports=("http",))


def stage(command: CommandSpec = HTTP_ONLY, **changes: Any) -> StageSpec:
    return StageSpec("llm", command=command, **changes)


def problems(made: StageSpec) -> dict[str, str]:
    try:
        check_spec(replace(spec(), stages=(made,)))
    except Refused as refusal:
        return {it.path.removeprefix("stages[0]."): it.problem for it in refusal.problems}
    return {}


def wrong(*argv: str, ports: tuple[str, ...] = (), **fields: Any) -> dict[str, str]:
    ready = fields.pop("ready", Probe(LOG, "up"))
    return problems(stage(CommandSpec(argv, ports, ready=ready, **fields)))


PLACE = CommandPlace(
    host="10.0.0.1",
    shard_index=1,
    shard_count=2,
    device_uuids=("GPU-a", "GPU-b"),
    utilization=0.9,
    memory_bytes=12,
    ports={"http": 20_000},
    leader_host="10.0.0.2",
    leader_ports={"http": 20_007},
    generation="1.a.2",
    instance_id="id",
    run_dir="/run/x",
    cache_dir="/cache",
)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--bind={host}:{port:http}", "--bind=10.0.0.1:20000"),
        ("{leader_host}:{leader_port:http}", "10.0.0.2:20007"),
        ("{shard_index}/{shard_count}", "1/2"),
        ("{device_uuids} {device_indexes}", "GPU-a,GPU-b 0,1"),
        ("{utilization} {memory_bytes}", "0.9 12"),
        ("{generation} {instance_id} {run_dir} {cache_dir}", "1.a.2 id /run/x /cache"),
        ('{"a": {"b": 1}} {} { host }', '{"a": {"b": 1}} {} { host }'),
        ("{{host}} {{port:http}}", "{host} {port:http}"),
    ],
)
def test_templates_are_filled_and_other_braces_are_left(text: str, filled: str) -> None:
    assert PLACE.fill(text) == filled


def test_what_is_not_settled_yet_stands_in_angle_brackets() -> None:
    place = CommandPlace(host="h")
    assert place.fill("{port:http} {run_dir} {shard_index}") == "<port:http> <run_dir> 0"
    assert [*names_in("{port:http}{{host}}{a b}{run_dir}")] == ["port:http", "run_dir"]


def test_a_sound_program_passes_and_comes_through_the_wire() -> None:
    command = CommandSpec(
        ("/usr/bin/serve", "{port:http}", "{leader_port:rdv}", "{memory_bytes}"),
        ("http", "rdv"),
        ready=Probe(HTTP, "/health", interval_s=1),
        live=Probe(GRPC, "a.B", port="rdv", failures=7),
        canary=Probe(HTTP, "/v1", body='{"a": 1}', contains="x", timeout_s=9),
        drain=DrainSpec(1.0, 2.0, "running:x", "/metrics", "http"),
    )
    made = replace(
        spec(),
        stages=(
            stage(command, devices=(0,), memory=MemoryNeed(0.5), env=(("A", "{host}"),)),
            StageSpec("log", command=CommandSpec(("a",), ready=Probe(LOG, "up"))),
            StageSpec(
                "tcp", command=CommandSpec(("a", "{port:p}"), ("p",), ready=Probe(TCP, port="p"))
            ),
        ),
    )
    check_spec(made)
    assert spec_from_proto(spec_to_proto(made)) == made
    assert is_same_wish(made, made)
    assert command.protocols() == {"http": HTTP, "rdv": GRPC}


def test_braces_that_hold_something_else_are_no_mistake() -> None:
    for text in ('{"host": 1}', "{host: 1}", "{ other }", "{{ host }}", "{port: 80}", "{a b}"):
        assert "command.argv[1]" not in wrong("a", text, ports=())


@pytest.mark.parametrize(
    ("found", "path", "words"),
    [
        (wrong(), "command.argv", "is empty"),
        (wrong(""), "command.argv[0]", "is the program"),
        (wrong("{host}/serve"), "command.argv[0]", "holds a template"),
        (wrong("bin/serve"), "command.argv[0]", "is relative"),
        (wrong("a", "{hots}"), "command.argv[1]", "{hots} is no template (there are: cache_dir"),
        (wrong("a", "{port:http}"), "command.argv[1]", "names no port of the stage"),
        (wrong("a", "{port}"), "command.argv[1]", "is no template"),
        (wrong("a", "{ host }"), "command.argv[1]", "for its blanks: {host} is one"),
        (
            wrong("a", "--p={port: http}", ports=("http",)),
            "command.argv[1]",
            "'{port: http}' is no template, for its blanks: {port:http} is one",
        ),
        (problems(stage(env=(("A", "{run_dir }"),))), "env[A]", "{run_dir} is one"),
        (wrong("a", "{utilization}"), "command.argv[1]", "add `devices`"),
        (wrong("a", "x\0"), "command.argv[1]", "NUL"),
        (wrong("a", *["x"] * 1_000), "command.argv", "1001 entries"),
        (wrong("a", "é" * 32_769), "command.argv[1]", "longer than 65536 bytes"),
        (wrong("a", ports=("http",)), "command.ports", "put {port:http} into the command"),
        (wrong("a", "{port:h}", ports=("h", "h")), "command.ports", "twice"),
        (wrong("a", ports=("a b",)), "command.ports", "is no port's name"),
        (wrong("a", ready=None), "command.ready", "without ports there is nothing to look at"),
        (wrong("a", ready=Probe("")), "command.ready", "says not how to look"),
        (wrong("a", ready=Probe(HTTP, "/")), "command.ready.port", "is no port of the stage"),
        (wrong("a", ready=Probe(LOG)), "command.ready", "log is empty"),
        (wrong("a", ready=Probe(LOG, "x", body="1")), "command.ready.body", "for http alone"),
        (wrong("a", live=Probe(LOG, "x")), "command.live", "for `ready` alone"),
        (wrong("a", ready=Probe(LOG, "x", timeout_s=0)), "command.ready.timeout_s", "above 0"),
        (wrong("a", live=Probe(TCP, failures=101)), "command.live.failures", "1 to 100"),
        (wrong("a", drain=DrainSpec(path="/m")), "command.drain.path", "there is none"),
        (wrong("a", drain=DrainSpec(metric="a b")), "command.drain.metric", "no metric's name"),
        (
            problems(stage(devices=(0,), memory=MemoryNeed(0.5, reuse_profile=True))),
            "memory.reuse_profile",
            "for a Stage class",
        ),
        (problems(stage(entrypoint="a:B")), "command", "say one of them"),
        (problems(stage(args_json='{"a": 1}')), "args_json", "a program has its argv"),
        (problems(stage(env=(("A", "{no}"),))), "env[A]", "is no template"),
        (
            problems(stage(replace(HTTP_ONLY, drain=DrainSpec(3.0, 2.0)), stop_budget_s=5.0)),
            "command.drain",
            "nothing is left",
        ),
        (
            problems(stage(replace(HTTP_ONLY, canary=Probe(HTTP, "no-slash")))),
            "command.canary",
            "begins with /",
        ),
        (
            problems(stage(replace(HTTP_ONLY, canary=Probe(HTTP, "/", body="{")))),
            "command.canary.body",
            "is not JSON",
        ),
    ],
)
def test_what_is_wrong_with_a_program_is_said_at_its_field(
    found: dict[str, str], path: str, words: str
) -> None:
    assert words in found[path]


def test_all_problems_of_a_program_are_told_at_once() -> None:
    found = wrong("a", "{x}", "{y}", live=Probe(LOG, "x"), canary=Probe(TCP))
    assert {"command.argv[1]", "command.argv[2]", "command.live", "command.canary.port"} <= {*found}


DOCUMENT = Path(__file__).parents[2] / "docs" / "command-stages.md"


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.S))
def test_every_spec_of_the_document_is_sound(text: str) -> None:
    check_spec(spec_from_proto(parse_spec(text).spec))


def test_every_template_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    names = [*PLAIN_NAMES, *(f"{name}:NAME" for name in PORT_NAMES)]
    assert [name for name in names if f"`{{{name}}}`" not in text] == []
