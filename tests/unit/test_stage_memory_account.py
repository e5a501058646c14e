"""What a stage's account of its memory makes of what its meter reads, from start to start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagekeeper.core.model import MemoryProfile
from stagekeeper.runtime.launch import Launch, LaunchDevice
from stagekeeper.stage import memory_account, phases
from stagekeeper.stage.activity import Activity
from stagekeeper.stage.memory_account import BudgetExceeded
from stagekeeper.stage.phases import PhaseRunner
from stagekeeper.stage.stage import Stage
from stagekeeper.stage.torch_stage import _CudaMeter
from stagekeeper.stage.vitals import Vitals, failure_from


class Meter:
    """A card of which each phase takes what the test says."""

    def __init__(self) -> None:
        self.used = self.peak = 0

    def used_bytes(self) -> int:
        return self.used

    def held_bytes(self) -> int:
        return self.used

    def reset_peak(self) -> None:
        self.peak = self.used

    def peak_bytes(self) -> int:
        return self.peak


class Weighed(Stage):
    """Takes so much in each phase, and remembers which phases it went through."""

    weights, batch, graphs = 400, 200, 0
    runs_out = False

    def __init__(self) -> None:
        self.meter = Meter()
        self.went_through: list[str] = []
        self.left = -1

    def load(self) -> None:
        self.meter.used = self.weights

    def memory_meter(self) -> Meter:
        return self.meter

    def measure(self) -> None:
        self.went_through.append("measure")
        self.meter.peak = self.weights + self.batch

    def allocate(self, budget_bytes: int) -> None:
        self.left = budget_bytes
        self.meter.used += budget_bytes

    def capture(self) -> None:
        self.meter.used += self.graphs
        if self.runs_out:
            raise MemoryError("no room")


class Starts:
    """Starts of one kind of stage, on a card with 1,000 bytes for it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._patch = monkeypatch

    async def start(
        self,
        *,
        reuse: bool = False,
        reserve: int = 0,
        args: str = "{}",
        env: str = "",
        **takes: object,
    ) -> tuple[Weighed, Vitals]:
        cls = type("Weighed", (Weighed,), takes)
        self._patch.setattr(phases, "find_class", lambda launch: cls)
        launch = Launch(
            instance_id="i",
            deployment="d",
            replica_index=0,
            stage_id=0,
            stage_name="s",
            stage_count=1,
            entrypoint="m:Weighed",
            args_json=args,
            devices=[LaunchDevice("GPU-1", "cuda", 1000, 8000, reserve, "H200")],
            control_socket="unused",
            run_dir=str(self._folder),
            cache_dir=str(self._folder / "cache"),
            env_digest=env,
            skips_measure=reuse,
        )
        self._patch.setattr(phases, "_arguments", lambda launch: {})
        vitals = Vitals()
        hooks = SimpleNamespace(report_progress=lambda *told: None, context=None, siblings={})
        stage = await PhaseRunner(launch, hooks, vitals, Activity()).run()
        assert isinstance(stage, Weighed)
        return stage, vitals

    @property
    def profiles(self) -> list[Path]:
        return list((self._folder / "cache").glob("profiles/*.json"))


@pytest.fixture
def starts(tmp_path, monkeypatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


async def test_what_was_measured_is_kept_and_stands_in_for_measure_when_that_is_allowed(starts):
    first, told = await starts.start(reuse=True)
    assert (first.went_through, first.left) == (["measure"], 400)
    assert told.measured_memory == MemoryProfile(400, 600, 0)
    assert told.predicted_memory is None

    second, told = await starts.start(reuse=True)
    assert (second.went_through, second.left) == ([], 400)
    assert told.predicted_memory == MemoryProfile(400, 600, 0)
    assert told.measured_memory is None


async def test_start_that_may_not_reuse_measures_and_shows_both(starts):
    await starts.start()
    stage, told = await starts.start(batch=300)

    assert (stage.went_through, stage.left) == (["measure"], 300)
    assert told.predicted_memory == MemoryProfile(400, 600, 0)
    assert told.measured_memory == MemoryProfile(400, 700, 0)


@pytest.mark.parametrize("content", [b"", b"null", b'{"x":' + b"[" * 100_000, b"{}" * 10_000, None])
async def test_what_cannot_be_read_of_an_earlier_start_is_as_if_nothing_was_kept(starts, content):
    await starts.start()
    (path,) = starts.profiles
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)

    stage, told = await starts.start(reuse=True)
    assert (stage.went_through, told.predicted_memory) == (["measure"], None)
    assert (await starts.start(reuse=True))[0].went_through == []


@pytest.mark.parametrize("args", ['{"layers": 2}', '{"layers": 1, "more": null}'])
async def test_another_kind_of_start_reuses_nothing(starts, args):
    await starts.start(reuse=True, args='{"layers": 1}')
    stage, _ = await starts.start(reuse=True, args=args)

    assert stage.went_through == ["measure"]


