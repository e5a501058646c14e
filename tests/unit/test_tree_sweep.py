"""When a sweep is over, against a table of processes that is made up."""

from __future__ import annotations

import pytest

from stagekeeper.host import proc_table, tree_sweep
from stagekeeper.host.tree_sweep import TREE_ENV, Sweep

OURS = [b"PATH=/bin", f"{TREE_ENV}=t/a".encode()]
OTHERS = [b"PATH=/bin", f"{TREE_ENV}=t/ab".encode()]
KERNEL_THREAD = 0x00200000


class Table:
    """Processes by pid: what each was started with. A pid's start ticks are ten times the pid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.environments: dict[int, list[bytes] | None] = {}
        self.flags: dict[int, int] = {}
        self.is_deaf = False
        monkeypatch.setattr(proc_table, "other_pids", lambda: iter(list(self.environments)))
        monkeypatch.setattr(proc_table, "stat_fields", self._stat_fields)
        monkeypatch.setattr(proc_table, "environment", lambda pid: self.environments.get(pid))
        monkeypatch.setattr(tree_sweep, "kill", self._kill)

    def _stat_fields(self, pid: int) -> list[bytes] | None:
        if pid not in self.environments:
            return None
        fields = [b"0"] * 40
        fields[0], fields[3], fields[19] = b"S", str(pid // 10).encode(), str(10 * pid).encode()
        fields[6] = str(self.flags.get(pid, 0)).encode()
        return fields

    def _kill(self, pid: int, start_ticks: int) -> bool:
        if not self.is_deaf:
            del self.environments[pid]
        return True


@pytest.fixture
def table(monkeypatch) -> Table:
    return Table(monkeypatch)


def looks(work: Sweep, *, at_most: int = 20) -> int:
    """Look until it is over; return how often."""
    for count in range(1, at_most + 1):
        work.look()
        if work.is_over:
            return count
    raise AssertionError(f"not over after {at_most} looks")


def test_nothing_is_believed_after_the_second_look(table):
    table.environments = {5: OTHERS, 10: OTHERS, 11: None}  # the first in session 0
    work = Sweep("t/a")

    assert looks(work) == 2
    assert work.killed == set()


def test_what_was_killed_is_looked_for_twice_more(table):
    table.environments = {10: OTHERS, 12: OURS, 13: OURS}
    work = Sweep("t/a")

    assert looks(work) == 3
    assert work.killed == {(12, 120), (13, 130)}
    assert list(table.environments) == [10]


def test_one_that_becomes_another_program_is_looked_at_again(table):
    work = Sweep("t/a")

    work.look()
    table.environments[12] = []
    work.look()
    assert not work.is_over
    table.environments[12] = OURS  # as it was all the time
    looks(work)

    assert work.killed == {(12, 120)}


def test_one_that_comes_up_between_two_looks_starts_the_count_again(table):
    work = Sweep("t/a")

    work.look()
    table.environments[12] = OURS
    work.look()
    work.look()

    assert not work.is_over
    assert looks(work) == 1


def test_threads_of_the_kernel_hold_nothing_up(table):
    work = Sweep("t/a")
    for pid in (12, 13):
        table.environments[pid] = []
        table.flags[pid] = KERNEL_THREAD
        work.look()

    assert work.is_over


def test_one_without_any_environment_holds_nothing_up(table):
    table.environments = {12: []}

    assert looks(Sweep("t/a")) == 3


def test_one_that_started_before_the_place_did_is_none_of_it(table):
    table.environments = {11: OURS, 12: OURS}
    work = Sweep("t/a", since_ticks=120)

    looks(work)

    assert work.killed == {(12, 120)}


def test_session_counts_whatever_the_environment_says(table):
    table.environments = {30: [], 31: OTHERS, 40: OTHERS}
    work = Sweep("t/a", session=3)

    looks(work)

    assert work.killed == {(30, 300), (31, 310)}


def test_one_that_does_not_die_keeps_it_from_being_over(table):
    table.environments = {12: OURS}
    table.is_deaf = True
    work = Sweep("t/a")

    with pytest.raises(AssertionError, match="not over"):
        looks(work)
    assert work.found == {(12, 120)}
