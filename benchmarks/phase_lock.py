"""The phase lock between processes, beside a bare `fcntl.lockf` in the same processes.

Run as a program it is one of these processes: it takes a lock, holds it, lets it go, and writes
when it did so, on the host's monotonic clock.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.report import Row, median_of, quantile, show
from stagekeeper.runtime.phase_lock import Mode, PhaseLock
from tests.harness.lock_user import waits_in_the_kernel
from tests.harness.waiting import wait_for

CARD = "host/GPU-0"
WRITERS, ROUNDS, HOLD_S = 4, 100, 0.002
KILLS = 15
READERS, READER_HOLD_S, ENTRIES = 4, 0.05, 20
HAND_OVER_REACH_S, KILL_REACH_S = 0.001, 0.010


@dataclass(frozen=True)
class Turn:
    """One hold of one process."""

    process: int
    asked: float
    had: float
    freed: float


async def phase_lock() -> None:
    """Hand-overs in turn, a killed holder, and a writer among steady readers."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        turns = {kind: await _writers(kind, Path(folder)) for kind in ("bare", "ours")}
        rows += _hand_overs(turns["ours"], turns["bare"])
        kills_s = {kind: await _kills(kind, Path(folder)) for kind in ("bare", "ours")}
        took_s, bare_s = median_of(kills_s["ours"]), median_of(kills_s["bare"])
        rows.append(
            Row(
                "SIGKILL of the holder to the next",
                f"{took_s * 1e3:.2f} ms",
                f"{bare_s * 1e3:.2f} ms",
                f"{took_s / bare_s:.1f} ×",
                f"<= {KILL_REACH_S * 1e3:g} ms",
                took_s <= KILL_REACH_S,
            )
        )
        rows.append(await _among_readers(Path(folder)))
    show(
        "phase lock",
        f"{WRITERS} processes that want the lock alone, {ROUNDS} times each for "
        f"{HOLD_S * 1e3:g} ms; {KILLS} kills; {READERS} readers that hold it "
        f"{READER_HOLD_S * 1e3:g} ms again and again, and {ENTRIES} entries of a writer; the "
        "ceiling is a bare record lock in the same processes",
        rows,
    )


def _hand_overs(ours: Sequence[Turn], bare: Sequence[Turn]) -> list[Row]:
    (took, order), (limit, limit_order) = _gaps(ours), _gaps(bare)
    rows = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        took_s, limit_s = quantile(took, share), quantile(limit, share)
        has_reach = name == "p50"
        rows.append(
            Row(
                f"hand-over to one that waits, {name}",
                f"{took_s * 1e3:.2f} ms",
                f"{limit_s * 1e3:.2f} ms",
                f"{took_s / limit_s:.1f} ×",
                f"<= {HAND_OVER_REACH_S * 1e3:g} ms" if has_reach else "",
                took_s <= HAND_OVER_REACH_S if has_reach else None,
            )
        )
    rows.append(
        Row(
            "of them in turn",
            f"{order:.1%}",
            f"{limit_order:.1%}",
            reach=">= 95 %",
            is_reached=order >= 0.95,
        )
    )
    return rows


def _gaps(turns: Sequence[Turn]) -> tuple[list[float], float]:
    """Return how long each hand-over to a process that waited took, and how many were in turn.

    Out of turn is whoever overtakes one that had asked a whole hold earlier: of two that ask at
    once nobody knows who was first in the kernel.
    """
    ordered = sorted(turns, key=lambda it: it.had)
    gaps, in_turn = [], 0
    for before, turn in pairwise(ordered):
        if turn.asked >= before.freed:
            continue  # nobody waited
        gaps.append(max(0.0, turn.had - before.freed))
        waiting = [it for it in ordered if it.asked < before.freed and it.had >= turn.had]
        in_turn += turn.asked <= min(it.asked for it in waiting) + HOLD_S
    return gaps, in_turn / max(1, len(gaps))


async def _writers(kind: str, folder: Path) -> list[Turn]:
    processes = [await _start(kind, folder, "alone", HOLD_S, ROUNDS) for _ in range(WRITERS)]
    for process in processes:
        _go(process)
    outputs = await asyncio.gather(*(_output(process) for process in processes))
    return [
        Turn(number, *map(float, line.split()))
        for number, output in enumerate(outputs)
        for line in output.splitlines()
    ]


