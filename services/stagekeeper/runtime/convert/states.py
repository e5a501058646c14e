"""States and other enumerations: a table each way, made from the names when this is imported.

A number that this release does not know, and 0 ("unspecified"), are no state: lookups give None.
Invariant: every state of the core has its number, or the import fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from stagekeeper.core.states import (
    DeploymentState,
    HoldReason,
    Mode,
    OperationState,
    Phase,
    ReplicaState,
    RollbackEnding,
    ShardState,
    WorkerState,
)
from stagekeeper.v1 import types_pb2 as pb2

S = TypeVar("S", bound=str)


def _numbers(prefix: str, states: Sequence[S]) -> dict[S, int]:
    """Look up the protocol's number of each state, once, when the module is imported."""
    values = vars(pb2)
    return {state: cast(int, values[f"{prefix}_{state}"]) for state in states}


def _inverse(numbers: Mapping[S, int]) -> dict[int, S]:
    return {number: state for state, number in numbers.items()}


_SHARD_STATES = _numbers("SHARD_STATE", list(ShardState))
SHARD_STATE_OF = _inverse(_SHARD_STATES)
_PHASES = _numbers("PHASE", list(Phase))
PHASE_OF = _inverse(_PHASES)
_OPERATION_STATES = _numbers("OPERATION_STATE", list(OperationState))
OPERATION_STATE_OF = _inverse(_OPERATION_STATES)
_ROLLBACK_ENDINGS = _numbers("ROLLBACK_ENDING", list(RollbackEnding))
ROLLBACK_ENDING_OF = _inverse(_ROLLBACK_ENDINGS)
_REPLICA_STATES = _numbers("REPLICA_STATE", list(ReplicaState))
_DEPLOYMENT_STATES = _numbers("DEPLOYMENT_STATE", list(DeploymentState))
_WORKER_STATES = _numbers("WORKER_STATE", list(WorkerState))
_MODES = _numbers("MODE", list(Mode))
_HOLD_REASONS = _numbers("HOLD_REASON", list(HoldReason))
FAILURE_KINDS = {
    name.removeprefix("FAILURE_KIND_"): number for name, number in pb2.FailureKind.items()
}
FAILURE_KIND_OF = {number: name for name, number in FAILURE_KINDS.items()}
PROTOCOLS = {"grpc": pb2.ADDRESS_PROTOCOL_GRPC, "http": pb2.ADDRESS_PROTOCOL_HTTP}
PROTOCOL_OF = {number: name for name, number in PROTOCOLS.items()}


def shard_state_to_proto(state: ShardState) -> pb2.ShardState.ValueType:
    return cast("pb2.ShardState.ValueType", _SHARD_STATES[state])


def shard_state_from_proto(number: int) -> ShardState | None:
    """Return None for "unspecified" and for numbers that this release does not know."""
    return SHARD_STATE_OF.get(number)


def phase_to_proto(phase: Phase | None) -> pb2.Phase.ValueType:
    return cast("pb2.Phase.ValueType", 0 if phase is None else _PHASES[phase])


def phase_from_proto(number: int) -> Phase | None:
    return PHASE_OF.get(number)


def operation_state_to_proto(state: OperationState) -> pb2.OperationState.ValueType:
    return cast("pb2.OperationState.ValueType", _OPERATION_STATES[state])


def operation_state_from_proto(number: int) -> OperationState | None:
    """Return None for "unspecified" and for numbers that this release does not know."""
    return OPERATION_STATE_OF.get(number)


def rollback_ending_to_proto(ending: RollbackEnding | None) -> pb2.RollbackEnding.ValueType:
    return cast("pb2.RollbackEnding.ValueType", 0 if ending is None else _ROLLBACK_ENDINGS[ending])


def replica_state_to_proto(state: ReplicaState) -> pb2.ReplicaState.ValueType:
    return cast("pb2.ReplicaState.ValueType", _REPLICA_STATES[state])


def deployment_state_to_proto(state: DeploymentState) -> pb2.DeploymentState.ValueType:
    return cast("pb2.DeploymentState.ValueType", _DEPLOYMENT_STATES[state])


def worker_state_to_proto(state: WorkerState) -> pb2.WorkerState.ValueType:
    return cast("pb2.WorkerState.ValueType", _WORKER_STATES[state])


def mode_to_proto(mode: Mode) -> pb2.Mode.ValueType:
    return cast("pb2.Mode.ValueType", _MODES[mode])


def hold_reason_to_proto(reason: HoldReason | None) -> pb2.HoldReason.ValueType:
    return cast("pb2.HoldReason.ValueType", 0 if reason is None else _HOLD_REASONS[reason])
