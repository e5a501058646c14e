"""`describe` and `events` as text and as JSON: the worst first, nothing said twice, 80 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from stagekeeper.cli.text.describe import Answers, describe_blocks
from stagekeeper.cli.text.describe_json import describe_json
from stagekeeper.cli.text.describe_view import description_lines
from stagekeeper.cli.text.events import (
    GAPS,
    event_json,
    plain_line,
    subject_of,
    terminal_lines,
)
from stagekeeper.cli.text.times import clock_text, since_text, utc_text
from stagekeeper.client import Gap
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

NOW = 1_700_000_000.0
GIB = 2**30


def ago(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(NOW - seconds), nanos=123_000_000)


def routed(stage: str, *, stage_id: int = 0, **changes: Any) -> pb2.RoutedShard:
    worker_state = changes.pop("worker_state", types.WORKER_STATE_ALIVE)
    fields: dict[str, Any] = {
        "deployment": "omni",
        "stage_id": stage_id,
        "stage_name": stage,
        "stage_count": 2,
        "shard_count": 1,
        "committed": True,
        "state": types.SHARD_STATE_READY,
        "instance_id": "0123456789abcdef",
        "pid": 4242,
        "create_time": ago(7_500),
        "ready_time": ago(7_400),
        "memory_bytes": 3 * GIB,
        "devices": [types.DeviceClaim(device_id="GPU-1", reserved_bytes=4 * GIB)],
        "addresses": [types.ShardAddress(name="stage", url="127.0.0.1:5000")],
        **changes,
    }
    record = types.ShardRecord(**fields)
    return pb2.RoutedShard(record=record, worker_id="node-1", worker_state=worker_state)


def replica(index: int = 0, *shards: pb2.RoutedShard, **changes: Any) -> pb2.Replica:
    fields: dict[str, Any] = {
        "replica_index": index,
        "state": types.REPLICA_STATE_READY,
        "ready_shard_count": 2,
        "shard_count": 2,
        "shards": shards or [routed("thinker"), routed("talker", stage_id=1)],
        **changes,
    }
    return pb2.Replica(**fields)


def stage(name: str, devices: list[int], **need: Any) -> types.StageSpec:
    memory = types.MemoryNeed(**need) if need else None
    return types.StageSpec(
        name=name, entrypoint="omni:Stage", devices=devices, memory=memory, shard_count=1
    )


SPEC = types.DeploymentSpec(
    name="omni",
    replicas=2,
    entry="thinker",
    model=types.ModelInfo(name="Omni", version="30B", abilities=["chat", "audio"]),
    stages=[
        stage("thinker", [0], utilization=0.9, reserve_bytes=2 * GIB),
        stage("talker", [1], bytes=12 * GIB),
        stage("code2wav", [1], utilization=0.1),
        stage("words", []),
    ],
)


def answers(*replicas: pb2.Replica, **changes: Any) -> Answers:
    workers = changes.pop("workers", None) or pb2.ListWorkersResponse(
        complete=True,
        mode=types.MODE_NORMAL,
        workers=[
            pb2.Worker(
                worker_id="node-1",
                state=types.WORKER_STATE_ALIVE,
                incarnation=1,
                agent_address="127.0.0.1:9",
            ),
            pb2.Worker(worker_id="other", state=types.WORKER_STATE_ALIVE, incarnation=1),
        ],
    )
    failures, events = changes.pop("failures", []), changes.pop("events", [])
    fields: dict[str, Any] = {
        "name": "omni",
        "state": types.DEPLOYMENT_STATE_READY,
        "spec": SPEC,
        "spec_revision": 1,
        "durable": True,
        "create_time": ago(100_000),
        "state_time": ago(62),
        "replicas": replicas or [replica()],
        **changes,
    }
    return Answers(pb2.Deployment(**fields), workers, failures, events)


def text_of(given: Answers, columns: int | None = 80) -> str:
    lines = description_lines(describe_blocks(given, NOW), given.events, NOW, columns)
    return "\n".join(lines)


DEAD = "stage talker (pid 77) was ended by SIGKILL"
FAILURE = types.Failure(
    failure_id="f1",
    message=DEAD,
    origin=types.FailureOrigin(
        worker_id="node-1", replica_index=1, stage_name="talker", stage_id=1
    ),
    detect_time=ago(62),
    exit=types.ExitInfo(signal=9),
    last_log_lines=["loading", "", "out of luck"],
)


def dead() -> Answers:
    reason = f"1 of 2 shards READY: stage 1 (talker) on worker node-1 FAILED: {DEAD}"
    failed = routed(
        "talker", stage_id=1, state=types.SHARD_STATE_FAILED, state_reason=DEAD, pid=0,
        failure_id="f1",
    )  # fmt: skip
    broken = replica(
        1,
        routed("thinker"),
        failed,
        state=types.REPLICA_STATE_FAILED,
        ready_shard_count=1,
        reason=reason,
        next_action="deploy again: what is left of it is stopped",
        state_time=ago(62),
    )
    return answers(
        replica(0),
        broken,
        state=types.DEPLOYMENT_STATE_DEGRADED,
        reason=f"1 of 2 replicas READY: replica 1 FAILED: {reason}",
        failures=[FAILURE],
    )


def test_what_is_well_is_said_shortly_with_its_spec():
    text = text_of(answers())

    assert text.startswith("omni  READY  since ")
    assert "(1 min" in text.splitlines()[0]
    for absent in ("why:", "next:", "last failure", "other", "note:"):
        assert absent not in text
    for present in (
        "replica 0  READY  2/2 shards READY  since before this supervisor began",
        "4242",
        "2 h 4 min",
        "3 GiB",
        "4 GiB of GPU-1, 127.0.0.1:5000, instance 01234567",
        "node-1  ALIVE",
        "model: Omni 30B (chat, audio)",
        "entry thinker",
        "2      talker    1      12 GiB",
        "2      code2wav  1      10 %",
        "1      thinker   0      90 % + 2 GiB",
        "3      words     none   -",
    ):
        assert present in text, text


def test_the_worst_stands_first_and_nothing_is_said_twice():
    text = text_of(dead(), None)

    assert text.index("replica 1  FAILED") < text.index("replica 0  READY")
    assert text.count(DEAD) == 1
    assert text.count("deploy again") == 1
    assert "last failure: talker on worker node-1 at" in text
    assert "(signal 9)" in text
    assert "| loading\n" in text
    assert "| out of luck\n" in text


def test_a_terminal_of_80_columns_breaks_no_sentence_beyond_it():
    reason = "because of one thing and another " * 10
    waiting = replica(
        reason=reason, next_action=reason, state=types.REPLICA_STATE_PARTIAL, next_action_in_s=5.6
    )
    text = text_of(answers(waiting, state=types.DEPLOYMENT_STATE_FAILED, reason=reason))

    assert max(len(line) for line in text.splitlines()) <= 80
    assert "(in 5.6 s)" in text, "a time stays on one line"


def test_what_happens_by_the_clock_says_when():
    late = replica(
        0,
        routed("thinker", worker_state=types.WORKER_STATE_SUSPECT),
        next_action="worker node-1 is late: it is UNREACHABLE unless it is heard",
        next_action_in_s=4.2,
    )

    text = text_of(answers(late))

    assert "is heard (in 4.2 s)" in text
    assert "node-1 SUSPECT" in text
    late.next_action_in_s = 0.0
    assert "is heard (now)" in text_of(answers(late))


def test_replicas_that_wait_for_different_things_are_told_apart():
    two = [
        replica(n, state=types.REPLICA_STATE_PENDING, next_action=f"thing {n}", reason="missing")
        for n in range(2)
    ]
    text = text_of(answers(*two, state=types.DEPLOYMENT_STATE_FAILED, reason="0 of 2"))

    assert "next: see each replica" in text
    assert "next: thing 0" in text
    assert "next: thing 1" in text


def test_a_supervisor_that_recovers_says_so_with_the_workers_that_are_awaited():
    workers = pb2.ListWorkersResponse(
        complete=False,
        mode=types.MODE_HOLD,
        hold_reason=types.HOLD_REASON_RECOVERING,
        workers=[
            pb2.Worker(worker_id="away", state=types.WORKER_STATE_UNREACHABLE, reason="awaited"),
            pb2.Worker(worker_id="other", state=types.WORKER_STATE_ALIVE, incarnation=2),
        ],
    )
    pending = replica(0, state=types.REPLICA_STATE_PENDING, ready_shard_count=0)
    pending.ClearField("shards")

    text = text_of(answers(pending, workers=workers, state=types.DEPLOYMENT_STATE_DEGRADED))

    assert "are still" in text
    assert "still awaited (away)" in " ".join(text.split())
    assert "workers\n" not in text, "nobody knows whether it ever held any of it"
    assert "other" not in text


def test_what_nobody_is_known_to_want_says_what_to_do():
    given = answers(spec=None)
    given.deployment.ClearField("spec")

    text = text_of(given)

    assert "nobody is known to want it" in text
    assert "`stagekeeper delete omni`" in " ".join(text.split())
    assert "spec  revision" not in text
    assert "(--no-store)" in text_of(answers(durable=False))


def test_trouble_of_a_stage_is_said_before_its_facts():
    stalled = routed(
        "thinker", state=types.SHARD_STATE_STALLED, state_reason="no progress", busy_for_s=40.0
    )
    loading = routed(
        "talker", state=types.SHARD_STATE_STARTING, phase=types.PHASE_LOAD, committed=False,
        progress=types.Progress(counter=3, done=42, total=100, note="reading weights"),
    )  # fmt: skip
    sharded = routed("code2wav", shard_index=1, shard_count=2, attempt=2, restart_ages_s=[3.0])

    text = text_of(answers(replica(0, stalled, loading, sharded)), 200)

    assert "no progress; BUSY: no progress for 40 s" in text
    assert "STARTING(LOAD)" in text
    assert "42 of 100: reading weights" in text
    assert "code2wav[1]" in text
    assert "attempt 2, 1 restart" in text


def test_an_old_failure_of_what_is_well_again_is_no_news():
    assert "last failure" not in text_of(answers(replica(), failures=[FAILURE]))


def test_of_many_that_are_well_most_are_counted():
    text = text_of(answers(*(replica(n) for n in range(50))))

    assert "and 30 more replicas that are READY" in text


def test_description_as_json_has_all_of_it():
    document = json.loads(json.dumps(describe_json("e:1", dead())))

    assert document["supervisor"]["mode"] == "NORMAL"
    assert document["deployment"]["state_time"].endswith("Z")
    assert document["deployment"]["spec"]["stages"][1]["bytes"] == 12 * GIB
    assert document["deployment"]["spec"]["stages"][3]["utilization"] is None
    broken = document["deployment"]["replicas"][1]
    assert broken["next_action_in_s"] is None
    assert broken["stages"][1]["failure_id"] == "f1"
    assert document["failures"][0]["last_log_lines"] == ["loading", "", "out of luck"]
    assert [worker["worker_id"] for worker in document["workers"]] == ["node-1"]


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_of(item)}
    return {key for item in value for key in keys_of(item)} if isinstance(value, list) else set()


def test_every_key_of_the_json_description_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    words = set(re.findall(r"\w+", page.partition("## `status --output json`")[2]))
    given = dead()
    document = describe_json("e:1", Answers(given.deployment, given.workers, [FAILURE], [EVENT]))

    assert keys_of(document) <= words


# Events.

EVENT = pb2.Event(
    kind=pb2.EVENT_KIND_REPLICA_CHANGED,
    time=ago(5),
    message="omni replica 0 is FAILED (it was READY): " + "a long story " * 8,
    is_warning=True,
    deployment="omni",
    replica_index=0,
)


def test_an_event_in_a_pipe_is_one_line_with_utc_level_kind_and_subject():
    line = plain_line(EVENT)

    assert re.match(
        r"2023-11-14T22:13:15\.123Z  warn  REPLICA_CHANGED       omni/0  omni replica 0", line
    )
    assert "\n" not in plain_line(pb2.Event(message="two\nlines"))


def test_an_event_in_a_terminal_stays_within_it():
    first, *rest = terminal_lines(EVENT, NOW, 80)

    assert re.match(r"\d\d:\d\d:\d\d  REPLICA_CHANGED       omni replica 0", first)
    assert max(map(len, [first, *rest])) <= 80
    assert all(line.startswith(" " * 32) for line in rest)
    assert len(terminal_lines(EVENT, NOW, 40)) == 1, "too narrow for columns of our own"


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({}, "supervisor"),
        ({"worker_id": "w"}, "w"),
        ({"deployment": "m"}, "m"),
        ({"deployment": "m", "replica_index": 0}, "m/0"),
        ({"deployment": "m", "replica_index": 0, "stage_id": 2, "worker_id": "w"}, "m/0/2"),
    ],
)
def test_an_events_subject_is_the_narrowest_that_it_is_about(fields, subject):
    assert subject_of(pb2.Event(**fields)) == subject


def test_an_event_as_json_says_null_for_what_it_is_not_about():
    document = event_json(EVENT)

    assert document["kind"] == "REPLICA_CHANGED"
    assert document["warning"] is True
    assert (document["replica_index"], document["stage_id"]) == (0, None)
    assert document["worker_id"] is None


def test_every_gap_has_words():
    assert GAPS.keys() == set(Gap)


def test_times_of_today_are_short_and_others_have_their_date():
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock_text(ago(0), NOW))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", clock_text(ago(200_000), NOW))
    assert since_text(ago(-50), NOW).endswith("(0.0 s)"), "another machine's clock may be ahead"
    assert utc_text(ago(0)) == "2023-11-14T22:13:20.123Z"


def test_a_start_that_failed_under_an_earlier_reign_shows_its_last_failure() -> None:
    reason = f"no worker that is registered reports it; its last recorded failure: {DEAD}"
    never = replica(1, state=types.REPLICA_STATE_PENDING, ready_shard_count=0, reason=reason)
    never.ClearField("shards")
    later = types.Failure(failure_id="f2", message="another", origin=FAILURE.origin)

    text = text_of(answers(never, failures=[later, FAILURE]), None)

    assert "last failure: talker on worker node-1" in text
    assert "| out of luck" in text
    assert text.count(DEAD) == 1


def test_the_workers_are_those_that_hold_or_held_it():
    ghost = pb2.Worker(worker_id="agent-0", state=types.WORKER_STATE_UNREACHABLE)
    held = pb2.Worker(worker_id="node-1", state=types.WORKER_STATE_ALIVE, incarnation=1)
    lost = replica(1, state=types.REPLICA_STATE_PENDING, ready_shard_count=0, reason="away")
    lost.ClearField("shards")
    workers = pb2.ListWorkersResponse(complete=False, workers=[ghost, held])

    text = text_of(
        answers(lost, workers=workers, failures=[FAILURE], state=types.DEPLOYMENT_STATE_DEGRADED),
        None,
    )

    listed = text.split("workers\n")[1].split("spec ")[0]
    assert "node-1" in listed
    assert "agent-0" not in listed
