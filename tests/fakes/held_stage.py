"""One stage process as an agent holds it, without a process behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.records import RecordStore, StageRecord
from stagekeeper.agent.stage_process import StageProcess
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
from stagekeeper.core.model import ShardRecord
from stagekeeper.core.states import ShardState
from stagekeeper.runtime.launch import Launch
from stagekeeper.v1 import stage_control_service_pb2 as pb
from stagekeeper.v1 import types_pb2
from tests.fakes.virtual_clock import VirtualClock


class Held:
    """One stage process, with what it tells and what was told of it."""

    def __init__(self, tmp_path: Path, state: ShardState = ShardState.STARTING) -> None:
        self.clock = VirtualClock()
        self.directory = directory = AgentDirectory(tmp_path, WorkerId("w"))
        directory.create()
        self.store = RecordStore(directory)
        record = StageRecord(
            incarnation=1,
            boot_id="b",
            control_socket="/tmp/none",
            stop_budget_s=1.0,
            shard=ShardRecord(
                deployment=DeploymentName("m"),
                replica_index=ReplicaIndex(0),
                stage_id=StageId(0),
                stage_name="s",
                stage_count=1,
                shard_index=0,
                shard_count=1,
                generation=Generation(Epoch(1, "r"), 1),
                operation_id=OperationId("op"),
                instance_id=InstanceId("i"),
                state=state,
            ),
        )
        self.store.prepare(
            record,
            Launch(
                instance_id="i",
                deployment="m",
                replica_index=0,
                stage_id=0,
                stage_name="s",
                stage_count=1,
                entrypoint="a:B",
                control_socket="/tmp/none",
                run_dir=str(directory.run_dir(InstanceId("i"))),
                cache_dir="/tmp",
            ),
        )
        self.slice_changes = 0
        self.changes = 0
        self.stage = StageProcess(record, self.store, self.clock, self.on_change)

    def on_change(self, stage: StageProcess, is_other_slice: bool) -> None:
        self.changes += 1
        self.slice_changes += is_other_slice

    def says(self, state: types_pb2.ShardState.ValueType, **fields: Any) -> None:
        self.stage.saw(pb.WatchStageResponse(instance_id="i", state=state, **fields))

    def is_ready(self, **fields) -> None:
        address = types_pb2.ShardAddress(
            name="stage", protocol=types_pb2.ADDRESS_PROTOCOL_GRPC, url="127.0.0.1:1"
        )
        self.says(types_pb2.SHARD_STATE_READY, addresses=[address], **fields)
