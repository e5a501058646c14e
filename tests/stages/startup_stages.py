"""Stages for the start-up cases: how long they load, what they leave behind, whom they wait for."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from stagekeeper.actor import endpoint
from stagekeeper.stage import Stage


class Timed(Stage):
    """Loads for so many seconds. With a trace file, says there when it began and ended to load."""

    def __init__(self, seconds: float = 0.0, trace: str = "") -> None:
        self.seconds = seconds
        self.trace = trace

    def load(self) -> None:
        self._say("begin")
        self._wait()
        time.sleep(self.seconds)
        self._say("end")

    def _wait(self) -> None:
        pass

    def _say(self, word: str) -> None:
        if self.trace:
            # One write of a few bytes, appended: the lines of several processes do not mix.
            with open(self.trace, "ab", buffering=0) as file:
                file.write(f"{word} {self.context.stage_name} {time.monotonic()}\n".encode())

    @endpoint(idempotent=True)
    def budget_bytes(self) -> int:
        return self.context.budget_bytes


class Meeting(Timed):
    """Loads until so many stages have come to the folder; then as `Timed` does."""

    def __init__(self, folder: str, count: int, seconds: float = 0.0, trace: str = "") -> None:
        super().__init__(seconds, trace)
        self.folder = Path(folder)
        self.count = count

    def _wait(self) -> None:
        (self.folder / self.context.stage_name).touch()
        while len(list(self.folder.iterdir())) < self.count:
            time.sleep(0.01)


class Engine(Stage):
    """Starts two workers and takes memory; then loads until a file appears, or fails in a way.

    The workers are in the stage's session and in one of their own.
    """

    def __init__(self, how: str = "", gate: str = "", lines: int = 0) -> None:
        self.how = how
        self.gate = gate
        self.lines = lines

    def load(self) -> None:
        self.weights = bytearray(os.urandom(1 << 10) * (64 << 10))  # 64 MiB, really there
        for own_session in (False, True):
            subprocess.Popen(["sleep", "600"], start_new_session=own_session)
        for number in range(self.lines):
            print(f"line {number}", flush=True)
        if self.how == "raise":
            raise RuntimeError("weights are half downloaded")
        if self.how == "exit":
            os._exit(7)
        if self.how == "hold_gil":
            _hold_gil(600.0)
        while self.gate and not Path(self.gate).exists():
            time.sleep(0.01)

    @endpoint
    def hold_gil(self, began: str, seconds: float) -> None:
        """Listen to nothing and to nobody for so long: no request, no signal handler of Python."""
        Path(began).touch()
        _hold_gil(seconds)

    @endpoint(idempotent=True)
    def pid(self) -> int:
        return os.getpid()


def _hold_gil(seconds: float) -> None:
    import ctypes

    # PyDLL keeps the GIL during the call, as a careless C extension does.
    ctypes.PyDLL(None).sleep(int(seconds))
