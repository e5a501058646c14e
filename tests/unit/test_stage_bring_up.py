"""Phases, vitals and memory, without a process."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from stagekeeper.core.states import IllegalMove, Phase, ShardState
from stagekeeper.runtime.launch import Launch, LaunchDevice
from stagekeeper.stage import Stage, StageContext, phases
from stagekeeper.stage.activity import Activity
from stagekeeper.stage.memory import HostMemoryMeter, MemoryMeter
from stagekeeper.stage.memory_account import BudgetExceeded
from stagekeeper.stage.phases import PhaseRunner
from stagekeeper.stage.stage import make_stage
from stagekeeper.stage.vitals import Vitals, failure_from, is_out_of_memory, one_line


def launch(entrypoint: str, *budgets: int, args_json: str = "{}") -> Launch:
    return Launch(
        instance_id="i",
        deployment="d",
        replica_index=0,
        stage_id=0,
        stage_name="s",
        stage_count=1,
        entrypoint=entrypoint,
        args_json=args_json,
        devices=[
            LaunchDevice(device_id=f"cpu:{n}", kind="cpu", budget_bytes=b, total_bytes=10_000)
            for n, b in enumerate(budgets)
        ],
        control_socket="unused",
        run_dir="/nonexistent/run",
        cache_dir="/nonexistent/cache",
    )


class Hooks:
    """What a host gives, and what it was told."""

    def __init__(self) -> None:
        self.siblings: dict[str, object] = {}
        self.told: list[tuple[int, int, str]] = []

    @property
    def context(self) -> StageContext:
        return StageContext(
            "d", 0, 0, "s", 0, 1, (), 0, cache_dir=Path("cache"), run_dir=Path("run")
        )

    def report_progress(self, done: int, total: int, note: str) -> None:
        self.told.append((done, total, note))


class FixedMeter:
    def __init__(self, used: int, peak: int) -> None:
        self.used, self.peak = used, peak
        self.was_reset = False

    def used_bytes(self) -> int:
        return self.used

    def reset_peak(self) -> None:
        self.was_reset = True

    def peak_bytes(self) -> int:
        return self.peak


class Metered(Stage):
    meter: MemoryMeter | None = None
    budgets: list[int]

    def __init__(self) -> None:
        self.budgets = []

    def memory_meter(self) -> MemoryMeter | None:
        return type(self).meter

    def allocate(self, budget_bytes: int) -> None:
        self.budgets.append(budget_bytes)


@pytest.fixture
def bring_up(monkeypatch):
    """Run all phases of a Metered stage; its class is handed over and not looked up."""
    monkeypatch.setattr(phases, "find_class", lambda launch: Metered)

    async def run(*budgets: int, meter: MemoryMeter | None) -> tuple[Metered, Vitals]:
        monkeypatch.setattr(Metered, "meter", meter)
        vitals = Vitals()
        stage = await PhaseRunner(launch("unused", *budgets), Hooks(), vitals, Activity()).run()
        assert isinstance(stage, Metered)
        return stage, vitals

    return run


async def test_allocate_gets_the_least_budget_less_the_peak(bring_up):
    stage, vitals = await bring_up(1000, 800, meter=FixedMeter(used=250, peak=300))

    assert stage.budgets == [500]
    assert vitals.device_bytes == 250


async def test_allocate_gets_the_whole_budget_where_nothing_measures(bring_up):
    stage, vitals = await bring_up(1000, meter=None)

    assert stage.budgets == [1000]
    assert vitals.device_bytes is None


@pytest.mark.parametrize(("peak", "left"), [(999, 1), (1000, 0)])
async def test_peak_up_to_the_budget_is_allowed(bring_up, peak, left):
    stage, _ = await bring_up(1000, meter=FixedMeter(used=0, peak=peak))

    assert stage.budgets == [left]


async def test_peak_above_the_budget_fails_with_both_numbers(bring_up):
    with pytest.raises(BudgetExceeded, match=r"used 1001 bytes .* its budget there is 1000 bytes"):
        await bring_up(1000, meter=FixedMeter(used=0, peak=1001))


async def test_without_cards_no_peak_is_too_high(bring_up):
    stage, _ = await bring_up(meter=FixedMeter(used=0, peak=10**12))

    assert stage.budgets == [0]


def test_host_meter_sees_growth_and_a_peak_that_is_gone_again():
    meter = HostMemoryMeter()
    meter.reset_peak()
    # Pages of its own: an allocator would hand out ones that this process had before.
    with mmap.mmap(-1, 32 * 2**20) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        used = meter.used_bytes()

    assert used >= 31 * 2**20
    assert meter.peak_bytes() >= 31 * 2**20
    assert meter.used_bytes() < used


# --- stages without a host


def test_stage_without_a_host_is_a_plain_object_that_says_what_it_lacks():
    stage = Metered()

    stage.progress(1, 2, "unheard")

    with pytest.raises(RuntimeError, match=r"set `stage\.context"):
        _ = stage.context
    with pytest.raises(RuntimeError, match=r"set `stage\.siblings"):
        _ = stage.siblings


def test_test_can_set_context_and_siblings():
    stage = Metered()
    stage.context = Hooks().context
    stage.siblings = {"talker": "a stand-in"}

    assert stage.context.stage_name == "s"
    assert stage.siblings["talker"] == "a stand-in"


def test_host_is_there_in_init_already_and_not_for_stages_made_inside():
    class Inner(Stage): ...

    class Outer(Stage):
        def __init__(self) -> None:
            self.progress(1, 1, f"I am {self.context.stage_name}")
            self.inner = Inner()

    hooks = Hooks()
    stage = make_stage(Outer, {}, hooks)

    assert hooks.told == [(1, 1, "I am s")]
    assert isinstance(stage, Outer)
    with pytest.raises(RuntimeError):
        _ = stage.inner.context


# --- vitals


def test_vitals_refuse_moves_that_are_not_in_the_table():
    vitals = Vitals()
    vitals.enter_phase(Phase.LOAD)
    vitals.failed(failure_from(ValueError("x")))

    with pytest.raises(IllegalMove):
        vitals.serves([])
    assert vitals.state is ShardState.FAILED
    assert vitals.phase is Phase.LOAD


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


class OutOfMemoryError(RuntimeError):
    __module__ = "torch"


class NotTorchsOutOfMemoryError(RuntimeError):
    __module__ = "torchlike"


NotTorchsOutOfMemoryError.__name__ = "OutOfMemoryError"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (_raised(RuntimeError("load failed"), MemoryError()), True),
        (NotTorchsOutOfMemoryError("x"), False),
        (RuntimeError("out of luck"), False),
        (_raised(ValueError("x"), KeyError("y")), False),
    ],
)
def test_memory_that_ran_out_is_recognised(error, expected):
    assert is_out_of_memory(error) is expected


def test_error_is_told_in_one_line():
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 5000))) == 1000
