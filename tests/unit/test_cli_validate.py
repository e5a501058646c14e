"""`validate`: every problem with its line, offline."""

from __future__ import annotations

import json

from stagekeeper.cli.exits import ExitCode
from stagekeeper.cli.main import run

GOOD = """\
name: hello
replicas: 2
stages:
  - {name: front, entrypoint: "m:Front"}
  - {name: a, entrypoint: "m:A", devices: [1], memory: {utilization: 0.5}}
  - {name: b, entrypoint: "m:B", devices: [1], memory: {utilization: 0.5}}
"""

BAD = """\
name: hello
stages:
  - name: a
    entrypoint: m:A
    devices: [0]
  - name: a
    entrypoint: nowhere
"""


def test_good_file_is_summed_up(tmp_path, capsys):
    path = tmp_path / "spec.yaml"
    path.write_text(GOOD)

    assert run(["validate", str(path)]) == ExitCode.DONE
    assert capsys.readouterr().out == (
        f"{path}: ok: hello, 2 replicas of 3 stages; start order: front | a → b\n"
    )


def test_every_problem_is_listed_with_its_line(tmp_path, capsys):
    path = tmp_path / "spec.yaml"
    path.write_text(BAD)

    assert run(["validate", str(path)]) == ExitCode.BAD_SPEC
    err = capsys.readouterr().err
    assert f"{path}:3: stages[0].memory: " in err or f"{path}:5: stages[0].memory: " in err
    assert f"{path}:6: stages[1].name: " in err
    assert f"{path}:7: stages[1].entrypoint: " in err


def test_problems_of_several_files_come_at_once(tmp_path, capsys):
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text(BAD)

    code = run(["validate", str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")])

    assert code == ExitCode.BAD_SPEC
    err = capsys.readouterr().err
    assert "one.yaml:6" in err
    assert "two.yaml:6" in err


def test_missing_file_is_named(tmp_path, capsys):
    assert run(["validate", str(tmp_path / "none.yaml")]) == ExitCode.BAD_SPEC
    assert "none.yaml" in capsys.readouterr().err


def test_one_name_in_two_files_is_refused(tmp_path, capsys):
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text(GOOD)

    code = run(["validate", str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")])

    assert code == ExitCode.BAD_SPEC
    assert "both describe 'hello'" in capsys.readouterr().err


def test_json_has_the_lines_and_keeps_the_exit_code(tmp_path, capsys):
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)

    code = run(
        ["validate", "--output=json", str(tmp_path / "good.yaml"), str(tmp_path / "bad.yaml")]
    )

    assert code == ExitCode.BAD_SPEC
    good, bad = json.loads(capsys.readouterr().out)["files"]
    assert good["name"] == "hello"
    assert good["problems"] == []
    assert {problem["path"]: problem["line"] for problem in bad["problems"]}[
        "stages[1].entrypoint"
    ] == 7


def test_what_the_reader_and_what_the_core_finds_come_together(tmp_path, capsys):
    path = tmp_path / "spec.yaml"
    path.write_text(BAD + "    ports: [http]\nreplica: 3\n")

    assert run(["validate", str(path)]) == ExitCode.BAD_SPEC
    err = capsys.readouterr().err
    assert f"{path}:8: stages[1].ports: is for a stage with a `command`" in err
    assert f"{path}:9: replica: " in err
    assert f"{path}:6: stages[1].name: " in err
    assert f"{path}:7: stages[1].entrypoint: " in err


def test_what_only_follows_from_a_problem_is_not_told_beside_it(tmp_path, capsys):
    path = tmp_path / "spec.yaml"
    path.write_text("name: [1]\nstages: []\n")

    assert run(["validate", str(path)]) == ExitCode.BAD_SPEC
    err = capsys.readouterr().err
    assert err.count(": name: ") == 1
    assert err.count(": stages: ") == 1
