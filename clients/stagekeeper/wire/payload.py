"""The payload codec: values to `Payload` and back, as JSON or MessagePack; never pickle.

JSON travels in `text`, MessagePack in `data`, with extension 1 for tensors (see tensors.py), 2 for
argument lists that are neither one positional value nor all keywords, and those that others
register (see extensions.py), which JSON refuses. What is encoded: None, bool, int, float, str,
bytes, list, tuple (comes back as a list), set (as a list), dict, timezone-aware datetime, dataclass
and msgspec Struct (as a dict), enum (as its value), numpy arrays and scalars, torch tensors. In
JSON a tensor becomes nested lists, bytes become base64 and NaN becomes null. Invariant: this module
imports neither numpy nor torch before a tensor is met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire import tensors as tensor_codec
from stagekeeper.wire.extensions import extension_of, extension_with
from stagekeeper.wire.tensors import PayloadError
from stagekeeper.wire.transport import MAX_PAYLOAD_BYTES

__all__ = [
    "JSON",
    "MAX_DEPTH",
    "MSGPACK",
    "PayloadError",
    "PayloadTooLarge",
    "content_type_of",
    "decode",
    "decode_arguments",
    "encode",
    "encode_arguments",
]

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

MAX_DEPTH: Final = 100
"""Containers inside containers that are promised to work. Deeper ones may, until Python's own
recursion limit; they are refused then, never crash."""

_TENSOR: Final = 1
_ARGUMENTS: Final = 2
_TOO_DEEP: Final = "it is nested too deeply (or holds itself)"
_EXTENSION_HEADS: Final = frozenset((0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))

Tensors = Literal["numpy", "torch"]


class PayloadTooLarge(PayloadError):
    """The payload is above MAX_PAYLOAD_BYTES; send it in parts."""


def encode(value: object, content_type: str = MSGPACK) -> Payload:
    """Encode one value.

    Raises:
        PayloadError: something in it cannot travel; the message names where it is.
        PayloadTooLarge: it is larger than a payload may be.
    """
    return _payload(value, content_type, str)


def decode(payload: Payload, tensors: Tensors = "numpy") -> Any:
    """Decode one value. A payload without a body is None.

    Args:
        payload: as it came from the wire; nothing in it is trusted.
        tensors: "numpy" for read-only arrays that share the payload's memory (bfloat16 is widened
            to float32, which numpy has); "torch" for tensors with memory of their own.

    Raises:
        PayloadError: it is not what its content type says, or holds a tensor that cannot be made.
    """
    body = payload.WhichOneof("body")
    if body is None:
        content_type_of(payload)
        return None
    if content_type_of(payload) == JSON:
        return _decoded(_from_json, _json_text(payload, body))
    return _decoded(_DECODERS[tensors].decode, _msgpack_data(payload, body))


def encode_arguments(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    content_type: str = MSGPACK,
    *,
    names: Sequence[str] = (),
) -> Payload:
    """Encode a call's arguments.

    Args:
        names: of the positional parameters, for messages; without, they are counted from 0.

    Raises:
        PayloadError: an argument cannot travel (the message names it), or JSON cannot say this mix:
            it has keywords, or one positional value that is not an object.
        PayloadTooLarge: together they are larger than a payload may be.
    """
    if not args and not kwargs:
        if content_type not in (JSON, MSGPACK):
            raise _unknown_content_type(content_type)
        return Payload(content_type=content_type)
    if not args:
        return _payload(dict(kwargs), content_type, lambda path: _argument(f"$[1]{path[1:]}", ()))
    if len(args) == 1 and not kwargs and _is_never_a_map(args[0]):
        return _payload(args[0], content_type, lambda path: _argument(f"$[0][0]{path[1:]}", names))
    if content_type == JSON:
        if len(args) == 1 and not kwargs:
            # Some values become an object only when they are encoded: look at what came out.
            payload = _payload(args[0], JSON, lambda path: _argument(f"$[0][0]{path[1:]}", names))
            if not payload.text.startswith("{"):
                return payload
        raise PayloadError(
            "JSON carries keyword arguments, or one positional argument that is no object: "
            "name the arguments, or use MessagePack"
        )
    both = [list(args), dict(kwargs)]
    return encode(
        msgspec.msgpack.Ext(
            _ARGUMENTS, _encoded(_to_msgpack, both, lambda path: _argument(path, names))
        )
    )


def decode_arguments(
    payload: Payload, tensors: Tensors = "numpy"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode a call's arguments as (positional, keyword). No body means no arguments.

    Raises:
        PayloadError: it is not what its content type says, or its keywords are not text.
    """
    body = payload.WhichOneof("body")
    if body is None:
        content_type_of(payload)
        return (), {}
    if content_type_of(payload) == MSGPACK:
        data = _msgpack_data(payload, body)
        if data and data[0] in _EXTENSION_HEADS:
            value = _decoded(_ARGUMENT_DECODERS[tensors].decode, data)
            if isinstance(value, _Arguments):
                return tuple(value.args), value.kwargs
            return (value,), {}
    value = decode(payload, tensors)
    if not isinstance(value, dict):
        return (value,), {}
    return (), _keywords(value)


