from __future__ import annotations

import threading
import time

import pytest

from stagekeeper.actor import context
from stagekeeper.stage.activity import Activity, Work


@pytest.fixture
def monotonic(monkeypatch):
    """Replace the clock by one that stands still until the test moves it."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def test_idle_is_not_busy():
    activity = Activity()

    assert activity.busy_for_s() is None
    assert (activity.call_count, activity.is_busy) == (0, False)


def test_busy_time_is_that_of_the_work_that_is_silent_longest(monotonic):
    activity = Activity()
    old = Work("old")
    activity.begin(old)
    monotonic.now += 3
    new = Work("new")
    activity.begin(new)
    monotonic.now += 1
    assert activity.busy_for_s() == 4.0

    activity.touch(old)
    assert activity.busy_for_s() == 1.0

    activity.end(new)
    assert activity.busy_for_s() == 0.0


def test_progress_of_one_call_does_not_excuse_another(monotonic):
    activity = Activity()
    silent, lively = Work("silent"), Work("lively")
    activity.begin(silent)
    activity.begin(lively)
    monotonic.now += 5

    activity.report(lively, 1, 2, "half")

    assert activity.busy_for_s() == 5.0


def test_progress_from_a_thread_of_the_models_own_speaks_for_all(monotonic):
    activity = Activity()
    activity.begin(Work("one"))
    activity.begin(Work("two"))
    monotonic.now += 5

    activity.report(context(), 1, 2, "half")

    assert activity.busy_for_s() == 0.0


def test_phases_are_work_but_no_calls():
    activity = Activity()
    activity.begin(Work("LOAD", is_call=False))
    activity.begin(Work("encode"))

    assert activity.call_count == 1
    assert activity.cancel_calls() == ["encode"]


def test_ending_twice_counts_once():
    activity = Activity()
    work = Work("encode")
    activity.begin(work)
    activity.end(work)
    before = activity.counter

    activity.end(work)

    assert (activity.call_count, activity.counter) == (0, before)


def test_new_phase_begins_a_new_scale_and_the_counter_goes_on():
    activity = Activity()
    activity.report(context(), 7, 10, "weights")
    before = activity.counter

    activity.reset_progress()

    view = activity.progress_view()
    assert (view.done, view.total, view.note) == (0, 0, "")
    assert view.counter > before


def test_counter_loses_nothing_between_threads():
    activity = Activity()

    def report() -> None:
        for number in range(2_000):
            activity.report(context(), number, 0, "")

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert activity.counter == 8_000


@pytest.mark.parametrize(
    ("said", "told"),
    [(3, 3), (-1, 0), (2.7, 2), (2**70, 2**63 - 1), (float("inf"), 2**63 - 1), (float("nan"), 0)],
)
def test_progress_that_cannot_be_told_is_bounded(said, told):
    activity = Activity()

    activity.report(context(), said, said, "note \udcff" + "x" * 5_000)

    view = activity.progress_view()
    assert (view.done, view.total) == (told, told)
    assert view.note.startswith("note ?x") and len(view.note) == 1_000
