"""The keepalive of the clients of this process in a quarter of its time.

Decided here: the numbers that have to do with pings are scaled alike, and nothing else. That a dead
connection is found out in 8 s, which is 2 s here, is held by `integration/test_keepalive_pair.py`.
"""

from __future__ import annotations

import pytest

from stagekeeper.client import pool
from stagekeeper.wire.transport import CLIENT_OPTIONS

FACTOR = 4
_SCALED = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let channels that are opened from now on find out four times sooner that they are dead."""
    options = tuple(
        (name, value // FACTOR if name in _SCALED else value) for name, value in CLIENT_OPTIONS
    )
    monkeypatch.setattr(pool, "CLIENT_OPTIONS", options)
