"""What the machine behind a start decides: order, failure, deadlines, rollback, interrupts.

Its drivers are tested in test_initializer_threads.py and test_initializer_tasks.py, and with the
vectors of planner.json in test_planner_vectors.py.
"""

from __future__ import annotations

import pytest

from stagekeeper.core.errors import InitError
from stagekeeper.core.init_run import CleanStage, InitRun, StartStage


def started(run: InitRun, *stage_ids: int, now: float = 0.0) -> None:
    for stage_id in stage_ids:
        order = run.next_order(now=now)
        assert isinstance(order, StartStage)
        assert order.stage_id == stage_id


def is_settled(run: InitRun) -> bool:
    return run.is_settled  # a function, because a type checker takes a property for constant


def test_groups_begin_in_order_and_a_begun_one_goes_on_first():
    run: InitRun[int, str] = InitRun([[0, 3], [1], [2]])
    started(run, 0, 1)
    run.stage_succeeded(0, "a", now=1.0)
    started(run, 3, 2)
    assert run.next_order(now=1.0) is None


def test_success_of_all_gives_handles_ascending():
    run: InitRun[int, str | None] = InitRun([[0, 2], [1]])
    started(run, 0, 1)
    run.stage_succeeded(1, None, now=1.0)
    run.stage_succeeded(0, "a", now=1.0)
    started(run, 2)
    assert not is_settled(run)
    run.stage_succeeded(2, "c", now=2.0)
    assert is_settled(run)
    assert run.error() is None
    assert list(run.handles().items()) == [(0, "a"), (1, None), (2, "c")]


def test_empty_run_is_settled_from_the_start():
    run: InitRun[int, str] = InitRun([])
    assert is_settled(run)
    assert run.next_order(now=0.0) is None
    assert run.handles() == {}


def test_failure_cleans_in_reverse_order_of_success_once_nothing_is_in_flight():
    run: InitRun[int, str] = InitRun([[0], [1], [2], [3, 4]])
    started(run, 0, 1, 2, 3)
    run.stage_succeeded(1, "b", now=1.0)
    run.stage_succeeded(0, "a", now=2.0)
    run.stage_failed(2, OSError("no"), now=3.0)
    assert run.next_order(now=3.0) is None, "stage 3 is in flight"
    run.stage_succeeded(3, "d", now=4.0)

    assert run.next_order(now=5.0) == CleanStage(3, "d")
    assert run.next_order(now=5.0) is None, "one at a time"
    run.stage_cleaned(3, None, now=6.5)
    assert run.next_order(now=7.0) == CleanStage(0, "a")
    run.stage_cleaned(0, RuntimeError("stuck"), now=7.0)
    assert run.next_order(now=8.0) == CleanStage(1, "b")
    assert not is_settled(run)
    run.stage_cleaned(1, None, now=8.0)

    assert is_settled(run)
    assert run.next_order(now=9.0) is None
    error = run.error()
    assert isinstance(error, InitError)
    assert error.stage_id == 2
    assert isinstance(error.__cause__, OSError)
    assert list(error.cleanup_errors) == [0]
    assert [(entry.stage_id, entry.cleaned) for entry in error.report.entries] == [
        (3, True),
        (0, False),
        (1, True),
    ]
    assert [entry.duration_s for entry in error.report.entries] == [1.5, 0.0, 0.0]
    assert error.report.entries[1].error == "RuntimeError: stuck"
    assert str(error) == (
        "stage 2 failed to start: OSError: no; rolled back: 3, 1; "
        "the cleanup of stage 0 raised RuntimeError: stuck"
    )


def test_handles_are_refused_after_a_failure():
    run: InitRun[int, str] = InitRun([[0]])
    started(run, 0)
    run.stage_failed(0, OSError(), now=0.0)
    with pytest.raises(RuntimeError, match="not all up"):
        run.handles()


def test_error_is_refused_while_something_is_under_way():
    run: InitRun[int, str] = InitRun([[0]])
    started(run, 0)
    with pytest.raises(RuntimeError, match="in flight"):
        run.error()


@pytest.mark.parametrize("report", ["stage_succeeded", "stage_failed", "stage_cleaned"])
def test_outcome_that_was_not_ordered_is_refused_with_its_story(report):
    run: InitRun[int, object] = InitRun([[0], [1]])
    started(run, 0)
    with pytest.raises(RuntimeError, match=r"stage 1 is not .*in flight \[0\]"):
        getattr(run, report)(1, None, now=0.0)


