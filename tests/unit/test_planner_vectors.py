"""Every vector of tests/cases/planner.json: grouping, admission, and run_init with both drivers.

The two vectors marked manual (R25, R26) are driven in test_init_run.py.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.agent.initializer import run_init, run_init_async
from stagekeeper.core.errors import InitError, PlanError
from stagekeeper.core.model import MemoryNeed
from stagekeeper.core.planner import admission_check, admission_report, init_groups

VECTORS = json.loads((Path(__file__).parent.parent / "cases" / "planner.json").read_text())
RUN_INIT_VECTORS = [vector for vector in VECTORS["run_init"] if "manual" not in vector]
EVENT_LIMIT_S = 5
TRIES_FOR_SPEED = 3
"""A limit is about the code: on a shared machine the best of a few tries tells."""


def by_id(vectors: list[dict]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["id"] for vector in vectors])


def pairs_of(plan: Any) -> list[tuple]:
    """Build the pairs of a plan, or those that a vector's generator stands for."""
    if isinstance(plan, list):
        return [tuple(row) for row in plan]
    count = plan["n"]
    rows: list[list] = {
        "disjoint": lambda: [[i, [i]] for i in range(count)],
        "chain": lambda: [[i, [i, i + 1]] for i in range(count)],
        "shared": lambda: [[i, [i % plan["cards"]]] for i in range(count)],
        "star": lambda: [
            *([i, [i]] for i in range(count - 1)),
            [count - 1, list(range(count - 1))],
        ],
        "tiny": lambda: [[i, [i % plan["cards"]], plan["util"]] for i in range(count)],
    }[plan["gen"]]()
    if "shuffle_seed" in plan:
        random.Random(plan["shuffle_seed"]).shuffle(rows)
    return [tuple(row) for row in rows]


def within_limit(vector: dict, act: Callable[[], Any]) -> Any:
    """Run `act` and return its result; fail when it was too slow each time."""
    took_s = 0.0
    for _ in range(TRIES_FOR_SPEED):
        began = time.perf_counter()
        result = act()
        took_s = time.perf_counter() - began
        if took_s <= vector.get("limit_s", took_s):
            return result
    pytest.fail(f"{took_s:.2f} s, where {vector['limit_s']} s are allowed")


def assert_refused(vector: dict, act: Callable[[], Any]) -> None:
    with pytest.raises(PlanError) as caught:
        act()
    assert caught.value.problems
    for word in vector["out"]["mentions"]:
        assert word in str(caught.value)


@by_id(VECTORS["grouping"])
def test_grouping_vector(vector):
    pairs = pairs_of(vector["in"]["stage_devices"])
    out = vector["out"]
    if "raises" in out:
        assert_refused(vector, lambda: init_groups(pairs))
        return

    groups = within_limit(vector, lambda: init_groups(pairs))

    assert groups == init_groups(dict(pairs)) == init_groups(iter(reversed(pairs)))
    if "groups" in out:
        assert groups == out["groups"]
    seen = {
        "count": len(groups),
        "first": groups[0] if groups else None,
        "first_len": len(groups[0]) if groups else 0,
        "last": groups[-1] if groups else None,
        "largest": max(map(len, groups), default=0),
    }
    for key, expected in out.get("groups_summary", {}).items():
        assert seen[key] == expected, key


@by_id(VECTORS["admission"])
def test_admission_vector(vector):
    given, out = vector["in"], vector["out"]
    totals = [(device, total) for device, total in given["totals"]]
    reserve = given["reserve"]
    stages = [
        (stage, (devices, float(utilization) if isinstance(utilization, str) else utilization))
        for stage, devices, utilization in pairs_of(given["stages"])
    ]
    if "raises" in out:
        assert_refused(vector, lambda: admission_check(stages, totals, reserve))
        return

    refusals = within_limit(vector, lambda: admission_check(stages, totals, reserve))

    assert refusals == admission_check(dict(stages), dict(totals), reserve)
    need = dict(out["need"])
    assert len(refusals) == len(out["over"])
    for device, refusal in zip(out["over"], refusals, strict=True):
        assert f"device {device}:" in refusal
        assert str(need[device]) in refusal
    report = admission_report(
        [
            (stage, (devices, MemoryNeed(utilization=utilization, reserve_bytes=reserve)))
            for stage, (devices, utilization) in stages
        ],
        totals,
    )
    assert report.refusals == refusals
    assert {device.device_id: device.need_bytes for device in report.devices} == need


class Scene:
    """Plays the inits and cleanups of one vector and writes down what was called."""

    def __init__(self, given: dict) -> None:
        self.pairs = pairs_of(given["stage_devices"])
        init = given["init"]
        self.inits: dict[int, dict] = (
            {stage: {"return": stage} for stage, _ in self.pairs}
            if isinstance(init, dict)
            else dict(init)
        )
        self.delayed = given.get("delayed", [])
        self.cleanup_raises = set(given.get("cleanup_raises", ()))
        groups: list[list[int]] = init_groups(self.pairs)
        self.group_of = {stage: number for number, group in enumerate(groups) for stage in group}
        self.lock = threading.Lock()
        self.called: list[int] = []
        self.cleaned: list[int] = []
        self.busy_groups: set[int] = set()
        self.threads: set[int] = set()
        self.overlaps: list[int] = []

    def begin(self, stage: int) -> dict:
        with self.lock:
            self.called.append(stage)
            self.threads.add(threading.get_ident())
            if self.group_of[stage] in self.busy_groups:
                self.overlaps.append(stage)
            self.busy_groups.add(self.group_of[stage])
        return self.inits[stage]

    def end(self, stage: int) -> Any:
        with self.lock:
            self.busy_groups.discard(self.group_of[stage])
        step = self.inits[stage]
        if "raise" in step:
            raise getattr(builtins, step["raise"])(f"stage {stage}")
        return step["return"]

    def clean(self, stage: int, handle: Any) -> None:
        self.cleaned.append(stage)
        assert handle == self.inits[stage]["return"]
        if stage in self.cleanup_raises:
            raise RuntimeError(f"cleanup of {stage}")


