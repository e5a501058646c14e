"""What a worker's report may say: a slice that makes no sense is refused, a bad entry left out.

Decided here: what is wrong in itself. Not decided here: what disagrees with another worker's entry
(that is kept, and derived as CONFLICT), and what is late (`registration`).

Invariant: a bad entry is refused alone. It changes neither the other entries nor their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekeeper.core.command_stage_check import ports_problem
from stagekeeper.core.errors import FieldProblem, Reason, bad_fields
from stagekeeper.core.failure_check import failure_problems
from stagekeeper.core.field_check import (
    ages_problem,
    count_problem,
    id_problem,
    length_problem,
    named,
    range_problem,
    seconds_problem,
)
from stagekeeper.core.ids import DeviceId, FailureId, Generation, InstanceId, OperationId
from stagekeeper.core.limits import (
    LARGEST_BYTES,
    LARGEST_MINTED,
    LARGEST_NUMBER,
    LONGEST_DIGEST_BYTES,
    LONGEST_ID,
    LONGEST_MESSAGE,
    LONGEST_TEXT,
    MOST_FAILURES,
    MOST_FOREIGN,
    MOST_OPERATIONS,
    MOST_REPORTED_REPLICAS,
    MOST_REPORTED_STAGES,
    MOST_SHARDS,
    MOST_SHARDS_OF_STAGE,
    MOST_WORKER_DEVICES,
)
from stagekeeper.core.model import (
    Device,
    Failure,
    MemoryProfile,
    OperationRecord,
    RefusedEntry,
    RollbackRecord,
    ShardRecord,
    WorkerReport,
)
from stagekeeper.core.names import name_problem, shown, text_problem
from stagekeeper.core.states import LIVE_SHARD_STATES, ShardState

_ShardKey = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class CheckedReport:
    """What is kept of a report. `refused` names shards by their index in it, ascending.

    `left_out` has a line for each device, operation and failure that was wrong in itself.
    """

    shards: tuple[ShardRecord, ...]
    devices: tuple[Device, ...]
    operations: tuple[OperationRecord, ...]
    failures: tuple[Failure, ...]
    refused: tuple[RefusedEntry, ...] = ()
    left_out: tuple[str, ...] = ()


def check_slice(report: WorkerReport, digest: bytes, newest: Generation, *, known: int = 0) -> None:
    """Check what the slice says of the worker itself, and how much of everything it holds.

    Args:
        report: the slice.
        digest: as its heartbeats will carry it.
        newest: the newest generation of this reign.
        known: the incarnation that is known of the worker.

    Raises:
        Refused: BAD_FIELD, naming every wrong field at once.
    """
    epoch = report.highest_epoch
    highest_reign = max(LARGEST_MINTED, newest.epoch.number)
    found = [
        ("worker_id", name_problem(report.worker_id)),
        ("host_id", id_problem(report.host_id)),
        ("agent_address", _address_problem(report.agent_address)),
        ("hostname", length_problem(report.hostname) or text_problem(report.hostname)),
        ("incarnation", range_problem(report.incarnation, 1, max(LARGEST_MINTED, known + 1))),
        ("revision", range_problem(report.revision, 0, LARGEST_NUMBER)),
        ("highest_epoch.number", range_problem(epoch.number, 0, highest_reign)),
        ("highest_epoch.supervisor_id", length_problem(epoch.supervisor_id)),
        ("digest", _digest_problem(digest)),
    ]
    problems = [
        *named(found),
        *count_problems(
            shards=len(report.shards),
            operations=len(report.operations),
            failures=len(report.failures),
            devices=len(report.devices),
        ),
    ]
    if problems:
        raise bad_fields(problems, "the registration")


def count_problems(
    *, shards: int, operations: int, failures: int, devices: int
) -> list[FieldProblem]:
    """Say what a report has too much of: worth knowing before so much is converted."""
    found = [
        ("replica_states", count_problem(shards, MOST_SHARDS)),
        ("operations", count_problem(operations, MOST_OPERATIONS)),
        ("failures", count_problem(failures, MOST_FAILURES)),
        ("devices", count_problem(devices, MOST_WORKER_DEVICES)),
    ]
    return list(named(found))


def check_entries(report: WorkerReport, newest: Generation) -> CheckedReport:
    """Sort out the entries of a report that are wrong in themselves.

    `newest` is the newest generation of this reign.
    """
    left_out: list[str] = []
    shards, refused = _sound_shards(report.shards, newest)
    devices: dict[DeviceId, Device] = {}
    for index, device in enumerate(report.devices):
        problem = _device_problem(device, devices)
        if problem:
            left_out.append(f"devices[{index}] was left out: {problem}")
        else:
            devices[device.device_id] = device
    operations: dict[OperationId, OperationRecord] = {}
    for index, operation in enumerate(report.operations):
        problem = _operation_problem(operation, operations, newest)
        if problem:
            left_out.append(f"operations[{index}] was left out: {problem}")
        else:
            operations[operation.operation_id] = operation
    failures: dict[FailureId, Failure] = {}
    for index, failure in enumerate(report.failures):
        problems = failure_problems(failure)
        if problems:
            left_out.append(f"failures[{index}] was left out: {problems[0]}")
        else:
            failures.setdefault(failure.failure_id, failure)
    return CheckedReport(
        shards=shards,
        devices=tuple(devices.values()),
        operations=tuple(operations.values()),
        failures=tuple(failures.values()),
        refused=refused,
        left_out=tuple(left_out),
    )


def _sound_shards(
    records: Sequence[ShardRecord], newest: Generation
) -> tuple[tuple[ShardRecord, ...], tuple[RefusedEntry, ...]]:
    sound: list[ShardRecord] = []
    refused: list[RefusedEntry] = []
    first: dict[_ShardKey, int] = {}
    generations: dict[_ShardKey, dict[Generation, int]] = {}
    instances: dict[InstanceId, int] = {}
    for index, record in enumerate(records):
        key = record.deployment, record.replica_index, record.stage_id, record.shard_index
        problem = _shard_problem(record, newest)
        known = generations.get(key)
        if known is None and key in first:
            # Hashing generations is dear, and nearly every shard is there in one generation only.
            known = generations[key] = {records[first[key]].generation: first[key]}
        if problem is None and known is not None and record.generation in known:
            other = records[known[record.generation]]
            problem = (
                Reason.BAD_FIELD,
                f"is there twice, also as instance {shown(other.instance_id)}",
            )
        if problem is None and record.instance_id and record.instance_id in instances:
            other = records[instances[record.instance_id]]
            problem = Reason.BAD_FIELD, f"instance_id: is that of {_shard_label(other)} too"
        if problem is not None:
            reason, text = problem
            # The text names no place: in the message on the wire there may be other ones before it.
            message = f"{_shard_label(record)} {text}"
            refused.append(RefusedEntry(index, reason.value, message))
            continue
        first.setdefault(key, index)
        if known is not None:
            known[record.generation] = index
        instances[record.instance_id] = index
        sound.append(record)
    return tuple(sound), tuple(refused)


def _shard_label(record: ShardRecord) -> str:
    place = f"replica {record.replica_index} stage {record.stage_id} shard {record.shard_index}"
    return f"{shown(record.deployment)} {place}"


def _shard_problem(record: ShardRecord, newest: Generation) -> tuple[Reason, str] | None:
    """Say what is wrong with one shard in itself."""
    if not (
        0 <= record.stage_id < record.stage_count <= MOST_REPORTED_STAGES
        and 0 <= record.shard_index < record.shard_count <= MOST_SHARDS_OF_STAGE
        and 0 <= record.replica_index < MOST_REPORTED_REPLICAS
    ):
        return Reason.SHARD_OUT_OF_RANGE, (
            f"is out of range: replica_index {record.replica_index} of at most "
            f"{MOST_REPORTED_REPLICAS}, stage_id {record.stage_id} of stage_count "
            f"{record.stage_count} (at most {MOST_REPORTED_STAGES}), shard_index "
            f"{record.shard_index} of shard_count {record.shard_count} (at most "
            f"{MOST_SHARDS_OF_STAGE})"
        )
    if problem := name_problem(record.deployment):
        return Reason.BAD_FIELD, f"deployment: {problem}"
    if problem := name_problem(record.stage_name):
        return Reason.BAD_FIELD, f"stage_name: {problem}"
    if problem := _generation_problem(record.generation, newest):
        return Reason.BAD_FIELD, problem
    if record.state is ShardState.CONFLICT:
        return Reason.BAD_FIELD, "state: CONFLICT is derived by the supervisor, never reported"
    if not record.instance_id and record.state in LIVE_SHARD_STATES:
        return Reason.BAD_FIELD, f"instance_id: is empty, and the shard is {record.state}"
    for claim in record.devices:
        if not 0 <= claim.reserved_bytes <= LARGEST_BYTES:
            return Reason.BAD_FIELD, f"devices: cannot hold {claim.reserved_bytes} bytes"
        if claim.used_bytes is not None and claim.used_bytes > LARGEST_BYTES:
            return Reason.BAD_FIELD, f"devices: cannot use {claim.used_bytes} bytes"
    for profile in (record.predicted_memory, record.measured_memory):
        if profile is not None and max(_bytes_of(profile)) > LARGEST_BYTES:
            return Reason.BAD_FIELD, f"its memory cannot be {max(_bytes_of(profile))} bytes"
    ids = f"{record.instance_id}{record.operation_id}{record.failure_id}"
    # Nearly all are short and plain, and this is said of every shard of every registration.
    if (len(ids) > LONGEST_ID or not (ids.isascii() and ids.isprintable())) and (
        problem := _ids_problem(record)
    ):
        return Reason.BAD_FIELD, problem
    if record.spec_revision > LARGEST_MINTED:
        return Reason.BAD_FIELD, f"spec_revision: {record.spec_revision} is above any"
    if record.restart_ages_s and (problem := ages_problem(record.restart_ages_s)):
        return Reason.BAD_FIELD, f"restart_ages_s: {problem}"
    if record.busy_for_s is not None and (problem := seconds_problem(record.busy_for_s)):
        return Reason.BAD_FIELD, f"busy_for_s: {problem}"
    return None


def _bytes_of(profile: MemoryProfile) -> tuple[int, ...]:
    return profile.weights_bytes, profile.peak_bytes, profile.graph_bytes or 0


def _ids_problem(record: ShardRecord) -> str:
    """Say what is wrong with the ids of a shard, which may be empty."""
    for name in ("instance_id", "operation_id", "failure_id"):
        identity = getattr(record, name)
        if len(identity) > LONGEST_ID:
            return f"{name}: is an id of more than {LONGEST_ID} characters"
        if problem := text_problem(identity):
            return f"{name}: {problem}"
    return ""


def _device_problem(device: Device, known: dict[DeviceId, Device]) -> str:
    if device.device_id in known:
        return f"device_id {shown(device.device_id)} is there twice"
    for name, count in (
        ("total_bytes", device.total_bytes),
        ("used_bytes", device.used_bytes or 0),
        ("reserved_bytes", device.reserved_bytes),
    ):
        if not 0 <= count <= LARGEST_BYTES:
            return f"{name} {count} is out of range"
    if problem := count_problem(len(device.foreign), MOST_FOREIGN):
        return f"foreign: {problem}"
    if any(not 0 <= it.memory_bytes <= LARGEST_BYTES for it in device.foreign):
        return "foreign: memory_bytes is out of range"
    texts = [device.kind, device.model, device.lock_domain_id, device.sick_reason]
    texts += [text for it in device.foreign for text in (it.name, it.worker_id)]
    longest = max(map(len, texts))
    if longest > LONGEST_TEXT:
        return f"has a text of {longest} characters, at most {LONGEST_TEXT} are taken"
    if problem := next(filter(None, (text_problem(it.name) for it in device.foreign)), ""):
        return f"foreign: {problem}"
    if problem := text_problem(device.sick_reason):
        return f"sick_reason: {problem}"
    return id_problem(device.device_id)


def _operation_problem(
    operation: OperationRecord, known: dict[OperationId, OperationRecord], newest: Generation
) -> str:
    if operation.operation_id in known:
        return f"operation_id {shown(operation.operation_id)} is there twice"
    if not 0 <= operation.replica_index < MOST_REPORTED_REPLICAS:
        return f"replica_index {operation.replica_index} is out of range"
    if len(operation.rollback) > MOST_REPORTED_STAGES:
        return f"rollback: {count_problem(len(operation.rollback), MOST_REPORTED_STAGES)}"
    if len(operation.up_stage_ids) > MOST_REPORTED_STAGES:
        return f"up_stage_ids: {count_problem(len(operation.up_stage_ids), MOST_REPORTED_STAGES)}"
    if problem := ports_problem(operation.ports, MOST_REPORTED_STAGES):
        return f"ports: {problem}"
    for entry in operation.rollback:
        if problem := _rollback_problem(entry):
            return f"rollback: {problem}"
    if operation.failure is not None and (problems := failure_problems(operation.failure)):
        return f"failure.{problems[0]}"
    return (
        id_problem(operation.operation_id)
        or name_problem(operation.deployment)
        or length_problem(operation.reason, LONGEST_MESSAGE)
        or _generation_problem(operation.generation, newest)
    )


def _rollback_problem(entry: RollbackRecord) -> str:
    for name, count in (
        ("memory_before_bytes", entry.memory_before_bytes),
        ("memory_after_bytes", entry.memory_after_bytes),
    ):
        if count is not None and not 0 <= count <= LARGEST_BYTES:
            return f"{name} {count} is out of range"
    return (
        seconds_problem(entry.duration_s)
        or length_problem(entry.error, LONGEST_MESSAGE)
        or length_problem(entry.stage_name)
        or length_problem(entry.worker_id)
    )


def _generation_problem(generation: Generation, newest: Generation) -> str:
    """Refuse what no reign could go above: the epoch is raised over every generation reported."""
    epoch = generation.epoch
    if (
        1 <= generation.n <= max(LARGEST_MINTED, newest.n)
        and epoch.number <= max(LARGEST_MINTED, newest.epoch.number)
        and len(epoch.supervisor_id) <= LONGEST_ID
    ):
        return ""
    return f"generation: {generation} was minted by no supervisor"


def _digest_problem(digest: bytes) -> str:
    if len(digest) <= LONGEST_DIGEST_BYTES:
        return ""
    return f"has {len(digest)} bytes, at most {LONGEST_DIGEST_BYTES} are taken"


def _address_problem(address: str) -> str:
    host, colon, port = address.rpartition(":")
    # Few digits, since Python refuses to read a number of thousands of them.
    is_port = len(port) <= 5 and port.isascii() and port.isdigit() and 0 < int(port) < 65_536
    return (
        id_problem(address) if host and colon and is_port else f"{shown(address)} is not host:port"
    )
