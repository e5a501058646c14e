"""Stages for the tests of the stage process: each shows one thing that may happen inside."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from stagekeeper.actor import context, endpoint
from stagekeeper.stage import Stage


def wait_for_file(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class OddWords(Stage):
    """Says what cannot be sent: half a surrogate, as in the name of a file, and no numbers."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def load(self) -> None:
        self.progress(-1, 2**70, "weights of \udcff" + "x" * 5_000)
        if self.fails:
            raise FileNotFoundError("no file \udcff")

    @endpoint
    def fail(self) -> None:
        raise ValueError("no \udcff")


class Calls(Stage):
    """Every kind of endpoint, and every way to end."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.gates: dict[str, asyncio.Event] = {}

    @endpoint(idempotent=True)
    def greet(self, name: str, *, loud: bool = False) -> str:
        text = f"{self.greeting} {name}"
        return text.upper() if loud else text

    @endpoint
    async def greet_async(self, name: str) -> str:
        await asyncio.sleep(0)
        return f"{self.greeting} {name}"

    @endpoint
    def give(self, value: Any) -> Any:
        return value

    @endpoint
    def where(self) -> dict[str, Any]:
        here = self.context
        return {
            "deployment": here.deployment,
            "stage": here.stage_name,
            "budget": here.budget_bytes,
            "devices": [device.device_id for device in here.devices],
            "cache_is_there": here.cache_dir.is_dir(),
            "thread": threading.current_thread().name,
            "pid": os.getpid(),
            "session": os.getsid(0),
            "stdin": os.read(0, 1) == b"",
        }

    @endpoint
    def fail(self, message: str) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError(message) from error

    @endpoint
    async def fail_async(self, message: str) -> None:
        raise ValueError(message)

    @endpoint
    def fail_deep(self, depth: int) -> None:
        if depth:
            self.fail_deep_step(depth)
        raise ValueError("at the bottom")

    def fail_deep_step(self, depth: int) -> None:
        self.fail_deep(depth - 1) if depth % 2 else self.fail_deep_other(depth)

    def fail_deep_other(self, depth: int) -> None:
        self.fail_deep(depth - 1)

    @endpoint
    def fail_unreadably(self) -> None:
        raise Unreadable

    @endpoint
    def leave(self) -> None:
        sys.exit(7)

    @endpoint
    async def leave_async(self) -> None:
        sys.exit(7)

    @endpoint
    def stop_iteration(self) -> None:
        raise StopIteration("lost?")

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError("not by the caller")

    @endpoint
    def unsendable(self) -> object:
        return object()

    @endpoint
    def huge(self, size: int) -> bytes:
        return b"x" * size

    def hidden(self) -> str:
        return "never"

    # --- waiting, and being told to stop

    @endpoint
    def wait_for_file(self, path: str) -> str:
        wait_for_file(path)
        return "there"

    @endpoint
    async def sleep(self, began: str, ended: str) -> None:
        Path(began).touch()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            Path(ended).write_text("cancelled")
            raise

    @endpoint
    def look_at_context(self, began: str, ended: str) -> None:
        call = context()
        has_deadline = call.deadline is not None
        Path(began).touch()
        while not call.cancelled:
            time.sleep(0.002)
        Path(ended).write_text(f"cancelled, deadline {has_deadline}")

    @endpoint
    def remaining(self) -> float | None:
        return context().remaining_s

    @endpoint
    def hold_gil(self, seconds: float) -> None:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    @endpoint
    def work_with_progress(self, began: str, until: str) -> None:
        count = 0
        Path(began).touch()
        while not Path(until).exists():
            count += 1
            self.progress(count, 100, "working")
            time.sleep(0.001)

    # --- streams

    @endpoint
    def count(self, upto: int) -> Iterator[int]:
        yield from range(upto)

    @endpoint
    async def count_async(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    @endpoint
    def count_then_fail(self, upto: int) -> Iterator[int]:
        yield from range(upto)
        raise ValueError("after the last")

    @endpoint
    def threads_of_steps(self) -> Iterator[int]:
        for _ in range(20):
            yield threading.get_ident()

    @endpoint
    def count_for_ever(self, ended: str) -> Iterator[int]:
        number = 0
        try:
            while True:
                yield number
                number += 1
        finally:
            Path(ended).write_text(str(number))

    @endpoint
    async def count_for_ever_async(self, ended: str) -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                yield number
                number += 1
                await asyncio.sleep(0)
        finally:
            Path(ended).write_text(str(number))


class Phases(Stage):
    """Each phase appends to a list; `hold` names one that waits for a file."""

    def __init__(self, hold: str = "", gate: str = "") -> None:
        self.hold = hold
        self.gate = gate
        self.seen: list[list[Any]] = []

    def _note(self, phase: str, *more: Any) -> None:
        self.seen.append([phase, threading.current_thread().name, *more])
        if phase == self.hold:
            self.progress(1, 3, f"in {phase}")
            wait_for_file(self.gate)

    def load(self) -> None:
        self._note("load")

    async def measure(self) -> None:
        self.seen.append(["measure", threading.current_thread().name])

    def allocate(self, budget_bytes: int) -> None:
        self._note("allocate", budget_bytes)

    def capture(self) -> None:
        self._note("capture")

    @endpoint
    def phases(self) -> list[list[Any]]:
        return self.seen


class Failing(Stage):
    """Fails in the phase that `phase` names, in the way that `how` names."""

    def __init__(self, phase: str, how: str = "raise") -> None:
        self.phase = phase
        self.how = how
        self._act("init")

    def _act(self, phase: str) -> None:
        if phase != self.phase:
            return
        if self.how == "memory":
            raise MemoryError("no more")
        if self.how == "exit":
            sys.exit(0)
        raise RuntimeError(f"broken in {phase}")

    def load(self) -> None:
        self._act("load")

    async def measure(self) -> None:
        self._act("measure")

    def allocate(self, budget_bytes: int) -> None:
        self._act("allocate")

    def capture(self) -> None:
        self._act("capture")


class Asking(Stage):
    """Asks its siblings, from both sorts of code."""

    @endpoint
    async def ask(self, sibling: str, name: str, *args: Any) -> Any:
        return await getattr(self.siblings[sibling], name).call_one(*args)

    @endpoint
    def ask_sync(self, sibling: str, name: str, *args: Any) -> Any:
        return getattr(self.siblings[sibling], name).call_one_sync(*args)

    @endpoint
    async def ask_sync_on_loop(self, sibling: str) -> Any:
        return self.siblings[sibling].greet.call_one_sync("x")

    @endpoint
    async def relay(self, sibling: str, upto: int) -> AsyncIterator[int]:
        async for number in self.siblings[sibling].count.stream(upto):
            yield number

    @endpoint
    def relay_sync(self, sibling: str, upto: int) -> Iterator[int]:
        yield from self.siblings[sibling].count.stream_sync(upto)

    @endpoint
    def names(self) -> list[str]:
        return sorted(self.siblings)


class Talkative(Stage):
    """Leaves something running when it is asked to end."""

    def load(self) -> None:
        print("a line from load", flush=True)
        threading.Thread(target=time.sleep, args=(600,), name="left over").start()

    @endpoint
    def ping(self) -> str:
        return "pong"


NOT_A_STAGE = 3


class FailsUnreadably(Stage):
    def measure(self) -> None:
        raise Unreadable


class CancelsItsStart(Stage):
    async def load(self) -> None:
        raise asyncio.CancelledError("not by the agent")
