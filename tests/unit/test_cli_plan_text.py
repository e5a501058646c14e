"""The picture of a plan: words, bars, rows in a pipe, and the document for programs."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stagekeeper.cli.exits import ExitCode
from stagekeeper.cli.main import run
from stagekeeper.cli.text.bars import Part, bar
from stagekeeper.cli.text.plan import need_text, plan_text
from stagekeeper.cli.text.plan_json import plan_json
from stagekeeper.cli.text.plan_view import write_plan
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

GIB = 2**30
PLAN_ID = "cfa4601f-67159629-1491cfd1"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def omni(held_bytes: int = 0) -> pb2.PlanDeploymentResponse:
    """The thinker on a card of its own; talker and code2wav on the other, where something lies."""
    plan = pb2.PlanDeploymentResponse(plan_id=PLAN_ID)
    plan.groups.add(stage_ids=[0], stage_names=["thinker"], devices=[0], estimated_s=62.0)
    plan.groups.add(stage_ids=[1, 2], stage_names=["talker", "code2wav"], devices=[1])
    replica = plan.replicas.add(replica_index=0, worker_id="node-1")
    for number in range(2):
        replica.cards.add(device=number, device_id=f"GPU-{number}")
        plan.devices.add(
            worker_id="node-1",
            device_id=f"GPU-{number}",
            model="NVIDIA H200",
            total_bytes=100 * GIB,
        )
    first, second = plan.devices
    first.stages.add(
        stage_name="thinker",
        memory_bytes=90 * GIB,
        need=types.MemoryNeed(utilization=0.9),
    )
    first.need_bytes = 90 * GIB
    for stage_id, (name, need) in enumerate(
        [
            ("talker", types.MemoryNeed(utilization=0.6, reserve_bytes=2 * GIB)),
            ("code2wav", types.MemoryNeed(bytes=10 * GIB)),
        ],
        start=1,
    ):
        second.stages.add(
            stage_id=stage_id,
            stage_name=name,
            memory_bytes=62 * GIB if name == "talker" else 10 * GIB,
            need=need,
        )
    second.need_bytes = 72 * GIB + held_bytes
    if held_bytes:
        second.holdings.add(holder="other replica 0 stage 0", memory_bytes=held_bytes)
    second.is_over = second.need_bytes > second.total_bytes
    return plan


def refused() -> pb2.PlanDeploymentResponse:
    plan = omni(held_bytes=40 * GIB)
    plan.replicas[0].Clear()
    plan.refusals.add(
        reason="ADMISSION_REFUSED",
        worker_id="node-1",
        device_id="GPU-1",
        message="no room for omni replica 0: device GPU-1: 120259084288 bytes needed",
    )
    plan.refusals.add(reason="AGENT_UNREACHABLE", worker_id="node-2", message="node-2 is deaf")
    return plan


def drawn(plan: pb2.PlanDeploymentResponse, monkeypatch, columns: int = 80) -> list[str]:
    """What a terminal of so many columns shows, without the colours."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    write_plan(plan_text("omni", plan), out)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


def piped(plan: pb2.PlanDeploymentResponse) -> list[str]:
    out = io.StringIO()
    write_plan(plan_text("omni", plan), out)
    return out.getvalue().splitlines()


def test_plan_in_a_terminal_of_80_columns(monkeypatch):
    shown = drawn(omni(held_bytes=20 * GIB), monkeypatch)

    assert shown == [
        "omni: it fits: replica 0 would start",
        f"plan id: {PLAN_ID}",
        "estimated time: unknown: no earlier start is known",
        "",
        "GROUP  STAGES, IN TURN    CARDS  ESTIMATED",
        "1      thinker            0      1 min 2 s",
        "2      talker → code2wav  1      unknown",
        "",
        "REPLICA  WORKER  ITS CARDS",
        "0        node-1  0 is GPU-0, 1 is GPU-1",
        "",
        "CARDS  ▓ held  █ new  ░ free",
        "node-1 GPU-0: 100 GiB, NVIDIA H200",
        "  " + "█" * 54 + "░" * 6 + " 90 %",
        "  new   90 GiB  0/thinker: 0.9 of 100 GiB",
        "  free  10 GiB  of 100 GiB",
        "node-1 GPU-1: 100 GiB, NVIDIA H200",
        "  " + "▓" * 12 + "█" * 43 + "░" * 5 + " 92 %",
        "  held  20 GiB  other replica 0 stage 0",
        "  new   62 GiB  0/talker: 0.6 of 100 GiB + 2 GiB reserve",
        "  new   10 GiB  0/code2wav: 10 GiB",
        "  free   8 GiB  of 100 GiB",
    ]


def test_card_that_is_over_shows_where_it_ends_and_the_exact_bytes(monkeypatch):
    shown = drawn(refused(), monkeypatch)

    assert shown[0] == "omni: it would be refused now, for 2 reasons"
    (over,) = [line for line in shown if "┃" in line]
    assert over == "  " + "▓" * 21 + "█" * 32 + "┃" + "█" * 6 + " 112 %"
    assert "  over  12 GiB  120259084288 bytes wanted, 107374182400 there" in shown
    at = shown.index("REFUSED            WHERE         WHY")
    assert shown[at + 1].startswith("ADMISSION_REFUSED  node-1 GPU-1  no room for omni replica 0:")
    assert shown[-1] == "AGENT_UNREACHABLE  node-2        node-2 is deaf"
    assert max(map(len, shown)) <= 80


def test_plan_in_a_narrow_terminal_keeps_its_bars_on_one_line(monkeypatch):
    shown = drawn(omni(), monkeypatch, columns=40)

    bars = [line for line in shown if line.endswith(" %")]
    assert len(bars) == 2
    assert max(map(len, bars)) <= 40


