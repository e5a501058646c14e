"""What a call was refused with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from stagekeeper.wire.error_details import WireError, unpack


@asynccontextmanager
async def refused(code: grpc.StatusCode, reason: str) -> AsyncIterator[list[WireError]]:
    """Expect the block to be refused so; its details are appended to what is lent."""
    found: list[WireError] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield found
    assert caught.value.code() == code, caught.value
    details = unpack(caught.value)
    assert details is not None, caught.value
    assert details.reason == reason, details
    found.append(details)
