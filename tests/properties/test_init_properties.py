"""The invariants of a start, over random plans, failures and orders of completion.

First the machine under a simulated driver, where every interleaving can be had; then both real
drivers, with the machine's decisions recorded and the order of completion drawn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.agent import initializer
from stagekeeper.agent.initializer import run_init, run_init_async
from stagekeeper.core.errors import InitError
from stagekeeper.core.init_run import CleanStage, InitRun, StartStage
from stagekeeper.core.planner import init_groups

in_its_time = settings(deadline=None)  # a busy machine is no failure
WAIT_LIMIT_S = 20
KINDS = [OSError, MemoryError, KeyboardInterrupt, SystemExit]

Stage = TypeVar("Stage", bound=int)
Handle = TypeVar("Handle")
Trace = list[tuple[str, int]]


@dataclass(frozen=True)
class Plan:
    """A start, and how each of its stages will behave."""

    devices: dict[int, list[int]]
    fails: dict[int, type[BaseException]]
    cleanup_fails: frozenset[int]
    width: int
    rank: dict[int, int]  # of all inits in flight, the one with the least rank ends first

    @property
    def groups(self) -> list[list[int]]:
        return init_groups(self.devices)


@st.composite
def plans(draw) -> Plan:
    devices = draw(
        st.dictionaries(
            st.integers(0, 30), st.lists(st.integers(0, 4), unique=True, max_size=2), max_size=9
        )
    )
    stages = sorted(devices)
    some = st.sets(st.sampled_from(stages), max_size=3) if stages else st.just(set())
    return Plan(
        devices=devices,
        fails={stage: draw(st.sampled_from(KINDS)) for stage in draw(some)},
        cleanup_fails=frozenset(draw(some)),
        width=draw(st.integers(1, 5)),
        rank={stage: place for place, stage in enumerate(draw(st.permutations(stages)))},
    )


def check_trace(plan: Plan, trace: Trace, outcome: dict | BaseException) -> None:
    """Hold the invariants against what the machine ordered and recorded, in its order."""
    in_flight: set[int] = set()
    up: list[int] = []
    failed: list[int] = []
    cleaned: list[int] = []
    is_interrupted = False
    group_of = {stage: group[0] for group in plan.groups for stage in group}
    starts: dict[int, list[int]] = {}
    for event, stage in trace:
        if event == "start":
            assert not failed and not is_interrupted, "a start after the first failure"
            assert group_of[stage] not in {group_of[it] for it in in_flight}, "an overlap"
            assert len(in_flight) < plan.width
            starts.setdefault(group_of[stage], []).append(stage)
            in_flight.add(stage)
        elif event == "up":
            in_flight.remove(stage)
            up.append(stage)
        elif event == "failed":
            in_flight.remove(stage)
            failed.append(stage)
        elif event == "interrupt":
            is_interrupted = True
        else:
            assert event == "clean"
            assert not in_flight, "a cleanup while an init was in flight"
            cleaned.append(stage)
    assert not in_flight
    for group, order in starts.items():
        assert order == sorted(group_of_stages(plan, group))[: len(order)]
    if isinstance(outcome, dict):
        assert not failed and not is_interrupted and not cleaned
        assert list(outcome) == sorted(plan.devices)
        assert sorted(up) == sorted(plan.devices)
        assert all(handle == f"h{stage}" for stage, handle in outcome.items())
        return
    assert cleaned == up[::-1], "all that came up is cleaned once, in reverse order"
    assert not set(cleaned) & set(failed)
    if isinstance(outcome, InitError):
        assert [outcome.stage_id, *outcome.also_failed] == failed
        assert set(outcome.cleanup_errors) == plan.cleanup_fails & set(cleaned)
        assert [entry.stage_id for entry in outcome.report.entries] == cleaned
        assert type(outcome.__cause__) in KINDS
    else:
        assert is_interrupted
        assert len(outcome.__notes__) == 1


def group_of_stages(plan: Plan, first: int) -> list[int]:
    return next(group for group in plan.groups if group[0] == first)


# --- the machine ------------------------------------------------------------------------------


@in_its_time
@given(plans(), st.data())
def test_machine_keeps_the_invariants_in_any_interleaving(plan, data):
    run: InitRun[int, str] = InitRun(plan.groups)
    trace: Trace = []
    asking = plan.width  # runners that would ask for an order now
    orders: list[StartStage[int] | CleanStage[int, str]] = []
    interrupt: KeyboardInterrupt | None = None
    while asking or orders:
        if interrupt is None and data.draw(st.integers(0, 9)) == 0:
            interrupt = KeyboardInterrupt()
            run.interrupt(interrupt)
            trace.append(("interrupt", -1))
            asking += 1  # as a driver sends one more to see to what is left
        if asking and (not orders or data.draw(st.booleans())):
            asking -= 1
            order = run.next_order(now=0.0)
            if order is not None:
                orders.append(order)
                kind = "start" if isinstance(order, StartStage) else "clean"
                trace.append((kind, order.stage_id))
            continue  # a runner that gets nothing never asks again
        order = orders.pop(data.draw(st.integers(0, len(orders) - 1)))
        stage = order.stage_id
        if isinstance(order, CleanStage):
            assert order.handle == f"h{stage}"
            error = RuntimeError() if stage in plan.cleanup_fails else None
            run.stage_cleaned(stage, error, now=0.0)
        elif stage in plan.fails:
            trace.append(("failed", stage))
            run.stage_failed(stage, plan.fails[stage](), now=0.0)
        else:
            trace.append(("up", stage))
            run.stage_succeeded(stage, f"h{stage}", now=0.0)
        asking += 1
    assert run.is_settled
    check_trace(plan, trace, run.error() or run.handles())


@in_its_time
@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.floats(0.5, 9), st.floats(0, 12)), min_size=1)
)
def test_stages_fail_exactly_when_they_take_their_limit_or_more(times):
    """Each stage is a group of its own: it has a limit, and it takes a time to come up."""
    groups = [[stage] for stage in sorted(times)]
    run: InitRun[int, str] = InitRun(
        groups, stage_timeout_s={stage: limit for stage, (limit, _) in times.items()}
    )
    while run.next_order(now=0.0) is not None:
        pass
    for stage in sorted(times, key=lambda stage: times[stage][1]):
        run.stage_succeeded(stage, "up", now=times[stage][1])
    last = max(took for _, took in times.values())
    cleaned = []
    while isinstance(order := run.next_order(now=last), CleanStage):
        cleaned.append(order.stage_id)
        run.stage_cleaned(order.stage_id, None, now=last)
    overdue = {stage: limit for stage, (limit, took) in times.items() if took >= limit}
    if not overdue:
        assert run.handles() == dict.fromkeys(sorted(times), "up")
        return
    error = run.error()
    assert isinstance(error, InitError)
    assert overdue[error.stage_id] == min(overdue.values())
    assert {error.stage_id, *error.also_failed} == set(overdue)
    assert sorted(cleaned) == sorted(times)


# --- the drivers ------------------------------------------------------------------------------


class RecordedRun(InitRun[Stage, Handle], Generic[Stage, Handle]):
    """Writes down what is ordered and recorded, in the order in which the machine sees it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace: Trace = []
        recorded.append(self.trace)

    def next_order(self, *, now: float) -> Any:
        order = super().next_order(now=now)
        if order is not None:
            kind = "start" if isinstance(order, StartStage) else "clean"
            self.trace.append((kind, order.stage_id))
        return order

    def stage_succeeded(self, stage_id: Stage, handle: Handle, *, now: float) -> None:
        super().stage_succeeded(stage_id, handle, now=now)
        self.trace.append(("up", stage_id))

    def stage_failed(self, stage_id: Stage, error: BaseException, *, now: float) -> None:
        super().stage_failed(stage_id, error, now=now)
        self.trace.append(("failed", stage_id))

    def interrupt(self, cause: BaseException) -> None:
        super().interrupt(cause)
        self.trace.append(("interrupt", -1))


