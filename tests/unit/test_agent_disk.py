"""What an agent keeps on disk: identity, records, operations, generations, failures, logs."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest

from stagekeeper.agent import records
from stagekeeper.agent.directory import AgentDirectory, file_name
from stagekeeper.agent.durable_file import write_durably
from stagekeeper.agent.failures import FailureSpool, failure_id_of, make_failure
from stagekeeper.agent.identity import AgentIdentity, IdentityUnreadable
from stagekeeper.agent.log_tail import LONGEST_LINE_BYTES, follow, last_lines, tail
from stagekeeper.agent.operation_store import (
    KEPT_SLOTS,
    OperationFile,
    OperationStore,
    StageClaims,
)
from stagekeeper.agent.records import KEPT_LOGS, RecordStore, StageRecord
from stagekeeper.core.ids import (
    NO_EPOCH,
    DeploymentName,
    DeviceId,
    Epoch,
    Generation,
    InstanceId,
    OperationId,
    ReplicaIndex,
    SlotKey,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import (
    DeviceClaim,
    EndpointInfo,
    MemoryNeed,
    ModelInfo,
    OperationPlan,
    OperationRecord,
    Peer,
    RollbackRecord,
    ShardAddress,
    ShardRecord,
    StageSpec,
    StageStart,
)
from stagekeeper.core.states import OperationState, Phase, ShardState
from stagekeeper.runtime.launch import Launch

REIGN = Epoch(3, "reign")


@pytest.fixture
def directory(tmp_path) -> AgentDirectory:
    directory = AgentDirectory(tmp_path, WorkerId("w"))
    directory.create()
    return directory


def shard(instance: str = "i1", *, n: int = 1, stage_id: int = 0, **changes) -> ShardRecord:
    fields = {
        "deployment": DeploymentName("m"),
        "replica_index": ReplicaIndex(0),
        "stage_id": StageId(stage_id),
        "stage_name": "thinker",
        "stage_count": 2,
        "shard_index": 0,
        "shard_count": 1,
        "generation": Generation(REIGN, n),
        "operation_id": OperationId(f"op-{n}"),
        "instance_id": InstanceId(instance),
        "state": ShardState.STARTING,
        **changes,
    }
    return ShardRecord(**fields)


def record(instance: str = "i1", **changes) -> StageRecord:
    return StageRecord(
        incarnation=4,
        boot_id="boot",
        shard=shard(instance, **changes),
        control_socket="/tmp/x",
        stop_budget_s=10.0,
    )


def launch(directory: AgentDirectory, instance: str) -> Launch:
    return Launch(
        instance_id=instance,
        deployment="m",
        replica_index=0,
        stage_id=0,
        stage_name="thinker",
        stage_count=2,
        entrypoint="a:B",
        control_socket="/tmp/x",
        run_dir=str(directory.run_dir(InstanceId(instance))),
        cache_dir="/tmp/c",
    )


# --- files


def test_write_that_fails_leaves_the_old_content_and_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    write_durably(path, b"old")

    def on_full_disk(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", on_full_disk)
        with pytest.raises(OSError, match=r"No space left on device: '.*/f\.json'"):
            write_durably(path, b"new")

    assert {it.name: it.read_bytes() for it in tmp_path.iterdir()} == {"f.json": b"old"}


# --- identity


def test_each_life_is_one_above_the_last(tmp_path):
    path = tmp_path / "identity.json"
    lives = [AgentIdentity.next_life(path, WorkerId("w"), recorded_incarnation=0) for _ in range(3)]

    assert [it.incarnation for it in lives] == [1, 2, 3]
    assert len({it.host_id for it in lives}) == 1


def test_life_that_was_refused_is_followed_by_one_of_its_number(tmp_path):
    path = tmp_path / "identity.json"

    def life() -> AgentIdentity:
        return AgentIdentity.next_life(path, WorkerId("w"), recorded_incarnation=0)

    assert [life().incarnation for _ in range(2)] == [1, 2]
    for _ in range(2):
        refused = life()
        assert refused.incarnation == 3
        refused.note_refusal()
    taken = life()
    taken.note_refusal()
    taken.note_epoch(Epoch(1, "a"))
    assert life().incarnation == 4
    risen = life()
    risen.note_refusal()
    risen.rise_above(7)
    assert life().incarnation == 9
    assert life().highest_epoch == Epoch(1, "a")


def test_incarnation_is_above_the_records_too(tmp_path):
    identity = AgentIdentity.next_life(tmp_path / "i", WorkerId("w"), recorded_incarnation=8)

    assert identity.incarnation == 9


def test_neither_incarnation_nor_epoch_goes_down(tmp_path):
    path = tmp_path / "identity.json"
    identity = AgentIdentity.next_life(path, WorkerId("w"), recorded_incarnation=0)
    assert identity.highest_epoch == NO_EPOCH

    identity.note_epoch(Epoch(5, "b"))
    identity.note_epoch(Epoch(5, "a"))
    identity.note_epoch(Epoch(4, "z"))
    identity.rise_above(9)
    identity.rise_above(3)

    again = AgentIdentity.next_life(path, WorkerId("w"), recorded_incarnation=0)
    assert again.highest_epoch == Epoch(5, "b")
    assert again.incarnation == 11


def test_damaged_identity_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "identity.json"
    path.write_text("{")

    with pytest.raises(IdentityUnreadable, match="move it away"):
        AgentIdentity.next_life(path, WorkerId("w"), recorded_incarnation=0)


def test_file_is_flushed_before_it_has_its_name_and_its_folder_afterwards(tmp_path, monkeypatch):
    """What an agent obeys, starts or tells is on disk before: a power cut takes none of it back."""
    done = []
    fsync, rename = os.fsync, os.rename

    def flush(descriptor):
        fsync(descriptor)
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append(f"{kind} flushed")

    def name(source, target):
        rename(source, target)
        done.append("named")

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", name)
    identity = AgentIdentity.next_life(tmp_path / "i", WorkerId("w"), recorded_incarnation=0)
    done.clear()

    identity.note_epoch(Epoch(5, "b"))

    assert done == ["file flushed", "named", "folder flushed"]


# --- stage records


def test_record_comes_back_as_it_was(directory):
    full = record(
        state=ShardState.READY,
        committed=True,
        phase=Phase.CAPTURE,
        model=ModelInfo("Qwen", "30B", ("chat", "audio")),
        devices=(DeviceClaim(DeviceId("cpu:0"), 7, None),),
        addresses=(ShardAddress("stage", "grpc", "127.0.0.1:1"),),
        endpoints=(EndpointInfo("echo", True, False),),
        create_time=1.5,
    )
    store = RecordStore(directory)
    store.prepare(full, launch(directory, "i1"))

    (found,) = RecordStore(directory).load()

    assert found == full
    assert found.process is None  # an intent
    assert found.shard.phase is Phase.CAPTURE


def test_half_written_record_is_never_seen(directory):
    store = RecordStore(directory)
    store.prepare(record(), launch(directory, "i1"))
    folder = directory.run_dir(InstanceId("i1"))
    (folder / "record.json.new").write_text('{"half": ')

    assert RecordStore(directory).load() == [record()]


def test_folder_whose_intent_was_never_written_is_removed(directory):
    folder = directory.run_dir(InstanceId("i1"))
    folder.mkdir()
    (folder / "launch.json").write_text("{}")

    assert RecordStore(directory).load() == []
    assert not folder.exists()


def test_record_in_the_folder_of_another_instance_is_set_aside(directory):
    store = RecordStore(directory)
    store.prepare(record("i1"), launch(directory, "i1"))
    folder = directory.run_dir(InstanceId("i1"))
    folder.rename(folder.with_name("i2"))

    assert RecordStore(directory).load() == []
    assert (folder.with_name("i2") / "record.damaged").exists()


def test_logs_of_the_last_two_instances_of_a_slot_are_kept(directory):
    store = RecordStore(directory)
    for n in range(1, 5):
        it = record(f"i{n}", n=n)
        store.prepare(it, launch(directory, f"i{n}"))
        store.log_path(InstanceId(f"i{n}")).write_text(f"log {n}")
        if n < 4:
            store.end(it)

    slot = record(n=1).shard.slot
    assert store.instances_of(slot) == ["i4", "i3"]
    assert sorted(path.name for path in directory.stages.iterdir()) == ["i3", "i4"]
    again = RecordStore(directory)
    again.load()
    assert again.instances_of(slot) == ["i4", "i3"]


def test_logs_of_slots_that_are_long_gone_are_bounded(directory):
    store = RecordStore(directory)
    for stage_id in range(KEPT_LOGS + 5):
        it = record(f"i{stage_id}", stage_id=stage_id)
        store.prepare(it, launch(directory, f"i{stage_id}"))
        store.end(it)

    assert len(list(directory.stages.iterdir())) == KEPT_LOGS


def test_log_that_is_superfluous_for_two_reasons_is_removed_once(directory, monkeypatch):
    before = RecordStore(directory)
    with monkeypatch.context() as earlier:
        earlier.setattr(records, "KEPT_LOGS", KEPT_LOGS + 1)  # its agent died before it pruned
        for stage_id in (0, *range(KEPT_LOGS)):
            n = len(list(directory.stages.iterdir())) + 1
            it = record(f"i{n:03}", stage_id=stage_id, n=n)
            before.prepare(it, launch(directory, f"i{n:03}"))
            before.end(it)
    store = RecordStore(directory)
    store.load()

    store.prepare(record("next", n=1_000), launch(directory, "next"))

    assert store.instances_of(record().shard.slot) == ["next", "i002"]
    assert len(list(directory.stages.iterdir())) == KEPT_LOGS + 1


# --- operations


def operation(n: int = 1, state: OperationState = OperationState.RESERVED) -> OperationFile:
    return OperationFile(
        OperationRecord(
            OperationId(f"op/{n}"),
            DeploymentName("m"),
            ReplicaIndex(0),
            Generation(REIGN, n),
            state,
            rollback=(RollbackRecord(StageId(1), True, "", 0.5),),
        ),
        (StageId(0), StageId(1)),
    )


def test_operation_comes_back_and_its_generation_outlives_it(directory):
    store = OperationStore(directory)
    store.load()
    store.write(operation(7))
    assert OperationStore(directory).load() == [operation(7)]

    store.remove(OperationId("op/7"))

    again = OperationStore(directory)
    assert again.load() == []
    slot = SlotKey(DeploymentName("m"), ReplicaIndex(0), StageId(1))
    assert again.highest_generation(slot) == Generation(REIGN, 7)
    other = SlotKey(DeploymentName("m"), ReplicaIndex(1), StageId(1))
    assert again.highest_generation(other) is None


def test_operation_comes_back_with_all_that_it_takes_to_go_on(directory):
    plan = OperationPlan(
        OperationId("op/7"),
        DeploymentName("m"),
        ReplicaIndex(0),
        Generation(REIGN, 7),
        WorkerId("w"),
        (
            StageStart(
                StageId(1),
                StageSpec(
                    "talker",
                    "a:B",
                    devices=(0,),
                    memory=MemoryNeed(utilization=0.1 + 0.2),
                    shard_count=2,
                    env=(("A", "1"), ("B", "=")),
                    stall_timeout_s=1.5,
                ),
                (DeviceId("cpu:0"),),
                shard_index=1,
                shard_count=2,
                restart_ages_s=(0.1, 2.0),
            ),
        ),
        stage_count=2,
        entry_stage_id=StageId(0),
        spec_revision=3,
        model=ModelInfo("m", "1", ("chat",)),
    )
    file = msgspec.structs.replace(
        operation(7, OperationState.STARTING),
        plan=plan,
        asked_stage_ids=(StageId(1),),
        peers=(Peer(StageId(0), "thinker", 0, InstanceId("i"), "10.0.0.1:1"),),
        claims=(StageClaims(StageId(1), (DeviceClaim(DeviceId("cpu:0"), 3),)),),
    )
    OperationStore(directory).write(file)

    (found,) = OperationStore(directory).load()

    # A repeated step is compared with it, so not even a float may differ.
    assert found == file
    assert found.can_go_on


def test_operation_of_an_earlier_release_is_read_and_cannot_go_on(directory):
    OperationStore(directory).write(operation(7))
    (path,) = directory.operations.glob("*.json")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: fields[name] for name in ("record", "stage_ids")}))

    (found,) = OperationStore(directory).load()

    assert found.record == operation(7).record
    assert not found.can_go_on


def test_attempts_are_counted_over_the_records_of_one_generation(directory):
    store = RecordStore(directory)
    first = record("i1")
    slot, generation = first.shard.slot, first.shard.generation
    assert store.next_attempt(slot, generation) == 0
    store.prepare(first, launch(directory, "i1"))
    assert store.next_attempt(slot, generation) == 1

    store.end(first)

    again = RecordStore(directory)
    again.load()
    assert again.next_attempt(slot, generation) == 1
    newer = Generation(generation.epoch, generation.n + 1)
    assert again.next_attempt(slot, newer) == 0


def test_generation_of_an_operation_counts_before_it_has_ended(directory):
    OperationStore(directory).write(operation(7))

    store = OperationStore(directory)
    store.load()

    slot = SlotKey(DeploymentName("m"), ReplicaIndex(0), StageId(0))
    assert store.highest_generation(slot) == Generation(REIGN, 7)


def test_damaged_operation_is_set_aside_alone(directory):
    store = OperationStore(directory)
    store.write(operation(1))
    store.write(operation(2))
    first, _ = sorted(directory.operations.glob("*.json"))
    first.write_text("[]")

    assert len(OperationStore(directory).load()) == 1


def test_what_is_none_of_ours_is_left_alone(directory):
    records, operations = RecordStore(directory), OperationStore(directory)
    records.prepare(record("i1"), launch(directory, "i1"))
    operations.write(operation(1))
    stray_file = directory.stages / "notes.txt"
    stray_file.touch()
    stray_folder = directory.operations / "folder.json"
    stray_folder.mkdir()

    assert len(RecordStore(directory).load()) == 1
    assert len(OperationStore(directory).load()) == 1
    assert stray_file.exists() and stray_folder.exists()


def test_generations_of_the_newest_slots_are_kept(directory):
    store = OperationStore(directory)
    slots = [
        SlotKey(DeploymentName(f"m{n}"), ReplicaIndex(0), StageId(0)) for n in range(KEPT_SLOTS + 5)
    ]
    for n, slot in enumerate(reversed(slots)):
        store.note_generation(slot, Generation(REIGN, n))

    store.remove(OperationId("any"))

    for it in (store, again := OperationStore(directory)):
        again.load()
        assert it.highest_generation(slots[0]) == Generation(REIGN, KEPT_SLOTS + 4)
        assert it.highest_generation(slots[KEPT_SLOTS - 1]) == Generation(REIGN, 5)
        assert it.highest_generation(slots[KEPT_SLOTS]) is None


def test_generations_are_written_only_when_they_have_changed(directory):
    store = OperationStore(directory)
    store.write(operation(7))
    store.remove(OperationId("op/7"))
    written = directory.generations_file.stat().st_mtime_ns

    store.remove(OperationId("op/7"))
    again = OperationStore(directory)
    again.load()
    again.remove(OperationId("op/7"))
    assert directory.generations_file.stat().st_mtime_ns == written

    again.write(operation(8))
    again.remove(OperationId("op/8"))
    assert directory.generations_file.stat().st_mtime_ns != written


# --- failures


def test_failure_is_spooled_once_and_leaves_when_it_is_settled(directory):
    failure = make_failure(
        WorkerId("w"),
        shard(phase=Phase.LOAD),
        "EXITED",
        "it ended",
        detected_by="pidfd",
        detect_time=1.0,
        last_log_lines=[str(it) for it in range(30)],
    )
    spool = FailureSpool(directory)
    spool.add(failure)
    spool.add(replace(failure, message="it is told otherwise"))
    assert failure.failure_id == failure_id_of(InstanceId("i1"), "EXITED")
    assert failure.last_log_lines == tuple(str(it) for it in range(10, 30))

    again = FailureSpool(directory)
    again.load()
    assert again.pending == (failure,)
    assert again.of_instance(InstanceId("i1")) == failure
    assert again.settle([failure.failure_id])
    assert not again.settle([failure.failure_id])

    third = FailureSpool(directory)
    third.load()
    assert third.pending == ()


# --- logs


def test_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_lines(log, 5) == []

    log.write_bytes(b"one\ntwo\n\xff\xfe\nunfinished")

    assert last_lines(log, 2) == ["\ufffd\ufffd", "unfinished"]
    assert last_lines(log, 10) == ["one", "two", "\ufffd\ufffd", "unfinished"]


def test_last_lines_of_a_long_log_are_read_from_its_end(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {it}\n" for it in range(200_000)))

    assert last_lines(log, 3) == ["line 199997", "line 199998", "line 199999"]


def test_of_a_line_that_is_drawn_over_itself_the_last_drawing_is_shown(tmp_path):
    log = tmp_path / "stage.log"
    bar = b"".join(b"\rloading %3d%%" % done for done in range(101))
    log.write_bytes(b"of Windows\r\n" + bar + b"\nthe next bar" + bar * 100)
    assert last_lines(log, 20) == ["of Windows", "loading 100%", "loading 100%"]


def test_line_that_never_ends_is_cut(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 5_000_000)

    (line,) = last_lines(log, 20)

    assert len(line) == LONGEST_LINE_BYTES


async def test_followed_log_gives_the_last_lines_and_what_comes(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthr")
    over = asyncio.Event()
    pieces = []
    async for lines in follow(log, 1, is_over=over.is_set):
        pieces.append(lines)
        if lines == ["two"]:
            with log.open("a") as more:
                more.write("ee\nfour\n")
        if "four" in lines:
            with log.open("a") as more:
                more.write("last words")
            over.set()

    assert pieces == [["two"], ["three", "four"], ["last words"]]


async def test_followed_log_that_was_emptied_is_read_from_its_beginning(tmp_path):
    log = tmp_path / "log"
    log.write_text("one of many words\n")
    lines = [
        line
        async for piece in _followed(log, at_first=lambda: log.write_text("new\n"))
        for line in piece
    ]
    assert lines == ["one of many words", "new"]


async def _followed(log, *, at_first):
    looks = 0

    def is_over() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            at_first()
        return looks > 3

    async for piece in follow(log, 9, is_over=is_over):
        yield piece


@pytest.mark.parametrize("ending", [b"\n", b""], ids=["finished", "unfinished"])
@pytest.mark.parametrize("count", [1, 2, 699, 700, 701, 10_000])
def test_exactly_the_last_lines_are_read_wherever_blocks_end(tmp_path, count, ending):
    log = tmp_path / "log"
    lines = [f"{it} ".ljust(it % 601, "x") for it in range(700)]  # 200 kB
    log.write_bytes("\n".join(lines).encode() + ending)

    assert last_lines(log, count) == lines[-count:]


async def test_many_long_lines_of_no_text_come_in_pieces_that_fit_into_messages(tmp_path):
    log = tmp_path / "log"
    log.write_bytes((b"\xff" * 50_000 + b"\n") * 400)

    pieces = [piece async for piece in tail(log, 10_000)]

    lines = [line for piece in pieces for line in piece]
    assert lines == ["\ufffd" * LONGEST_LINE_BYTES] * 400
    assert max(len("".join(piece).encode()) for piece in pieces) < 1_000_000


async def test_line_that_goes_on_is_cut_once_and_the_next_one_is_whole(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 500_000 + b"\nnext\n")

    followed = [line async for piece in follow(log, 9, is_over=lambda: True) for line in piece]

    assert followed == ["x" * LONGEST_LINE_BYTES, "next"]  # the first is too far behind
    assert last_lines(log, 1) == ["next"]


async def test_log_is_read_beside_the_event_loop(tmp_path, monkeypatch):
    """A block on a slow disk must not keep heartbeats waiting."""
    log = tmp_path / "log"
    log.write_text("one\n")
    loops_thread = threading.get_ident()
    readers: set[int] = set()
    opened = Path.open

    def noting(self, *args, **kwargs):
        readers.add(threading.get_ident())
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noting)
    assert [piece async for piece in follow(log, 9, is_over=lambda: True)] == [["one"]]
    assert [piece async for piece in tail(log, 9)] == [["one"]]

    assert readers and loops_thread not in readers


async def test_no_more_than_a_piece_of_a_long_log_is_in_memory(tmp_path):
    log = tmp_path / "log"
    log.write_bytes((b"x" * 8_000 + b"\n") * 4_000)  # 32 MB, half of it is asked for
    shown = 0
    tracemalloc.start()
    try:
        async for piece in tail(log, 2_000):
            shown += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert shown == 2_000
    assert peak < 2_000_000


@pytest.mark.parametrize(
    "identity", ["op-1", "a.b", "a/b", "..", "é" * 63, "🦙" * 60, "%2F", "a/b\0%." * 9]
)
def test_identity_becomes_a_file_name_that_says_it(tmp_path, identity):
    name = file_name(identity)

    (tmp_path / f"{name}.json.new").touch()
    assert unquote(name) == identity
    assert "/" not in name and name not in (".", "..")


def test_long_identities_become_different_file_names_that_file_systems_take(tmp_path):
    names = {file_name(letter + "🦙" * 127) for letter in "abc"}

    for name in names:
        (tmp_path / f"{name}.json.new").touch()
    assert len(names) == 3
