"""Classes by name, in one process and in another. Scripts run here as `python` runs them."""

from __future__ import annotations

import functools
import os
import pickle
import runpy
import sys
import textwrap
import types
from typing import Any, Generic, TypeVar

import pytest

from stagekeeper.actor import Actor
from stagekeeper.actor import entrypoint as subject
from stagekeeper.actor.entrypoint import (
    Entrypoint,
    EntrypointError,
    entrypoint_of,
    load_class,
)

T = TypeVar("T")

ACTOR = """
from stagekeeper.actor import Actor, endpoint
from stagekeeper.actor.entrypoint import entrypoint_of, load_class

class Worker(Actor):
    @endpoint
    def step(self): return 1
"""


class Worker(Actor):
    class Inner(Actor):
        pass


class Store(Actor, Generic[T]):
    pass


class Hidden(Actor):
    pass


hidden, Hidden = Hidden, Worker  # type: ignore[misc, assignment]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for modules and scripts; nothing that is imported from it outlives the test."""
    monkeypatch.setattr(subject, "_alias_by_path", {})
    monkeypatch.setattr(subject, "_path_by_alias", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


# --- naming


def test_class_is_named_by_module_and_qualname():
    assert entrypoint_of(Worker) == Entrypoint(f"{__name__}:Worker")
    assert entrypoint_of(Worker.Inner) == Entrypoint(f"{__name__}:Worker.Inner")
    assert load_class(f"{__name__}:Worker.Inner") is Worker.Inner


def _local_class() -> type[Actor]:
    class Local(Actor):
        pass

    return Local


def _class_of_no_module() -> type[Actor]:
    return type("Made", (Actor,), {"__module__": "nowhere_at_all"})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (_local_class(), r"Local is defined inside a function.*move it to the top level"),
        (lambda: Worker(), "a lambda is no class: give the class itself"),
        (functools.partial(Worker), "is no class: give the class itself, and its arguments after"),
        (Worker(), "is an actor already made: give its class, Worker,"),
        (Store[int], "is no class: give Store itself, without brackets"),
        (int, r"builtins\.int is no actor: derive it from stagekeeper\.actor\.Actor"),
        (hidden, r"Hidden is not what its module has under that name"),
        (_class_of_no_module(), "no module nowhere_at_all has been imported"),
    ],
)
def test_class_that_no_other_process_would_find_is_refused(value, said):
    with pytest.raises(EntrypointError, match=said):
        entrypoint_of(value)


# --- loading


@pytest.mark.parametrize("name", ["", "Worker", ":Worker", "module:"])
def test_name_of_another_form_is_refused(name):
    with pytest.raises(EntrypointError, match="not of the form module:Class"):
        load_class(name)


def test_class_that_is_not_imported_yet_is_imported(folder):
    write(folder / "lazily_found.py", ACTOR)
    sys.path.insert(0, str(folder))
    cls = load_class("lazily_found:Worker")
    assert issubclass(cls, Actor)
    assert cls is load_class("lazily_found:Worker")
    assert entrypoint_of(cls) == Entrypoint("lazily_found:Worker")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_here_at_all:Worker", "no module not_here_at_all here: install it for .*PYTHONPATH"),
        ("not_here_at_all.deep.er:Worker", "no module not_here_at_all here: install it"),
        ("broken:Worker", "the import of broken raised ValueError: no such card"),
        (
            "wanting:Worker",
            "the import of wanting raised ModuleNotFoundError: No module named 'gone'",
        ),
        ("exiting:Worker", "the import of exiting raised SystemExit: 2"),
        ("whole:Absent", "whole has no Absent in this process: both .* the same version"),
        ("whole:Worker.Absent", "whole has no Worker.Absent in this process"),
        ("whole:number", "whole:number is 7, no class derived from"),
        ("whole:Plain", "whole:Plain is <class .*>, no class derived from"),
    ],
)
def test_class_that_cannot_be_loaded_says_why(folder, name, said):
    write(folder / "broken.py", "raise ValueError('no such card')")
    write(folder / "wanting.py", "import gone")
    write(folder / "exiting.py", "import sys\nsys.exit(2)")
    write(folder / "whole.py", f"{ACTOR}\nnumber = 7\nclass Plain: pass\n")
    sys.path.insert(0, str(folder))
    with pytest.raises(EntrypointError, match=said):
        load_class(name)


def test_what_an_import_raised_is_the_cause(folder):
    write(folder / "broken.py", "raise ValueError('no such card')")
    sys.path.insert(0, str(folder))
    with pytest.raises(EntrypointError) as caught:
        load_class("broken:Worker")
    assert isinstance(caught.value.__cause__, ValueError)


