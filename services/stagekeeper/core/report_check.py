"""What a worker's report may say: a slice that makes no sense is refused, a bad entry left out.

Decided here: what is wrong in itself. Not decided here: what disagrees with another worker's entry
(that is kept, and derived as CONFLICT), and what is late (`registration`).

Invariant: a bad entry is refused alone. It changes neither the other entries nor their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekeeper.core.errors import FieldProblem, Reason, bad_fields
from stagekeeper.core.ids import DeviceId, FailureId, Generation, InstanceId, OperationId
from stagekeeper.core.model import (
    Device,
    Failure,
    OperationRecord,
    RefusedEntry,
    ShardRecord,
    WorkerReport,
)
from stagekeeper.core.names import name_problem, text_problem
from stagekeeper.core.states import LIVE_SHARD_STATES, ShardState

LARGEST_NUMBER = 2**63 - 1
"""What a store can hold."""

LARGEST_MINTED = 2**62
"""No reign or generation is believed above it and above what this reign has minted itself: one at
the end of what can be stored could never be followed by another."""

MOST_SHARDS = 20_000
"""One slice of so many is taken in about a second and costs the supervisor less than 64 MiB."""

MOST_OPERATIONS = 10_000
MOST_FAILURES = 10_000
MOST_DEVICES = 1_000
MOST_STAGES = 1_000
MOST_SHARDS_OF_STAGE = 1_000
MOST_REPLICAS = 100_000
LONGEST_ID = 255
LONGEST_DIGEST = 64

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


def check_slice(report: WorkerReport, digest: bytes, newest: Generation) -> None:
    """Check what the slice says of the worker itself, and how much of everything it holds.

    Args:
        report: the slice.
        digest: as its heartbeats will carry it.
        newest: the newest generation of this reign.

    Raises:
        Refused: BAD_FIELD, naming every wrong field at once.
    """
    problems: list[FieldProblem] = []

    def check(path: str, problem: str) -> None:
        if problem:
            problems.append(FieldProblem(path, problem))

    check("worker_id", name_problem(report.worker_id))
    check("host_id", _id_problem(report.host_id))
    check("agent_address", _address_problem(report.agent_address))
    check("hostname", "" if len(report.hostname) <= LONGEST_ID else "is too long")
    check("incarnation", _number_problem(report.incarnation, lowest=1))
    check("revision", _number_problem(report.revision, lowest=0))
    epoch = report.highest_epoch
    highest = max(LARGEST_MINTED, newest.epoch.number)
    check("highest_epoch.number", _number_problem(epoch.number, lowest=0, highest=highest))
    check("highest_epoch.supervisor_id", _too_long(epoch.supervisor_id))
    check("digest", "" if len(digest) <= LONGEST_DIGEST else f"is above {LONGEST_DIGEST} bytes")
    for path, count, most in (
        ("replica_states", len(report.shards), MOST_SHARDS),
        ("operations", len(report.operations), MOST_OPERATIONS),
        ("failures", len(report.failures), MOST_FAILURES),
        ("devices", len(report.devices), MOST_DEVICES),
    ):
        check(path, "" if count <= most else f"has {count} entries, at most {most} are taken")
    if problems:
        raise bad_fields(problems, "the registration")


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
        problem = failure_problem(failure)
        if problem:
            left_out.append(f"failures[{index}] was left out: {problem}")
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


def failure_problem(failure: Failure) -> str:
    """Say what is wrong with a failure; empty when it is sound."""
    return _id_problem(failure.failure_id)


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
            problem = Reason.BAD_FIELD, f"is there twice, also as instance {other.instance_id!r}"
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
    return f"{record.deployment!r} {place}"


def _shard_problem(record: ShardRecord, newest: Generation) -> tuple[Reason, str] | None:
    """Say what is wrong with one shard in itself."""
    if not (
        0 <= record.stage_id < record.stage_count <= MOST_STAGES
        and 0 <= record.shard_index < record.shard_count <= MOST_SHARDS_OF_STAGE
        and 0 <= record.replica_index < MOST_REPLICAS
    ):
        return Reason.SHARD_OUT_OF_RANGE, (
            f"is out of range: replica_index {record.replica_index} of at most {MOST_REPLICAS}, "
            f"stage_id {record.stage_id} of stage_count {record.stage_count} (at most "
            f"{MOST_STAGES}), shard_index {record.shard_index} of shard_count "
            f"{record.shard_count} (at most {MOST_SHARDS_OF_STAGE})"
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
        if not 0 <= claim.reserved_bytes <= LARGEST_NUMBER:
            return Reason.BAD_FIELD, f"devices: cannot hold {claim.reserved_bytes} bytes"
    if max(len(record.instance_id), len(record.operation_id)) > LONGEST_ID:
        return Reason.BAD_FIELD, f"has an id of more than {LONGEST_ID} characters"
    return None


def _device_problem(device: Device, known: dict[DeviceId, Device]) -> str:
    if device.device_id in known:
        return f"device_id {device.device_id!r} is there twice"
    if not 0 <= device.total_bytes <= LARGEST_NUMBER:
        return f"total_bytes {device.total_bytes} is out of range"
    return _id_problem(device.device_id)


def _operation_problem(
    operation: OperationRecord, known: dict[OperationId, OperationRecord], newest: Generation
) -> str:
    if operation.operation_id in known:
        return f"operation_id {operation.operation_id!r} is there twice"
    if not 0 <= operation.replica_index < MOST_REPLICAS:
        return f"replica_index {operation.replica_index} is out of range"
    return (
        _id_problem(operation.operation_id)
        or name_problem(operation.deployment)
        or _generation_problem(operation.generation, newest)
    )


def _generation_problem(generation: Generation, newest: Generation) -> str:
    """Refuse what no reign could go above: the epoch is raised over every generation reported."""
    if 1 <= generation.n <= max(LARGEST_MINTED, newest.n) and (
        generation.epoch.number <= max(LARGEST_MINTED, newest.epoch.number)
    ):
        return ""
    return f"generation: {generation} was minted by no supervisor"


def _id_problem(identity: str) -> str:
    if not identity:
        return "is empty"
    return _too_long(identity) or text_problem(identity)


def _too_long(text: str) -> str:
    return f"is longer than {LONGEST_ID} characters" if len(text) > LONGEST_ID else ""


def _number_problem(number: int, *, lowest: int, highest: int = LARGEST_NUMBER - 1) -> str:
    """Refuse, without another limit, what could not be raised by one and stored."""
    return "" if lowest <= number <= highest else f"{number} is not from {lowest} to {highest}"


def _address_problem(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        return f"{address!r} is not host:port"
    return _id_problem(address)
