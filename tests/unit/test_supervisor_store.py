"""The store: what was written comes back, a reign that is over writes nothing, damage is told."""

from __future__ import annotations

import sqlite3
import zlib
from dataclasses import replace

import pytest

from stagekeeper.core.commands import (
    Desired,
    EntombDeployment,
    RemoveOperation,
    SaveDeployment,
    SavedOperation,
    SaveEpoch,
    SaveFailure,
    SaveOperation,
    SaveRoster,
)
from stagekeeper.core.ids import (
    NO_EPOCH,
    DeploymentName,
    DeviceId,
    Epoch,
    FailureId,
    Generation,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import (
    DeploymentSpec,
    Failure,
    FailureOrigin,
    MemoryNeed,
    OperationPlan,
    Peer,
    ReplicaStart,
    StageSpec,
    StageStart,
)
from stagekeeper.supervisor import store_rows
from stagekeeper.supervisor.state_lock import StateDirTaken, StateLock
from stagekeeper.supervisor.store import FILE_NAME, EpochLost, SqliteStore, StoreFailed

FIRST, SECOND = Epoch(1, "a"), Epoch(2, "b")


def desired(name: str, **changes) -> Desired:
    spec = DeploymentSpec(
        DeploymentName(name),
        (StageSpec("s", "m:S", devices=(0,), memory=MemoryNeed(utilization=0.5)),),
    )
    return Desired(spec, 1, changes.get("is_creating", False), changes.get("is_deleting", False))


def failure(failure_id: str) -> Failure:
    origin = FailureOrigin(
        WorkerId("w"),
        DeploymentName("d"),
        ReplicaIndex(0),
        StageId(0),
        "s",
        0,
        InstanceId("i"),
    )
    return Failure(FailureId(failure_id), "EXITED", origin, "it exited")


def start(operation_id: str, *workers: str) -> ReplicaStart:
    spec = desired("d").spec.stages[0]
    return ReplicaStart(
        tuple(
            OperationPlan(
                OperationId(operation_id),
                DeploymentName("d"),
                ReplicaIndex(0),
                Generation(FIRST, 1),
                WorkerId(worker),
                (StageStart(StageId(0), spec, (DeviceId("gpu"),), number, len(workers)),),
                stage_count=1,
                entry_stage_id=StageId(0),
                spec_revision=1,
            )
            for number, worker in enumerate(workers)
        )
    )


PEERS = tuple(
    Peer(StageId(0), "s", number, InstanceId(f"i{number}"), f"h:{number}") for number in (0, 1)
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / FILE_NAME


@pytest.fixture
def opened(tmp_path):
    stores = []

    def open_store(**options) -> SqliteStore:
        store = SqliteStore(tmp_path, **options)
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


def test_new_store_is_empty_and_says_so(opened):
    stored = opened().load()
    assert stored.is_new
    assert (stored.epoch, stored.desired, stored.roster) == (NO_EPOCH, (), ())


def test_everything_written_is_there_for_the_next_reign(opened):
    store = opened()
    store.seize(FIRST)
    store.write(
        FIRST,
        [
            SaveDeployment(desired("b", is_creating=True)),
            SaveDeployment(desired("a", is_deleting=True)),
            SaveFailure(failure("f1")),
            SaveRoster((WorkerId("w2"), WorkerId("w1"))),
        ],
    )
    store.write(FIRST, [EntombDeployment(DeploymentName("c"), Generation(FIRST, 7))])
    store.close()
    stored = opened().load()
    assert not stored.is_new
    assert stored.epoch == FIRST
    assert stored.desired == (desired("a", is_deleting=True), desired("b", is_creating=True))
    assert stored.tombstones == {"c": Generation(FIRST, 7)}
    assert stored.roster == ("w1", "w2")
    assert stored.failures == (failure("f1"),)


def test_entombed_deployment_is_no_longer_desired(opened):
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveDeployment(desired("a"))])
    store.write(FIRST, [EntombDeployment(DeploymentName("a"), Generation(FIRST, 1))])
    stored = store.load()
    assert stored.desired == ()
    assert stored.tombstones == {"a": Generation(FIRST, 1)}


def test_roster_written_again_is_replaced(opened):
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveRoster((WorkerId("a"), WorkerId("b")))])
    store.write_roster(FIRST, [WorkerId("b"), WorkerId("c")])
    with pytest.raises(EpochLost):
        store.write_roster(SECOND, [])
    assert store.load().roster == ("b", "c")


def test_reign_that_is_over_writes_nothing(opened):
    old, new = opened(), opened()
    old.seize(FIRST)
    new.seize(SECOND)
    with pytest.raises(EpochLost, match="another one took over"):
        old.write(FIRST, [SaveDeployment(desired("a"))])
    with pytest.raises(EpochLost):
        old.seize(FIRST)
    assert new.load().desired == ()