def test_pipe_gets_a_row_for_each_part_of_each_sum_and_each_refusal():
    shown = piped(refused())

    assert "node-1  GPU-1  held    40 GiB  other replica 0 stage 0" in shown
    assert "node-1  GPU-1  new     62 GiB  0/talker: 0.6 of 100 GiB + 2 GiB reserve" in shown
    assert "node-1  GPU-0  free    10 GiB  of 100 GiB" in shown
    assert [line.split()[0] for line in shown[-2:]] == ["ADMISSION_REFUSED", "AGENT_UNREACHABLE"]
    assert "0        nowhere  no room" in shown
    assert not set("".join(shown)) & {part.cell for part in Part}


def test_commands_are_shown_as_a_shell_would_take_them():
    plan = omni()
    plan.commands.add(stage_name="llm", worker_id="node-1", argv=["serve", "a b", "<port:http>"])
    plan.commands.add(stage_name="llm", shard_index=1, worker_id="node-2", argv=["serve"])
    out = io.StringIO()
    write_plan(plan_text("omni", plan), out)

    lines = [line.split(maxsplit=2) for line in out.getvalue().splitlines()]
    assert ["0/llm", "node-1", "serve 'a b' '<port:http>'"] in lines
    assert ["0/llm[1]", "node-2", "serve"] in lines
    (first, _) = plan_json("e", "omni", plan)["commands"]
    assert first["argv"] == ["serve", "a b", "<port:http>"]


@pytest.mark.parametrize(
    ("starting", "kept", "said"),
    [
        ([], [0], "nothing to do: replica 0 would be left alone"),
        ([], [0, 1, 2, 3], "nothing to do: replicas 0 to 3 would be left alone"),
        ([1], [0, 2], "it fits: replica 1 would start, replicas 0, 2 would be left alone"),
    ],
)
def test_replicas_that_are_kept_are_named(starting, kept, said):
    plan = pb2.PlanDeploymentResponse(kept_replicas=kept)
    for index in starting:
        plan.replicas.add(replica_index=index, worker_id="w1")

    shown = piped(plan)

    assert shown[0] == f"omni: {said}"
    for index in kept:
        assert any(re.fullmatch(rf"{index} +- +left alone", line) for line in shown)
    assert any(line.endswith("w1      none needed") for line in shown) == bool(starting)


def test_time_is_said_with_where_it_comes_from():
    plan = omni()
    plan.estimated_s = 62.0

    assert piped(plan)[2] == "estimated time: 1 min 2 s, by earlier starts (the longest group)"


def test_of_many_that_hold_a_card_a_terminal_shows_the_largest(monkeypatch):
    plan = omni()
    for number in range(30):
        plan.devices[0].holdings.add(holder=f"h{number}", memory_bytes=number * 2**20)

    shown = drawn(plan, monkeypatch)

    held = [line.split()[-1] for line in shown if line.startswith("  held")]
    assert held == ["h29", "h28", "h27", "h26", "h25", "others"]
    assert len([line for line in piped(plan) if " held " in line]) == 30


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(1, 2**50), st.integers(4, 200))
@example(held=7, new=1, total=8, width=4)
def test_bar_is_as_long_as_asked_and_shows_whatever_is_there(held, new, total, width):
    pieces = bar(held, new, total, width)

    assert sum(piece.cells for piece in pieces) == width
    assert all(piece.cells > 0 for piece in pieces)
    parts = {piece.part for piece in pieces}
    assert (Part.LIMIT in parts) == (Part.OVER in parts) == (held + new > total)
    assert (Part.FREE in parts) == (held + new < total)
    if held + new <= total:
        assert (Part.HELD in parts, Part.NEW in parts) == (held > 0, new > 0)


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (types.MemoryNeed(utilization=0.25), "0.25 of 8 GiB"),
        (types.MemoryNeed(bytes=GIB, reserve_bytes=2**20), "1 GiB + 1 MiB reserve"),
    ],
)
def test_need_is_written_as_the_spec_states_it(need, text):
    assert need_text(need, 8 * GIB) == text


def test_document_has_null_for_what_is_unknown_and_bytes_for_sizes():
    document = plan_json("127.0.0.1:7070", "omni", refused())

    json.dumps(document)
    assert (document["fits"], document["estimated_s"]) == (False, None)
    assert document["groups"][0]["estimated_s"] == 62.0
    assert document["groups"][1]["stages"] == ["talker", "code2wav"]
    assert document["replicas"] == [
        {"replica_index": 0, "worker_id": None, "cards": [], "parts": []}
    ]
    talker = document["devices"][1]["stages"][0]
    assert (talker["utilization"], talker["bytes"]) == (0.6, None)
    assert talker["memory_bytes"] == 62 * GIB
    assert [it["device_id"] for it in document["refusals"]] == ["GPU-1", None]


def test_without_a_supervisor_the_offline_check_is_named(tmp_path, capsys):
    path = tmp_path / "spec.yaml"
    path.write_text('name: m\nstages: [{name: s, entrypoint: "m:S"}]\n')

    code = run(["plan", str(path), "--endpoint=127.0.0.1:1"])

    assert code == ExitCode.UNREACHABLE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"`stagekeeper validate {path}` checks the spec" in shown.err


def test_bad_spec_is_said_before_anybody_is_asked(tmp_path, capsys):
    path = tmp_path / "spec.yaml"
    path.write_text("name: m\nstages: []\n")

    assert run(["plan", str(path), "--endpoint=127.0.0.1:1"]) == ExitCode.BAD_SPEC
    assert "spec.yaml:2: stages" in capsys.readouterr().err
