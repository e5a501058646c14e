"""Failures, and operations with what their rollbacks did.

A failure is kept even when its kind is unknown: the rest is worth reading. An operation without an
id, a known state or a generation cannot be acted on and is refused. What is too large as a whole is
refused before it is converted.
"""

from __future__ import annotations

from typing import cast

from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.ids import (
    DeploymentName,
    FailureId,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.limits import LARGEST_FAILURE_BYTES, LARGEST_OPERATION_BYTES
from stagekeeper.core.model import (
    ExitInfo,
    Failure,
    FailureOrigin,
    OperationRecord,
    RollbackRecord,
)
from stagekeeper.runtime.convert.command_stages import (
    stage_ports_from_proto,
    stage_ports_to_proto,
)
from stagekeeper.runtime.convert.identities import (
    generation_from_proto,
    generation_to_proto,
    time_from_proto,
    time_to_proto,
)
from stagekeeper.runtime.convert.states import (
    FAILURE_KIND_OF,
    FAILURE_KINDS,
    OPERATION_STATE_OF,
    PHASE_OF,
    ROLLBACK_ENDING_OF,
    SHARD_STATE_OF,
    operation_state_to_proto,
    phase_to_proto,
    rollback_ending_to_proto,
    shard_state_to_proto,
)
from stagekeeper.v1 import types_pb2 as pb2


def failure_to_proto(failure: Failure) -> pb2.Failure:
    origin = failure.origin
    message = pb2.Failure(
        failure_id=failure.failure_id,
        kind=cast("pb2.FailureKind.ValueType", FAILURE_KINDS.get(failure.kind, 0)),
        origin=pb2.FailureOrigin(
            worker_id=origin.worker_id,
            deployment=origin.deployment,
            replica_index=origin.replica_index,
            stage_id=origin.stage_id,
            stage_name=origin.stage_name,
            shard_index=origin.shard_index,
            instance_id=origin.instance_id,
            generation=None
            if origin.generation is None
            else generation_to_proto(origin.generation),
            phase=phase_to_proto(origin.phase),
            pid=origin.pid,
        ),
        message=failure.message,
        detected_by=failure.detected_by,
        last_log_lines=failure.last_log_lines,
        remote_traceback=failure.remote_traceback,
        path=[pb2.FailureHop(owner=owner, decision=decision) for owner, decision in failure.path],
        restarts_tried=failure.restarts_tried,
        causes=[failure_to_proto(cause) for cause in failure.causes],
    )
    if failure.exit is not None:
        message.exit.CopyFrom(exit_to_proto(failure.exit))
    if failure.detect_time is not None:
        message.detect_time.CopyFrom(time_to_proto(failure.detect_time))
    return message


def failure_from_proto(message: pb2.Failure) -> Failure:
    """Convert a failure; an unknown kind becomes UNSPECIFIED, since the rest is worth keeping.

    Raises:
        Refused: TOO_LARGE; all of it together.
    """
    _check_size("failure", message.ByteSize(), LARGEST_FAILURE_BYTES)
    return _failure_from_proto(message)


def _failure_from_proto(message: pb2.Failure) -> Failure:
    origin = message.origin
    return Failure(
        failure_id=FailureId(message.failure_id),
        kind=FAILURE_KIND_OF.get(message.kind, "UNSPECIFIED"),
        origin=FailureOrigin(
            worker_id=WorkerId(origin.worker_id),
            deployment=DeploymentName(origin.deployment),
            replica_index=ReplicaIndex(origin.replica_index),
            stage_id=StageId(origin.stage_id),
            stage_name=origin.stage_name,
            shard_index=origin.shard_index,
            instance_id=InstanceId(origin.instance_id),
            generation=(
                generation_from_proto(origin.generation) if origin.HasField("generation") else None
            ),
            phase=PHASE_OF.get(origin.phase),
            pid=origin.pid,
        ),
        message=message.message,
        exit=exit_from_proto(message.exit) if message.HasField("exit") else None,
        detected_by=message.detected_by,
        detect_time=(
            time_from_proto(message.detect_time) if message.HasField("detect_time") else None
        ),
        last_log_lines=tuple(message.last_log_lines),
        remote_traceback=message.remote_traceback,
        path=tuple((hop.owner, hop.decision) for hop in message.path),
        restarts_tried=message.restarts_tried,
        causes=tuple(_failure_from_proto(cause) for cause in message.causes),
    )


def exit_to_proto(exit_info: ExitInfo) -> pb2.ExitInfo:
    return pb2.ExitInfo(
        code=exit_info.code,
        signal=exit_info.signal,
        out_of_memory=exit_info.out_of_memory,
        asked=exit_info.asked,
    )


def exit_from_proto(message: pb2.ExitInfo) -> ExitInfo:
    return ExitInfo(
        code=message.code if message.HasField("code") else None,
        signal=message.signal if message.HasField("signal") else None,
        out_of_memory=message.out_of_memory,
        asked=message.asked,
    )


def rollback_to_proto(record: RollbackRecord) -> pb2.RollbackEntry:
    return pb2.RollbackEntry(
        stage_id=record.stage_id,
        cleaned=record.cleaned,
        error=record.error,
        duration_s=record.duration_s,
        stage_name=record.stage_name,
        worker_id=record.worker_id,
        was=pb2.SHARD_STATE_UNSPECIFIED if record.was is None else shard_state_to_proto(record.was),
        phase=phase_to_proto(record.phase),
        ending=rollback_ending_to_proto(record.ending),
        memory_before_bytes=record.memory_before_bytes,
        memory_after_bytes=record.memory_after_bytes,
    )


def rollback_from_proto(message: pb2.RollbackEntry) -> RollbackRecord:
    has = message.HasField
    return RollbackRecord(
        StageId(message.stage_id),
        message.cleaned,
        message.error,
        message.duration_s,
        stage_name=message.stage_name,
        worker_id=WorkerId(message.worker_id),
        was=SHARD_STATE_OF.get(message.was),
        phase=PHASE_OF.get(message.phase),
        ending=ROLLBACK_ENDING_OF.get(message.ending),
        memory_before_bytes=message.memory_before_bytes if has("memory_before_bytes") else None,
        memory_after_bytes=message.memory_after_bytes if has("memory_after_bytes") else None,
    )


def operation_to_proto(record: OperationRecord) -> pb2.OperationRecord:
    return pb2.OperationRecord(
        operation_id=record.operation_id,
        deployment=record.deployment,
        replica_index=record.replica_index,
        generation=generation_to_proto(record.generation),
        state=operation_state_to_proto(record.state),
        reason=record.reason,
        rollback=[rollback_to_proto(entry) for entry in record.rollback],
        failure=None if record.failure is None else failure_to_proto(record.failure),
        up_stage_ids=record.up_stage_ids,
        ports=[stage_ports_to_proto(it) for it in record.ports],
    )


def operation_from_proto(message: pb2.OperationRecord) -> OperationRecord:
    """Convert an operation.

    Raises:
        Refused: BAD_FIELD; it has no id, no known state or no generation. TOO_LARGE; all of it
            together.
    """
    _check_size("operation", message.ByteSize(), LARGEST_OPERATION_BYTES)
    state = OPERATION_STATE_OF.get(message.state)
    problems = []
    if not message.operation_id:
        problems.append(FieldProblem("operation_id", "is missing"))
    if state is None:
        problems.append(FieldProblem("state", f"{message.state} is no state of an operation"))
    if not message.HasField("generation"):
        problems.append(FieldProblem("generation", "is missing"))
    if problems or state is None:
        raise bad_fields(problems, "the operation")
    return OperationRecord(
        operation_id=OperationId(message.operation_id),
        deployment=DeploymentName(message.deployment),
        replica_index=ReplicaIndex(message.replica_index),
        generation=generation_from_proto(message.generation),
        state=state,
        reason=message.reason,
        rollback=tuple([rollback_from_proto(entry) for entry in message.rollback]),
        failure=failure_from_proto(message.failure) if message.HasField("failure") else None,
        up_stage_ids=tuple([StageId(it) for it in message.up_stage_ids]),
        ports=tuple([stage_ports_from_proto(it) for it in message.ports]),
    )


def _check_size(what: str, size: int, largest: int) -> None:
    if size > largest:
        raise Refused(Reason.TOO_LARGE, f"the {what} has {size} bytes, at most {largest} are taken")
