"""What `stages --local` reads of a state directory, and that reading changes nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.agent.damaged import DamagedRecords
from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.local_stages import LocalState, LocalWorker, StageChoice, read_workers
from stagekeeper.agent.operation_store import OperationFile, OperationStore
from stagekeeper.agent.records import RecordStore, StageRecord
from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.local_stopping import choices_from
from stagekeeper.cli.main import run
from stagekeeper.cli.text.local_stages import local_json, local_text
from stagekeeper.cli.text.tables import plain_lines
from stagekeeper.core.ids import (
    DeploymentName,
    Epoch,
    Generation,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import OperationRecord, ShardAddress, ShardRecord
from stagekeeper.core.states import OperationState, ShardState
from stagekeeper.host.process import ProcessIdentity, boot_id, identity_of
from stagekeeper.runtime.launch import INSTANCE_ENV, Launch
from tests.harness.processes import lock_held

Spawn = Callable[[str], ProcessIdentity]

# Nobody else on this host has them: all of its processes are looked at.
ONE, TWO = uuid.uuid4().hex, uuid.uuid4().hex


@pytest.fixture
def directory(tmp_path: Path) -> AgentDirectory:
    directory = AgentDirectory(tmp_path, WorkerId("w"))
    directory.create()
    return directory


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts processes that carry an instance id, each in its own session."""
    children = []

    def start(instance: str) -> ProcessIdentity:
        env = {"PATH": os.environ["PATH"], INSTANCE_ENV: instance}
        child = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
        children.append(child)
        identity = identity_of(child.pid)
        assert identity is not None
        return identity

    yield start
    for child in children:
        child.kill()
        child.wait()


def record(
    instance: str, process: ProcessIdentity | None = None, *, boot: str = "", **changes: Any
) -> StageRecord:
    fields: dict[str, Any] = {
        "deployment": DeploymentName("m"),
        "replica_index": ReplicaIndex(0),
        "stage_id": StageId(0),
        "stage_name": "thinker",
        "stage_count": 2,
        "shard_index": 0,
        "shard_count": 1,
        "generation": Generation(Epoch(1, "s"), 1),
        "operation_id": OperationId("op-1"),
        "instance_id": InstanceId(instance),
        "state": ShardState.READY,
        "committed": True,
        "addresses": (ShardAddress("stage", "grpc", "127.0.0.1:5"),),
        **changes,
    }
    return StageRecord(
        incarnation=1,
        boot_id=boot or boot_id(),
        shard=ShardRecord(**fields),
        control_socket="/tmp/none",
        stop_budget_s=10.0,
        pid=process.pid if process else 0,
        start_ticks=process.start_ticks if process else 0,
    )


def launch(instance: str) -> Launch:
    return Launch(
        instance_id=instance,
        deployment="m",
        replica_index=0,
        stage_id=0,
        stage_name="thinker",
        stage_count=2,
        entrypoint="a:B",
        control_socket="/tmp/none",
        run_dir="/tmp",
        cache_dir="/tmp",
    )


def keep(directory: AgentDirectory, *records: StageRecord) -> RecordStore:
    store = RecordStore(directory)
    for it in records:
        store.prepare(it, launch(it.instance_id))
    return store


def read(directory: AgentDirectory) -> LocalWorker:
    (worker,) = read_workers(directory.root.parent.parent)
    return worker


def state_of(directory: AgentDirectory) -> LocalState:
    (stage,) = read(directory).stages
    return stage.state


def test_living_stage_is_shown_with_what_it_holds(directory, spawn):
    process = spawn(ONE)
    keep(directory, record(ONE, process))

    worker = read(directory)

    (stage,) = worker.stages
    assert (worker.worker_id, worker.agent_pid) == ("w", None)
    assert (stage.state, stage.process, stage.others) == (LocalState.COMMITTED, process, ())
    assert stage.age_s is not None and stage.age_s < 60
    assert stage.memory_bytes
    assert stage.log_path == directory.run_dir(InstanceId(ONE)) / "stage.log"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"committed": False}, LocalState.UNCOMMITTED),
        ({"state": ShardState.STOPPING}, LocalState.STOPPING),
        ({"state": ShardState.FAILED}, LocalState.FAILED),
    ],
)
def test_state_is_the_recorded_one_while_the_process_lives(directory, spawn, changes, state):
    keep(directory, record(ONE, spawn(ONE), **changes))

    assert state_of(directory) is state


