"""What several ranks yield, as one sequence, in the order in which it comes.

Decided here: how far the ranks' streams are read ahead of whoever reads this one. Invariant:
whoever stops reading has closed every stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from stagekeeper.actor.rank_links import PayloadStream
from stagekeeper.v1.types_pb2 import Payload

_READ_AHEAD_VALUES: Final = 4
"""So many for each rank wait for the reader; a stream is read on while there is room for more."""


class Arrival(NamedTuple):
    """A value of a rank, or the error that is the last of it."""

    rank: int
    value: Any
    error: Exception | None


def merged(
    streams: Sequence[tuple[int, PayloadStream]], decode: Callable[[Payload], Any], name: str
) -> AsyncGenerator[Arrival, None]:
    """Yield what all streams yield, and at last the error of each that has one.

    Args:
        streams: with the rank of each; at least one.
        decode: makes a value of what came; what it raises ends that stream.
        name: of what was called, for people.
    """
    if len(streams) == 1:
        return _of_one(*streams[0], decode)
    return _of_all(streams, decode, name)


async def _of_one(
    rank: int, stream: PayloadStream, decode: Callable[[Payload], Any]
) -> AsyncGenerator[Arrival, None]:
    try:
        while True:
            try:
                value = decode(await stream.__anext__())
            except StopAsyncIteration:
                return
            except Exception as error:
                yield Arrival(rank, None, error)
                return
            yield Arrival(rank, value, None)
    finally:
        await stream.aclose()


async def _of_all(
    streams: Sequence[tuple[int, PayloadStream]], decode: Callable[[Payload], Any], name: str
) -> AsyncGenerator[Arrival, None]:
    arrived: asyncio.Queue[Arrival | None] = asyncio.Queue(len(streams) * _READ_AHEAD_VALUES)

    async def read(rank: int, stream: PayloadStream) -> None:
        async with aclosing(_of_one(rank, stream, decode)) as arrivals:
            async for arrival in arrivals:
                await arrived.put(arrival)
        await arrived.put(None)

    readers = [
        asyncio.create_task(read(rank, stream), name=f"{name} of rank {rank}")
        for rank, stream in streams
    ]
    try:
        reading = len(readers)
        while reading:
            arrival = await arrived.get()
            if arrival is None:
                reading -= 1
            else:
                yield arrival
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
