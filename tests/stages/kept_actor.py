"""An actor for those who send nonsense: what it was sent stays, and can be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from stagekeeper.actor import Actor, endpoint


class Kept(Actor):
    def __init__(self, text: str = "") -> None:
        self.text = text
        self.heard: list[Any] = []

    @endpoint
    async def hear(self, what: Any) -> None:
        self.heard.append(what)

    @endpoint
    async def told(self) -> list[Any]:
        return [self.text, *self.heard]

    @endpoint
    async def echo(self, what: Any) -> Any:
        return what

    @endpoint
    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def unsendable(self) -> object:
        return object()

    @endpoint
    async def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    async def chunks(self, count: int, size: int) -> AsyncIterator[bytes]:
        for number in range(count):
            self.text = str(number)
            yield b"x" * size


class KeptPlain(Actor):
    """Yields from its thread, and says from another actor's view how far it is."""

    at = 0

    @endpoint
    def chunks(self, count: int, size: int) -> Iterator[bytes]:
        for number in range(count):
            KeptPlain.at = number
            yield b"x" * size


class Onlooker(Actor):
    @endpoint
    async def at(self) -> int:
        return KeptPlain.at
