"""What only the driver with tasks can get wrong: who is cancelled, when, and how often."""

from __future__ import annotations

import asyncio

import pytest

from stagekeeper.agent.initializer import run_init_async
from stagekeeper.core.errors import InitError


class Stages:
    """Inits and cleanups under a test's control; writes down what happened, in order."""

    def __init__(self, *, blocked: set[int] = frozenset(), fails: dict | None = None) -> None:  # type: ignore[assignment]
        self.log: list[tuple[str, int]] = []
        self.gates = {stage: asyncio.Event() for stage in blocked}
        self.started = {stage: asyncio.Event() for stage in blocked}
        self.fails = fails or {}
        self.end_gate: asyncio.Event | None = None  # what a cancelled init's own clean-up awaits
        self.cleanup_gate: asyncio.Event | None = None
        self.cleanup_started = asyncio.Event()
        self.killed = asyncio.Event()

    async def init(self, stage: int) -> str:
        self.log.append(("init", stage))
        try:
            if stage in self.gates:
                self.started[stage].set()
                await self.gates[stage].wait()
        except asyncio.CancelledError:
            self.log.append(("cancelled", stage))
            if self.end_gate is not None:
                await self.end_gate.wait()
            self.log.append(("killed", stage))
            self.killed.set()
            raise
        if stage in self.fails:
            raise self.fails[stage]
        return f"h{stage}"

    async def cleanup(self, stage: int, handle: str) -> None:
        assert handle == f"h{stage}"
        self.cleanup_started.set()
        if self.cleanup_gate is not None:
            await self.cleanup_gate.wait()
        self.log.append(("cleanup", stage))


async def settle_loop() -> None:
    """Let every task run until it waits for something that only the test can give."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_cancelled_caller_ends_what_is_in_flight_rolls_back_and_raises():
    stages = Stages(blocked={1})
    caller = asyncio.create_task(
        run_init_async({0: [0], 1: [1], 2: [1]}, stages.init, stages.cleanup)
    )
    await stages.started[1].wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await caller
    assert stages.log == [
        ("init", 0),
        ("init", 1),
        ("cancelled", 1),
        ("killed", 1),
        ("cleanup", 0),
    ]
    assert caught.value.__notes__ == ["stage 1 failed: CancelledError; rolled back: 0"]


async def test_second_cancellation_cuts_neither_an_inits_end_nor_a_cleanup():
    stages = Stages(blocked={1})
    stages.end_gate, stages.cleanup_gate = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(run_init_async({0: [0], 1: [1]}, stages.init, stages.cleanup))
    await stages.started[1].wait()
    caller.cancel()
    await settle_loop()
    caller.cancel()
    await settle_loop()
    stages.end_gate.set()
    await stages.cleanup_started.wait()
    caller.cancel()
    await settle_loop()
    assert not caller.done()
    stages.cleanup_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert stages.log[-3:] == [("cancelled", 1), ("killed", 1), ("cleanup", 0)]


async def test_init_that_comes_up_although_cancelled_is_cleaned():
    cleaned = []
    up = asyncio.Event()

    async def stubborn(stage: int) -> str:
        try:
            up.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return "up"

    async def cleanup(stage: int, handle: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        cleaned.append((stage, handle, task.cancelling()))

    caller = asyncio.create_task(run_init_async({0: []}, stubborn, cleanup))
    await up.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cleaned == [(0, "up", 0)], "no trace of the cancellation of the init"


async def test_caller_cancelled_before_its_tasks_run_leaves_nothing_up():
    stages = Stages()

    async def call() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await run_init_async({0: [0], 1: [1]}, stages.init, stages.cleanup)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(call())
    assert stages.log == [("init", 0), ("init", 1), ("cleanup", 1), ("cleanup", 0)]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_failure_elsewhere_cancels_no_init_in_flight():
    stages = Stages(blocked={0}, fails={1: OSError("no")})
    caller = asyncio.create_task(run_init_async({0: [0], 1: [1]}, stages.init, stages.cleanup))
    await stages.started[0].wait()
    await settle_loop()
    assert not caller.done()
    stages.gates[0].set()
    with pytest.raises(InitError) as caught:
        await caller
    assert caught.value.stage_id == 1
    assert stages.log == [("init", 0), ("init", 1), ("cleanup", 0)]


async def test_init_over_its_limit_is_cancelled_and_only_it():
    stages = Stages(blocked={0, 1})
    caller = asyncio.create_task(
        run_init_async(
            {0: [0], 1: [1], 2: [1]}, stages.init, stages.cleanup, stage_timeout_s={0: 0.01}
        )
    )
    await stages.killed.wait()
    stages.gates[1].set()
    with pytest.raises(InitError) as caught:
        await caller
    assert caught.value.stage_id == 0
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert ("cleanup", 1) in stages.log
    assert ("init", 2) not in stages.log


async def test_limit_of_a_stage_that_is_up_does_not_touch_the_next_one():
    stages = Stages(blocked={1})
    asyncio.get_running_loop().call_later(0.04, stages.gates[1].set)
    assert await run_init_async(
        {0: [0], 1: [0]}, stages.init, stages.cleanup, stage_timeout_s={0: 0.02}
    ) == {0: "h0", 1: "h1"}


async def test_limit_that_passes_during_an_inits_own_end_does_not_cut_it():
    stages = Stages(blocked={0})
    stages.end_gate = asyncio.Event()
    caller = asyncio.create_task(
        run_init_async({0: [0]}, stages.init, stages.cleanup, stage_timeout_s=0.02)
    )
    await stages.started[0].wait()
    caller.cancel()
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.04, passed.set)
    await passed.wait()
    stages.end_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert stages.log == [("init", 0), ("cancelled", 0), ("killed", 0)]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
async def test_whatever_an_init_raises_is_a_failure_of_its_stage(raised):
    stages = Stages(fails={1: raised("x")})
    with pytest.raises(InitError) as caught:
        await run_init_async({0: [0], 1: [0]}, stages.init, stages.cleanup)
    assert isinstance(caught.value.__cause__, raised)
    assert stages.log == [("init", 0), ("init", 1), ("cleanup", 0)]


async def test_callers_timeout_arrives_as_such_after_the_rollback():
    stages = Stages(blocked={1})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_init_async({0: [0], 1: [1]}, stages.init, stages.cleanup)
    assert stages.log[-1] == ("cleanup", 0)


async def test_width_bounds_the_inits_at_once():
    stages = Stages(blocked={0, 1, 2})
    caller = asyncio.create_task(
        run_init_async({0: [], 1: [], 2: []}, stages.init, stages.cleanup, max_parallel=2)
    )
    await settle_loop()
    assert stages.log == [("init", 0), ("init", 1)]
    for gate in stages.gates.values():
        gate.set()
    assert await caller == {0: "h0", 1: "h1", 2: "h2"}
    with pytest.raises(ValueError, match="max_parallel"):
        await run_init_async({}, stages.init, stages.cleanup, max_parallel=0)
