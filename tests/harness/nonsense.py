"""Requests that make no sense, made from ones that do: each field in turn, and many at once.

What is sent is bytes, so that fields may have another wire type than the contract says. Everything
comes from a seed: the same seed makes the same requests.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

import stagekeeper.v1

Field = Any
"""A FieldDescriptor: the types of the two that there are do not go together."""

DEEPEST = 6
"""Messages in messages; a failure may cause another one for ever."""

HUGE = 300_000
ENORMOUS = 31 << 20
"""Above what any request may take, below what gRPC takes of a message."""

TEXTS = [
    "", "m", "w1", "a/b", "\n", "a\0b", "\x7f", "🦙", "e\u0301", "\u202eltr", "\ufeff", "\u2028",
    "x" * 63, "x" * 64, "x" * 256, "🦙" * 63, "🦙" * 128, "x" * HUGE, "é" * HUGE, "{}", "[", "3",
    "null", '{"text": 3}', '{"a": 1, "a": 2}', '{"a": 1e999}', "[" * 100_000, '{"a":' * 50_000,
    "9" * 5_000, "127.0.0.1:" + "9" * 5_000, "127.0.0.1:1", "m:S", "..:..", "default", "%s%n{0}",
]  # fmt: skip
WORST = ["🦙" * 128, "127.0.0.1:" + "9" * 5_000, "x" * HUGE]
"""Of the texts: those that have done harm before. Each field gets them, whatever chance chooses."""

BYTES = [
    b"", b"\x00", b"\xff" * 9, b"x" * 64, b"x" * 65, b"x" * HUGE, b"\x91" * 100_000,
    b"\x81\xa1a" * 20_000, b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xc7\x03\x01abc", b"\xc7\x03\x63abc",
    b"\xd4\x02\x90", b"\xa2\xff\xff", b"\x81\xa4text\xa1x", b"\x81\x01\x02",
    b"\xc9\xff\xff\xff\xff\x01",
]  # fmt: skip
DOUBLES = [
    0.0, -0.0, 0.5, -1.0, 1.0000001, 1e9, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
NUMBERS = [0, 1, 2, 7, 64, 255, 10_000, 2**31, 2**62, 2**62 + 1]
ENUMS = [0, 1, 99, 2**31 - 1, -1]
LARGEST = {
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
}


FUZZED = {
    "supervisor": ("DiscoveryService", "DeploymentService", "SupervisorService"),
    "agent": ("AgentService",),
    "stage": ("StageService", "StageControlService"),
    "tree": ("ActorService", "StageService"),
}
"""Whose rpcs are sent nonsense, by the process that serves them: each that the contract has."""


def services() -> dict[str, ServiceDescriptor]:
    """Return every service of the contract by its name, found in the generated modules."""
    found = {}
    for info in pkgutil.iter_modules(stagekeeper.v1.__path__):
        if info.name.endswith("_service_pb2"):
            module = importlib.import_module(f"stagekeeper.v1.{info.name}")
            found.update(module.DESCRIPTOR.services_by_name)
    return found


def methods(process: str) -> list[MethodDescriptor]:
    """Return every rpc that a kind of process serves."""
    known = services()
    return [method for name in FUZZED[process] for method in known[name].methods]


def label(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}.{method.name}"


@dataclass(frozen=True)
class Nonsense:
    """A request, and what was done to make it one."""

    data: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.what}: {self.data[:300]!r}{'…' if len(self.data) > 300 else ''}"


def each_field(
    sound: Callable[[], Message], chance: random.Random, values: int, *, has_worst: bool = False
) -> Iterator[Nonsense]:
    """Yield requests with one wrong field each, for every field at any depth.

    Args:
        sound: makes a request that would be taken, another one each time.
        chance: chooses the values.
        values: how many of each field are tried; there are up to some thirty.
        has_worst: those that did harm before are tried in any case.
    """
    for path in sorted(_paths(sound())):
        tries = _edges(_field_at(sound(), path))
        chance.shuffle(tries)
        worst = [edge for edge in tries if has_worst and _is_worst(edge)]
        for edge in [*worst, *tries[:values]]:
            request = sound()
            where = _put(request, path, edge)
            yield Nonsense(request.SerializeToString(), f"{where} = {_short(edge)}")
    for field in sound().DESCRIPTOR.fields:
        request = sound()
        request.ClearField(field.name)
        yield Nonsense(request.SerializeToString(), f"no {field.name}")


def many_fields(
    sound: Callable[[], Message], chance: random.Random, count: int
) -> Iterator[Nonsense]:
    """Yield `count` requests in which several fields are wrong."""
    paths = sorted(_paths(sound()))
    for _ in range(count if paths else 0):
        request, done = sound(), []
        for path in chance.sample(paths, min(len(paths), chance.choice([2, 3, 5, 20]))):
            edge = chance.choice(_edges(_field_at(request, path)))
            done.append(f"{_put(request, path, edge)} = {_short(edge)}")
        yield Nonsense(request.SerializeToString(), ", ".join(done))


def wrong_wires(sound: Callable[[], Message], chance: random.Random) -> Iterator[Nonsense]:
    """Yield requests with fields of other wire types than theirs, and with fields of nobody's."""
    numbers = [field.number for field in sound().DESCRIPTOR.fields]
    for number in [*numbers, 999, 536_870_911]:
        for wire, body in ((0, b"\x96\x01"), (1, b"12345678"), (2, b"\x03abc"), (5, b"1234")):
            extra = _varint(number << 3 | wire) + body
            data = sound().SerializeToString()
            data = data + extra if chance.random() < 0.5 else extra + data
            if _can_be_read(sound(), data):
                yield Nonsense(data, f"field {number} of wire type {wire}")


