"""Spec files: every key of the page, every mistake with its line, nothing ignored."""

from __future__ import annotations

import json

import pytest
import yaml
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.client import SpecError, load_spec, parse_spec
from stagekeeper.client.spec_file import MOST_REPLICAS, spec_from_dict
from stagekeeper.client.spec_tree import plain, tree_of_yaml
from stagekeeper.client.spec_values import parse_size
from stagekeeper.core import limits
from stagekeeper.core.spec_check import check_spec
from stagekeeper.runtime.convert import spec_from_proto

in_its_time = settings(deadline=None)  # a busy machine is no failure

FULL = """\
name: qwen3-omni
model: {name: Qwen3-Omni, version: "30B-A3B", abilities: [chat, audio]}
replicas: 2
entry: thinker
stages:
  - name: thinker
    entrypoint: my_models.omni:Thinker
    args: {weights: /models/omni, layers: 3, rate: 0.5, deep: {at: [1, null, true]}}
    devices: [0]
    memory: {utilization: 0.9, reserve: 2GiB, reuse_profile: true}
    shard_count: 1
    env: {LOG_LEVEL: debug}
    start_timeout_s: 600
    stall_timeout_s: 120
    stop_budget_s: 30.5
    max_in_flight: 8
  - {name: talker, entrypoint: my_models.omni:Talker, devices: [1], memory: {bytes: 12GiB}}
placement: {workers: [node-1], device_pool: [GPU-1]}
overlap_loads: true
"""

MINIMAL = "name: m\nstages:\n  - name: s\n    entrypoint: a:B\n"


def _problems(text):
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "m.yaml")
    return [(problem.line, problem.path, problem.problem) for problem in caught.value.problems]


def test_every_key_of_this_release_is_read():
    loaded = parse_spec(FULL, "m.yaml")
    assert json_format.MessageToDict(loaded.spec, preserving_proto_field_name=True) == {
        "name": "qwen3-omni",
        "model": {"name": "Qwen3-Omni", "version": "30B-A3B", "abilities": ["chat", "audio"]},
        "replicas": 2,
        "entry": "thinker",
        "stages": [
            {
                "name": "thinker",
                "entrypoint": "my_models.omni:Thinker",
                "args_json": '{"weights":"/models/omni","layers":3,"rate":0.5,'
                '"deep":{"at":[1,null,true]}}',
                "devices": [0],
                "memory": {
                    "utilization": 0.9,
                    "reserve_bytes": str(2 * 2**30),
                    "reuse_profile": True,
                },
                "shard_count": 1,
                "env": {"LOG_LEVEL": "debug"},
                "start_timeout_s": 600,
                "stall_timeout_s": 120,
                "stop_budget_s": 30.5,
                "max_in_flight": 8,
            },
            {
                "name": "talker",
                "entrypoint": "my_models.omni:Talker",
                "devices": [1],
                "memory": {"bytes": str(12 * 2**30)},
            },
        ],
        "placement": {"workers": ["node-1"], "device_pool": ["GPU-1"]},
        "overlap_loads": True,
    }


def test_dict_says_the_same_as_the_file():
    assert spec_from_dict(yaml.safe_load(FULL)).spec == parse_spec(FULL).spec


def test_lines_of_fields_are_known_also_for_what_the_supervisor_refuses():
    loaded = parse_spec(FULL, "m.yaml")
    assert loaded.locate("stages[0].memory") == 10
    assert loaded.locate("stages[0].memory.reserve_bytes") == 10
    assert loaded.locate("stages[1].devices[0]") == 17
    assert loaded.locate("stages[1].args_json") == 17
    assert loaded.locate("nowhere.at.all") == 0
    error = loaded.error([("stages[1].memory", "is too much"), ("name", "is taken")])
    assert [problem.line for problem in error.problems] == [1, 17]
    assert "2 problems in m.yaml" in str(error)
    assert "line 17: stages[1].memory: is too much" in str(error)


def test_all_problems_are_told_at_once_with_their_lines():
    text = """\
name: 7
replica: 2
stages:
  - name: a
    entrypoint: m:C
    memory: {utilization: high, bytes: 5 apples}
    devices: 0
    args: [1]
  - entrypiont: m:C
    max_in_flight: 0
    env: {A: 1}
"""
    assert _problems(text) == [
        (1, "name", "needs text: quote it"),
        (2, "replica", "there is no key `replica` (did you mean replicas?)"),
        (6, "stages[0].memory.utilization", "needs a number"),
        (
            6,
            "stages[0].memory.bytes",
            "needs a size like 12GiB (units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)",
        ),
        (6, "stages[0].memory", "needs exactly one of utilization and bytes"),
        (7, "stages[0].devices", "needs a list"),
        (8, "stages[0].args", "needs the names and values of keyword arguments"),
        (9, "stages[1].entrypiont", "there is no key `entrypiont` (did you mean entrypoint?)"),
        (9, "stages[1].name", "is missing"),
        (9, "stages[1].entrypoint", "is missing"),
        (10, "stages[1].max_in_flight", "needs a whole number, at least 1"),
        (11, "stages[1].env.A", "needs text: quote it"),
    ]


