"""Devices and shards: what an agent holds.

A shard must have a known state, a generation and known protocols to be one at all; whether it makes
sense is the core's to judge. Registrations are hot, so this reads each field once and builds no
message that is absent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.ids import (
    DeploymentName,
    DeviceId,
    Epoch,
    FailureId,
    Generation,
    InstanceId,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.limits import LARGEST_SHARD_BYTES
from stagekeeper.core.model import (
    NO_PROGRESS,
    Device,
    DeviceClaim,
    EndpointInfo,
    ForeignHolder,
    MemoryProfile,
    ModelInfo,
    Progress,
    ShardAddress,
    ShardRecord,
)
from stagekeeper.core.states import ShardState
from stagekeeper.runtime.convert.identities import (
    generation_to_proto,
    time_from_proto,
    time_to_proto,
)
from stagekeeper.runtime.convert.states import (
    PHASE_OF,
    PROTOCOL_OF,
    PROTOCOLS,
    SHARD_STATE_OF,
    phase_to_proto,
    shard_state_to_proto,
)
from stagekeeper.v1 import types_pb2 as pb2


def model_info_to_proto(model: ModelInfo) -> pb2.ModelInfo:
    return pb2.ModelInfo(name=model.name, version=model.version, abilities=model.abilities)


def model_info_from_proto(message: pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(message.name, message.version, tuple(message.abilities))


def device_to_proto(device: Device) -> pb2.Device:
    return pb2.Device(
        device_id=device.device_id,
        kind=device.kind,
        model=device.model,
        index=device.index,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes,
        lock_domain_id=device.lock_domain_id,
        reserved_bytes=device.reserved_bytes,
        foreign=[
            pb2.ForeignHolder(
                pid=it.pid, name=it.name, memory_bytes=it.memory_bytes, worker_id=it.worker_id
            )
            for it in device.foreign
        ],
        sick_reason=device.sick_reason,
    )


def device_from_proto(message: pb2.Device) -> Device:
    return Device(
        device_id=DeviceId(message.device_id),
        kind=message.kind,
        model=message.model,
        index=message.index,
        total_bytes=message.total_bytes,
        lock_domain_id=message.lock_domain_id,
        used_bytes=message.used_bytes if message.HasField("used_bytes") else None,
        reserved_bytes=message.reserved_bytes,
        foreign=tuple(
            ForeignHolder(it.pid, it.name, it.memory_bytes, WorkerId(it.worker_id))
            for it in message.foreign
        ),
        sick_reason=message.sick_reason,
    )


def progress_to_proto(progress: Progress) -> pb2.Progress:
    return pb2.Progress(
        counter=progress.counter, done=progress.done, total=progress.total, note=progress.note
    )


def progress_from_proto(message: pb2.Progress) -> Progress:
    return Progress(message.counter, message.done, message.total, message.note)


def memory_profile_to_proto(profile: MemoryProfile) -> pb2.MemoryProfile:
    return pb2.MemoryProfile(
        weights_bytes=profile.weights_bytes,
        peak_bytes=profile.peak_bytes,
        graph_bytes=profile.graph_bytes,
    )


def memory_profile_from_proto(message: pb2.MemoryProfile) -> MemoryProfile:
    return MemoryProfile(
        message.weights_bytes,
        message.peak_bytes,
        message.graph_bytes if message.HasField("graph_bytes") else None,
    )


def shard_to_proto(record: ShardRecord, *, state: ShardState | None = None) -> pb2.ShardRecord:
    """Convert a shard; `state` replaces its own, where a derived one is to be shown."""
    message = pb2.ShardRecord(
        deployment=record.deployment,
        replica_index=record.replica_index,
        spec_revision=record.spec_revision,
        model_name=record.model.name,
        model_version=record.model.version,
        abilities=record.model.abilities,
        stage_id=record.stage_id,
        stage_name=record.stage_name,
        stage_count=record.stage_count,
        shard_index=record.shard_index,
        shard_count=record.shard_count,
        generation=generation_to_proto(record.generation),
        attempt=record.attempt,
        operation_id=record.operation_id,
        committed=record.committed,
        instance_id=record.instance_id,
        devices=[
            pb2.DeviceClaim(
                device_id=claim.device_id,
                reserved_bytes=claim.reserved_bytes,
                used_bytes=claim.used_bytes,
            )
            for claim in record.devices
        ],
        addresses=[
            pb2.ShardAddress(
                name=address.name,
                protocol=PROTOCOLS.get(address.protocol, pb2.ADDRESS_PROTOCOL_UNSPECIFIED),
                url=address.url,
            )
            for address in record.addresses
        ],
        endpoints=[
            pb2.EndpointInfo(
                name=endpoint.name, idempotent=endpoint.idempotent, streaming=endpoint.streaming
            )
            for endpoint in record.endpoints
        ],
        state=shard_state_to_proto(state or record.state),
        state_reason=record.state_reason,
        phase=phase_to_proto(record.phase),
        memory_bytes=record.memory_bytes,
        restart_ages_s=record.restart_ages_s,
        pid=record.pid,
        busy_for_s=record.busy_for_s,
        entry=record.entry,
        failure_id=record.failure_id,
    )
    if record.create_time is not None:
        message.create_time.CopyFrom(time_to_proto(record.create_time))
    if record.ready_time is not None:
        message.ready_time.CopyFrom(time_to_proto(record.ready_time))
    if record.progress is not NO_PROGRESS:
        message.progress.CopyFrom(progress_to_proto(record.progress))
    if record.predicted_memory is not None:
        message.predicted_memory.CopyFrom(memory_profile_to_proto(record.predicted_memory))
    if record.measured_memory is not None:
        message.measured_memory.CopyFrom(memory_profile_to_proto(record.measured_memory))
    return message


_PARTS_KEPT: Final = 1_024


class SharedParts:
    """Makes equal parts of the shards of one slice one object, and builds each once.

    Most of a big slice repeats itself, and would take the supervisor's memory again each time. One
    for each slice, so that nothing of a slice outlives it here.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self.model = lru_cache(_PARTS_KEPT)(ModelInfo)
        self.generation = lru_cache(_PARTS_KEPT)(_generation)
        self.claims = lru_cache(_PARTS_KEPT)(_claims)
        self.endpoints = lru_cache(_PARTS_KEPT)(_endpoints)

    def text(self, text: str) -> str:
        return self._texts.setdefault(text, text)


