"""What crosses the wire comes out as it went in, and nonsense is refused in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.core import model
from stagekeeper.core.ids import NO_EPOCH, ChangeRevision, Epoch, Generation, StageId, WorkerId
from stagekeeper.core.states import OperationState, Phase, RollbackEnding, ShardState
from stagekeeper.runtime import convert
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import supervisor_service_pb2 as supervisor_pb2
from stagekeeper.v1 import types_pb2 as pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=8)
SECONDS = st.floats(0, 1e9)
WALL = st.one_of(st.none(), st.integers(0, 2 * 10**15).map(lambda micros: micros / 1e6))
EPOCHS = st.builds(Epoch, U64, TEXT)
GENERATIONS = st.builds(Generation, EPOCHS, U64)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(of, max_size=3).map(tuple)


def maybe(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), of)


MODELS = st.builds(model.ModelInfo, TEXT, TEXT, tuples(TEXT))
DEVICES = st.builds(
    model.Device, TEXT, TEXT, TEXT, U32, U64, TEXT, maybe(U64), U64, sick_reason=TEXT
)
CLAIMS = st.builds(model.DeviceClaim, TEXT, U64, maybe(U64))
ADDRESSES = st.builds(model.ShardAddress, TEXT, st.sampled_from(["grpc", "http"]), TEXT)
ENDPOINTS = st.builds(model.EndpointInfo, TEXT, st.booleans(), st.booleans())
PROGRESS = st.builds(model.Progress, U64, U64, U64, TEXT)
PROFILES = st.builds(model.MemoryProfile, U64, U64, maybe(U64))
SHARDS = st.builds(
    model.ShardRecord,
    deployment=TEXT,
    replica_index=U32,
    stage_id=U32,
    stage_name=TEXT,
    stage_count=U32,
    shard_index=U32,
    shard_count=U32,
    generation=GENERATIONS,
    operation_id=TEXT,
    instance_id=TEXT,
    state=st.sampled_from(ShardState),
    committed=st.booleans(),
    state_reason=TEXT,
    phase=maybe(st.sampled_from(Phase)),
    spec_revision=U64,
    model=MODELS,
    attempt=U32,
    devices=tuples(CLAIMS),
    addresses=tuples(ADDRESSES),
    endpoints=tuples(ENDPOINTS),
    create_time=WALL,
    ready_time=WALL,
    memory_bytes=maybe(U64),
    restart_ages_s=tuples(SECONDS),
    pid=U32,
    busy_for_s=maybe(SECONDS),
    entry=st.booleans(),
    failure_id=TEXT,
    progress=PROGRESS,
    predicted_memory=maybe(PROFILES),
    measured_memory=maybe(PROFILES),
)
I32 = st.integers(-(2**31), 2**31 - 1)
EXITS = st.builds(model.ExitInfo, maybe(I32), maybe(I32), st.booleans(), st.booleans())
ORIGINS = st.builds(
    model.FailureOrigin,
    TEXT,
    TEXT,
    U32,
    U32,
    TEXT,
    U32,
    TEXT,
    maybe(GENERATIONS),
    maybe(st.sampled_from(Phase)),
    U32,
)


def failures(causes: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        model.Failure,
        failure_id=TEXT,
        kind=st.sampled_from(["EXITED", "SIGNALED", "STALLED", "UNSPECIFIED"]),
        origin=ORIGINS,
        message=TEXT,
        exit=maybe(EXITS),
        detected_by=TEXT,
        detect_time=WALL,
        last_log_lines=tuples(TEXT),
        remote_traceback=TEXT,
        path=tuples(st.tuples(TEXT, TEXT)),
        restarts_tried=U32,
        causes=causes,
    )


FAILURES = failures(tuples(failures(st.just(()))))
ROLLBACKS = st.builds(
    model.RollbackRecord,
    U32,
    st.booleans(),
    TEXT,
    SECONDS,
    TEXT,
    TEXT,
    maybe(st.sampled_from(ShardState)),
    maybe(st.sampled_from(Phase)),
    maybe(st.sampled_from(RollbackEnding)),
    maybe(U64),
    maybe(U64),
)
OPERATIONS = st.builds(
    model.OperationRecord,
    st.text(min_size=1, max_size=8),
    TEXT,
    U32,
    GENERATIONS,
    st.sampled_from(OperationState),
    TEXT,
    tuples(ROLLBACKS),
    maybe(FAILURES),
    tuples(U32),
)
PEERS = st.builds(model.Peer, U32, TEXT, U32, TEXT, TEXT)
NEEDS = st.one_of(
    st.builds(
        model.MemoryNeed,
        utilization=st.floats(0, 1),
        reserve_bytes=U64,
        reuse_profile=st.booleans(),
    ),
    st.builds(model.MemoryNeed, bytes=U64, reserve_bytes=U64),
    st.just(model.MemoryNeed()),
)
STAGES = st.builds(
    model.StageSpec,
    TEXT,
    TEXT,
    st.text(min_size=1, max_size=8),
    tuples(U32),
    maybe(NEEDS),
    st.integers(1, 9),
    st.dictionaries(TEXT, TEXT, max_size=2).map(lambda env: tuple(sorted(env.items()))),
    maybe(SECONDS),
    maybe(SECONDS),
    maybe(SECONDS),
    st.integers(1, 99),
)
SPECS = st.builds(
    model.DeploymentSpec,
    TEXT,
    tuples(STAGES),
    st.integers(1, 9),
    TEXT,
    MODELS,
    st.builds(model.Placement, tuples(TEXT), tuples(TEXT)),
)
STARTS = st.builds(
    model.StageStart, U32, STAGES, tuples(TEXT), U32, st.integers(1, 9), tuples(SECONDS)
)
REPORTS = st.builds(
    model.WorkerReport,
    worker_id=TEXT,
    host_id=TEXT,
    incarnation=U64,
    revision=U64,
    agent_address=TEXT,
    hostname=TEXT,
    stages_outlive_agent=st.booleans(),
    outlive_reason=TEXT,
    highest_epoch=EPOCHS,
    devices=tuples(DEVICES),
    inventory_unknown=st.booleans(),
    inventory_reason=TEXT,
    shards=tuples(SHARDS),
    operations=tuples(OPERATIONS),
    failures=tuples(FAILURES),
    notes=tuples(TEXT),
)

ROUND_TRIPS: list[tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = [
    (SHARDS, convert.shard_to_proto, convert.shard_from_proto),
    (FAILURES, convert.failure_to_proto, convert.failure_from_proto),
    (OPERATIONS, convert.operation_to_proto, convert.operation_from_proto),
    (PEERS, convert.peer_to_proto, convert.peer_from_proto),
    (SPECS, convert.spec_to_proto, convert.spec_from_proto),
    (DEVICES, convert.device_to_proto, convert.device_from_proto),
    (
        st.builds(ChangeRevision, EPOCHS, U64),
        convert.revision_to_proto,
        convert.revision_from_proto,
    ),
]


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=lambda case: case[1].__name__)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_value_converted_there_and_back_is_equal(case, data):
    values, to_proto, from_proto = case
    value = data.draw(values)
    message = to_proto(value)
    parsed = type(message).FromString(message.SerializeToString())
    assert from_proto(parsed) == value


@given(report=REPORTS)
@settings(max_examples=60, deadline=None)
def test_report_converted_there_and_back_is_equal(report):
    message = convert.report_to_proto(report, cluster="c", digest=b"d")
    back, refused, places = convert.report_from_proto(message)
    assert (back, refused) == (report, [])
    assert places == list(range(len(report.shards)))
    assert (message.cluster, message.digest) == ("c", b"d")


@given(stages=tuples(STARTS), generation=GENERATIONS, info=MODELS, overlap_loads=st.booleans())
@settings(max_examples=40, deadline=None)
def test_plan_converted_there_and_back_is_equal(stages, generation, info, overlap_loads):
    fields: dict[str, Any] = {"operation_id": "op", "deployment": "d", "replica_index": 1}
    plan = model.OperationPlan(
        **fields,
        generation=generation,
        worker_id=WorkerId("w"),
        stages=stages,
        stage_count=3,
        entry_stage_id=StageId(2),
        spec_revision=4,
        model=info,
        overlap_loads=overlap_loads,
    )
    header = convert.header_to_proto("c", Epoch(3, "s"), 7)
    message = convert.plan_to_proto(plan, header, agent_pb2.OPERATION_STEP_START)
    assert convert.plan_from_proto(message, WorkerId("w")) == plan
    assert message.header == header


def test_shards_that_are_none_are_left_out_alone_with_their_places():
    good = pb2.ShardRecord(
        deployment="d", generation=pb2.Generation(n=1), state=pb2.SHARD_STATE_READY
    )
    stateless = pb2.ShardRecord(deployment="d", generation=pb2.Generation(n=1))
    future = pb2.ShardRecord(deployment="d")
    future.state = cast(Any, 4711)
    odd = pb2.ShardRecord()
    odd.CopyFrom(good)
    odd.addresses.add(name="stage", protocol=99)
    report, refused, places = convert.report_from_proto(
        supervisor_pb2.RegisterWorkerRequest(
            worker_id="w", replica_states=[stateless, good, future, odd, good]
        )
    )
    assert [shard.state for shard in report.shards] == [ShardState.READY] * 2
    assert places == [1, 4]
    assert [(entry.index, entry.reason) for entry in refused] == [
        (0, "BAD_FIELD"),
        (2, "BAD_FIELD"),
        (3, "BAD_FIELD"),
    ]
    assert "state: 4711" in refused[1].message
    assert "generation: is missing" in refused[1].message
    assert "addresses[0].protocol: 99" in refused[2].message
    assert report.highest_epoch == NO_EPOCH


def test_time_that_no_calendar_has_is_unknown():
    shard = pb2.ShardRecord(generation=pb2.Generation(n=1), state=pb2.SHARD_STATE_READY)
    shard.create_time.seconds = 2**62
    assert convert.shard_from_proto(shard).create_time is None


def test_every_field_of_a_shard_has_its_value():
    names = {field.name for field in pb2.ShardRecord.DESCRIPTOR.fields}
    renamed = {"model_name", "model_version", "abilities"}
    values = {field.name for field in dataclasses.fields(model.ShardRecord)}
    assert names - renamed == values - {"model"}