def test_raised_epoch_is_the_writers_own_from_then_on(opened):
    store = opened()
    store.seize(FIRST)
    raised = Epoch(9, "a")
    store.write(FIRST, [SaveEpoch(raised)])
    with pytest.raises(EpochLost):
        store.write(FIRST, [])
    store.write(raised, [SaveDeployment(desired("a"))])


def test_failed_write_leaves_nothing_of_its_batch(opened, path):
    store = opened()
    store.seize(FIRST)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE failures")
    with pytest.raises(StoreFailed, match="failures"):
        store.write(FIRST, [SaveDeployment(desired("a")), SaveFailure(failure("f"))])
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM deployments").fetchone() == (0,)


def test_roster_that_may_be_lost_leaves_all_else_as_durable_as_before(opened):
    store = opened()
    store.seize(FIRST)

    store.write_roster(FIRST, [WorkerId("w")])
    with pytest.raises(EpochLost):
        store.write_roster(SECOND, [])

    (level,) = store._connection.execute("PRAGMA synchronous").fetchone()
    assert level == 2, "FULL: a write is on disk before anybody hears of it"


def test_failures_are_kept_once_each_and_only_the_newest(opened):
    store = opened(failure_limit=2)
    store.seize(FIRST)
    for failure_id in ("1", "2", "2", "3", "1"):
        store.write(FIRST, [SaveFailure(failure(failure_id))])
    assert [kept.failure_id for kept in store.load().failures] == ["3", "1"]


def test_failure_that_is_told_again_is_left_as_it_was_in_its_place(opened):
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveFailure(failure("1")), SaveFailure(failure("2"))])

    store.write(FIRST, [SaveFailure(replace(failure("1"), message="it is told otherwise"))])

    assert store.load().failures == (failure("1"), failure("2"))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE deployments SET spec = x'0a' || spec WHERE name = 'bad'",
        "UPDATE deployments SET checksum = 1 WHERE name = 'bad'",
        "UPDATE deployments SET name = 'worse' WHERE name = 'bad'",
    ],
)
def test_damaged_row_is_quarantined_and_the_rest_is_used(opened, path, damage):
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveDeployment(desired("bad")), SaveDeployment(desired("good"))])
    store.close()
    with sqlite3.connect(path) as other:
        other.execute(damage)
    store = opened()
    stored = store.load()
    assert stored.desired == (desired("good"),)
    assert len(stored.quarantined) == 1
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT source FROM quarantine").fetchall() == [("deployments",)]
    assert store.load().desired == (desired("good"),)


def test_damaged_file_is_set_aside_and_the_store_is_not_taken_for_new(opened, path):
    path.write_bytes(b"this was a database once" * 100)
    stored = opened().load()
    assert not stored.is_new
    assert stored.desired == ()
    assert path.with_suffix(".damaged-1").read_bytes().startswith(b"this was")
    assert "damaged-1" in stored.quarantined[0]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM epoch",
        "UPDATE epoch SET number = 'many'",
        "UPDATE epoch SET number = -1",
        "UPDATE epoch SET number = 9223372036854775807",
        "UPDATE epoch SET supervisor_id = x'00'",
    ],
)
def test_damaged_epoch_is_told_and_the_next_reign_can_write(opened, path, damage):
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveDeployment(desired("kept"))])
    store.close()
    with sqlite3.connect(path) as other:
        other.execute(damage)

    store = opened()
    stored = store.load()

    assert stored.epoch == NO_EPOCH
    assert not stored.is_new
    assert stored.desired == (desired("kept"),)
    assert stored.quarantined[0].startswith("epoch: ")
    store.seize(SECOND)
    store.write(SECOND, [SaveDeployment(desired("new"))])
    assert store.load().epoch == SECOND


@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_written_to_a_file_that_is_not_there_any_more(opened, path, is_replaced):
    store = opened()
    store.seize(FIRST)
    path.rename(path.with_suffix(".away"))
    if is_replaced:
        path.write_bytes(path.with_suffix(".away").read_bytes())

    with pytest.raises(StoreFailed, match="was removed or replaced"):
        store.write(FIRST, [SaveDeployment(desired("d"))])
    with pytest.raises(StoreFailed, match="was removed or replaced"):
        store.write_roster(FIRST, [WorkerId("w")])


def test_whoever_is_kept_from_the_file_is_told_by_what(opened, path):
    store = opened()
    store.seize(FIRST)
    store._connection.execute("PRAGMA busy_timeout = 1")
    with sqlite3.connect(path, isolation_level=None) as backup:
        backup.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreFailed, match="by another program"):
            store.write(FIRST, [SaveDeployment(desired("d"))])
        backup.execute("ROLLBACK")