def _generation(epoch_number: int, supervisor_id: str, n: int) -> Generation:
    return Generation(Epoch(epoch_number, supervisor_id), n)


def _claims(facts: tuple[tuple[str, int, int | None], ...]) -> tuple[DeviceClaim, ...]:
    return tuple([DeviceClaim(DeviceId(one), reserved, used) for one, reserved, used in facts])


def _endpoints(facts: tuple[tuple[str, bool, bool], ...]) -> tuple[EndpointInfo, ...]:
    return tuple([EndpointInfo(*one) for one in facts])


def shard_from_proto(message: pb2.ShardRecord, shared: SharedParts | None = None) -> ShardRecord:
    """Convert a shard; `shared` is that of the slice it is in.

    Raises:
        Refused: BAD_FIELD; the shard has no known state, no generation or an unknown protocol.
            TOO_LARGE; all of it together.
    """
    if (size := message.ByteSize()) > LARGEST_SHARD_BYTES:
        raise Refused(
            Reason.TOO_LARGE, f"the shard has {size} bytes, at most {LARGEST_SHARD_BYTES} are taken"
        )
    state = SHARD_STATE_OF.get(message.state)
    has = message.HasField
    if state is None or not has("generation") or not _has_known_protocols(message):
        raise bad_fields(_shard_problems(message), "the shard")
    shared = shared or SharedParts()
    text = shared.text
    generation = message.generation
    epoch = generation.epoch
    progress = message.progress if has("progress") else None
    predicted = message.predicted_memory if has("predicted_memory") else None
    measured = message.measured_memory if has("measured_memory") else None
    return ShardRecord(
        deployment=DeploymentName(text(message.deployment)),
        replica_index=ReplicaIndex(message.replica_index),
        stage_id=StageId(message.stage_id),
        stage_name=text(message.stage_name),
        stage_count=message.stage_count,
        shard_index=message.shard_index,
        shard_count=message.shard_count,
        generation=shared.generation(epoch.number, epoch.supervisor_id, generation.n),
        operation_id=OperationId(text(message.operation_id)),
        instance_id=InstanceId(message.instance_id),
        state=state,
        committed=message.committed,
        state_reason=message.state_reason,
        phase=PHASE_OF.get(message.phase),
        spec_revision=message.spec_revision,
        model=shared.model(message.model_name, message.model_version, tuple(message.abilities)),
        attempt=message.attempt,
        devices=shared.claims(
            tuple(
                [
                    (
                        it.device_id,
                        it.reserved_bytes,
                        it.used_bytes if it.HasField("used_bytes") else None,
                    )
                    for it in message.devices
                ]
            )
        ),
        addresses=tuple(
            [
                ShardAddress(text(address.name), PROTOCOL_OF[address.protocol], address.url)
                for address in message.addresses
            ]
        ),
        endpoints=shared.endpoints(
            tuple([(it.name, it.idempotent, it.streaming) for it in message.endpoints])
        ),
        create_time=time_from_proto(message.create_time) if has("create_time") else None,
        ready_time=time_from_proto(message.ready_time) if has("ready_time") else None,
        memory_bytes=message.memory_bytes if has("memory_bytes") else None,
        restart_ages_s=tuple(message.restart_ages_s),
        pid=message.pid,
        busy_for_s=message.busy_for_s if has("busy_for_s") else None,
        entry=message.entry,
        failure_id=FailureId(message.failure_id),
        progress=NO_PROGRESS if progress is None else progress_from_proto(progress),
        predicted_memory=None if predicted is None else memory_profile_from_proto(predicted),
        measured_memory=None if measured is None else memory_profile_from_proto(measured),
    )


def _has_known_protocols(message: pb2.ShardRecord) -> bool:
    return all(address.protocol in PROTOCOL_OF for address in message.addresses)


def _shard_problems(message: pb2.ShardRecord) -> list[FieldProblem]:
    problems = []
    if message.state not in SHARD_STATE_OF:
        problems.append(FieldProblem("state", f"{message.state} is no state of a shard"))
    if not message.HasField("generation"):
        problems.append(FieldProblem("generation", "is missing"))
    problems += [
        FieldProblem(f"addresses[{index}].protocol", f"{address.protocol} is no known protocol")
        for index, address in enumerate(message.addresses)
        if address.protocol not in PROTOCOL_OF
    ]
    return problems
