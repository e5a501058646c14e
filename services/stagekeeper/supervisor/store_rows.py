"""The store's tables, and how a value becomes a row and a row a value again.

Messages are kept as protobuf with a checksum, since a flipped bit is still a message. Invariant: a
row that does not come out as it went in raises `RowDamaged`; nothing is guessed from half of one.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from google.protobuf.message import DecodeError

from stagekeeper.core.commands import Desired, SavedOperation
from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import DeploymentName, Epoch, Generation, WorkerId
from stagekeeper.core.model import Failure, OperationPlan, Peer, ReplicaStart
from stagekeeper.core.names import name_problem
from stagekeeper.runtime.convert import (
    failure_from_proto,
    failure_to_proto,
    peer_from_proto,
    plan_from_proto,
    plan_to_proto,
    spec_from_proto,
    spec_to_proto,
)
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.v1 import types_pb2 as pb2

SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE epoch (
    id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL, supervisor_id TEXT NOT NULL
);
INSERT INTO epoch VALUES (1, 0, '');
CREATE TABLE deployments (
    name TEXT PRIMARY KEY, spec BLOB NOT NULL, spec_revision INTEGER NOT NULL,
    is_creating INTEGER NOT NULL, is_deleting INTEGER NOT NULL, create_time REAL,
    checksum INTEGER NOT NULL
);
CREATE TABLE tombstones (
    name TEXT PRIMARY KEY, number INTEGER NOT NULL, supervisor_id TEXT NOT NULL, n INTEGER NOT NULL
);
CREATE TABLE failures (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, failure_id TEXT UNIQUE NOT NULL, failure BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE roster (worker_id TEXT PRIMARY KEY);
CREATE TABLE quarantine (
    id INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL, key TEXT NOT NULL,
    content TEXT NOT NULL, why TEXT NOT NULL
);
"""
OPERATIONS_SCHEMA = """
CREATE TABLE operations (
    operation_id TEXT PRIMARY KEY, parts BLOB NOT NULL, is_decided INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
"""
MIGRATIONS = {0: SCHEMA + OPERATIONS_SCHEMA, 1: OPERATIONS_SCHEMA}
"""By the version that a file has: what makes it one of this version. 0 is a new file."""
LARGEST_INTEGER = 2**63 - 1
"""SQLite's; the protocol's numbers are unsigned, and none of ours comes near."""

Row = tuple[Any, ...]

_LENGTHS = ">II"
"""Of a worker's id and of its part, before both."""


class RowDamaged(ValueError):
    """A row that is not what was written; the message says what is wrong with it."""


def epoch_from_row(row: Row) -> Epoch:
    """Read the row of `epoch`: its number and the supervisor.

    Raises:
        RowDamaged: it is no reign.
    """
    number, supervisor_id = row
    if not isinstance(number, int) or not isinstance(supervisor_id, str):
        raise RowDamaged("its number or its supervisor is none")
    if not 0 <= number < LARGEST_INTEGER:
        raise RowDamaged(f"its number is {number}")
    return Epoch(number, supervisor_id)


def desired_to_row(desired: Desired) -> Row:
    body = spec_to_proto(desired.spec).SerializeToString(deterministic=True)
    return (
        desired.spec.name,
        body,
        desired.spec_revision,
        desired.is_creating,
        desired.is_deleting,
        desired.create_time,
        zlib.crc32(body),
    )


def desired_from_row(row: Row) -> Desired:
    """Read a row of `deployments`.

    Raises:
        RowDamaged: it is not what was written.
    """
    name, body, spec_revision, is_creating, is_deleting, create_time, checksum = row
    _check_body(body, checksum)
    try:
        spec = spec_from_proto(pb2.DeploymentSpec.FromString(body))
    except (DecodeError, Refused) as error:
        raise RowDamaged(f"its spec cannot be read: {error}") from error
    if spec.name != name:
        raise RowDamaged(f"its spec is of {spec.name!r}")
    if not isinstance(spec_revision, int) or not isinstance(create_time, float | None):
        raise RowDamaged("its revision or its time is no number")
    return Desired(spec, spec_revision, bool(is_creating), bool(is_deleting), create_time)


