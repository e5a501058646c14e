"""What `init` writes, and that it is right."""

from __future__ import annotations

import importlib
import sys

import pytest

from stagekeeper.cli.exits import ExitCode
from stagekeeper.cli.main import run
from stagekeeper.cli.spec_files import read_spec
from stagekeeper.cli.starter import SPEC_FILE, STAGES_FILE
from stagekeeper.stage import Stage


def test_starter_is_written_with_the_commands_to_go_on_with(tmp_path, capsys):
    code = run(["init", str(tmp_path / "new")])

    assert code == ExitCode.DONE
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [STAGES_FILE, SPEC_FILE]
    out = capsys.readouterr().out
    assert "stagekeeper up spec.yaml --pythonpath ." in out
    assert "stagekeeper call hello greet" in out


def test_starter_spec_is_valid_and_names_classes_that_exist(tmp_path, monkeypatch):
    run(["init", str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hello_stages", raising=False)
    module = importlib.import_module("hello_stages")

    loaded = read_spec(tmp_path / SPEC_FILE)

    for stage in loaded.spec.stages:
        module_name, _, class_name = stage.entrypoint.partition(":")
        assert module_name == "hello_stages"
        assert issubclass(getattr(module, class_name), Stage)


@pytest.mark.parametrize("name", [SPEC_FILE, STAGES_FILE])
def test_nothing_is_overwritten_and_nothing_is_written_beside_it(tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")

    code = run(["init", str(tmp_path)])

    assert code == ExitCode.FAILED
    assert (tmp_path / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert name in capsys.readouterr().err


def test_both_files_are_named_in_the_plural(tmp_path, capsys):
    for name in (SPEC_FILE, STAGES_FILE):
        (tmp_path / name).write_text("mine")

    assert run(["init", str(tmp_path)]) == ExitCode.FAILED
    assert " exist already, " in capsys.readouterr().err


def test_dangling_link_is_not_written_through(tmp_path):
    (tmp_path / SPEC_FILE).symlink_to(tmp_path / "elsewhere")

    assert run(["init", str(tmp_path)]) == ExitCode.FAILED
    assert not (tmp_path / "elsewhere").exists()