async def _kills(kind: str, folder: Path) -> list[float]:
    took_s = []
    for _ in range(KILLS):
        holder = await _start(kind, folder, "alone", 60.0, 1)
        _go(holder)
        await _has_it(kind, folder)
        waiter = await _start(kind, folder, "alone", 0.0, 1)
        _go(waiter)
        await waits_in_the_kernel(waiter.pid)
        killed_at = time.monotonic()
        holder.kill()
        had = float((await _output(waiter)).split()[1])
        took_s.append(had - killed_at)
        await holder.wait()
    return took_s


async def _among_readers(folder: Path) -> Row:
    """Let a writer in again and again while readers hold the lock one over the other."""
    readers = [
        await _start("ours", folder, "shared", READER_HOLD_S, 10_000) for _ in range(READERS)
    ]
    try:
        for reader in readers:
            _go(reader)
            await asyncio.sleep(READER_HOLD_S / READERS)
        writer = await _start("ours", folder, "alone", 0.001, ENTRIES, pause_s=READER_HOLD_S)
        _go(writer)
        lines = (await _output(writer)).splitlines()
    finally:
        for reader in readers:
            reader.kill()
            await reader.communicate()
    waits_s = [float(had) - float(asked) for asked, had, _ in map(str.split, lines)]
    worst_s = max(waits_s)
    return Row(
        f"a writer's longest wait among {READERS} readers",
        f"{worst_s * 1e3:.1f} ms",
        f"{READER_HOLD_S * 1e3:.0f} ms hold",
        f"{worst_s / READER_HOLD_S:.2f} ×",
        "one hold and 10 ms",
        worst_s <= READER_HOLD_S + 0.010,
    )


# --- the processes


async def _start(
    kind: str, folder: Path, mode: str, hold_s: float, rounds: int, *, pause_s: float = 0.0
) -> Process:
    arguments = [kind, folder, mode, hold_s, rounds, pause_s]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.phase_lock", *map(str, arguments)),
        stdin=PIPE,
        stdout=PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


def _go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")


async def _output(process: Process) -> str:
    async with asyncio.timeout(120.0):
        return (await process.communicate())[0].decode()


async def _has_it(kind: str, folder: Path) -> None:
    marker = folder / f"{kind}-had"
    await wait_for(marker.exists, "the first one has the lock")
    marker.unlink()


async def _ours(folder: Path, mode: Mode, hold_s: float, rounds: int, pause_s: float) -> None:
    lock = PhaseLock(folder, [CARD], "benchmark")
    for _ in range(rounds):
        asked = time.monotonic()
        async with lock.held(mode, "MEASURE"):
            had = time.monotonic()
            _mark(folder / "ours-had", hold_s)
            await asyncio.sleep(hold_s)
            freed = time.monotonic()
        print(asked, had, freed)
        await asyncio.sleep(pause_s)


def _bare(folder: Path, mode: Mode, hold_s: float, rounds: int) -> None:
    descriptor = os.open(folder / "bare", os.O_RDWR | os.O_CREAT)
    for _ in range(rounds):
        asked = time.monotonic()
        fcntl.lockf(descriptor, mode)
        had = time.monotonic()
        _mark(folder / "bare-had", hold_s)
        time.sleep(hold_s)
        freed = time.monotonic()
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
        print(asked, had, freed)


def _mark(path: Path, hold_s: float) -> None:
    if hold_s > 1.0:  # it is there to be killed
        path.touch()


def main() -> None:
    kind, folder, mode, hold_s, rounds, pause_s = sys.argv[1:]
    how = Mode.ALONE if mode == "alone" else Mode.SHARED
    print("up", flush=True)
    sys.stdin.readline()
    if kind == "bare":
        _bare(Path(folder), how, float(hold_s), int(rounds))
    else:
        asyncio.run(_ours(Path(folder), how, float(hold_s), int(rounds), float(pause_s)))


if __name__ == "__main__":
    main()
