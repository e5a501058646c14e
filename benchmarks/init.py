"""Starts against their limit: the slowest group alone, slept or started without anything else.

The limit of a start is the largest sum of a group, since a group is serial and groups are not. It
is measured in the same run, in turns: bare sleeps for the two drivers, a bare loop over the same
rows for grouping, the slowest group deployed alone for real stage processes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.report import Row, median_of, show
from stagekeeper.agent.initializer import run_init, run_init_async
from stagekeeper.core.planner import init_groups
from tests.harness.cluster import Cluster

SHAPES = ((4, 4), (16, 8), (64, 2))
"""Groups × stages of each."""
SLEEPS_S = (0.1, 0.01)
ROUNDS = 5
REACH = 1.02
"""For 16 × 8 of 100 ms; the other rows are for comparison."""

STAGES = 10_000
GROUPING_ROUNDS = 9
GROUPING_REACH_S = 0.25

LOADS_S = ((0.7, 0.8), (0.5, 0.4))
"""Two disjoint groups of stage processes: how long each of their stages loads."""
PROCESS_ROUNDS = 5

Devices = dict[int, list[int]]


async def init() -> None:
    """`run_init` and its asyncio twin against the bare sleeps of one group."""
    rows: list[Row] = []
    for sleep_s in SLEEPS_S:
        for group_count, stage_count in SHAPES:
            rows += await _starts(group_count, stage_count, sleep_s)
    show(
        "init",
        f"G × S: G groups of S stages; median of {ROUNDS} starts, each beside the bare sleeps of "
        "one group; one thread per group",
        rows,
    )


async def _starts(group_count: int, stage_count: int, sleep_s: float) -> list[Row]:
    devices = {
        group * stage_count + place: [group]
        for group in range(group_count)
        for place in range(stage_count)
    }

    async def sleeps() -> None:
        for _ in range(stage_count):
            await asyncio.sleep(sleep_s)

    def bare() -> None:
        for _ in range(stage_count):
            time.sleep(sleep_s)

    def in_threads() -> None:
        run_init(devices, lambda _: time.sleep(sleep_s), _nothing, max_workers=group_count)

    async def in_tasks() -> None:
        await run_init_async(devices, lambda _: asyncio.sleep(sleep_s), _nothing_async)

    # The plain functions in a thread, as a program without a loop would call them.
    took = [
        (
            await _timed(lambda: asyncio.to_thread(bare)),
            await _timed(lambda: asyncio.to_thread(in_threads)),
            await _timed(sleeps),
            await _timed(in_tasks),
        )
        for _ in range(ROUNDS)
    ]
    bare_s, threads_s, bare_task_s, tasks_s = ([turn[place] for turn in took] for place in range(4))
    has_reach = (group_count, stage_count, sleep_s) == (16, 8, 0.1)
    what = f"{group_count} × {stage_count} of {sleep_s * 1e3:g} ms"
    return [
        _ratio_row(f"{what}, run_init", threads_s, bare_s, has_reach),
        _ratio_row(f"{what}, asyncio", tasks_s, bare_task_s, has_reach),
    ]


def _ratio_row(
    what: str, took_s: Sequence[float], limit_s: Sequence[float], has_reach: bool
) -> Row:
    ratio = median_of([mine / bare for mine, bare in zip(took_s, limit_s, strict=True)])
    return Row(
        what,
        f"{median_of(took_s) * 1e3:.1f} ms",
        f"{median_of(limit_s) * 1e3:.1f} ms",
        f"{ratio:.3f} ×",
        f"<= {REACH} ×" if has_reach else "",
        ratio <= REACH if has_reach else None,
    )


async def grouping() -> None:
    """Groups of many stages in every shape, next to a bare loop over the same rows."""
    rows = []
    for what, devices in _plans():
        shuffled = list(devices.items())
        random.Random(1).shuffle(shuffled)
        mine, bare, groups = [], [], init_groups(shuffled)
        for _ in range(GROUPING_ROUNDS):
            began = time.perf_counter()
            _loop_over(shuffled)
            between = time.perf_counter()
            init_groups(shuffled)
            mine.append(time.perf_counter() - between)
            bare.append(between - began)
        took_s, limit_s = median_of(mine), median_of(bare)
        rows.append(
            Row(
                f"{what}: {len(groups):,} groups",
                f"{took_s * 1e3:.1f} ms",
                f"{limit_s * 1e3:.1f} ms bare loop",
                f"{took_s / limit_s:.1f} ×",
                f"<= {GROUPING_REACH_S:g} s",
                took_s <= GROUPING_REACH_S,
            )
        )
    show("grouping", f"{STAGES:,} stages, shuffled; median of {GROUPING_ROUNDS}", rows)


def _plans() -> list[tuple[str, Devices]]:
    cards = list(range(8))
    return [
        ("unrelated", {stage: [stage] for stage in range(STAGES)}),
        ("pairs", {stage: [stage // 2] for stage in range(STAGES)}),
        ("chain", {stage: [stage, stage + 1] for stage in range(STAGES)}),
        ("8 cards, one each", {stage: [stage % 8] for stage in range(STAGES)}),
        ("8 cards, all of them", dict.fromkeys(range(STAGES), cards)),
    ]


def _loop_over(rows: Sequence[tuple[int, list[int]]]) -> dict[int, int]:
    """Touch every row and every card of it once, as grouping cannot but do."""
    last_on: dict[int, int] = {}
    for stage_id, cards in rows:
        for card in cards:
            last_on[card] = stage_id
    return last_on


async def processes() -> None:
    """Two disjoint groups of real stage processes, against the slowest of them alone."""
    both_s, alone_s = [], []
    async with Cluster() as cluster:
        await cluster.start_supervisor()
        await cluster.start_agent()
        await _deploy_s(cluster, LOADS_S)  # once, so that all is in the page cache
        for _ in range(PROCESS_ROUNDS):
            alone_s.append(await _deploy_s(cluster, LOADS_S[:1]))
            both_s.append(await _deploy_s(cluster, LOADS_S))
    sums_s = [sum(loads_s) for loads_s in LOADS_S]
    ratio = median_of([both / alone for both, alone in zip(both_s, alone_s, strict=True)])
    show(
        "init processes",
        f"one agent, two groups of two stages that load {sums_s[0]:g} s and {sums_s[1]:g} s in "
        f"all; from `deploy` to READY; median of {PROCESS_ROUNDS}; the limit is the first group "
        "alone",
        [
            Row(
                "two disjoint groups of stage processes",
                f"{median_of(both_s):.2f} s",
                f"{median_of(alone_s):.2f} s",
                f"{ratio:.2f} ×",
            ),
            Row(
                "of it beside the loads",
                f"{median_of(both_s) - sums_s[0]:.2f} s",
                f"{median_of(alone_s) - sums_s[0]:.2f} s",
            ),
        ],
    )


async def _deploy_s(cluster: Cluster, groups: Sequence[Sequence[float]]) -> float:
    """Bring a deployment up and down again; return how long the way up took."""
    stages = [
        {
            "name": f"s{card}{place}",
            "entrypoint": "startup_stages:Timed",
            "args": {"seconds": load_s},
            "devices": [card],
            "memory": {"utilization": 0.3},
        }
        for card, loads_s in enumerate(groups)
        for place, load_s in enumerate(loads_s)
    ]
    async with cluster.client() as client:
        took_s = await _timed(lambda: client.deploy({"name": "groups", "stages": stages}))
        await client.delete("groups")
    await cluster.no_stage_left()
    return took_s


async def _timed(run: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await run()
    return time.perf_counter() - began


def _nothing(stage_id: int, handle: object) -> None:
    raise AssertionError(f"stage {stage_id} is not to be cleaned")


async def _nothing_async(stage_id: int, handle: object) -> None:
    raise AssertionError(f"stage {stage_id} is not to be cleaned")