def test_store_of_a_later_release_is_refused_and_left_alone(opened, path):
    opened().close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreFailed, match="later release"):
        opened()
    assert path.exists()


def test_second_owner_of_a_state_directory_is_refused_until_the_first_is_gone(tmp_path):
    first = StateLock(tmp_path)
    with pytest.raises(StateDirTaken, match="in use by another supervisor"):
        StateLock(tmp_path)
    first.release()
    StateLock(tmp_path).release()


def test_only_the_newest_tombstones_are_kept_and_come_back_oldest_first(opened):
    store = opened(tombstone_limit=2)
    store.seize(FIRST)
    for number, name in enumerate(["c", "b", "a", "b"]):
        store.write(FIRST, [EntombDeployment(DeploymentName(name), Generation(FIRST, number))])
    stored = store.load()
    assert list(stored.tombstones.items()) == [
        ("a", Generation(FIRST, 2)),
        ("b", Generation(FIRST, 3)),
    ]


ENDPOINT = "127.0.0.1:7070"


@pytest.mark.parametrize(
    ("theirs", "ours", "may_pass"),
    [
        (ENDPOINT, ENDPOINT, True),
        (ENDPOINT, "127.0.0.1:7071", False),
        ("", ENDPOINT, False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
    ],
)
def test_owner_of_a_state_directory_may_be_waited_for_if_it_has_the_same_endpoint(
    tmp_path, theirs, ours, may_pass
):
    StateLock(tmp_path, ENDPOINT + "0" * 40).release()  # whose traces are longer
    first = StateLock(tmp_path, theirs)
    try:
        with pytest.raises(StateDirTaken, match=theirs or "pid") as caught:
            StateLock(tmp_path, ours)
    finally:
        first.release()
    assert caught.value.may_pass is may_pass


def test_owner_that_has_not_said_who_it_is_yet_may_be_waited_for(tmp_path):
    first = StateLock(tmp_path, ENDPOINT)
    (tmp_path / "supervisor.lock").write_text("")
    try:
        with pytest.raises(StateDirTaken, match="pid unknown") as caught:
            StateLock(tmp_path, ENDPOINT)
    finally:
        first.release()
    assert caught.value.may_pass


def test_starts_under_way_come_back_whole_until_they_are_removed(opened):
    one, other = start("o-1", "w1", "wörker"), start("o-2", "w3")
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveOperation(SavedOperation(it)) for it in (one, other)])
    assert store.load().operations == (SavedOperation(one), SavedOperation(other))

    decided = SavedOperation(one, True, PEERS)
    store.write(FIRST, [SaveOperation(decided), RemoveOperation(other.operation_id)])

    assert store.load().operations == (decided,)
    store.write(FIRST, [RemoveOperation(OperationId("nobody"))])
    assert opened().load().operations == (decided,)


def test_reign_that_is_over_writes_no_start(opened):
    store = opened()
    store.seize(SECOND)

    with pytest.raises(EpochLost):
        store.write(FIRST, [SaveOperation(SavedOperation(start("o-1", "w1")))])

    assert store.load().operations == ()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE operations SET checksum = 0 WHERE operation_id = 'o-1'",
        "UPDATE operations SET operation_id = 'o-9' WHERE operation_id = 'o-1'",
    ],
)
def test_start_that_is_damaged_is_set_aside_alone(opened, path, damage):
    store = opened()
    store.seize(FIRST)
    store.write(FIRST, [SaveOperation(SavedOperation(start(it, "w1"))) for it in ("o-1", "o-2")])
    with sqlite3.connect(path) as other:
        other.execute(damage)

    stored = store.load()

    assert [it.start.operation_id for it in stored.operations] == ["o-2"]
    assert len(stored.quarantined) == 1


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\0\0\1\0\0\0\5w", b"\0\0\0\1\0\0\0\2w\xff\xff"])
def test_row_of_a_start_that_is_none_is_told(body):
    with pytest.raises(store_rows.RowDamaged):
        store_rows.operation_from_row(("o-1", body, 0, zlib.crc32(body)))


def test_store_of_the_release_before_is_opened_with_all_it_has(tmp_path, opened, path):
    with sqlite3.connect(path) as old:
        old.executescript(f"BEGIN; {store_rows.SCHEMA} PRAGMA user_version = 1; COMMIT;")
        row = store_rows.desired_to_row(desired("d"))
        old.execute("INSERT INTO deployments VALUES (?,?,?,?,?,?,?)", row)
        old.execute("UPDATE epoch SET number = 1, supervisor_id = 'a'")

    stored = opened().load()

    assert (stored.epoch, stored.desired, stored.operations) == (FIRST, (desired("d"),), ())
    store = opened()
    store.write(FIRST, [SaveOperation(SavedOperation(start("o-1", "w1")))])
    assert len(store.load().operations) == 1