def play_with_threads(given: dict) -> tuple[Scene, Any]:
    scene = Scene(given)
    names = {step[key] for step in scene.inits.values() for key in step if key in EVENT_KEYS}
    events = {name: threading.Event() for name in names}
    timers = {
        trigger: threading.Timer(delay_ms / 1000, events[name].set)
        for trigger, delay_ms, name in scene.delayed
    }

    def fire(name: str | None) -> None:
        if name is not None:
            events[name].set()
            if name in timers:
                timers[name].start()

    def init(stage: int) -> Any:
        step = scene.begin(stage)
        fire(step.get("set_start"))
        if "wait" in step:
            assert events[step["wait"]].wait(EVENT_LIMIT_S)
        time.sleep(step.get("sleep_ms", 0) / 1000)
        fire(step.get("set_end"))
        return scene.end(stage)

    before = threading.active_count()
    try:
        outcome: Any = run_init(scene.pairs, init, scene.clean, max_workers=given["max_workers"])
    except InitError as error:
        outcome = error
    for timer in timers.values():
        timer.join(EVENT_LIMIT_S)
    assert threading.active_count() == before, "threads are left"
    assert len(scene.threads) <= given["max_workers"]
    return scene, outcome


def play_with_tasks(given: dict) -> tuple[Scene, Any]:
    scene = Scene(given)

    async def play() -> Any:
        names = {step[key] for step in scene.inits.values() for key in step if key in EVENT_KEYS}
        events = {name: asyncio.Event() for name in names}
        delays = {trigger: (delay_ms / 1000, name) for trigger, delay_ms, name in scene.delayed}

        def fire(name: str | None) -> None:
            if name is not None:
                events[name].set()
                if name in delays:
                    delay_s, target = delays[name]
                    asyncio.get_running_loop().call_later(delay_s, events[target].set)

        async def init(stage: int) -> Any:
            step = scene.begin(stage)
            fire(step.get("set_start"))
            if "wait" in step:
                async with asyncio.timeout(EVENT_LIMIT_S):
                    await events[step["wait"]].wait()
            await asyncio.sleep(step.get("sleep_ms", 0) / 1000)
            fire(step.get("set_end"))
            return scene.end(stage)

        async def clean(stage: int, handle: Any) -> None:
            scene.clean(stage, handle)

        try:
            outcome: Any = await run_init_async(
                scene.pairs, init, clean, max_parallel=given["max_workers"]
            )
        except InitError as error:
            outcome = error
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"
        return outcome

    return scene, asyncio.run(play())


EVENT_KEYS = {"wait", "set_start", "set_end"}


def test_vectors_left_out_here_are_the_manual_ones():
    assert {vector["id"] for vector in VECTORS["run_init"] if "manual" in vector} == {"R25", "R26"}


@pytest.mark.parametrize("play", [play_with_threads, play_with_tasks], ids=["threads", "tasks"])
@by_id(RUN_INIT_VECTORS)
def test_run_init_vector(vector, play):
    for _ in range(vector["in"].get("repeat", 1)):
        scene, outcome = within_limit(vector, lambda: play(vector["in"]))
        assert_scene(vector["out"], scene)
        if "error" in vector["out"]:
            assert_error(vector["out"], outcome, is_async=play is play_with_tasks)
            assert {entry.stage_id for entry in outcome.report.entries} == set(scene.cleaned)
        else:
            assert isinstance(outcome, dict)
            assert list(outcome) == sorted(outcome)
            if "result" in vector["out"]:
                assert [list(pair) for pair in outcome.items()] == vector["out"]["result"]
            assert len(outcome) == vector["out"].get("result_len", len(outcome))


def assert_scene(out: dict, scene: Scene) -> None:
    assert not scene.overlaps, "inits of one group overlap"
    assert len(scene.cleaned) == len(set(scene.cleaned)), "cleaned twice"
    if "exact" in out:
        assert scene.called == out["exact"]
    if "called" in out:
        assert set(scene.called) == set(out["called"])
    assert not set(scene.called) & set(out.get("not_called", ()))
    if "cleaned" in out:
        assert set(scene.cleaned) == set(out["cleaned"])
    if "cleaned_equals" in out:
        assert out["cleaned_equals"] == "called minus 2"
        assert set(scene.cleaned) == set(scene.called) - {2}
    if "cleanup_order" in out:
        assert scene.cleaned == out["cleanup_order"]


def assert_error(out: dict, error: InitError, *, is_async: bool) -> None:
    assert isinstance(error, InitError)
    allowed = out["error"] if isinstance(out["error"], list) else [out["error"]]
    assert error.stage_id in allowed
    assert error.phase is None
    cause: BaseException | None = error.__cause__
    if is_async and out["cause"] == "StopIteration":
        # No coroutine can raise it: Python turns it into a RuntimeError on the way out.
        assert isinstance(cause, RuntimeError)
        cause = cause.__cause__
    assert type(cause).__name__ == out["cause"]
    assert set(error.cleanup_errors) == set(out.get("cleanup_errors", ()))
    assert set(error.also_failed) == set(out.get("also_failed", ()))