@pytest.mark.parametrize(
    ("extra", "path", "words"),
    [
        ("restart: {strategy: one_for_one}", "restart", "deploy the same file again"),
    ],
)
def test_key_of_a_later_release_is_refused_with_what_to_do_instead(extra, path, words):
    text = MINIMAL + extra if extra.startswith(" ") else extra + "\n" + MINIMAL
    ((line, found_path, problem),) = _problems(text)
    assert found_path == path
    assert line == (5 if extra.startswith(" ") else 1)
    assert problem.startswith("not yet: ")
    assert words in problem


COMMAND = """\
name: m
stages:
  - name: llm
    command: [vllm, serve, "--port={port:http}"]
    ports: [http, rdv]
    env: {MASTER: "{leader_host}:{leader_port:rdv}"}
    ready: {http: /health, interval_s: 1}
    live: {grpc: "", port: rdv, failures: 5}
    canary:
      http: /v1/completions
      body: {prompt: Paris, max_tokens: 1}
      contains: "text"
      timeout_s: 20
    drain:
      settle_s: 2
      in_flight: {metric: "vllm:running", http: /metrics}
"""


def test_a_program_is_a_stage_with_its_ports_probes_and_drain():
    loaded = parse_spec(COMMAND)
    (stage,) = loaded.spec.stages
    command = stage.command

    assert list(command.argv) == ["vllm", "serve", "--port={port:http}"]
    assert list(command.ports) == ["http", "rdv"]
    assert (command.ready.http_path, command.ready.interval_s) == ("/health", 1)
    assert command.live.WhichOneof("look") == "grpc_service"
    assert (command.live.port, command.live.failures) == ("rdv", 5)
    assert json.loads(command.canary.body) == {"prompt": "Paris", "max_tokens": 1}
    assert (command.drain.metric, command.drain.path) == ("vllm:running", "/metrics")
    assert loaded.locate("stages[0].command.argv[2]") == 4
    assert loaded.locate("stages[0].command.canary.body") == 11
    check_spec(spec_from_proto(loaded.spec))


def test_what_is_wrong_with_a_program_is_told_all_at_once():
    text = """\
name: m
stages:
  - name: s
    command: [vllm]
    entrypoint: a:B
    args: {x: 1}
    ready: {http: /, tcp: http}
    live: {}
  - name: t
    entrypoint: a:B
    ports: [http]
"""
    assert _problems(text) == [
        (5, "stages[0].entrypoint", "is not for a stage with a `command`: say one of them"),
        (
            6,
            "stages[0].args",
            "is not for a stage with a `command`: put arguments into the command",
        ),
        (7, "stages[0].ready", "needs exactly one of http, grpc, tcp, log"),
        (8, "stages[0].live", "needs exactly one of http, grpc, tcp, log"),
        (11, "stages[1].ports", "is for a stage with a `command`"),
    ]


def test_key_that_stands_twice_is_refused_wherever_it_is():
    text = "name: m\n" + MINIMAL + "    args:\n      x: 1\n      x: 2\n"
    assert _problems(text) == [
        (2, "name", "stands twice, first on line 1"),
        (8, "stages[0].args.x", "stands twice, first on line 7"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("name: [", "not YAML"),
        ("a: b: c", "not YAML"),
        ("- a\n", "mapping"),
        ("just text", "mapping"),
        ("name: m\n---\nname: n\n", "not YAML"),
        ("name: !!python/object:os.system x\nstages: []\n", "tags"),
        ("name: &a [*a]\nstages: []\n", "aliases"),
        ("1: x\n", "is not text"),
        ("name: m\nstages: []\n", "at least one stage"),
        ("name: m\nstages:\n", "needs a list"),
        ("name: !!int abc\nstages: []\n", "not of the kind"),
    ],
)
def test_malformed_file_is_refused_in_words(text, words):
    with pytest.raises(SpecError, match=words):
        parse_spec(text)


