"""The invariants of a start, over random plans, failures and orders of completion.

First the machine under a simulated driver, where every interleaving can be had, limits and
interrupts included; then both real drivers, with the machine's decisions recorded, the order of
completion drawn, and the same invariants held against what the two functions themselves see.
"""

from __future__ import annotations

import asyncio
import queue
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
    """Hold the invariants against what the machine ordered and recorded, in its order.

    A stage that is overdue has failed and is in flight still; should it come up, it is cleaned.
    """
    in_flight: set[int] = set()
    up: list[int] = []
    failed: list[int] = []
    overdue: set[int] = set()
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
            if stage not in overdue:
                failed.append(stage)
        elif event == "overdue":
            assert stage in in_flight
            overdue.add(stage)
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
    assert set(cleaned) & set(failed) <= overdue, "a stage that failed was cleaned"
    if isinstance(outcome, InitError):
        assert [outcome.stage_id, *outcome.also_failed] == failed
        assert set(outcome.cleanup_errors) == plan.cleanup_fails & set(cleaned)
        assert [entry.stage_id for entry in outcome.report.entries] == cleaned
        assert type(outcome.__cause__) in ([TimeoutError] if failed[0] in overdue else KINDS)
    else:
        assert is_interrupted
        assert len(outcome.__notes__) == 1


def group_of_stages(plan: Plan, first: int) -> list[int]:
    return next(group for group in plan.groups if group[0] == first)


# --- the machine ------------------------------------------------------------------------------


@in_its_time
@given(plans(), st.data())
def test_machine_keeps_the_invariants_in_any_interleaving(plan, data):
    stages = sorted(plan.devices)
    limits = data.draw(
        st.dictionaries(st.sampled_from(stages), st.integers(1, 6)) if stages else st.just({})
    )
    run: InitRun[int, str] = InitRun(plan.groups, stage_timeout_s=limits)
    trace: Trace = []
    asking = plan.width  # runners that would ask for an order now
    orders: list[StartStage[int] | CleanStage[int, str]] = []
    deadlines: dict[int, float] = {}
    interrupt: KeyboardInterrupt | None = None
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        now += data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        for stage, deadline in sorted(deadlines.items(), key=lambda it: (it[1], it[0])):
            if deadline <= now:
                del deadlines[stage]
                trace.append(("overdue", stage))

    while asking or orders:
        if interrupt is None and data.draw(st.integers(0, 9)) == 0:
            interrupt = KeyboardInterrupt()
            run.interrupt(interrupt)
            trace.append(("interrupt", -1))
            asking += 1  # as a driver sends one more to see to what is left
        pass_time()
        if asking and (not orders or data.draw(st.booleans())):
            asking -= 1
            order = run.next_order(now=now)
            if order is not None:
                orders.append(order)
                kind = "start" if isinstance(order, StartStage) else "clean"
                trace.append((kind, order.stage_id))
            if isinstance(order, StartStage) and order.deadline is not None:
                assert order.deadline == now + limits[order.stage_id]
                deadlines[order.stage_id] = order.deadline
            continue  # a runner that gets nothing never asks again
        order = orders.pop(data.draw(st.integers(0, len(orders) - 1)))
        stage = order.stage_id
        deadlines.pop(stage, None)
        if isinstance(order, CleanStage):
            assert order.handle == f"h{stage}"
            error = RuntimeError() if stage in plan.cleanup_fails else None
            run.stage_cleaned(stage, error, now=now)
        elif stage in plan.fails:
            trace.append(("failed", stage))
            run.stage_failed(stage, plan.fails[stage](), now=now)
        else:
            trace.append(("up", stage))
            run.stage_succeeded(stage, f"h{stage}", now=now)
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
drivers: list[InterruptibleThreads[Any, Any]] = []