def tombstone_to_row(name: DeploymentName, ceiling: Generation) -> Row:
    number, n = min(ceiling.epoch.number, LARGEST_INTEGER), min(ceiling.n, LARGEST_INTEGER)
    return (name, number, ceiling.epoch.supervisor_id, n)


def tombstone_from_row(row: Row) -> tuple[DeploymentName, Generation]:
    """Read a row of `tombstones`.

    Raises:
        RowDamaged: it is not what was written.
    """
    name, number, supervisor_id, n = row
    _check_name(name)
    if not (isinstance(number, int) and isinstance(n, int) and isinstance(supervisor_id, str)):
        raise RowDamaged("its generation is no generation")
    return DeploymentName(name), Generation(Epoch(number, supervisor_id), n)


def failure_to_row(failure: Failure) -> Row:
    body = failure_to_proto(failure).SerializeToString(deterministic=True)
    return (failure.failure_id, body, zlib.crc32(body))


def failure_from_row(row: Row) -> Failure:
    """Read a row of `failures`: its sequence number, id, message and checksum.

    Raises:
        RowDamaged: it is not what was written.
    """
    _, failure_id, body, checksum = row
    _check_body(body, checksum)
    try:
        failure = failure_from_proto(pb2.Failure.FromString(body))
    except (DecodeError, Refused) as error:
        raise RowDamaged(f"its failure cannot be read: {error}") from error
    if failure.failure_id != failure_id:
        raise RowDamaged(f"its failure is {failure.failure_id!r}")
    return failure


def operation_to_row(saved: SavedOperation) -> Row:
    """Write a start as the requests that its workers are sent, each with the length before it."""
    body = b""
    for part in saved.start.parts:
        request = plan_to_proto(
            part, agent_pb2.CommandHeader(), agent_pb2.OPERATION_STEP_COMMIT, peers=saved.peers
        )
        worker_id = part.worker_id.encode()
        message = request.SerializeToString(deterministic=True)
        body += struct.pack(_LENGTHS, len(worker_id), len(message)) + worker_id + message
    return (saved.start.operation_id, body, saved.is_decided, zlib.crc32(body))


def operation_from_row(row: Row) -> SavedOperation:
    """Read a row of `operations`.

    Raises:
        RowDamaged: it is not what was written.
    """
    operation_id, body, is_decided, checksum = row
    _check_body(body, checksum)
    parts: list[OperationPlan] = []
    peers: tuple[Peer, ...] = ()
    try:
        while body:
            id_size, size = struct.unpack_from(_LENGTHS, body)
            at = struct.calcsize(_LENGTHS)
            worker_id = WorkerId(body[at : at + id_size].decode())
            request = agent_pb2.InitStageRequest.FromString(body[at + id_size :][:size])
            parts.append(plan_from_proto(request, worker_id))
            peers = tuple(peer_from_proto(peer) for peer in request.peers)
            body = body[at + id_size + size :]
    except (DecodeError, Refused, struct.error, UnicodeDecodeError) as error:
        raise RowDamaged(f"its parts cannot be read: {error}") from error
    if not parts or any(part.operation_id != operation_id for part in parts):
        raise RowDamaged("its parts are of another operation")
    return SavedOperation(ReplicaStart(tuple(parts)), bool(is_decided), peers)


def worker_id_from_row(row: Row) -> WorkerId:
    """Read a row of `roster`.

    Raises:
        RowDamaged: it is not what was written.
    """
    (worker_id,) = row
    _check_name(worker_id)
    return WorkerId(worker_id)


def _check_body(body: object, checksum: object) -> None:
    if not isinstance(body, bytes) or zlib.crc32(body) != checksum:
        raise RowDamaged("its checksum is wrong")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name_problem(name):
        raise RowDamaged(f"{name!r} is no name")
