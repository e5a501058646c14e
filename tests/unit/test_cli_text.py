"""Text that verbs print: amounts, tables, progress, status, notices."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.cli.calling import read_argument
from stagekeeper.cli.deploying import deploy_failed
from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.text.amounts import count, seconds, size
from stagekeeper.cli.text.failures import failure_lines, remote_tracebacks
from stagekeeper.cli.text.lines import first_line, visible
from stagekeeper.cli.text.progress import QUIET_S, CreationProgress
from stagekeeper.cli.text.status import status_text
from stagekeeper.cli.text.status_json import status_json
from stagekeeper.cli.text.tables import Table, plain_lines, style_of, terminal_lines, write_table
from stagekeeper.cli.up.child import Ended, Ready, describe_exit, parse_facts
from stagekeeper.cli.up.default_devices import default_devices, ram_bytes
from stagekeeper.cli.up.notices import DeploymentNotices, child_notice
from stagekeeper.client import DeployFailed
from stagekeeper.client.view import why_none_is_ready
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

GIB = 2**30


class FakeTime:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (int(1.5 * GIB), "1.5 GiB"),
        (4 * GIB, "4 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_are_read_in_one_glance(value, text):
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (12.9, "12 s"),
        (60, "1 min 0 s"),
        (3725, "1 h 2 min"),
    ],
)
def test_durations_are_read_in_one_glance(value, text):
    assert seconds(value) == text


def test_counts_agree_with_their_noun():
    assert (count(1, "replica"), count(0, "replica")) == ("1 replica", "0 replicas")


def test_plain_table_has_a_line_a_row_and_no_empty_cell():
    lines = plain_lines(Table(("NAME", "WHY"), (("a", ""), ("long-name", "two\nlines"))))

    assert lines == ["NAME       WHY", "a          -", "long-name  two; lines"]


def test_terminal_wraps_the_last_cell_in_its_own_column():
    table = Table(("NAME", "WHY"), (("a", "word " * 20), ("bb", "")))

    lines = terminal_lines(table, 60)

    assert lines[0] == "NAME  WHY"
    assert lines[1].startswith("a     word word")
    assert lines[2].startswith("      word")
    assert lines[-1] == "bb"
    assert all(len(line) <= 60 for line in lines)


def test_narrow_terminal_has_the_last_cell_below_and_cuts_no_name():
    name = "a-very-long-name-that-leaves-no-room"
    lines = terminal_lines(Table(("NAME", "WHY"), ((name, "first\nsecond"),)), 50)

    assert lines[1:] == [name, "    first", "    second"]


def test_table_into_a_pipe_has_no_colour_codes():
    out = io.StringIO()

    write_table(Table(("STATE",), (("READY",), ("FAILED",))), out)

    assert out.getvalue() == "STATE\nREADY\nFAILED\n"


def test_states_have_colours_by_their_first_word():
    assert style_of("READY") == "green"
    assert style_of("STARTING(LOAD)") == "yellow"
    assert style_of("FAILED (why)") == "bold red"
    assert style_of("agent-0") == ""


def test_control_characters_of_others_are_shown_as_text():
    evil = "\x1b[31mred\x07\x9b2J\u202e"
    shown = r"\x1b[31mred\x07\x9b2J\u202e"
    table = Table(("WHY",), ((evil,),))
    assert visible("a\tb\n" + evil) == "a\tb\n" + shown
    assert first_line(evil) == shown
    assert plain_lines(table)[1] == shown
    assert terminal_lines(table, 80)[1].strip() == shown


def progress(
    *,
    stage_id=0,
    state=types.SHARD_STATE_STARTING,
    phase=types.PHASE_LOAD,
    done=0,
    worker_id="agent-0",
):
    return types.StageProgress(
        replica_index=1,
        stage_id=stage_id,
        stage_name=f"stage{stage_id}",
        worker_id=worker_id,
        state=state,
        phase=phase,
        progress=types.Progress(done=done, total=40 if done else 0, note="reading" if done else ""),
    )


def test_new_phase_is_a_line_and_a_repeat_is_none():
    clock = FakeTime()
    creation = CreationProgress(clock)
    clock.now += 2.5

    assert creation.feed(progress()) == "[2.5 s] 1/stage0 on agent-0: STARTING(LOAD)"
    assert creation.feed(progress()) == ""
    assert creation.feed(progress(phase=types.PHASE_MEASURE)).endswith("STARTING(MEASURE)")
    assert creation.feed(progress(state=types.SHARD_STATE_READY, phase=0)).endswith(": READY")


def test_shards_of_one_stage_have_a_row_each_and_a_line_for_each_phase():
    creation = CreationProgress(FakeTime())
    told = [
        line
        for done in range(5)
        for worker_id in ("n1", "n2")
        if (line := creation.feed(progress(done=done, worker_id=worker_id)))
    ]
    assert [line.split(" on ")[1] for line in told] == [
        "n1: STARTING(LOAD)",
        "n2: STARTING(LOAD)",
    ]
    assert [row.worker_id for row in creation.rows] == ["n1", "n2"]


def test_counting_on_is_told_now_and_then():
    clock = FakeTime()
    creation = CreationProgress(clock)
    creation.feed(progress())

    clock.now += QUIET_S - 0.001
    assert creation.feed(progress(done=1)) == ""
    clock.now += 0.001
    assert creation.feed(progress(done=2)).endswith("STARTING(LOAD) 2/40 reading")
    assert creation.feed(progress(done=3)) == ""


def test_what_came_too_soon_is_told_when_nothing_else_comes():
    clock = FakeTime()
    creation = CreationProgress(clock)
    creation.feed(progress())
    assert creation.feed(progress(done=7)) == ""
    assert creation.kept_back() == []

    clock.now += QUIET_S
    (line,) = creation.kept_back()
    assert line.endswith("STARTING(LOAD) 7/40 reading")
    clock.now += QUIET_S
    assert creation.kept_back() == []


def test_standstill_is_not_told_again():
    clock = FakeTime()
    creation = CreationProgress(clock)
    creation.feed(progress(done=1))

    clock.now += 10 * QUIET_S

    assert creation.feed(progress(done=1)) == ""


def test_rows_stand_in_the_order_of_stages():
    creation = CreationProgress(FakeTime())
    creation.feed(progress(stage_id=2))
    creation.feed(progress(stage_id=0))

    assert [row.stage for row in creation.rows] == ["stage0", "stage2"]


def test_age_counts_from_the_state_and_not_from_the_last_message():
    clock = FakeTime()
    creation = CreationProgress(clock)
    creation.feed(progress())
    clock.now += 3
    creation.feed(progress(done=7))

    assert creation.age_s(creation.rows[0]) == 3


def test_age_of_a_stage_that_is_ready_is_how_long_it_took():
    clock = FakeTime()
    creation = CreationProgress(clock)
    clock.now += 4
    creation.feed(progress(state=types.SHARD_STATE_READY, phase=0))
    clock.now += 100

    assert creation.age_s(creation.rows[0]) == 4


def cluster():
    """One worker that is silent, one deployment with a replica that misses a stage."""
    worker = pb2.Worker(
        worker_id="agent-0",
        state=types.WORKER_STATE_UNREACHABLE,
        silent_for_s=12,
        agent_address="127.0.0.1:4",
        agent_reachable=False,
        shard_count=1,
        devices=[
            types.Device(device_id="cpu:0", total_bytes=4 * GIB, reserved_bytes=GIB, used_bytes=7)
        ],
        outlive_reason="it is process 1 of a container",
        notes=["the record of pid 9 is damaged"],
    )
    record = types.ShardRecord(
        stage_name="encoder",
        stage_count=2,
        shard_count=1,
        state=types.SHARD_STATE_READY,
        pid=77,
        committed=True,
        instance_id="i-1",
        addresses=[types.ShardAddress(name="stage", url="127.0.0.1:5")],
        devices=[types.DeviceClaim(device_id="cpu:0", reserved_bytes=GIB)],
        endpoints=[types.EndpointInfo(name="encode", idempotent=True)],
    )
    replica = pb2.Replica(
        state=types.REPLICA_STATE_PARTIAL,
        ready_shard_count=1,
        shard_count=2,
        reason="stage ranker is missing",
        next_action="deploy again",
        shards=[
            pb2.RoutedShard(
                record=record,
                worker_id="agent-0",
                worker_state=types.WORKER_STATE_UNREACHABLE,
            )
        ],
    )
    deployment = pb2.Deployment(
        name="search",
        spec=types.DeploymentSpec(name="search", replicas=2),
        spec_revision=1,
        state=types.DEPLOYMENT_STATE_FAILED,
        reason="no replica is READY",
        durable=True,
        replicas=[replica],
    )
    epoch = types.Epoch(number=3, supervisor_id="1f0c2a9b00")
    workers = pb2.ListWorkersResponse(
        workers=[worker],
        complete=False,
        epoch=epoch,
        mode=types.MODE_HOLD,
        hold_reason=types.HOLD_REASON_RECOVERING,
    )
    deployments = pb2.ListDeploymentsResponse(deployments=[deployment], complete=False)
    return workers, deployments


def test_status_says_why_an_inventory_is_unknown_and_what_was_read_last():
    workers, deployments = cluster()
    workers.workers[0].inventory_unknown = True
    workers.workers[0].inventory_reason = "nvmlInit: Driver Not Loaded"
    workers.workers[0].devices.add(device_id="GPU-1", reserved_bytes=GIB)

    text = status_text("127.0.0.1:7070", workers, deployments)

    shown = "\n".join(line for table in text.tables for line in plain_lines(table))
    for expected in (
        "inventory unknown: nvmlInit: Driver Not Loaded; last read: 2 devices",
        "cpu:0   agent-0  4 GiB    1 GiB     7 B      unknown  as last read; search/0/encoder",
        "GPU-1   agent-0  unknown  1 GiB     unknown  unknown  as last read",
    ):
        assert expected in shown


def gpus():
    """A sick card that is shared, one of which nobody can tell who uses it, and an idle one."""
    workers, deployments = cluster()
    (worker,) = workers.workers
    del worker.devices[:]
    worker.devices.add(
        device_id="GPU-1",
        total_bytes=80 * GIB,
        reserved_bytes=GIB,
        used_bytes=4 * GIB,
        sick_reason="XID 79 (it has fallen off the bus)",
        foreign=[
            types.ForeignHolder(pid=4711, name="python", memory_bytes=2 * GIB),
            types.ForeignHolder(name="others (pids unknown)", memory_bytes=GIB),
            types.ForeignHolder(
                pid=5, name="m replica 0 stage a", memory_bytes=GIB, worker_id="w2"
            ),
        ],
    )
    worker.devices.add(device_id="MIG-2", total_bytes=20 * GIB)
    worker.devices.add(device_id="GPU-3", total_bytes=80 * GIB, used_bytes=0)
    record = deployments.deployments[0].replicas[0].shards[0].record
    record.devices[0].device_id = "GPU-1"
    record.devices[0].used_bytes = 2**29
    return workers, deployments


def test_status_has_each_card_with_what_is_reserved_measured_foreign_and_by_whom():
    workers, deployments = gpus()

    text = status_text("127.0.0.1:7070", workers, deployments)

    assert plain_lines(text.tables[0])[1].split("  ")[-1].startswith("3 devices, 1 sick; silent")
    assert plain_lines(text.tables[1]) == [
        "DEVICE  WORKER   TOTAL   RESERVED  USED     FOREIGN  BY WHOM",
        "GPU-1   agent-0  80 GiB  1 GiB     4 GiB    4 GiB    "
        "SICK: XID 79 (it has fallen off the bus); search/0/encoder: 1 GiB, uses 512 MiB; "
        "pid 4711 (python): 2 GiB; others (pids unknown): 1 GiB; "
        "pid 5 (m replica 0 stage a): 1 GiB",
        "MIG-2   agent-0  20 GiB  0 B       unknown  unknown  -",
        "GPU-3   agent-0  80 GiB  0 B       0 B      0 B      -",
    ]
    # In a terminal no line is longer than it, for all that is to be said of one card.
    lines = terminal_lines(text.tables[1], 100)
    assert max(map(len, lines)) <= 100
    assert len(lines) == 8


def test_status_for_programs_has_the_same_of_each_card():
    workers, deployments = gpus()

    shown = json.loads(json.dumps(status_json("e", workers, deployments, [])))

    sick, unknown, idle = shown["workers"][0]["devices"]
    assert sick["sick_reason"] == "XID 79 (it has fallen off the bus)"
    assert (sick["reserved_bytes"], sick["used_bytes"]) == (GIB, 4 * GIB)
    assert sick["foreign_bytes"] == 4 * GIB
    assert sick["stages"] == [
        {
            "deployment": "search",
            "replica_index": 0,
            "stage": "encoder",
            "shard_index": 0,
            "reserved_bytes": GIB,
            "used_bytes": 2**29,
        }
    ]
    assert sick["foreign"][0] == {
        "pid": 4711,
        "name": "python",
        "memory_bytes": 2 * GIB,
        "worker_id": None,
    }
    assert (sick["foreign"][1]["pid"], sick["foreign"][2]["worker_id"]) == (None, "w2")
    assert (unknown["used_bytes"], unknown["foreign"]) == (None, [])
    assert (idle["sick_reason"], idle["used_bytes"]) == (None, 0)


def test_status_shows_state_reason_next_action_and_pids():
    workers, deployments = cluster()

    text = status_text("127.0.0.1:7070", workers, deployments)

    assert text.headline == "supervisor 127.0.0.1:7070  HOLD(RECOVERING)  epoch 3/1f0c2a9b"
    shown = "\n".join(line for table in text.tables for line in plain_lines(table))
    for expected in (
        "silent for 12 s",
        "AGENT_UNREACHABLE at 127.0.0.1:4",
        "the record of pid 9 is damaged",
        "cpu:0   agent-0  4 GiB  1 GiB     7 B   0 B      search/0/encoder: 1 GiB",
        "search/0  PARTIAL  1/2",
        "stage ranker is missing; next: deploy again",
        "search/0/encoder",
        " 77 ",
        "its worker is UNREACHABLE",
        "0/2",
    ):
        assert expected in shown
    assert any("have not all come back" in note for note in text.notes)
    assert any("it is process 1 of a container" in note for note in text.notes)


def test_status_says_how_far_a_stage_is_that_starts():
    workers, deployments = cluster()
    record = deployments.deployments[0].replicas[0].shards[0].record
    record.progress.CopyFrom(types.Progress(done=3, total=8, note="GET /health answered 503"))

    def shown() -> str:
        tables = status_text("127.0.0.1:7070", workers, deployments).tables
        return "\n".join(line for table in tables for line in plain_lines(table))

    assert "answered 503" not in shown()
    record.state, record.phase = types.SHARD_STATE_STARTING, types.PHASE_LOAD
    assert "3 of 8: GET /health answered 503" in shown()


RAISED = "stage bad raised in LOAD: RuntimeError: no weights"


def failed(*reasons, next_action="deploy again to start it", together=""):
    told = " | ".join(f"replica {n} FAILED: {reason}" for n, reason in enumerate(reasons))
    return pb2.Deployment(
        name="m",
        spec=types.DeploymentSpec(name="m", replicas=len(reasons)),
        state=types.DEPLOYMENT_STATE_FAILED,
        reason=together or f"0 of 2 replicas READY: {told}",
        durable=True,
        replicas=[
            pb2.Replica(
                replica_index=n,
                state=types.REPLICA_STATE_FAILED,
                reason=reason,
                next_action=next_action,
            )
            for n, reason in enumerate(reasons)
        ],
    )


@pytest.mark.parametrize(
    ("deployment", "note", "replica"),
    [
        (
            failed(f"m replica 0: {RAISED}", f"m replica 1: {RAISED}"),
            "0 of 2 replicas READY: replica 0 FAILED | replica 1 FAILED",
            f"m replica 0: {RAISED}; next: deploy again to start it",
        ),
        (failed("waiting", together="waiting"), "its replicas say why", "waiting; next: deploy"),
        (failed("w for a, b", next_action="w for a, b to come"), "FAILED", "next: w for a, b to"),
    ],
)
def test_status_says_a_reason_once(deployment, note, replica):
    deployments = pb2.ListDeploymentsResponse(deployments=[deployment], complete=True)
    workers = pb2.ListWorkersResponse(complete=True, mode=types.MODE_NORMAL)

    tables = status_text("e:1", workers, deployments).tables
    shown = "\n".join(line for table in tables for line in plain_lines(table))

    assert note in shown
    assert replica in shown
    for reason in (it.reason for it in deployment.replicas):
        assert shown.count(reason) == 1


def test_call_of_what_failed_says_each_reason_once():
    reasons = (f"m replica 0: {RAISED}", f"m replica 1: {RAISED}")

    told = why_none_is_ready(failed(*reasons))

    assert [told.count(reason) for reason in reasons] == [1, 1]
    assert told.endswith("; deploy again to start it")
    waits = failed("waiting for a", next_action="waiting for a", together="1 missing")
    assert why_none_is_ready(waits).count("waiting for a") == 1


def test_status_of_nothing_says_what_to_do():
    text = status_text(
        "127.0.0.1:7070",
        pb2.ListWorkersResponse(complete=True, mode=types.MODE_NORMAL),
        pb2.ListDeploymentsResponse(complete=True),
    )

    assert text.tables == ()
    assert any("stagekeeper agent" in note for note in text.notes)


def test_status_as_json_keeps_its_keys_and_says_null_for_unknown():
    workers, deployments = cluster()
    failure = types.Failure(failure_id="f", kind=types.FAILURE_KIND_EXITED, message="it ended")

    document = json.loads(json.dumps(status_json("e:1", workers, deployments, [failure])))

    assert document["supervisor"] == {
        "endpoint": "e:1",
        "epoch": 3,
        "supervisor_id": "1f0c2a9b00",
        "mode": "HOLD",
        "hold_reason": "RECOVERING",
        "complete": False,
        "registration_count": 0,
    }
    assert document["workers"][0]["state"] == "UNREACHABLE"
    assert document["workers"][0]["agent_reachable"] is False
    deployment = document["deployments"][0]
    assert deployment["replicas_wanted"] == 2
    stage = deployment["replicas"][0]["stages"][0]
    assert (stage["stage"], stage["pid"], stage["memory_bytes"]) == ("encoder", 77, None)
    assert stage["addresses"] == [{"name": "stage", "url": "127.0.0.1:5"}]
    assert document["failures"][0]["kind"] == "EXITED"
    assert document["failures"][0]["exit_code"] is None


def test_json_of_a_normal_supervisor_has_no_hold_reason():
    workers = pb2.ListWorkersResponse(complete=True, mode=types.MODE_NORMAL)
    document = status_json("e:1", workers, pb2.ListDeploymentsResponse(complete=True), [])

    assert document["supervisor"]["mode"] == "NORMAL"
    assert document["supervisor"]["hold_reason"] is None
    assert document["supervisor"]["complete"] is True


def test_failed_replica_is_told_with_its_log_and_its_rollback():
    failure = types.Failure(
        origin=types.FailureOrigin(stage_name="words", phase=types.PHASE_LOAD),
        exit=types.ExitInfo(code=1),
        last_log_lines=[f"line {n}" for n in range(30)],
        remote_traceback="Traceback: deep",
    )
    replica = pb2.ReplicaFailure(
        replica_index=1,
        worker_id="agent-1",
        message="stage words failed in LOAD",
        failure=failure,
        rollback=[
            types.RollbackEntry(
                stage_id=0,
                stage_name="words",
                worker_id="agent-1",
                was=types.SHARD_STATE_STARTING,
                phase=types.PHASE_LOAD,
                cleaned=True,
                ending=types.ROLLBACK_ENDING_KILLED,
                duration_s=0.3,
                memory_before_bytes=3 * 2**30,
                memory_after_bytes=2**30,
            ),
            types.RollbackEntry(stage_id=1, cleaned=True, duration_s=0.2),
            types.RollbackEntry(stage_id=2, cleaned=False, error="it does not die"),
        ],
    )

    lines = failure_lines([replica])

    assert lines[0] == "stage words failed in LOAD"
    assert "    | line 29" in lines
    assert "    | line 10" in lines
    assert "    | line 9" not in lines
    assert (
        "  rolled back: words on agent-1, STARTING(LOAD): killed, gone in 0.3 s, "
        "its cards 3 GiB -> 1 GiB" in lines
    )
    assert "  rolled back: stage 1: gone in 0.2 s" in lines
    assert "  rolled back: stage 2: NOT stopped: it does not die" in lines
    assert "Traceback: deep" in remote_tracebacks([replica])


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("stage a failed in LOAD", "mend the cause and deploy again"),
        ("replica 0 was undone: its agent was asked to end", ": deploy again"),
    ],
)
def test_start_that_an_ending_agent_undid_has_no_cause_to_mend(why, said):
    error = DeployFailed(
        "it failed", deployment=pb2.Deployment(name="m"), failures=[pb2.ReplicaFailure(message=why)]
    )
    assert said in deploy_failed(error, "mend the cause and deploy again").message


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (None, ((), {})),
        ('{"name": "Ada"}', ((), {"name": "Ada"})),
        ("[1, 2]", (([1, 2],), {})),
        ('"hello"', (("hello",), {})),
        ("null", ((None,), {})),
    ],
)
def test_json_object_is_keywords_and_anything_else_one_argument(text, arguments):
    assert read_argument(text) == arguments


def test_argument_can_come_from_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"a": 1}\n'))

    assert read_argument("-") == ((), {"a": 1})


def test_bare_word_is_refused_with_how_to_quote_it():
    with pytest.raises(CliError, match="own quotes") as refused:
        read_argument("hello")

    assert refused.value.code is ExitCode.USAGE


def test_ready_line_is_read_whatever_its_values_hold():
    assert parse_facts(" endpoint=127.0.0.1:1 state=/a dir/with spaces epoch=3/ab") == {
        "endpoint": "127.0.0.1:1",
        "state": "/a dir/with spaces",
        "epoch": "3/ab",
    }
    assert parse_facts("") == {}


def test_exits_are_named():
    assert describe_exit(0) == "exit code 0"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-200) == "killed by signal 200"


def test_notices_of_children_name_pid_address_and_what_was_taken_over():
    ready = Ready("agent-0", 42, {"address": "127.0.0.1:9", "adopted": "3"}, is_first=True)
    assert child_notice(ready) == (
        "agent-0: ready at 127.0.0.1:9 (pid 42), took over 3 running stages"
    )
    ended = Ended("supervisor", "killed by SIGKILL", 0.2, was_ready=True)
    assert child_notice(ended) == ("supervisor: ended (killed by SIGKILL); starting again in 0.2 s")


def change(kind, state, replica_state):
    return pb2.WatchDeploymentsResponse(
        kind=kind,
        deployment=pb2.Deployment(
            name="search",
            state=state,
            reason="why",
            replicas=[pb2.Replica(replica_index=0, state=replica_state, reason="because")],
        ),
    )


def workers_are_back(kind, *, complete=True):
    return pb2.WatchDeploymentsResponse(kind=kind, complete=complete)


@pytest.mark.parametrize("are_all_back", [True, False])
def test_restart_of_the_supervisor_is_one_line_and_what_is_different_after_it(are_all_back):
    notices = DeploymentNotices()
    ready = (types.DEPLOYMENT_STATE_READY, types.REPLICA_STATE_READY)
    missing = (types.DEPLOYMENT_STATE_DEGRADED, types.REPLICA_STATE_PENDING)
    for told in (
        change(pb2.CHANGE_KIND_SNAPSHOT, *ready),
        workers_are_back(pb2.CHANGE_KIND_SYNCED),
    ):
        assert notices.of(told) == []

    assert notices.of(change(pb2.CHANGE_KIND_SNAPSHOT, *missing)) == []
    synced = workers_are_back(pb2.CHANGE_KIND_SYNCED, complete=False)
    assert notices.of(synced) == ["supervisor is back, waiting for workers"]
    assert notices.of(workers_are_back(pb2.CHANGE_KIND_BOOKMARK, complete=False)) == []
    after = change(pb2.CHANGE_KIND_MODIFIED, *(ready if are_all_back else missing))
    assert notices.of(after) == []

    assert notices.of(workers_are_back(pb2.CHANGE_KIND_BOOKMARK)) == (
        [] if are_all_back else ["search: DEGRADED (why)", "search/0: PENDING (because)"]
    )
    assert notices.of(after) == []


def test_changes_are_told_once_and_a_first_sight_not_at_all():
    notices = DeploymentNotices()
    ready = change(
        pb2.CHANGE_KIND_SNAPSHOT, types.DEPLOYMENT_STATE_READY, types.REPLICA_STATE_READY
    )
    failed = change(
        pb2.CHANGE_KIND_MODIFIED, types.DEPLOYMENT_STATE_FAILED, types.REPLICA_STATE_FAILED
    )

    assert notices.of(ready) == []
    assert notices.of(workers_are_back(pb2.CHANGE_KIND_SYNCED)) == []
    assert notices.of(failed) == ["search: FAILED (why)", "search/0: FAILED (because)"]
    assert notices.of(failed) == []
    assert notices.of(pb2.WatchDeploymentsResponse(kind=pb2.CHANGE_KIND_BOOKMARK)) == []


@pytest.mark.parametrize(("agents", "each"), [(1, "3072MiB"), (2, "1536MiB")])
def test_default_slices_share_three_quarters_of_the_ram(agents, each):
    assert default_devices(agents, 8 * GIB, has_gpus=False) == (f"cpu:0={each}", f"cpu:1={each}")


def test_tiny_machine_still_gets_slices():
    assert default_devices(8, GIB, has_gpus=False) == ("cpu:0=256MiB", "cpu:1=256MiB")


def test_limit_of_a_container_counts_where_it_is_less(tmp_path):
    limit, unlimited = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("1048576\n")
    unlimited.write_text("max\n")

    assert ram_bytes((unlimited, limit, tmp_path / "missing")) == 1048576
    assert ram_bytes((unlimited,)) > 1048576


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item)


def test_every_key_of_the_json_status_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    workers, deployments = cluster()
    document = status_json("e:1", workers, deployments, [types.Failure(failure_id="f")])

    words = set(re.findall(r"\w+", page.partition("## `status --output json`")[2]))

    assert set(keys_of(document)) <= words
