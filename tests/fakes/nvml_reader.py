"""A process that reads NVIDIA cards when it is told to: NVML is loaded once a process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import structlog

from stagekeeper.agent.cards.device_choice import parse_choice
from stagekeeper.agent.cards.devices import CardFault
from stagekeeper.agent.cards.kernel_log import KernelLog
from stagekeeper.agent.cards.nvml import NvmlDevices
from stagekeeper.agent.cards.visible_devices import VisibleDevices

LONG_S = 30.0
KERNEL_LOG_ENV, NAMESPACE_ENV = "TEST_KERNEL_LOG", "TEST_PID_NAMESPACE"
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Seen:
    """One look, as another process saw it.

    `took_s` is how long it took, `look_again_s` what it answered; `faults` are the errors of
    single programs that were told with it.
    """

    cards: dict[str, dict[str, Any]]
    unknown_reason: str
    look_again_s: float
    took_s: float
    thread_count: int
    has_pynvml: bool
    notes: list[str]
    faults: list[dict[str, Any]]

    @property
    def uuids(self) -> list[str]:
        return list(self.cards)


class NvmlReader:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def look(self, word: str = "look") -> Seen:
        """Have it look, or only `listen` for errors, and return what it sees."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n".encode())
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        return Seen(**json.loads(line))

    async def end(self) -> int:
        """Tell it to end, and return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await asyncio.wait_for(self.process.wait(), 10)


@asynccontextmanager
async def nvml_reader(
    env: Mapping[str, str], *devices: str, deadline_s: float = LONG_S
) -> AsyncIterator[NvmlReader]:
    """A process that was given these `--devices`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.fakes.nvml_reader",
        json.dumps([deadline_s, *devices]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    try:
        yield NvmlReader(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _look(source: NvmlDevices, word: str, faults: list[CardFault]) -> Seen:
    began = time.monotonic()
    look_again_s = 0.0
    if word == "look":
        look_again_s = await source.look()
    else:
        await source.listen()
    took_s = time.monotonic() - began
    reading = source.reading(())
    return Seen(
        cards={
            it.device.device_id: {
                **dataclasses.asdict(it.device),
                "processes": None
                if it.processes is None
                else {str(process.pid): process.used_bytes for process in it.processes},
                "problem": it.problem,
            }
            for it in reading.cards
        },
        unknown_reason=reading.unknown_reason,
        look_again_s=look_again_s,
        took_s=took_s,
        thread_count=len(os.listdir("/proc/self/task")),
        has_pynvml="pynvml" in sys.modules,
        notes=list(source.notes),
        faults=[dataclasses.asdict(it) for it in faults],
    )


async def _serve(deadline_s: float, devices: list[str]) -> None:
    choice = parse_choice(devices).gpus
    assert choice is not None
    if deadline_s < LONG_S:
        import_module("pynvml")  # a short deadline is for calls, not for what a busy disk loads
    source = NvmlDevices(
        choice,
        "host",
        deadline_s=deadline_s,
        interval_s=5.0,
        visible=VisibleDevices.of(),
        kernel_log=KernelLog(Path(os.environ[KERNEL_LOG_ENV]), Path(os.environ[NAMESPACE_ENV]))
        if KERNEL_LOG_ENV in os.environ
        else None,
    )
    faults: list[CardFault] = []
    source.on_fault = faults.append
    loop = asyncio.get_running_loop()
    words = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    while word := await words.readline():
        faults.clear()
        seen = await _look(source, word.decode().strip(), faults)
        sys.stdout.write(json.dumps(dataclasses.asdict(seen)) + "\n")
        sys.stdout.flush()


def main() -> None:
    deadline_s, *devices = json.loads(sys.argv[1])
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(_serve(deadline_s, devices))


if __name__ == "__main__":
    main()