def test_phase_of_the_failure_is_that_of_its_exception():
    error = OSError("weights are cut short")
    error.phase = "LOAD"  # type: ignore[attr-defined]
    run: InitRun[int, str] = InitRun([[0]])
    started(run, 0)
    run.stage_failed(0, error, now=0.0)
    failure = run.error()
    assert isinstance(failure, InitError)
    assert failure.phase == "LOAD"
    assert "in LOAD: OSError: weights are cut short" in str(failure)


def test_exception_whose_text_cannot_be_printed_stops_no_rollback():
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    run: InitRun[int, str] = InitRun([[0, 1]])
    started(run, 0)
    run.stage_succeeded(0, "a", now=0.0)
    started(run, 1)
    run.stage_failed(1, Unprintable(), now=0.0)
    assert run.next_order(now=0.0) == CleanStage(0, "a")
    run.stage_cleaned(0, Unprintable(), now=0.0)
    assert "cannot be printed" in str(run.error())


def test_long_rollback_keeps_the_message_short():
    run: InitRun[int, int] = InitRun([list(range(10_000))])
    for stage_id in range(9_999):
        started(run, stage_id)
        run.stage_succeeded(stage_id, stage_id, now=0.0)
    started(run, 9_999)
    run.stage_failed(9_999, OSError(), now=0.0)
    while isinstance(order := run.next_order(now=0.0), CleanStage):
        run.stage_cleaned(order.stage_id, OSError("x"), now=0.0)
    assert len(str(run.error())) < 1000


@pytest.mark.parametrize(("now", "is_late"), [(9.999, False), (10.0, True)])
def test_init_is_late_from_its_deadline_on(now, is_late):
    run: InitRun[int, str] = InitRun([[0], [1, 2]], stage_timeout_s={0: 10.0, 2: None})
    assert run.next_order(now=0.0) == StartStage(0, deadline=10.0)
    assert run.next_order(now=0.0) == StartStage(1, deadline=None)
    run.stage_succeeded(1, "b", now=now)
    order = run.next_order(now=now)
    assert (order is None) == is_late, "the successor starts only while nothing has failed"


def test_late_success_is_a_failure_and_is_cleaned():
    run: InitRun[int, str] = InitRun([[0]], stage_timeout_s=1.5)
    started(run, 0)
    run.stage_succeeded(0, "a", now=2.0)
    assert run.next_order(now=2.0) == CleanStage(0, "a")
    run.stage_cleaned(0, None, now=2.0)
    error = run.error()
    assert isinstance(error, InitError)
    assert isinstance(error.__cause__, TimeoutError)
    assert str(error.__cause__) == "stage 0 was not ready within 1.5 s"
    assert [entry.stage_id for entry in error.report.entries] == [0]


def test_late_failure_is_the_cause_of_the_timeout_and_is_not_cleaned():
    run: InitRun[int, str] = InitRun([[0]], stage_timeout_s=1.0)
    started(run, 0)
    run.stage_failed(0, OSError("late"), now=2.0)
    assert run.next_order(now=2.0) is None
    error = run.error()
    assert isinstance(error, InitError)
    assert isinstance(error.__cause__, TimeoutError)
    assert isinstance(error.__cause__.__cause__, OSError)


def test_overdue_stage_is_recorded_before_a_failure_that_came_after_it():
    run: InitRun[int, str] = InitRun([[0], [1]], stage_timeout_s={1: 5.0})
    started(run, 0, 1)
    run.stage_failed(0, OSError(), now=6.0)
    run.stage_failed(1, OSError(), now=6.0)
    error = run.error()
    assert isinstance(error, InitError)
    assert error.stage_id == 1
    assert list(error.also_failed) == [0]


@pytest.mark.parametrize("limit", [0, -1, float("nan"), {0: 0}])
def test_limit_that_is_not_above_zero_is_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        InitRun([[0]], stage_timeout_s=limit)


def test_interrupt_after_success_still_cleans_everything():
    run: InitRun[int, str] = InitRun([[0]])
    started(run, 0)
    run.stage_succeeded(0, "a", now=0.0)
    assert is_settled(run)
    cause = KeyboardInterrupt()
    run.interrupt(cause)
    run.interrupt(KeyboardInterrupt("again"))
    assert not is_settled(run)
    assert run.next_order(now=0.0) == CleanStage(0, "a")
    run.stage_cleaned(0, None, now=0.0)
    assert run.error() is run.error() is cause
    assert cause.__notes__ == ["rolled back: 0"]


def test_interrupt_hides_no_failure():
    run: InitRun[int, str] = InitRun([[0]])
    started(run, 0)
    run.stage_failed(0, OSError("no"), now=0.0)
    cause = KeyboardInterrupt()
    run.interrupt(cause)
    assert run.error() is cause
    assert cause.__notes__ == ["stage 0 failed: OSError: no; rolled back: nothing"]