recorded: list[Trace] = []


@contextmanager
def recording() -> Iterator[list[Trace]]:
    recorded.clear()
    with mock.patch.object(initializer, "InitRun", RecordedRun):
        yield recorded


class Turns:
    """Lets threads end their inits one at a time, by rank, when all that can be in flight are.

    After a failure everything goes at once: then nothing more may begin anyway.
    """

    def __init__(self, plan: Plan) -> None:
        groups = plan.groups
        self._plan = plan
        self._successor = {a: b for group in groups for a, b in pairwise(group)}
        self._expected = min(plan.width, len(groups))
        self._groups_left = len(groups) - self._expected
        self._waiting: set[int] = set()
        self._has_failed = False
        self._changed = threading.Condition()

    def wait(self, stage: int) -> None:
        with self._changed:
            self._waiting.add(stage)
            self._release()
            assert self._changed.wait_for(lambda: stage not in self._waiting, WAIT_LIMIT_S)

    def _release(self) -> None:
        if self._has_failed:
            self._waiting.clear()
        elif len(self._waiting) == self._expected:
            stage = min(self._waiting, key=self._plan.rank.__getitem__)
            self._waiting.remove(stage)
            self._has_failed = stage in self._plan.fails
            if self._has_failed:
                self._waiting.clear()
            elif stage not in self._successor and self._groups_left:
                self._groups_left -= 1
            elif stage not in self._successor:
                self._expected -= 1
                if self._waiting:
                    self._release()
        self._changed.notify_all()