def test_stage_is_committed_when_its_operations_file_alone_says_so(directory, spawn):
    keep(directory, record(ONE, spawn(ONE), committed=False))
    operation = OperationRecord(
        OperationId("op-1"),
        DeploymentName("m"),
        ReplicaIndex(0),
        Generation(Epoch(1, "s"), 1),
        OperationState.COMMITTED,
    )
    OperationStore(directory).write(OperationFile(operation, (StageId(0),)))

    assert state_of(directory) is LocalState.COMMITTED


def test_pid_that_was_taken_again_is_not_taken_for_the_stage(directory, spawn):
    process = spawn(ONE)
    keep(
        directory,
        record(ONE, ProcessIdentity(process.pid, process.start_ticks - 1)),
    )

    (stage,) = read(directory).stages
    assert (stage.state, stage.process) == (LocalState.GONE, None)
    assert stage.others == (process,), "it carries the instance id, and is shown as left over"


def test_process_of_others_with_the_very_ticks_is_not_taken_for_the_stage(directory, spawn):
    keep(directory, record(ONE, spawn(TWO)))

    (stage,) = read(directory).stages
    assert (stage.state, stage.process, stage.others) == (LocalState.GONE, None, ())


def test_record_of_an_earlier_boot_is_gone(directory, spawn):
    keep(directory, record(ONE, spawn(TWO), boot="earlier"))

    assert state_of(directory) is LocalState.GONE


def test_process_of_an_intent_is_found_by_its_instance(directory, spawn):
    process = spawn(ONE)
    keep(directory, record(ONE, committed=False))

    (stage,) = read(directory).stages
    assert (stage.state, stage.process) == (LocalState.UNCOMMITTED, process)


def test_what_outlives_the_main_process_is_counted_and_told(directory, spawn):
    left = spawn(ONE)
    keep(directory, record(ONE, ProcessIdentity(2**22 - 1, 1)))

    worker = read(directory)

    (stage,) = worker.stages
    assert (stage.state, stage.others, stage.age_s) == (LocalState.GONE, (left,), None)
    assert stage.memory_bytes
    (note, *_) = local_text(directory.root, [worker]).notes
    assert f"its main process is gone, pid {left.pid} of it is left" in note


@pytest.mark.parametrize("name", ["record.json", "record.damaged"])
def test_damaged_record_is_shown_with_what_runs_and_what_to_do(directory, spawn, name):
    process = spawn(ONE)
    keep(directory, record(ONE, process))
    folder = directory.run_dir(InstanceId(ONE))
    (folder / "record.json").rename(folder / name)
    (folder / name).write_text("{")

    worker = read(directory)

    (damaged,) = worker.damaged
    assert worker.stages == ()
    assert damaged.processes == (process,)
    text = local_text(directory.root, [worker])
    (line,) = plain_lines(text.tables[0])[1:]
    assert line.startswith(f"m/0/thinker     w       {ONE[:8]}  {process.pid}")
    assert f"`kill {process.pid}`" in line
    assert "`stagekeeper stages --local --stop m/0/thinker`" in line
    (entry,) = local_json(directory.root, [worker])["workers"][0]["damaged"]
    assert (entry["deployment"], entry["stage"]) == ("m", "thinker")
    assert entry["pids"] == [process.pid]


def test_damaged_record_without_a_launch_file_is_shown_without_a_name(directory, spawn):
    process = spawn(ONE)
    keep(directory, record(ONE, process))
    for name in ("record.json", "launch.json"):
        (directory.run_dir(InstanceId(ONE)) / name).write_text("{")

    (damaged,) = read(directory).damaged

    assert (damaged.record.name, damaged.processes) == ("", (process,))


def test_reading_changes_nothing(directory, spawn):
    keep(directory, record(ONE, spawn(ONE)), record(TWO, stage_id=StageId(1)))
    (directory.run_dir(InstanceId(TWO)) / "record.json").write_text("{")
    (directory.stages / "empty").mkdir()
    (directory.stages / "file").touch()
    (directory.operations / "op.json").write_text("{")
    before = {path: path.stat().st_mtime_ns for path in directory.root.rglob("*")}

    read(directory)

    assert {path: path.stat().st_mtime_ns for path in directory.root.rglob("*")} == before