class InterruptibleThreads(initializer._Threads[Stage, Handle]):
    """The driver with threads, with a bell that can raise in the caller as a signal would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bell = Bell()  # type: ignore[assignment]
        drivers.append(self)

    def interrupt_caller(self) -> None:
        self._bell.put(KeyboardInterrupt())  # type: ignore[arg-type]

    def must_not_hold_the_lock(self) -> None:
        """Fail when this thread holds the lock of its driver; others do for moments only."""
        assert self._lock.acquire(timeout=WAIT_LIMIT_S), "called with the planner's lock held"
        self._lock.release()


class Bell:
    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def put(self, ring: BaseException | None) -> None:
        self._rings.put(ring)

    def get(self) -> None:
        ring = self._rings.get()
        if ring is not None:
            raise ring


@contextmanager
def recording() -> Iterator[list[Trace]]:
    recorded.clear()
    drivers.clear()
    with (
        mock.patch.object(initializer, "InitRun", RecordedRun),
        mock.patch.object(initializer, "_Threads", InterruptibleThreads),
    ):
        yield recorded


class Seen:
    """The run as its two functions see it. What is wrong is kept: raised there, it would be taken
    for a failure of the stage."""

    def __init__(self, plan: Plan) -> None:
        self.called: list[int] = []
        self.cleaned: list[int] = []
        self.wrong: list[str] = []
        self._group_of = {stage: group[0] for group in plan.groups for stage in group}
        self._in_init: set[int] = set()
        self._in_clean: set[int] = set()
        self._guard = threading.Lock()

    @contextmanager
    def init(self, stage: int) -> Iterator[None]:
        with self._guard:
            mine = self._group_of[stage]
            earlier = [it for it in self.called if self._group_of[it] == mine]
            self._expect(all(it < stage for it in earlier), f"{stage} after {earlier}")
            others = {it for it in self._in_init if self._group_of[it] == mine}
            self._expect(not others, f"{stage} overlaps {others}")
            self._expect(not self.cleaned, f"{stage} begins after a cleanup")
            self.called.append(stage)
            self._in_init.add(stage)
        try:
            yield
        finally:
            with self._guard:
                self._in_init.remove(stage)

    @contextmanager
    def clean(self, stage: int) -> Iterator[None]:
        with self._guard:
            self._expect(not self._in_init, f"{stage} is cleaned beside inits {self._in_init}")
            self._expect(not self._in_clean, f"{stage} is cleaned beside {self._in_clean}")
            self.cleaned.append(stage)
            self._in_clean.add(stage)
        try:
            yield
        finally:
            with self._guard:
                self._in_clean.remove(stage)

    def is_over(self) -> bool:
        """Whether the caller, who goes on now, has left nothing behind that still runs."""
        return not self._in_init and not self._in_clean

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


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

    def let_all_go(self) -> None:
        with self._changed:
            self._has_failed = True
            self._release()

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
@given(plans(), st.none() | st.integers(1, 8))
def test_threads_keep_the_invariants(plan, interrupted_at):
    """`interrupted_at`: in the how manieth init the caller is interrupted; None: in none."""
    turns = Turns(plan)
    seen = Seen(plan)
    is_interrupted = threading.Event()

    def init(stage: int) -> str:
        [driver] = drivers
        driver.must_not_hold_the_lock()
        with seen.init(stage):
            if len(seen.called) == interrupted_at and not is_interrupted.is_set():
                is_interrupted.set()
                driver.interrupt_caller()
                wait_until_recorded(recorded[0], ("interrupt", -1))
                turns.let_all_go()
            turns.wait(stage)
            if stage in plan.fails:
                raise plan.fails[stage]
            return f"h{stage}"

    def clean(stage: int, handle: str) -> None:
        drivers[0].must_not_hold_the_lock()
        with seen.clean(stage):
            if handle != f"h{stage}":
                seen.wrong.append(f"{stage} is cleaned with {handle}")
            if stage in plan.cleanup_fails:
                raise KeyboardInterrupt

    with recording() as traces:
        try:
            outcome: Any = run_init(plan.devices, init, clean, max_workers=plan.width)
        except (InitError, KeyboardInterrupt) as error:
            outcome = error
        is_over = seen.is_over()
    assert is_over, "the caller goes on before all of it has ended"
    [trace] = traces
    check_trace(plan, trace, outcome)
    assert not seen.wrong
    assert sorted(seen.called) == sorted(stage for event, stage in trace if event == "start")
    assert seen.cleaned == [stage for event, stage in trace if event == "clean"]
    if is_interrupted.is_set():
        assert isinstance(outcome, KeyboardInterrupt)
    else:
        assert isinstance(outcome, dict) == (not plan.fails)


def wait_until_recorded(trace: Trace, event: tuple[str, int]) -> None:
    for _ in range(WAIT_LIMIT_S * 1000):
        if event in trace:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"{event} was not recorded")


@in_its_time
@given(plans(), st.none() | st.integers(0, 12))
def test_tasks_keep_the_invariants(plan, cancelled_at):
    """`cancelled_at` counts the steps after which the caller is cancelled; None: it is not."""
    waiting: dict[int, asyncio.Event] = {}
    seen = Seen(plan)

    async def init(stage: int) -> str:
        with seen.init(stage):
            gate = waiting[stage] = asyncio.Event()
            try:
                await gate.wait()
            finally:
                waiting.pop(stage, None)
            if stage in plan.fails:
                raise plan.fails[stage]
            return f"h{stage}"

    async def clean(stage: int, handle: str) -> None:
        with seen.clean(stage):
            if handle != f"h{stage}":
                seen.wrong.append(f"{stage} is cleaned with {handle}")
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
        assert seen.is_over()
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
    assert not seen.wrong
    assert seen.called == [stage for event, stage in trace if event == "start"]
    assert seen.cleaned == [stage for event, stage in trace if event == "clean"]
    if cancelled_at is None:
        assert isinstance(outcome, dict) == (not plan.fails)
