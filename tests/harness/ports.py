"""Ports in a row that are this test process's own: others look elsewhere first."""

from __future__ import annotations

import os
import socket
from typing import Final

HOST: Final = "127.0.0.1"
_FIRST: Final = 21_000
_ROWS: Final = 1_000
_ROW: Final = 8


def ports_in_a_row(count: int) -> range:
    """Return so many ports, at most 8, that nobody has bound."""
    for attempt in range(_ROWS):
        first = _FIRST + (os.getpid() + attempt) % _ROWS * _ROW
        if all(_is_free(port) for port in range(first, first + count)):
            return range(first, first + count)
    raise AssertionError(f"no {count} ports in a row are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
