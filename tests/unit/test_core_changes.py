"""The change log: positions, coalescing, and when a reader has to list again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.commands import ChangeKind, PublishChange
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import ChangeRevision
from tests.plain import ChangeLog
from tests.worlds import EARLIER, REIGN, World, only, shard


def log_of(*names: str, limit: int = 100) -> ChangeLog:
    log = ChangeLog(REIGN, limit, limit)
    for name in names:
        log.add(ChangeKind.MODIFIED, name)
    return log


def names_since(log: ChangeLog, n: int) -> list[tuple]:
    return [(it.name, it.revision.n) for it in log.since(ChangeRevision(REIGN, n))]


def test_revisions_ascend_by_one_from_one() -> None:
    log = log_of()

    assert log.revision == ChangeRevision(REIGN, 0)
    assert [log.add(ChangeKind.ADDED, name).revision.n for name in "aba"] == [1, 2, 3]
    assert log.revision == ChangeRevision(REIGN, 3)


def test_a_reader_gets_each_name_once_at_its_last_change_in_order() -> None:
    log = log_of("a", "b", "a", "c", "b")

    assert names_since(log, 0) == [("a", 3), ("c", 4), ("b", 5)]
    assert names_since(log, 3) == [("c", 4), ("b", 5)]
    assert names_since(log, 5) == []


@pytest.mark.parametrize(("n", "is_gone"), [(2, True), (3, False), (5, False), (6, True)])
def test_what_was_compacted_or_has_not_happened_is_gone(n, is_gone) -> None:
    log = log_of(*"abcde", limit=2)

    if is_gone:
        with pytest.raises(Refused) as caught:
            names_since(log, n)
        assert caught.value.reason is Reason.REVISION_GONE
    else:
        assert len(names_since(log, n)) == 5 - n


@pytest.mark.parametrize("epoch", [EARLIER, replace(REIGN, supervisor_id="other")])
def test_another_reigns_position_is_gone(epoch) -> None:
    with pytest.raises(Refused) as caught:
        log_of("a").since(ChangeRevision(epoch, 0))

    assert caught.value.reason is Reason.REVISION_GONE


def test_a_name_changes_once_per_event_however_many_replicas_of_it_do() -> None:
    world = World()

    told = world.register(shards=[shard(replica=k) for k in range(5)] + [shard("n")])

    assert [it.name for it in only(PublishChange, told)] == ["m", "n"]
    assert [it.name for it in world.registry.changes_since(ChangeRevision(REIGN, 0))] == ["m", "n"]