def test_agent_that_runs_is_shown_with_its_pid(directory):
    with lock_held(directory.lock_file) as pid:
        worker = read(directory)

    assert worker.agent_pid == pid
    assert f"its agent runs (pid {pid})" in local_text(directory.root, [worker]).headlines[1]
    assert read(directory).agent_pid is None


def test_one_worker_of_several_is_read_alone(directory, tmp_path):
    AgentDirectory(tmp_path, WorkerId("v")).create()

    assert [it.worker_id for it in read_workers(tmp_path)] == ["v", "w"]
    assert [it.worker_id for it in read_workers(tmp_path, WorkerId("w"))] == ["w"]
    assert read_workers(tmp_path, WorkerId("x")) == []
    assert read_workers(tmp_path / "nowhere") == []


def test_nothing_at_all_is_said_to_be_nothing(tmp_path):
    text = local_text(tmp_path, [])

    assert text.headlines == (f"no agent has kept anything in {tmp_path}",)


def test_programs_get_every_key(directory, spawn):
    process = spawn(ONE)
    keep(directory, record(ONE, process))

    document = local_json(directory.root, [read(directory)])

    (worker,) = document["workers"]
    (stage,) = worker["stages"]
    assert (worker["agent_running"], worker["agent_pid"]) == (False, None)
    assert (stage["state"], stage["alive"], stage["pid"]) == ("COMMITTED", True, process.pid)
    assert stage["addresses"] == [{"name": "stage", "url": "127.0.0.1:5"}]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("m", StageChoice("m")),
        ("m/1", StageChoice("m", 1)),
        ("m/1/thinker", StageChoice("m", 1, "thinker")),
    ],
)
def test_name_of_what_is_to_be_stopped_is_read(text, choice):
    assert choices_from([text], stop_all=False, budget_s=None) == [choice]


@pytest.mark.parametrize("text", ["", "/", "m/", "m/x", "m/0/", "m//a", "m/0/a/b", "/0", "m/-1"])
def test_name_that_cannot_be_meant_is_a_usage_error(text):
    with pytest.raises(CliError) as raised:
        choices_from([text], stop_all=False, budget_s=None)

    assert raised.value.code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("names", "stop_all", "budget_s"),
    [(["m"], True, None), ([], False, 1.0), (["m"], False, -1.0), ([], True, float("nan"))],
)
def test_flags_that_contradict_each_other_are_a_usage_error(names, stop_all, budget_s):
    with pytest.raises(CliError) as raised:
        choices_from(names, stop_all=stop_all, budget_s=budget_s)

    assert raised.value.code is ExitCode.USAGE


def test_choice_takes_a_stage_by_name_or_id():
    shard = record(ONE, stage_id=StageId(1)).shard

    for choice in (StageChoice(), StageChoice("m"), StageChoice("m", 0, "1")):
        assert choice.takes(shard)
    for choice in (StageChoice("n"), StageChoice("m", 1), StageChoice("m", 0, "0")):
        assert not choice.takes(shard)


def test_damaged_record_is_settled_once_nothing_of_it_runs(directory, spawn):
    process = spawn(ONE)
    keep(directory, record(ONE, process))
    (directory.run_dir(InstanceId(ONE)) / "record.json").write_text("{")
    store = RecordStore(directory)
    assert store.load() == []
    changes = []
    damaged = DamagedRecords(store.damaged, store.end_damaged, lambda: changes.append(1))

    damaged.look()
    (note,) = damaged.notes()
    assert f"pid {process.pid} is left alone" in note
    damaged.look()
    assert len(changes) == 1, "nothing has changed"
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    damaged.look()

    (note,) = damaged.notes()
    assert "no process of it is left" in note
    assert len(changes) == 2
    assert read(directory).damaged == ()
    again = RecordStore(directory)
    again.load()
    assert again.damaged == []
    assert again.instances_of(record(ONE).shard.slot) == [ONE], "its log is kept"


def test_stop_that_the_system_refuses_is_said_to_be_that_and_no_bug(directory, capsys, monkeypatch):
    # It is for a whole process, and this one has other tests.
    monkeypatch.setattr("stagekeeper.cli.log_output.configure_logs", lambda level: None)
    directory.operations.rmdir()
    directory.operations.touch()
    state_dir = directory.root.parent.parent

    code = run(["stages", "--local", "--stop-all", f"--state-dir={state_dir}"])

    assert code == ExitCode.FAILED
    assert str(directory.operations) in capsys.readouterr().err
