"""Values of the core that take plain literals: their ids are NewTypes, dull to write in tests."""

from __future__ import annotations

from typing import Any

from stagekeeper.core import (
    changes,
    commands,
    events,
    ids,
    model,
    operations,
    placement,
    stage_sets,
)

AgentProbed: Any = events.AgentProbed
FailureReported: Any = events.FailureReported
OperationCancelled: Any = events.OperationCancelled
CommitEnded: Any = events.CommitEnded
OperationEnded: Any = events.OperationEnded
OperationStarted: Any = events.OperationStarted
SlotStopped: Any = events.SlotStopped

CommitOperation: Any = commands.CommitOperation
CreationAccepted: Any = commands.CreationAccepted
EntombDeployment: Any = commands.EntombDeployment
SaveRoster: Any = commands.SaveRoster

ReplicaKey: Any = ids.ReplicaKey
SlotKey: Any = ids.SlotKey

DeviceClaim: Any = model.DeviceClaim
Failure: Any = model.Failure
FailureOrigin: Any = model.FailureOrigin
Placement: Any = model.Placement
RollbackRecord: Any = model.RollbackRecord

ChangeLog: Any = changes.ChangeLog
Claim: Any = stage_sets.Claim
FailureNote: Any = operations.FailureNote
Offer: Any = placement.Offer
place_replicas: Any = placement.place_replicas
