"""What only the driver with threads can get wrong: signals, locks, limits, a host without threads.

R25 and R26 of planner.json, the vectors marked manual, are here.
"""

from __future__ import annotations

import contextvars
import json
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from stagekeeper.agent import initializer
from stagekeeper.agent.initializer import run_init
from stagekeeper.core.errors import InitError, PlanError
from stagekeeper.core.init_run import InitRun

WAIT_LIMIT_S = 20

INTERRUPTED_CHILD = """
import json, signal, sys, threading
from stagekeeper.agent.initializer import run_init

# What the parent is told, and waits for, is a line on stdout.
called, cleaned, handled = [], [], 0
in_flight = {stage: threading.Event() for stage in (0, 2)}
late, second = threading.Event(), threading.Event()
is_stubborn = sys.argv[1] == "twice"

def say(line):
    print(line, flush=True)

def on_sigint(number, frame):
    global handled
    handled += 1
    if handled == 1:
        threading.Timer(0.08, late.set).start()
    else:
        second.set()
    raise KeyboardInterrupt

def init(stage):
    called.append(stage)
    if stage in in_flight:
        in_flight[stage].set()
        if all(event.is_set() for event in in_flight.values()):
            say("in flight")
        assert late.wait(20)
    return "abc"[stage]

def clean(stage, handle):
    if is_stubborn and not cleaned:
        say("cleaning")
        assert second.wait(20)
    cleaned.append([stage, handle])

signal.signal(signal.SIGINT, on_sigint)
try:
    run_init({0: [0], 1: [0], 2: [1]}, init, clean)
    raised, notes = None, []
except BaseException as error:
    raised, notes = type(error).__name__, getattr(error, "__notes__", [])
say(json.dumps({
    "called": called, "cleaned": cleaned, "raised": raised, "notes": notes,
    "threads": threading.active_count(), "handled": handled,
}))
"""


def interrupt_child(mode: str) -> dict:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_CHILD, mode], stdout=subprocess.PIPE, text=True
    ) as child:
        watchdog = threading.Timer(WAIT_LIMIT_S, child.kill)
        watchdog.start()
        try:
            assert child.stdout is not None
            seen = []
            for line in child.stdout:
                seen.append(line.strip())
                if seen[-1] in ("in flight", "cleaning"):
                    child.send_signal(signal.SIGINT)
        finally:
            watchdog.cancel()
            child.kill()
    report: dict = json.loads(seen[-1])
    return report


def test_r25_ctrl_c_in_the_callers_thread_rolls_back_and_comes_out_last():
    report = interrupt_child("once")
    assert set(report["called"]) == {0, 2}
    assert sorted(report["cleaned"]) == [[0, "a"], [2, "c"]]
    assert report["raised"] == "KeyboardInterrupt"
    assert report["notes"] in (["rolled back: 0, 2"], ["rolled back: 2, 0"])
    assert report["threads"] == 1


def test_second_ctrl_c_during_the_rollback_does_not_cut_it_short():
    report = interrupt_child("twice")
    assert report["handled"] == 2
    assert sorted(report["cleaned"]) == [[0, "a"], [2, "c"]]
    assert report["raised"] == "KeyboardInterrupt"
    assert report["threads"] == 1


def test_r26_stage_over_its_limit_has_failed_and_its_late_success_is_cleaned():
    after_deadline = threading.Event()
    cleaned = []

    def init(stage: int) -> str:
        if stage == 1:
            threading.Timer(0.2, after_deadline.set).start()
            assert after_deadline.wait(WAIT_LIMIT_S)
        return "ab"[stage]

    with pytest.raises(InitError) as caught:
        run_init({0: [0], 1: [1]}, init, lambda *pair: cleaned.append(pair), stage_timeout_s=0.1)

    assert caught.value.stage_id == 1
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert cleaned == [(1, "b"), (0, "a")]


@pytest.mark.parametrize(("took_s", "succeeds"), [(9.999, True), (10.0, False)])
def test_limit_of_a_thread_holds_on_both_sides_of_its_edge(monkeypatch, took_s, succeeds):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(initializer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    cleaned = []

    def init(stage: int) -> str:
        clock.now += took_s
        return "handle"

    def start() -> dict[int, str]:
        return run_init(
            {0: []}, init, lambda stage, handle: cleaned.append(stage), stage_timeout_s=10
        )

    if succeeds:
        assert start() == {0: "handle"}
    else:
        with pytest.raises(InitError):
            start()
    assert cleaned == ([] if succeeds else [0])


def test_interrupt_between_the_last_success_and_the_return_leaves_nothing_up(monkeypatch):
    def handles(run: InitRun) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(InitRun, "handles", handles)
    cleaned = []
    with pytest.raises(KeyboardInterrupt) as caught:
        run_init({0: [0], 1: [0]}, lambda stage: stage, lambda stage, handle: cleaned.append(stage))
    assert cleaned == [1, 0]
    assert caught.value.__notes__ == ["rolled back: 1, 0"]


class OwnedLock:
    """A lock that knows its holder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *args: object) -> None:
        self.owner = None
        self._lock.release()


def test_functions_are_called_without_the_lock(monkeypatch):
    locks = []

    def make_lock() -> OwnedLock:
        locks.append(OwnedLock())
        return locks[-1]

    def is_held_here(*args: object) -> bool:
        return any(lock.owner == threading.get_ident() for lock in locks)

    monkeypatch.setattr(
        initializer, "threading", SimpleNamespace(Lock=make_lock, Thread=threading.Thread)
    )
    held = []

    def init(stage: int) -> int:
        held.append(is_held_here())
        if stage == 2:
            raise OSError
        return stage

    with pytest.raises(InitError):
        run_init({0: [0], 1: [0], 2: [0]}, init, lambda *pair: held.append(is_held_here()))
    assert locks
    assert held == [False] * 5


@pytest.mark.parametrize("threads_to_be_had", [0, 1])
def test_host_without_threads_starts_all_the_same(monkeypatch, threads_to_be_had):
    original = threading.Thread.start
    left = [threads_to_be_had]

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    cleaned = []

    def init(stage: int) -> int:
        if stage == 2:
            raise OSError
        return stage

    with pytest.raises(InitError):
        run_init({0: [0], 1: [0], 2: [0]}, init, lambda stage, handle: cleaned.append(stage))
    assert cleaned == [1, 0]
    left[0] = threads_to_be_had
    assert run_init({0: [0], 1: [1]}, lambda stage: stage, lambda *pair: None) == {0: 0, 1: 1}


def test_groups_run_side_by_side():
    together = threading.Barrier(3, timeout=WAIT_LIMIT_S)

    def init(stage: int) -> bool:
        return together.wait() >= 0

    assert run_init({0: [0], 1: [1], 2: [2]}, init, lambda *pair: None) == dict.fromkeys(
        range(3), True
    )


def test_inits_see_the_callers_context():
    request = contextvars.ContextVar("request", default="")
    request.set("of the caller")
    assert run_init({0: [], 1: []}, lambda stage: request.get(), lambda *pair: None) == {
        0: "of the caller",
        1: "of the caller",
    }


@pytest.mark.parametrize("width", [0, -1])
def test_width_of_nothing_is_refused(width):
    with pytest.raises(ValueError, match="max_workers"):
        run_init({}, lambda stage: None, lambda *pair: None, max_workers=width)


def test_bad_plan_is_refused_before_anything_starts():
    called: list[int] = []
    with pytest.raises(PlanError):
        run_init({0: [0], 1: [0, 0]}, called.append, lambda *pair: None)
    assert not called
