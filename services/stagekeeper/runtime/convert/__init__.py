"""What crosses the wire, as the core's values, and back: `x_from_proto` and `x_to_proto`.

Decided here: how each message maps to a value of `core.model`, and what a message must have at all
to be one. Whether a value makes sense is the core's to judge. A message that cannot be converted
raises `Refused`, with every wrong field; nothing else is raised, whatever comes in.

Invariant: `x_from_proto(x_to_proto(v)) == v`.
"""

from __future__ import annotations

from stagekeeper.runtime.convert.command_stages import (
    stage_ports_from_proto,
    stage_ports_to_proto,
)
from stagekeeper.runtime.convert.failures import (
    exit_from_proto,
    exit_to_proto,
    failure_from_proto,
    failure_to_proto,
    operation_from_proto,
    operation_to_proto,
    rollback_to_proto,
)
from stagekeeper.runtime.convert.identities import (
    epoch_from_proto,
    epoch_to_proto,
    generation_from_proto,
    generation_to_proto,
    revision_from_proto,
    revision_to_proto,
    time_from_proto,
    time_to_proto,
)
from stagekeeper.runtime.convert.procs import procs_wanted_from_proto
from stagekeeper.runtime.convert.reports import (
    report_from_proto,
    report_from_proto_in_turns,
    report_to_proto,
)
from stagekeeper.runtime.convert.shards import (
    device_from_proto,
    device_to_proto,
    memory_profile_from_proto,
    memory_profile_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    progress_from_proto,
    progress_to_proto,
    shard_from_proto,
    shard_to_proto,
)
from stagekeeper.runtime.convert.specs import (
    header_to_proto,
    memory_need_from_proto,
    memory_need_to_proto,
    peer_from_proto,
    peer_to_proto,
    plan_from_proto,
    plan_to_proto,
    spec_from_proto,
    spec_to_proto,
    stage_spec_from_proto,
    stage_spec_to_proto,
    stage_start_from_proto,
    stage_start_to_proto,
)
from stagekeeper.runtime.convert.states import (
    deployment_state_to_proto,
    hold_reason_to_proto,
    mode_to_proto,
    operation_state_from_proto,
    operation_state_to_proto,
    phase_from_proto,
    phase_to_proto,
    replica_state_to_proto,
    shard_state_from_proto,
    shard_state_to_proto,
    worker_state_to_proto,
)

__all__ = [
    "deployment_state_to_proto",
    "device_from_proto",
    "device_to_proto",
    "epoch_from_proto",
    "epoch_to_proto",
    "exit_from_proto",
    "exit_to_proto",
    "failure_from_proto",
    "failure_to_proto",
    "generation_from_proto",
    "generation_to_proto",
    "header_to_proto",
    "hold_reason_to_proto",
    "memory_need_from_proto",
    "memory_need_to_proto",
    "memory_profile_from_proto",
    "memory_profile_to_proto",
    "mode_to_proto",
    "model_info_from_proto",
    "model_info_to_proto",
    "operation_from_proto",
    "operation_state_from_proto",
    "operation_state_to_proto",
    "operation_to_proto",
    "peer_from_proto",
    "peer_to_proto",
    "phase_from_proto",
    "phase_to_proto",
    "plan_from_proto",
    "plan_to_proto",
    "procs_wanted_from_proto",
    "progress_from_proto",
    "progress_to_proto",
    "replica_state_to_proto",
    "report_from_proto",
    "report_from_proto_in_turns",
    "report_to_proto",
    "revision_from_proto",
    "revision_to_proto",
    "rollback_to_proto",
    "shard_from_proto",
    "shard_state_from_proto",
    "shard_state_to_proto",
    "shard_to_proto",
    "spec_from_proto",
    "spec_to_proto",
    "stage_ports_from_proto",
    "stage_ports_to_proto",
    "stage_spec_from_proto",
    "stage_spec_to_proto",
    "stage_start_from_proto",
    "stage_start_to_proto",
    "time_from_proto",
    "time_to_proto",
    "worker_state_to_proto",
]
