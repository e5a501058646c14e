"""An actor for those who send nonsense: what it was sent stays, and can be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from stagekeeper.actor import Actor, endpoint
from tests.stages.actor_cases import pass_gate, start_sleeper


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


class Far(Actor):
    """Lives on another host, as far as its owner knows."""

    def __init__(self, journal: str = "") -> None:
        self.sum = 0
        self.journal = journal

    @endpoint
    async def add(self, number: int) -> int:
        self.sum += number
        return self.sum

    @endpoint
    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def fail_when(self, path: str) -> None:
        """Raise once a file is there."""
        await asyncio.to_thread(pass_gate, path)
        raise ValueError("on purpose")

    @endpoint
    async def start_sleeper(self) -> int:
        return start_sleeper()

    @endpoint
    async def pid(self) -> int:
        print("I was asked", flush=True)
        return os.getpid()

    async def __cleanup__(self, exc: BaseException | None) -> None:
        if self.journal:
            with open(self.journal, "a") as file:
                file.write(f"{type(exc).__name__}: {exc}\n")
