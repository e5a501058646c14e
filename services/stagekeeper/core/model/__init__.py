"""The values that the core decides about: specs, reports, and what is derived from them.

All are frozen. Bytes, seconds; None means unknown, never zero. Wall-clock times are seconds since
the Unix epoch and are carried for display only.
"""

from __future__ import annotations

from stagekeeper.core.model.cards import Device, DeviceClaim, ForeignHolder, MemoryProfile
from stagekeeper.core.model.failures import ExitInfo, Failure, FailureOrigin
from stagekeeper.core.model.plans import OperationPlan, Peer, ReplicaStart, StageStart
from stagekeeper.core.model.reports import (
    NO_PROGRESS,
    EndpointInfo,
    OperationRecord,
    Progress,
    RefusedEntry,
    RollbackRecord,
    ShardAddress,
    ShardRecord,
    WorkerReport,
)
from stagekeeper.core.model.specs import (
    DEFAULT_MAX_IN_FLIGHT,
    NO_MODEL,
    DeploymentSpec,
    MemoryNeed,
    ModelInfo,
    Placement,
    StageSpec,
)
from stagekeeper.core.model.views import DeploymentView, ReplicaView, RoutedShard

__all__ = [
    "DEFAULT_MAX_IN_FLIGHT",
    "NO_MODEL",
    "NO_PROGRESS",
    "DeploymentSpec",
    "DeploymentView",
    "Device",
    "DeviceClaim",
    "EndpointInfo",
    "ExitInfo",
    "Failure",
    "FailureOrigin",
    "ForeignHolder",
    "MemoryNeed",
    "MemoryProfile",
    "ModelInfo",
    "OperationPlan",
    "OperationRecord",
    "Peer",
    "Placement",
    "Progress",
    "RefusedEntry",
    "ReplicaStart",
    "ReplicaView",
    "RollbackRecord",
    "RoutedShard",
    "ShardAddress",
    "ShardRecord",
    "StageSpec",
    "StageStart",
    "WorkerReport",
]
