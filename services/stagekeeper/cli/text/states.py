"""The names of states as messages carry them, without the prefixes that the protocol needs."""

from __future__ import annotations

from stagekeeper.cli.text.amounts import enum_name
from stagekeeper.v1 import types_pb2 as pb2


def shard_state(number: int) -> str:
    return enum_name(pb2.ShardState, number, "SHARD_STATE_")


def replica_state(number: int) -> str:
    return enum_name(pb2.ReplicaState, number, "REPLICA_STATE_")


def deployment_state(number: int) -> str:
    return enum_name(pb2.DeploymentState, number, "DEPLOYMENT_STATE_")


def worker_state(number: int) -> str:
    return enum_name(pb2.WorkerState, number, "WORKER_STATE_")


def phase(number: int) -> str:
    """Return LOAD, MEASURE, …; empty for no phase."""
    return enum_name(pb2.Phase, number, "PHASE_") if number else ""


def failure_kind(number: int) -> str:
    return enum_name(pb2.FailureKind, number, "FAILURE_KIND_")


def mode(mode_number: int, hold_reason: int) -> str:
    """Return NORMAL, or HOLD(RECOVERING)."""
    name = enum_name(pb2.Mode, mode_number, "MODE_")
    if not hold_reason:
        return name
    return f"{name}({enum_name(pb2.HoldReason, hold_reason, 'HOLD_REASON_')})"


def epoch(message: pb2.Epoch) -> str:
    """Return `3/1f0c2a9b`: the number, and the beginning of the supervisor's id."""
    return f"{message.number}/{message.supervisor_id[:8]}"
