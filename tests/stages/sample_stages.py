"""Small stages for tests: each shows one way in which a stage can behave, or misbehave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from stagekeeper.actor import endpoint
from stagekeeper.stage import Stage


class Echo(Stage):
    """Answers with what it got."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    @endpoint(idempotent=True)
    def echo(self, text: str) -> str:
        return self.prefix + text

    @endpoint(idempotent=True)
    async def where(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "replica": self.context.replica_index,
            "stage": self.context.stage_name,
            "shard": (self.shard_index, self.shard_count),
        }

    @endpoint
    def fail(self, message: str) -> None:
        raise ValueError(message)

    @endpoint
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    @endpoint
    def hold_gil(self, seconds: float) -> str:
        """Keep every other thread of the process from running Python."""
        import ctypes

        # PyDLL keeps the GIL during the call, as a careless C extension does.
        ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
        return "held"

    @endpoint
    def count(self, upto: int) -> Iterator[int]:
        yield from range(upto)

    @endpoint
    async def die(self) -> None:
        os._exit(3)

    @endpoint
    def say(self, line: str) -> None:
        print(line, flush=True)


class Front(Stage):
    """Asks its siblings."""

    @endpoint(idempotent=True)
    async def ask(self, text: str) -> str:
        return str(await self.siblings["back"].echo.call_one(text))

    @endpoint
    async def count_back(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number


class Slow(Stage):
    """Loads until a file appears, with or without signs of life."""

    def __init__(self, gate: str, progress: bool = True) -> None:
        self.gate = Path(gate)
        self.shows_progress = progress

    def load(self) -> None:
        count = 0
        while not self.gate.exists():
            time.sleep(0.05)
            count += 1
            if self.shows_progress:
                self.progress(count, 0, "waiting for the gate")

    @endpoint(idempotent=True)
    def echo(self, text: str) -> str:
        return text


class Broken(Stage):
    """Never comes up."""

    def __init__(self, how: str = "raise", phase: str = "load") -> None:
        self.how = how
        self.phase = phase

    def load(self) -> None:
        self._act("load")

    def measure(self) -> None:
        self._act("measure")

    def capture(self) -> None:
        self._act("capture")

    def _act(self, phase: str) -> None:
        if phase != self.phase:
            return
        if self.how == "exit":
            os._exit(0)
        if self.how == "memory":
            raise MemoryError("no more cards")
        raise RuntimeError("weights are half downloaded")


class Family(Stage):
    """Starts children: one in its own session, one that left it."""

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail
        self.children: list[int] = []

    def load(self) -> None:
        for new_session in (False, True):
            child = subprocess.Popen(["sleep", "600"], start_new_session=new_session)
            self.children.append(child.pid)
        if self.fail:
            raise RuntimeError("failed after having children")

    @endpoint
    def pids(self) -> list[int]:
        return [os.getpid(), *self.children]


class Household(Slow):
    """Loads until a file appears, with children: one in its own session, one that left it."""

    def load(self) -> None:
        for new_session in (False, True):
            subprocess.Popen(["sleep", "600"], start_new_session=new_session)
        super().load()


class Stubborn(Stage):
    """Ignores every polite request to end."""

    def load(self) -> None:
        # The start method runs in a worker thread; signals can only be set in the main one, so a
        # child that ignores SIGTERM stands for the native code that does not listen.
        self.child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"])

    @endpoint
    def block(self, seconds: float) -> None:
        time.sleep(seconds)


class Gated(Stage):
    """Says which phase it has reached, and waits there until that phase's gate is opened.

    Phase P is reached when `<gates>/P.reached` exists, and open once `<gates>/P.open` does.
    """

    def __init__(self, gates: str) -> None:
        self.gates = Path(gates)

    def load(self) -> None:
        self._pass("LOAD")

    def measure(self) -> None:
        self._pass("MEASURE")

    def allocate(self, budget_bytes: int) -> None:
        self._pass("ALLOCATE")

    def capture(self) -> None:
        self._pass("CAPTURE")

    @endpoint(idempotent=True)
    def echo(self, text: str) -> str:
        return text

    def _pass(self, phase: str) -> None:
        (self.gates / f"{phase}.reached").touch()
        while not (self.gates / f"{phase}.open").exists():
            time.sleep(0.01)


class Watch(Echo):
    """Also tells what time of day it believes it is."""

    @endpoint(idempotent=True)
    def wall_s(self) -> float:
        return time.time()