def enormous(sound: Callable[[], Message]) -> Iterator[Nonsense]:
    """Yield requests that are too large as a whole, in a field that nobody knows."""
    data = sound().SerializeToString() + _varint(999 << 3 | 2) + _varint(ENORMOUS)
    yield Nonsense(data + b"x" * ENORMOUS, f"{ENORMOUS} bytes in an unknown field")


def undecodable(sound: Callable[[], Message], chance: random.Random) -> Iterator[bytes]:
    """Yield frames that are no message at all."""
    data = sound().SerializeToString()
    frames = [b"\xff" * 7, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xff\xfe" * 5, data + b"\x07"]
    if data:
        frames.append(data[: chance.randrange(len(data))] + b"\x07")
    yield from (frame for frame in frames if not _can_be_read(sound(), frame))


def _can_be_read(message: Message, data: bytes) -> bool:
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False
    return True


# --- fields


Path = tuple[str, ...]


def _paths(message: Message, depth: int = 0) -> Iterator[Path]:
    """Yield the way to every field; of a list, into its first entry."""
    for field in message.DESCRIPTOR.fields:
        yield (field.name,)
        if field.message_type is None or _is_map(field) or depth >= DEEPEST:
            continue
        inner = _first(message, field, make=False)
        if inner is not None:
            yield from ((field.name, *rest) for rest in _paths(inner, depth + 1))


def _first(message: Message, field: Field, *, make: bool) -> Message | None:
    value: Any = getattr(message, field.name)
    if not field.is_repeated:
        return value if make or message.HasField(field.name) else None
    if len(value):
        return value[0]
    return value.add() if make else None


def _field_at(message: Message, path: Path) -> Field:
    descriptor: Any = message.DESCRIPTOR
    for name in path[:-1]:
        descriptor = descriptor.fields_by_name[name].message_type
    return descriptor.fields_by_name[path[-1]]


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _edges(field: Field) -> list[Any]:
    if _is_map(field):
        keys = ["A", "", "1A", "STAGEKEEPER_X", "A" * 300, "A=B", "a\0b", "🦙", "PATH"]
        return [{key: text} for key in keys for text in ("x", "a\0b", "x" * HUGE)] + [
            {f"A{number}": "x" * 60 for number in range(count)} for count in (999, 1_001, 9_000)
        ]
    if field.is_repeated:
        inner = [None] if field.message_type is not None else _scalars(field)
        some = inner[: min(len(inner), 12)]
        return [[], *([value] for value in some), *([value] * 2 for value in some[:4])] + [
            [some[0]] * count for count in (65, 1_001, 25_000)
        ]
    if field.message_type is not None:
        return [None]
    return _scalars(field)


def _scalars(field: Field) -> list[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return list(BYTES if field.type == FieldDescriptor.TYPE_BYTES else TEXTS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return [True, False]
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return list(DOUBLES)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return list(ENUMS)
    least, largest = LARGEST[kind]
    return [least, largest, *(it for it in NUMBERS if it < largest)]


def _is_worst(edge: Any) -> bool:
    if isinstance(edge, float):
        return edge != edge
    if isinstance(edge, int):
        return edge >= 2**32 - 2
    return isinstance(edge, str) and edge in WORST


def _put(message: Message, path: Path, edge: Any) -> str:
    """Set the field at the end of a path, making what is not there; return the way to it."""
    for name in path[:-1]:
        inner = _first(message, message.DESCRIPTOR.fields_by_name[name], make=True)
        assert inner is not None
        message = inner
    field = message.DESCRIPTOR.fields_by_name[path[-1]]
    if _is_map(field):
        getattr(message, field.name).update(edge)
    elif field.is_repeated:
        _fill(message, field, edge)
    elif field.message_type is not None:
        message.ClearField(field.name)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, edge)
    return ".".join(path)


def _fill(message: Message, field: Field, values: list[Any]) -> None:
    """Fill a list; messages in it are those that were there, again and again, or empty ones."""
    there: Any = getattr(message, field.name)
    if field.message_type is None:
        message.ClearField(field.name)
        there.extend(values)
        return
    pattern = type(there[0])() if len(there) else None
    if pattern is not None:
        pattern.CopyFrom(there[0])
    message.ClearField(field.name)
    for _ in values:
        added = there.add()
        if pattern is not None:
            added.CopyFrom(pattern)


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(data) + struct.pack("B", number)


def _short(edge: Any) -> str:
    text = repr(edge)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"
