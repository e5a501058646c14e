"""Patience with readers, as far as no connection is needed for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.supervisor.slow_readers import pour

LIMIT_S = 0.2


async def one_message() -> AsyncGenerator[str, None]:
    yield "news"


def stall(duration_s: float) -> None:
    """Let nothing of this process run."""
    time.sleep(duration_s)


async def test_stall_of_the_supervisors_own_cuts_no_reader():
    taken: list[str] = []

    async def write(message: str) -> None:
        stall(2 * LIMIT_S)
        await asyncio.sleep(LIMIT_S / 20)
        taken.append(message)

    await pour(one_message(), write, limit_s=LIMIT_S, reader="it")

    assert taken == ["news"]


async def test_reader_that_takes_nothing_is_cut_and_its_stream_closed():
    messages = one_message()

    async def write(message: str) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Refused) as cut:
        await pour(messages, write, limit_s=LIMIT_S, reader="it")

    assert cut.value.reason is Reason.REVISION_GONE
    with pytest.raises(StopAsyncIteration):
        await anext(messages)
