"""A failure that nobody took: the hook, what its outcome means, and what the program prints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from stagekeeper import actor
from stagekeeper.actor.errors import UnhandledFault
from stagekeeper.actor.failure import ExitInfo, FailureKind, MeshFailure, Origin
from stagekeeper.actor.hook import call_hook, end_program, install_excepthook

FAILURE = MeshFailure.at(
    Origin("workers", "m-1", 2, 1, "workers-a"), FailureKind.SIGNALED, exit=ExitInfo(signal=9)
)


@pytest.fixture
def own_excepthook():
    before = sys.excepthook
    seen: list[BaseException] = []
    sys.excepthook = lambda cls, error, trace: seen.append(error)
    yield seen
    sys.excepthook = before


@pytest.mark.parametrize("answer", [None, False, True])
def test_a_hook_that_returns_has_handled_it_whatever_it_returns(monkeypatch, answer):
    seen = []

    def hook(failure: MeshFailure) -> object:
        seen.append(failure)
        return answer

    monkeypatch.setattr(actor, "unhandled_fault_hook", hook)
    assert call_hook(FAILURE) is None
    assert seen == [FAILURE]


def test_the_hook_is_looked_up_when_it_is_needed_and_is_the_default_until_set(monkeypatch):
    assert actor.unhandled_fault_hook is end_program
    monkeypatch.delattr(actor, "unhandled_fault_hook")
    assert isinstance(call_hook(FAILURE), UnhandledFault)


def test_the_default_prints_the_tree_and_ends_the_program(capsys):
    error = call_hook(FAILURE)
    assert isinstance(error, UnhandledFault) and error.failure is FAILURE
    assert error.__cause__ is None and error.is_told
    assert capsys.readouterr().err == f"unhandled failure\n{FAILURE}\n"


def test_an_error_of_the_hooks_own_is_the_cause_of_the_fault_and_it_was_called_once(monkeypatch):
    calls = []

    def hook(failure: MeshFailure) -> None:
        calls.append(failure)
        raise asyncio.CancelledError if len(calls) > 1 else ValueError("mine")

    monkeypatch.setattr(actor, "unhandled_fault_hook", hook)
    for kind in (ValueError, asyncio.CancelledError):
        error = call_hook(FAILURE)
        assert isinstance(error, UnhandledFault) and error.failure is FAILURE
        assert isinstance(error.__cause__, kind)
    assert calls == [FAILURE, FAILURE]


@pytest.mark.parametrize("own", [SystemExit(7), KeyboardInterrupt(), UnhandledFault(FAILURE)])
def test_what_ends_a_program_is_kept_as_the_hook_raised_it(monkeypatch, own):
    def hook(failure: MeshFailure) -> None:
        raise own

    monkeypatch.setattr(actor, "unhandled_fault_hook", hook)
    assert call_hook(FAILURE) is own


@pytest.mark.parametrize("hook", [None, 3])
def test_a_hook_that_cannot_be_called_has_handled_nothing(monkeypatch, hook):
    monkeypatch.setattr(actor, "unhandled_fault_hook", hook)
    error = call_hook(FAILURE)
    assert isinstance(error, UnhandledFault) and isinstance(error.__cause__, TypeError)


def test_an_async_hook_has_handled_nothing_and_is_told_so(monkeypatch):
    async def hook(failure: MeshFailure) -> None: ...

    monkeypatch.setattr(actor, "unhandled_fault_hook", hook)
    error = call_hook(FAILURE)
    assert isinstance(error, UnhandledFault)
    assert "must be a plain function" in str(error.__cause__)


def test_a_fault_at_the_top_is_printed_once_and_anything_else_by_the_hook_before(
    own_excepthook, capsys
):
    install_excepthook()
    installed = sys.excepthook
    install_excepthook()
    assert sys.excepthook is installed
    fault, other = UnhandledFault(FAILURE), ValueError("other")
    for error in (fault, fault, other):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"unhandled failure\n{FAILURE}\n"
    assert own_excepthook == [other]


def test_what_left_the_tree_before_the_fault_is_printed_too(own_excepthook, capsys):
    install_excepthook()
    fault, left_by = UnhandledFault(FAILURE), ValueError("the program's own")
    fault.__context__ = left_by
    sys.excepthook(type(fault), fault, None)
    assert capsys.readouterr().err == f"unhandled failure\n{FAILURE}\n"
    assert own_excepthook == [left_by]
    fault.__context__ = asyncio.CancelledError()  # by the fault itself
    sys.excepthook(type(fault), fault, None)
    assert own_excepthook == [left_by]


def test_what_the_hook_raised_itself_is_printed_with_the_tree(own_excepthook, capsys):
    install_excepthook()
    fault = UnhandledFault(FAILURE)
    fault.__cause__ = ValueError("the hook's own")
    sys.excepthook(type(fault), fault, None)
    printed = capsys.readouterr().err
    assert printed.startswith(f"unhandled failure\n{FAILURE}\nunhandled_fault_hook raised:\n")
    assert printed.endswith("ValueError: the hook's own\n")


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_without_a_stderr_the_program_ends_all_the_same(monkeypatch, tmp_path, stderr):
    if stderr == "closed":
        stderr = (tmp_path / "err").open("w")
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    error = call_hook(FAILURE)
    assert isinstance(error, UnhandledFault) and error.__cause__ is None


_PROGRAM = """
import atexit
from stagekeeper.actor.failure import FailureKind, MeshFailure, Origin
from stagekeeper.actor.hook import call_hook, install_excepthook

install_excepthook()
atexit.register(print, "atexit")
try:
    raise call_hook(MeshFailure.at(Origin("w", "m", 2, 1, "w-a"), FailureKind.GONE))
finally:
    print("finally")
"""


@pytest.mark.parametrize("how", ["script", "module"])
def test_the_program_ends_with_1_and_the_tree_alone_after_its_finally_blocks(tmp_path: Path, how):
    (tmp_path / "prog.py").write_text(_PROGRAM)
    arguments = ["prog.py"] if how == "script" else ["-m", "prog"]
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stdout == "finally\natexit\n"
    assert ended.stderr == (
        "unhandled failure\nGONE: w[2] is gone, and how it ended is not known (w-a-gone-1)\n"
    )