def content_type_of(payload: Payload) -> str:
    """Return JSON or MSGPACK: the one stated, or the one that its body stands for (none: JSON).

    An answer is encoded in the content type of its request; this says which that is.

    Raises:
        PayloadError: another content type is stated.
    """
    stated = payload.content_type
    if not stated:
        return MSGPACK if payload.WhichOneof("body") == "data" else JSON
    if stated not in (JSON, MSGPACK):
        raise _unknown_content_type(stated)
    return stated


class _Arguments(msgspec.Struct, array_like=True):
    args: list[Any]
    kwargs: dict[str, Any]


def _json_text(payload: Payload, body: str) -> str:
    if body != "text":
        raise PayloadError(f"{JSON} travels in the field `text`, and this payload has `data`")
    return payload.text


def _msgpack_data(payload: Payload, body: str) -> bytes:
    if body != "data":
        raise PayloadError(f"{MSGPACK} travels in the field `data`, and this payload has `text`")
    return payload.data


def _keywords(value: dict[Any, Any]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise PayloadError(f"keyword arguments have names, and {key!r} is not text")
    return value


def _unknown_content_type(content_type: str) -> PayloadError:
    return PayloadError(f"content type {content_type!r} is not known: use {JSON} or {MSGPACK}")


def _is_never_a_map(value: object) -> bool:
    # Dataclasses, Structs and their like become maps, which would read as keywords.
    return value is None or isinstance(
        value, (bool, int, float, str, bytes, bytearray, memoryview, list, tuple, set, frozenset)
    )


# --- encoding


Place = Callable[[str], str]
"""Turns a path within what is encoded into one that its author knows."""

_POSITIONAL: Final = re.compile(r"\$\[0\]\[(\d+)\]")
_KEYWORD: Final = re.compile(r"\$\[1\]\['(\w+)'\]")


def _argument(path: str, names: Sequence[str]) -> str:
    """Say a path within `[positional, keywords]` as the caller wrote it: `x['a'][0]`."""
    found = _POSITIONAL.match(path)
    if found is not None:
        index = int(found[1])
        name = names[index] if index < len(names) else f"argument {index}"
        return name + path[found.end() :]
    found = _KEYWORD.match(path)
    return path if found is None else found[1] + path[found.end() :]


def _encode_foreign(value: object) -> object:
    extension = extension_of(value)
    if extension is not None:
        return msgspec.msgpack.Ext(extension.code, extension.pack(value))
    scalar = tensor_codec.scalar_of(value)
    if scalar is not None:
        return scalar
    packed = tensor_codec.pack_tensor(value)
    if packed is None:
        raise TypeError(f"{_a_kind_of(value)} cannot travel")
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(packed))


def _json_foreign(value: object) -> object:
    if extension_of(value) is not None:
        raise TypeError(f"{_a_kind_of(value)} cannot travel as JSON: use MessagePack")
    scalar = tensor_codec.scalar_of(value)
    if scalar is not None:
        return scalar
    listed = tensor_codec.list_tensor(value)
    if listed is None:
        raise TypeError(f"{_a_kind_of(value)} cannot travel as JSON")
    return listed


def _a_kind_of(value: object) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


_to_msgpack = msgspec.msgpack.Encoder(enc_hook=_encode_foreign).encode
_to_json = msgspec.json.Encoder(enc_hook=_json_foreign).encode
_from_json = msgspec.json.Decoder().decode


def _payload(value: object, content_type: str, place: Place) -> Payload:
    if content_type == MSGPACK:
        return Payload(content_type=MSGPACK, data=_encoded(_to_msgpack, value, place))
    if content_type == JSON:
        return Payload(content_type=JSON, text=_encoded(_to_json, value, place).decode())
    raise _unknown_content_type(content_type)