def test_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(EntrypointError("no")))
    assert isinstance(error, EntrypointError) and str(error) == "no"


# --- scripts


def run_script(path: str) -> dict[str, Any]:
    return runpy.run_path(path, run_name="__main__")


SCRIPT = f"""{ACTOR}
from beside import THERE

count = 0

if __name__ == "__main__":
    named = entrypoint_of(Worker)
    found_here = load_class(named.entrypoint, named.main_path)
    count = 1
"""


@pytest.mark.parametrize("file_name", ["train.py", "train"])
def test_class_of_a_script_is_found_by_the_scripts_path(folder, file_name):
    write(folder / "beside.py", "THERE = 1")
    path = write(folder / file_name, SCRIPT)
    sys.path.insert(0, str(folder))
    ran = run_script(path)
    sys.path.remove(str(folder))  # another process begins without it, and without what it has
    del sys.modules["beside"]
    named = ran["named"]
    assert named == Entrypoint("__main__:Worker", os.path.realpath(path))
    assert str(named) == f"{os.path.realpath(path)}:Worker"
    assert ran["found_here"] is ran["Worker"]  # in the script's own process nothing is imported

    cls = load_class(named.entrypoint, named.main_path)
    assert cls is not ran["Worker"]
    assert cls is load_class(named.entrypoint, named.main_path)
    module = sys.modules[cls.__module__]
    assert module.__name__ != "__main__"
    assert module.count == 0  # its __main__ block did not run
    # What it spawns from there is named as it was itself.
    assert entrypoint_of(cls) == named


def test_two_scripts_are_two_modules(folder):
    paths = [os.path.realpath(write(folder / name, ACTOR)) for name in ("a.py", "b.py")]
    first, second = (load_class("__main__:Worker", path) for path in paths)
    assert first is not second
    assert [entrypoint_of(cls).main_path for cls in (first, second)] == paths


@pytest.mark.parametrize("last", ["sys.exit(3)", "asyncio.run(spawn_a_tree())"])
def test_script_without_a_guard_is_told_of_it(folder, last):
    text = f"import asyncio, sys\n{ACTOR}\nasync def spawn_a_tree(): raise RuntimeError\n{last}"
    path = os.path.realpath(write(folder / "train.py", text))
    with pytest.raises(EntrypointError, match=r'^a script .* under `if __name__ == "__main__":`'):
        load_class("__main__:Worker", path)


def test_script_that_fails_is_tried_again_next_time(folder):
    path = os.path.realpath(write(folder / "train.py", f"{ACTOR}\nraise ValueError('not yet')"))
    for _ in range(2):
        with pytest.raises(
            EntrypointError, match=r"import of .*train\.py raised ValueError: not yet"
        ):
            load_class("__main__:Worker", path)
    write(folder / "train.py", ACTOR)
    assert load_class("__main__:Worker", path).__name__ == "Worker"


@pytest.mark.parametrize(
    ("path", "said"), [("", "needs the path of its script"), ("/not/here.py", "there is no script")]
)
def test_script_that_is_not_there_is_refused(folder, path, said):
    with pytest.raises(EntrypointError, match=said):
        load_class("__main__:Worker", path)


@pytest.mark.parametrize("name", ["package_of_jobs.train", "package_of_jobs"])
def test_class_of_a_module_run_by_name_is_named_by_that_name(folder, name):
    write(folder / "package_of_jobs" / "__init__.py", "")
    write(folder / "package_of_jobs" / "train.py", SCRIPT)
    write(folder / "package_of_jobs" / "__main__.py", SCRIPT)
    write(folder / "beside.py", "THERE = 1")
    sys.path.insert(0, str(folder))
    ran = runpy.run_module(name, run_name="__main__", alter_sys=True)
    full = name if "." in name else f"{name}.__main__"
    assert ran["named"] == Entrypoint(f"{full}:Worker")
    assert ran["found_here"] is ran["Worker"]
    cls = load_class(ran["named"].entrypoint)
    assert cls is not ran["Worker"]
    assert sys.modules[cls.__module__].count == 0


@pytest.mark.parametrize("file", [None, "<stdin>", "/gone/since.py"])
def test_class_of_no_file_is_refused(monkeypatch, file):
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(ACTOR, main.__dict__)
    with pytest.raises(EntrypointError, match=r"put it into a file and import it from there"):
        entrypoint_of(main.Worker)
