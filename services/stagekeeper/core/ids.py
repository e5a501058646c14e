"""Identities: what each is made of and how it is compared.

An identity is always fields, never a string that somebody parses: `llama-2` is a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

ClusterName = NewType("ClusterName", str)
WorkerId = NewType("WorkerId", str)
HostId = NewType("HostId", str)
DeploymentName = NewType("DeploymentName", str)
DeviceId = NewType("DeviceId", str)
InstanceId = NewType("InstanceId", str)
OperationId = NewType("OperationId", str)
FailureId = NewType("FailureId", str)
ReplicaIndex = NewType("ReplicaIndex", int)
StageId = NewType("StageId", int)


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """One reign of a supervisor, ordered as the pair (number, supervisor_id)."""

    number: int
    supervisor_id: str

    def __str__(self) -> str:
        return f"{self.number}/{self.supervisor_id[:8]}"


NO_EPOCH = Epoch(0, "")


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """One set of a stage's shards, ordered as the pair (epoch, n)."""

    epoch: Epoch
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.n}"


@dataclass(frozen=True, slots=True, order=True)
class ChangeRevision:
    """A position in one reign's change log; 0 is before its first change."""

    epoch: Epoch
    n: int


@dataclass(frozen=True, slots=True, order=True)
class ReplicaKey:
    """One full copy of a deployment."""

    deployment: DeploymentName
    index: ReplicaIndex

    def __str__(self) -> str:
        return f"{self.deployment} replica {self.index}"


@dataclass(frozen=True, slots=True, order=True)
class SlotKey:
    """A replica's place for one stage; generations and restart budgets belong to it."""

    deployment: DeploymentName
    index: ReplicaIndex
    stage_id: StageId

    @property
    def replica(self) -> ReplicaKey:
        return ReplicaKey(self.deployment, self.index)