_STAGE = "name: m\nstages:\n  - name: s\n    entrypoint: a:B\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            _STAGE + "    args: {x: " + "[" * 3000 + "]" * 3000 + "}\n",
            5,
            "more than 50 levels deep",
        ),
        (
            _STAGE + "    args:\n" + "".join(" " * (6 + n) + "a:\n" for n in range(3000)),
            53,
            "more than 50 levels deep",
        ),
        ("name: m\nx: \0\n", 2, "U+0000"),
        (_STAGE + "replicas: 99999999999999999999\n", 5, "at least 1 and at most 1000"),
        (_STAGE + "replicas: 1001\n", 5, "at most 1000"),
        (_STAGE + "    max_in_flight: 99999999999\n", 5, "at most 4294967295"),
        (_STAGE + "    args:\n      y: 1e999\n", 6, "1e999 is no finite number"),
        (_STAGE + "    args:\n      y: -.inf\n", 6, "-.inf is no finite number"),
        (_STAGE + "    args:\n      y: .NaN\n", 6, ".NaN is no finite number"),
        (_STAGE + "    args:\n      y: !!float nan\n", 6, "nan is no finite number"),
        (_STAGE + "    stall_timeout_s: .inf\n", 5, ".inf is no finite number"),
        (_STAGE + '    args: {y: "\\ud800"}\n', 5, "half a character"),
        (_STAGE + "    args: {y: " + "9" * 5000 + "}\n", 5, "not of the kind"),
        (_STAGE + "    memory: {bytes: 1GiB}\n", 5, "add `devices: [0]`"),
        (_STAGE + "    devices: []\n    memory: {bytes: 1GiB}\n", 6, "add `devices: [0]`"),
    ],
)
def test_value_that_cannot_be_meant_is_refused_with_its_line_and_briefly(text, line, words):
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    problem = caught.value.problems[0]
    assert (problem.line, words in problem.problem) == (line, True), problem
    assert len(problem.problem) < 150


def test_quoted_infinity_is_a_text_and_fifty_levels_are_read():
    args = json.loads(parse_spec(_STAGE + "    args: {y: '.inf'}\n").spec.stages[0].args_json)
    assert args == {"y": ".inf"}
    deep = _STAGE + "    args: {x: " + "[" * 40 + "]" * 40 + "}\n"
    assert parse_spec(deep).spec.stages[0].args_json


def test_infinity_in_a_dict_is_refused():
    stage = {"name": "s", "entrypoint": "a:B", "args": {"y": float("inf")}}
    with pytest.raises(SpecError, match=r"args\.y: inf is no finite number"):
        spec_from_dict({"name": "m", "stages": [stage]})


def test_file_that_is_no_text_is_refused_with_the_line(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_bytes(b"name: m\nentry: \xff\n")
    with pytest.raises(SpecError, match="line 2: the byte 0xff is no UTF-8"):
        load_spec(path)


def test_most_replicas_are_those_of_the_supervisor():
    assert MOST_REPLICAS == limits.MOST_REPLICAS


def test_path_of_what_holds_itself_is_cut():
    with pytest.raises(SpecError) as caught:
        parse_spec("name: &a [*a]\nstages: []\n")
    (path,) = [path for path, said in caught.value.violations if "aliases" in said]
    assert path.startswith("name[0][0]") and path.endswith("]…") and len(path) <= 41
    itself: dict = {"name": "m"}
    itself["model"] = itself
    with pytest.raises(SpecError) as caught:
        spec_from_dict(itself)
    assert max(len(path) for path, _ in caught.value.violations) <= 41


def test_many_aliases_do_not_make_a_small_file_large():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(SpecError, match="aliases"):
        parse_spec("\n".join(levels))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2026-01-02", "2026-01-02"),
        ("30B-A3B", "30B-A3B"),
        ("true", True),
        ("~", None),
        ("-5", -5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ('"5"', "5"),
        (".", "."),
        ("[-]", ["-"]),
        ("12GiB", "12GiB"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text, value):
    tree, problems = tree_of_yaml(text)
    assert problems == []
    assert tree is not None
    assert plain(tree) == value
    assert type(plain(tree)) is type(value)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=5), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@in_its_time
@given(st.dictionaries(st.text("abc", min_size=1), _json, max_size=3))
def test_arguments_arrive_as_they_were_written(args):
    document = {"name": "m", "stages": [{"name": "s", "entrypoint": "a:B", "args": args}]}
    loaded = parse_spec(json.dumps(document, ensure_ascii=False))
    assert json.loads(loaded.spec.stages[0].args_json) == args
    assert spec_from_dict(document).spec == loaded.spec


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("7B", 7),
        ("0.3B", None),
        ("12G", None),
        ("-1GiB", None),
        ("GiB", None),
        ("12 gib", None),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_wrong_types_in_a_dict_are_told_with_their_paths():
    with pytest.raises(SpecError) as caught:
        spec_from_dict({"name": "m", "stages": [{"name": b"s", "entrypoint": "a:B", 3: 4}]})
    assert {problem.path for problem in caught.value.problems} == {"stages[0].name", "stages[0]"}


def test_file_that_cannot_be_read_is_said(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        load_spec(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(SpecError, match="UTF-8"):
        load_spec(tmp_path / "latin.yaml")
    (tmp_path / "m.yaml").write_text(MINIMAL)
    assert load_spec(tmp_path / "m.yaml").spec.name == "m"
