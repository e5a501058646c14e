"""Tensors on the wire: [dtype name, shape, raw little-endian bytes], whatever library made them.

numpy and torch are told by what is loaded (`sys.modules`), so that a process without them never
imports them. A decoded numpy array is read-only and shares the message's memory, at whatever
alignment it lies there; a torch tensor gets memory of its own, since torch has no read-only ones.
bfloat16 has no numpy type: numpy receivers get float32, which holds every bfloat16 exactly.
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any, Final, Literal

import msgspec

ITEM_BYTES: Final = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes that travel, by name, with the bytes of one item."""

MAX_DIMENSIONS: Final = 64
"""numpy's own limit."""


class PayloadError(ValueError):
    """A value that cannot travel, or a payload that is not what it says.

    Attributes:
        place: where in the value: `$['a'][0]`, in the argument x of a call `x['a'][0]`; empty where
            the message is about the whole.
        problem: what is wrong there.
    """

    def __init__(self, message: str, *, place: str = "", problem: str = "") -> None:
        super().__init__(message)
        self.place = place
        self.problem = problem or message


_PackedTensor = tuple[str, list[int], memoryview]
_packed_decoder = msgspec.msgpack.Decoder(_PackedTensor)


def scalar_of(value: object) -> bool | int | float | str | bytes | None:
    """Return a numpy scalar as Python's own; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic) or value.dtype.kind not in "biufSU":
        return None
    item: bool | int | float | str | bytes = value.item()
    return item


def pack_tensor(value: object) -> _PackedTensor | None:
    """Take a numpy array or a torch tensor apart; None for anything else.

    Raises:
        TypeError: its dtype or its layout does not travel.
    """
    array = _as_numpy(value)
    if array is not None:
        name = str(array.dtype.name)
        _check_travels(name, "a numpy array")
        return name, list(array.shape), _little_endian_bytes(array)
    tensor = _as_torch(value)
    if tensor is not None:
        name = str(tensor.dtype).removeprefix("torch.")
        _check_travels(name, "a torch tensor")
        shape = list(tensor.shape)
        if tensor.is_complex():
            tensor = sys.modules["torch"].view_as_real(tensor)
        raw = tensor.reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return name, shape, memoryview(raw)
    return None


def list_tensor(value: object) -> object | None:
    """Return a numpy array or a torch tensor as nested lists, for JSON; None for anything else.

    Raises:
        TypeError: its layout does not travel.
    """
    array = _as_numpy(value)
    tensor = None if array is not None else _as_torch(value)
    found = array if array is not None else tensor
    return None if found is None else found.tolist()


def unpack_tensor(data: memoryview, library: Literal["numpy", "torch"]) -> Any:
    """Put a tensor together; `data` is the content of extension 1.

    Raises:
        PayloadError: it is malformed, of an unknown dtype, or `library` is not installed.
    """
    try:
        name, shape, raw = _packed_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise PayloadError(f"a tensor is [dtype name, shape, bytes]: {error}") from error
    item_bytes = ITEM_BYTES.get(name)
    if item_bytes is None:
        known = ", ".join(ITEM_BYTES)
        raise PayloadError(f"a tensor has the dtype {name!r}; those that travel are {known}")
    if len(shape) > MAX_DIMENSIONS:
        raise PayloadError(f"a tensor has {len(shape)} dimensions; {MAX_DIMENSIONS} are allowed")
    if any(extent < 0 for extent in shape) or math.prod(shape) * item_bytes != len(raw):
        raise PayloadError(f"a {name} tensor of shape {shape} does not have {len(raw)} bytes")
    module = _library(library)
    try:
        if library == "torch":
            return _torch_tensor(module, name, shape, raw)
        return _numpy_array(module, name, shape, raw)
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise PayloadError(f"a {name} tensor of shape {shape} cannot be made: {error}") from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PayloadError(f"the payload holds a tensor, and {name} is not installed") from error


def _numpy_array(numpy: Any, name: str, shape: list[int], raw: memoryview) -> Any:
    if name == "bfloat16":  # the upper half of a float32
        halves = numpy.frombuffer(raw, dtype="<u2").astype("<u4")
        return (halves << 16).view("<f4").reshape(shape)
    dtype = numpy.dtype(name).newbyteorder("<")
    return numpy.frombuffer(raw, dtype=dtype).reshape(shape)


def _torch_tensor(torch: Any, name: str, shape: list[int], raw: memoryview) -> Any:
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise PayloadError(f"this torch has no {name}")
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _as_numpy(value: object) -> Any | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    return value


def _as_torch(value: object) -> Any | None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    tensor: Any = value
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise TypeError("a sparse, quantized or meta tensor cannot travel: make it dense")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _check_travels(name: str, what: str) -> None:
    if name not in ITEM_BYTES:
        raise TypeError(f"{what} of dtype {name} cannot travel; {', '.join(ITEM_BYTES)} can")


def _little_endian_bytes(array: Any) -> memoryview:
    order = array.dtype.byteorder
    if order == ">" or (order == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return memoryview(array.reshape(-1).view("u1"))
