"""A steady load from a process of its own: calls are due at a pace, whatever became of others.

How long a call took is counted from the moment at which it was due, so that a client which could
not send does not look quick. Run as a program it calls until it has made so many calls and its
standard input is closed, and then prints what it has counted.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from stagekeeper.client import Client
from stagekeeper.client.routing import Route

MOST_IN_FLIGHT = 512
CALL_TIMEOUT_S = 30.0
SAMPLES_TOLD = 5


@dataclass
class LoadReport:
    """What a load came to.

    Attributes:
        sent: calls made.
        failed: calls that raised, or came back with another answer than theirs.
        retried: attempts beyond the first one of each call.
        took_s: from the first call's due time to the last one's end.
        latencies_s: of every call, ascending.
        errors: the first few failures in words.
    """

    sent: int = 0
    failed: int = 0
    retried: int = 0
    took_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def quantile_s(self, share: float) -> float:
        """Return the latency that `share` of all calls do not exceed."""
        return self.latencies_s[min(len(self.latencies_s) - 1, int(share * len(self.latencies_s)))]


class SteadyLoad:
    """A load that is under way in its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def has_begun(self) -> None:
        """Wait for the first answer."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 60.0)
        assert line == b"begun\n", line

    async def finish(self) -> LoadReport:
        """Let it end as soon as it has made its calls, and return what it counted."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        report = msgspec.json.decode(await self._process.stdout.read(), type=LoadReport)
        await self._process.wait()
        return report


@asynccontextmanager
async def steady_load(
    endpoint: str, deployment: str, method: str, *, per_s: float, at_least: int
) -> AsyncIterator[SteadyLoad]:
    """Call `method` with a text of its own each time; it has to come back.

    Args:
        at_least: calls; more are made until `finish`.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.harness.steady_load"),
        *(endpoint, deployment, method, str(per_s), str(at_least)),
        stdin=PIPE,
        stdout=PIPE,
        limit=1 << 28,
    )
    load = SteadyLoad(process)
    try:
        await load.has_begun()
        yield load
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _run(endpoint: str, deployment: str, method: str, per_s: float, at_least: int) -> None:
    report = LoadReport()
    free = asyncio.Semaphore(MOST_IN_FLIGHT)
    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    async with Client(endpoint) as client:
        attempts = _count_attempts(client)
        await client.call(deployment, method, "first", timeout=CALL_TIMEOUT_S)
        attempts.clear()
        print("begun", flush=True)

        async def call(number: int, due: float) -> None:
            text = str(number)
            try:
                answer = await client.call(deployment, method, text, timeout=CALL_TIMEOUT_S)
                problem = "" if answer == text else f"call {text} was answered {answer!r}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            finally:
                free.release()
            report.latencies_s.append(loop.time() - due)
            if problem:
                report.failed += 1
                report.errors = [*report.errors, problem][:SAMPLES_TOLD]

        calls: set[asyncio.Task[None]] = set()
        began = loop.time()
        while report.sent < at_least or not asked_to_end.done():
            due = began + report.sent / per_s
            await asyncio.sleep(due - loop.time())
            await free.acquire()
            task = asyncio.create_task(call(report.sent, due))
            calls.add(task)
            task.add_done_callback(calls.discard)
            report.sent += 1
        await asyncio.gather(*calls)
        report.took_s = loop.time() - began
        report.retried = len(attempts) - report.sent
    report.latencies_s.sort()
    sys.stdout.buffer.write(msgspec.json.encode(report))


def _count_attempts(client: Client) -> list[str]:
    """Note the instance that each attempt of a call goes to."""
    attempts: list[str] = []
    acquire = client.routes.acquire

    def acquire_and_note(route: Route) -> None:
        attempts.append(route.instance_id)
        acquire(route)

    client.routes.acquire = acquire_and_note  # type: ignore[method-assign]
    return attempts


if __name__ == "__main__":
    _endpoint, _deployment, _method, _per_s, _at_least = sys.argv[1:]
    asyncio.run(_run(_endpoint, _deployment, _method, float(_per_s), int(_at_least)))