def _encoded(encoder: Callable[[Any], bytes], value: object, place: Place = str) -> bytes:
    try:
        data = encoder(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        path, problem = _explain(encoder, value, error)
        where = place(path)
        raise PayloadError(f"{where}: {problem}", place=where, problem=problem) from error
    if len(data) > MAX_PAYLOAD_BYTES:
        path, size = _largest(encoder, value)
        where = place(path)
        problem = (
            f"it has {size} bytes, all that is sent together {len(data)}, and {MAX_PAYLOAD_BYTES} "
            "are allowed: send it in parts"
        )
        raise PayloadTooLarge(
            f"the payload has {len(data)} bytes, {MAX_PAYLOAD_BYTES} are allowed; most of them "
            f"({size}) in {where}: send it in parts",
            place=where,
            problem=problem,
        )
    return data


def _explain(encoder: Callable[[Any], bytes], value: object, error: Exception) -> tuple[str, str]:
    """Find the innermost value that does not encode, by encoding each part alone, and why."""
    if isinstance(error, RecursionError):
        return _deepest(value), _TOO_DEEP
    path = "$"
    while True:
        for step, child in _children(value):
            try:
                encoder(child)
            except RecursionError:
                return path + step, _TOO_DEEP
            except (TypeError, ValueError, OverflowError) as inner:
                path, value, error = path + step, child, inner
                break
        else:
            return path, str(error)


def _deepest(value: object) -> str:
    """Name the first MAX_DEPTH-deep place on the way down; "$" when the way is not found."""
    path, depth = "$", 0
    level: list[tuple[str, object]] = [(path, value)]
    while level and depth < MAX_DEPTH:
        deeper = [(p + s, c) for p, v in level for s, c in _children(v)]
        level = [item for item in deeper if isinstance(item[1], (dict, list, tuple))][:1000]
        depth += 1
        path = level[0][0] if level else path
    return path if len(path) < 200 else path[:100] + "…" + path[-60:]


def _largest(encoder: Callable[[Any], bytes], value: object) -> tuple[str, int]:
    """Follow the part that takes more than half of its whole, down to the last such one."""
    path, size = "$", len(encoder(value))
    while True:
        sized = [(len(encoder(child)), step, child) for step, child in _children(value)]
        most = max(sized, key=lambda item: item[0], default=None)
        if most is None or most[0] <= size // 2:
            return path, size
        size, path, value = most[0], path + most[1], most[2]


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    return []


# --- decoding


def _decoded(decoder: Callable[[Any], Any], data: str | bytes) -> Any:
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(
            f"the payload has {len(data)} bytes, {MAX_PAYLOAD_BYTES} are allowed: send it in parts"
        )
    try:
        return decoder(data)
    except PayloadError:
        raise
    except RecursionError as error:
        raise PayloadError("the payload is nested too deeply") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise PayloadError(f"the payload does not decode: {error}") from error


def _extension_hook(tensors: Tensors) -> Callable[[int, memoryview], Any]:
    def read_extension(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return tensor_codec.unpack_tensor(data, tensors)
        if code == _ARGUMENTS:
            raise PayloadError("extension 2 (an argument list) stands only around a whole request")
        extension = extension_with(code)
        if extension is None:
            raise PayloadError(f"extension {code} is not known: 1 is a tensor, 2 an argument list")
        try:
            return extension.unpack(bytes(data))
        except Exception as error:
            raise PayloadError(
                f"extension {code} ({extension.cls.__qualname__}) does not decode: {error}"
            ) from error

    return read_extension


_DECODERS: Final[Mapping[Tensors, msgspec.msgpack.Decoder[Any]]] = {
    "numpy": msgspec.msgpack.Decoder(ext_hook=_extension_hook("numpy")),
    "torch": msgspec.msgpack.Decoder(ext_hook=_extension_hook("torch")),
}


def _argument_hook(tensors: Tensors) -> Callable[[int, memoryview], Any]:
    inner = msgspec.msgpack.Decoder(_Arguments, ext_hook=_extension_hook(tensors))
    others = _extension_hook(tensors)

    def read_extension(code: int, data: memoryview) -> Any:
        return inner.decode(data) if code == _ARGUMENTS else others(code, data)

    return read_extension


_ARGUMENT_DECODERS: Final[Mapping[Tensors, msgspec.msgpack.Decoder[Any]]] = {
    "numpy": msgspec.msgpack.Decoder(ext_hook=_argument_hook("numpy")),
    "torch": msgspec.msgpack.Decoder(ext_hook=_argument_hook("torch")),
}