async def test_another_environment_of_the_spec_reuses_nothing(starts):
    await starts.start(reuse=True, env="of one")
    stage, _ = await starts.start(reuse=True, env="of another")
    assert stage.went_through == ["measure"]


async def test_order_of_arguments_makes_no_other_kind(starts):
    await starts.start(args='{"a": 1, "b": {"c": 2, "d": 3}}')
    stage, _ = await starts.start(reuse=True, args='{"b": {"d": 3, "c": 2}, "a": 1}')

    assert stage.went_through == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"weights_bytes":-1,"peak_bytes":5}', b"\xff"])
async def test_profile_that_makes_no_sense_is_as_none(starts, content):
    await starts.start()
    (path,) = starts.profiles
    path.write_bytes(content)
    stage, told = await starts.start(reuse=True)

    assert (stage.went_through, told.predicted_memory) == (["measure"], None)
    again, _ = await starts.start(reuse=True)
    assert again.went_through == []


async def test_weights_over_the_budget_fail_also_without_a_measurement(starts):
    await starts.start(reuse=True)

    with pytest.raises(BudgetExceeded, match=r"used 1001 bytes .* in LOAD.* there is 1000 bytes"):
        await starts.start(reuse=True, weights=1001)


async def test_more_weights_than_the_profile_knows_leave_room_for_the_batch_all_the_same(starts):
    await starts.start(reuse=True)
    stage, _ = await starts.start(reuse=True, weights=500)
    assert (stage.went_through, stage.left) == ([], 300)


async def test_profile_that_does_not_fit_the_start_is_measured_anew(starts, monkeypatch):
    await starts.start(reuse=True)
    # By the profile it would be over its budget: whether it is only MEASURE can tell.
    stage, _ = await starts.start(reuse=True, weights=900, batch=50)
    assert (stage.went_through, stage.left) == (["measure"], 50)
    # What was loaded is not what the profile is of.
    monkeypatch.setattr(memory_account, "_APART_BYTES", 10)
    stage, _ = await starts.start(reuse=True, weights=300)
    assert (stage.went_through, stage.left) == (["measure"], 500)
    stage, _ = await starts.start(reuse=True, weights=320)
    assert (stage.went_through, stage.left) == ([], 480)


async def test_startup_27_graphs_beyond_what_was_foreseen_fail_and_the_next_start_leaves_room(
    starts,
):
    with pytest.raises(
        BudgetExceeded, match=r"CAPTURE.* graphs took 300 bytes .* 200 bytes .* foreseen"
    ):
        await starts.start(reserve=200, graphs=300)

    stage, told = await starts.start(reserve=200, graphs=300)
    assert stage.left == 400 - 100
    assert told.predicted_memory == MemoryProfile(400, 600, 300)
    assert told.measured_memory == MemoryProfile(400, 600, 300)


async def test_startup_27_memory_that_runs_out_in_capture_says_what_was_foreseen(starts):
    with pytest.raises(MemoryError) as caught:
        await starts.start(reserve=200, graphs=300, runs_out=True)
    failure = failure_from(caught.value)

    assert failure.out_of_memory
    assert "graphs had taken 300 bytes" in failure.traceback
    assert "200 bytes (0 MiB) was foreseen for them" in failure.traceback
    stage, _ = await starts.start(reserve=200, graphs=300)
    assert stage.left == 300


async def test_graphs_within_the_reserve_take_nothing_from_what_is_left(starts):
    await starts.start(reserve=300, graphs=300)
    stage, _ = await starts.start(reserve=300, graphs=300)

    assert stage.left == 400


# --- what a card's driver and torch say together


class FakeCuda:
    """One card as torch shows it: the driver's total and free, and torch's own part."""

    def __init__(self) -> None:
        self.total, self.others, self.reserved, self.allocated, self.peak = 1000, 100, 0, 0, 0

    def init(self) -> None: ...

    def synchronize(self, card: int) -> None: ...

    def mem_get_info(self, card: int) -> tuple[int, int]:
        return self.total - self.others - self.reserved, self.total

    def memory_reserved(self, card: int) -> int:
        return self.reserved

    def memory_allocated(self, card: int) -> int:
        return self.allocated

    def max_memory_allocated(self, card: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, card: int) -> None:
        self.peak = self.allocated


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


@pytest.mark.parametrize(
    ("others_by_then", "peak"),
    [(100, 450), (130, 480), (20, 450)],
    ids=["nobody moves", "a library takes a workspace", "startup-2: a neighbour frees memory"],
)
def test_peak_is_torchs_and_what_the_card_lost_beside_it_since_the_baseline(
    cuda, others_by_then, peak
):
    meter = _CudaMeter(1)
    cuda.others, cuda.reserved, cuda.allocated = 90, 400, 350  # what came before is not counted
    cuda.others = 100
    meter.reset_peak()
    cuda.reserved, cuda.peak, cuda.others = 500, 450, others_by_then

    assert meter.peak_bytes() == peak
    assert (meter.used_bytes(), meter.held_bytes()) == (350, 500)
