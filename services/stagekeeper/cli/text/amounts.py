"""Bytes, seconds and enum names as people read them."""

from __future__ import annotations

from typing import Any

from stagekeeper.core.counted import counted

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count_bytes: int) -> str:
    """Write `1.5 GiB`; whole numbers without a fraction."""
    value = float(count_bytes)
    power = 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value /= 1024
        power += 1
    text = f"{value:.1f}".removesuffix(".0")
    return f"{text} {_UNITS[power]}"


def seconds(value: float) -> str:
    """Write `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if value < 10:
        return f"{value:.1f} s"
    whole = int(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def count(number: int, noun: str) -> str:
    """Write `1 replica`, `2 replicas`."""
    return counted(number, noun)


def enum_name(enum: Any, number: int, prefix: str) -> str:
    """Return the name of an enum's value without its prefix: READY for SHARD_STATE_READY.

    A number that this release does not know is returned as it is: it comes from a newer one.
    """
    try:
        name: str = enum.Name(number)
    except ValueError:
        return str(number)
    return name.removeprefix(prefix)