@in_its_time
@given(plans())
def test_threads_keep_the_invariants(plan):
    turns = Turns(plan)
    called: list[int] = []
    cleaned: list[int] = []

    def init(stage: int) -> str:
        called.append(stage)
        turns.wait(stage)
        if stage in plan.fails:
            raise plan.fails[stage]
        return f"h{stage}"

    def clean(stage: int, handle: str) -> None:
        assert handle == f"h{stage}"
        cleaned.append(stage)
        if stage in plan.cleanup_fails:
            raise KeyboardInterrupt

    with recording() as traces:
        try:
            outcome: Any = run_init(plan.devices, init, clean, max_workers=plan.width)
        except InitError as error:
            outcome = error
    [trace] = traces
    check_trace(plan, trace, outcome)
    assert sorted(called) == sorted(stage for event, stage in trace if event == "start")
    assert cleaned == [stage for event, stage in trace if event == "clean"]
    assert isinstance(outcome, dict) == (not plan.fails)


@in_its_time
@given(plans(), st.none() | st.integers(0, 12))
def test_tasks_keep_the_invariants(plan, cancelled_at):
    """`cancelled_at` counts the steps after which the caller is cancelled; None: it is not."""
    waiting: dict[int, asyncio.Event] = {}
    called: list[int] = []
    cleaned: list[int] = []

    async def init(stage: int) -> str:
        called.append(stage)
        gate = waiting[stage] = asyncio.Event()
        try:
            await gate.wait()
        finally:
            waiting.pop(stage, None)
        if stage in plan.fails:
            raise plan.fails[stage]
        return f"h{stage}"

    async def clean(stage: int, handle: str) -> None:
        assert handle == f"h{stage}"
        cleaned.append(stage)
        await asyncio.sleep(0)
        if stage in plan.cleanup_fails:
            raise KeyboardInterrupt

    async def play() -> Any:
        caller = asyncio.create_task(
            run_init_async(plan.devices, init, clean, max_parallel=plan.width)
        )
        for step in range(1000):
            for _ in range(3):  # all that can be in flight is, after this
                await asyncio.sleep(0)
            if caller.done():
                break
            if step == cancelled_at:
                caller.cancel()
            elif waiting:
                waiting.pop(min(waiting, key=plan.rank.__getitem__)).set()
        assert caller.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        if caller.cancelled():
            try:
                await caller
            except asyncio.CancelledError as error:
                return error
        return caller.exception() or caller.result()

    with recording() as traces:
        outcome = asyncio.run(play())
    [trace] = traces
    check_trace(plan, trace, outcome)
    assert called == [stage for event, stage in trace if event == "start"]
    assert cleaned == [stage for event, stage in trace if event == "clean"]
    if cancelled_at is None:
        assert isinstance(outcome, dict) == (not plan.fails)
