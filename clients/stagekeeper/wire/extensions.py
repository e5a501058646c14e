"""MessagePack extensions that other packages bring: values of their own classes inside of payloads.

The codec itself has extension 1 (tensors) and 2 (argument lists). Decided here: how a class gets a
code. Not decided here: which classes there are; whoever owns one registers it when imported, and a
process that has not imported it refuses what carries its code. Invariant: a code means one class,
and nothing of what is unpacked is trusted, so that `unpack` may raise whatever it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

Value = TypeVar("Value")

_OWN_CODES: Final = (1, 2)
_MOST: Final = 127
"""The codes from 0 are an application's; the negative ones are MessagePack's."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A class that travels under a code of its own."""

    code: int
    cls: type[Any]
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


_by_code: dict[int, Extension] = {}


def register_extension(
    code: int,
    cls: type[Value],
    pack: Callable[[Value], bytes],
    unpack: Callable[[bytes], Value],
) -> None:
    """Let values of `cls`, and of what derives from it, travel in MessagePack payloads.

    Registering the same class again replaces its functions.

    Args:
        code: from 3 to 127; part of the protocol.
        cls: must be nothing that travels by itself, such as a dataclass.
        pack: a TypeError or ValueError says why this value cannot travel.
        unpack: any exception says that the bytes are not what they should be.

    Raises:
        ValueError: the code is taken, or none of these.
    """
    known = _by_code.get(code)
    if code in _OWN_CODES or not 0 <= code <= _MOST:
        raise ValueError(f"extension {code} cannot be registered: the codes from 3 to 127 can")
    if known is not None and known.cls.__qualname__ != cls.__qualname__:
        raise ValueError(f"extension {code} is {known.cls.__qualname__} already")
    _by_code[code] = Extension(code, cls, pack, unpack)


def extension_of(value: object) -> Extension | None:
    """Return the extension that a value travels as; None when its class has none."""
    for extension in _by_code.values():
        if isinstance(value, extension.cls):
            return extension
    return None


def extension_with(code: int) -> Extension | None:
    """Return the extension with a code; None when nobody registered it here."""
    return _by_code.get(code)
