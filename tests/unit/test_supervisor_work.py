"""Work for agents, with agents that are scripted: cancelled runs, long stops, other lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from stagekeeper.core.commands import (
    AgentTarget,
    CancelOperation,
    ProbeAgent,
    StartOperation,
    StopSlot,
)
from stagekeeper.core.errors import Reason
from stagekeeper.core.events import Event, OperationCancelled, OperationEnded
from stagekeeper.core.ids import ClusterName, StageId, WorkerId
from stagekeeper.core.model import ReplicaStart
from stagekeeper.supervisor.agent_calls import AgentCalls, AgentError
from stagekeeper.supervisor.executor import Executor
from stagekeeper.supervisor.operation_run import LONGEST_DEFAULT_BUDGET_S, OperationRun
from stagekeeper.supervisor.progress_hub import ProgressHub
from stagekeeper.supervisor.settings import SupervisorSettings
from tests.fakes.virtual_clock import VirtualClock
from tests.plain import SlotKey
from tests.worlds import REIGN, World, gen, spec, stage_spec

CALL_S = 60.0
LATE = AgentError("it did not answer in time", is_late=True)


def start(stop_budget_s: float | None = None, stage_id: int = 0) -> StartOperation:
    """The start of a replica, a slot of which has to be stopped before."""
    world = World()
    world.register()
    (plan,) = world.deploy(replace(spec(), stages=(stage_spec(stop_budget_s=stop_budget_s),)))
    target = AgentTarget(plan.worker_id, 1, "127.0.0.1:1")
    stop = StopSlot(target, SlotKey("m", 0, StageId(stage_id)), gen(1), "anew")
    return StartOperation(ReplicaStart((plan,)), (target,), (stop,))


class ScriptedCalls:
    """Calls to an agent which takes `stop_s` to stop a slot, and refuses every step."""

    def __init__(self, stop_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.book: list[str] = []
        self._stopped_at = self.clock.monotonic() + stop_s

    async def stop_slot(self, command: StopSlot, timeout_s: float) -> None:
        self.book.append("stop")
        left_s = self._stopped_at - self.clock.monotonic()
        self.clock._now += min(left_s, timeout_s)
        await asyncio.sleep(0)
        if left_s > timeout_s:
            raise LATE

    async def persist(self, target: AgentTarget, attempt: Any, **_: Any) -> Any:
        self.book.append("step")
        raise AgentError("no", reason="REFUSED")

    async def cancel(self, *_: Any, **__: Any) -> None:
        raise AssertionError("what was refused holds nothing")


async def run(command: StartOperation, calls: ScriptedCalls) -> str:
    nothing: Any = lambda progress: None  # noqa: E731
    agent: Any = calls
    ended = await OperationRun(
        command, agent, rejoin_s=1.0, stop_timeout_s=CALL_S, on_progress=nothing
    ).run()
    assert isinstance(ended, OperationEnded)
    return ended.error


@pytest.mark.parametrize(("budget_s", "stop_s", "calls_made"), [(120.0, 119.0, 2), (None, 200, 4)])
async def test_stop_that_takes_longer_than_a_call_is_joined_again(budget_s, stop_s, calls_made):
    calls = ScriptedCalls(stop_s)
    assert await run(start(budget_s), calls) == "no", "and then the steps are taken"
    assert calls.book == ["stop"] * calls_made + ["step"]


@pytest.mark.parametrize(
    ("budget_s", "limit_s"), [(120.0, 120.0 + CALL_S), (None, LONGEST_DEFAULT_BUDGET_S + CALL_S)]
)
async def test_stop_that_takes_longer_than_its_budget_is_given_up(budget_s, limit_s):
    calls = ScriptedCalls(10_000)
    began = calls.clock.monotonic()
    assert await run(start(budget_s), calls) == str(LATE)
    assert calls.clock.monotonic() - began == limit_s
    assert "step" not in calls.book


async def test_slot_that_the_spec_does_not_have_can_be_stopped_too():
    calls = ScriptedCalls(100)
    await run(start(stage_id=7), calls)
    assert calls.book == ["stop", "stop", "step"]


class HeldCalls:
    """An agent that does not know of an operation yet: its start is still on our side."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.book: list[str] = []
        self.may_go = asyncio.Event()

    async def stop_slot(self, command: StopSlot, timeout_s: float) -> None:
        self.book.append("stop")
        try:
            await self.may_go.wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)  # its clean-up takes some turns
            self.book.append("run ends")

    async def persist(self, target: AgentTarget, attempt: Any, **_: Any) -> Any:
        self.book.append("step")
        raise AgentError("no")

    async def cancel(
        self, command: CancelOperation, timeout_s: float, *, lets_finish: bool = False
    ) -> None:
        self.book.append("cancel")


@pytest.mark.parametrize("turns", [0, 3])
async def test_cancelled_operation_is_never_told_to_an_agent_that_does_not_know_it(turns):
    held = HeldCalls()
    told: list[Event] = []
    calls: Any = held
    executor = Executor(SupervisorSettings(), calls, ProgressHub(), told.append)
    command = start()
    executor.carry_out(command)
    for _ in range(turns):
        await asyncio.sleep(0)

    (target,), operation_id = command.targets, command.start.operation_id
    executor.carry_out(CancelOperation(target, operation_id, "deleted"))
    await held.clock.settle()
    held.may_go.set()
    await held.clock.settle()

    assert held.book == (["stop", "run ends", "cancel"] if turns else ["cancel"])
    cancelled = OperationCancelled(target.worker_id, target.incarnation, operation_id, "")
    assert told == [cancelled]
    assert not executor._runs
    await executor.stop()


async def test_second_cancellation_does_not_disturb_the_end_that_the_first_one_began():
    """A start over two workers is cancelled at each of them."""
    held = HeldCalls()
    calls: Any = held
    executor = Executor(SupervisorSettings(), calls, ProgressHub(), lambda event: None)
    command = start()
    executor.carry_out(command)
    await held.clock.settle()
    (target,), operation_id = command.targets, command.start.operation_id

    executor.carry_out(CancelOperation(target, operation_id, "deleted"))
    await asyncio.sleep(0)
    other = replace(target, worker_id=WorkerId("w2"))
    executor.carry_out(CancelOperation(other, operation_id, "deleted"))
    await held.clock.settle()

    assert held.book == ["stop", "run ends", "cancel", "cancel"]
    await executor.stop()


def calls_to(target_of: Callable[[], AgentTarget | None]) -> AgentCalls:
    """Calls to the only agent, which reach nobody: the attempts are the test's own."""
    channels: Any = None
    return AgentCalls(
        ClusterName("default"),
        epoch_of=lambda: REIGN,
        target_of=lambda _: target_of(),
        channels=channels,
        clock=VirtualClock(),
    )


Attempt = Callable[[AgentTarget], Coroutine[Any, Any, None]]


def noted() -> tuple[Attempt, list[AgentTarget]]:
    """An attempt that succeeds, and the targets that it was made at."""
    said: list[AgentTarget] = []

    async def attempt(target: AgentTarget) -> None:
        said.append(target)

    return attempt, said


def unanswered() -> tuple[Attempt, asyncio.Event]:
    """An attempt that lasts until it is ended, and whether it was."""
    was_ended = asyncio.Event()

    async def attempt(target: AgentTarget) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_ended.set()

    return attempt, was_ended


@pytest.mark.parametrize("incarnation", [1, 3, None])
async def test_command_for_another_life_of_a_worker_is_never_said(incarnation):
    meant = AgentTarget("w1", 2, "127.0.0.1:1")  # type: ignore[arg-type]
    now = None if incarnation is None else AgentTarget(meant.worker_id, incarnation, meant.address)
    calls = calls_to(lambda: now)
    attempt, said = noted()

    with pytest.raises(AgentError) as caught:
        await calls.persist(meant, attempt, limit_s=0.0)

    assert caught.value.reason == Reason.STALE_INCARNATION
    assert said == []


async def test_command_goes_to_the_newest_address_of_the_same_life():
    meant = AgentTarget("w1", 2, "127.0.0.1:1")  # type: ignore[arg-type]
    moved = AgentTarget(meant.worker_id, 2, "127.0.0.1:2")
    calls = calls_to(lambda: moved)
    attempt, said = noted()

    await calls.persist(meant, attempt, limit_s=0.0)

    assert said == [moved]


async def test_recovery_R22_command_under_way_ends_when_its_worker_begins_another_life():
    meant = AgentTarget("w1", 1, "127.0.0.1:1")  # type: ignore[arg-type]
    now = meant
    calls = calls_to(lambda: now)
    attempt, was_ended = unanswered()

    saying = asyncio.create_task(calls.persist(meant, attempt, limit_s=600.0))
    await calls.clock.settle()  # type: ignore[attr-defined]
    calls.life_began()
    await calls.clock.settle()  # type: ignore[attr-defined]
    assert not saying.done(), "another worker's life"

    now = AgentTarget(meant.worker_id, 2, "127.0.0.1:2")
    calls.life_began()

    with pytest.raises(AgentError) as caught:
        await saying
    assert caught.value.reason == Reason.STALE_INCARNATION
    assert was_ended.is_set()


async def test_registration_of_another_life_is_what_ends_a_command_under_way():
    """The agent is dialled back in each life, and that is how the calls hear of one."""
    meant = AgentTarget("w1", 1, "127.0.0.1:1")  # type: ignore[arg-type]
    now = meant
    calls = calls_to(lambda: now)
    executor = Executor(SupervisorSettings(), calls, ProgressHub(), lambda event: None)
    attempt, was_ended = unanswered()
    saying = asyncio.create_task(calls.persist(meant, attempt, limit_s=600.0))
    await calls.clock.settle()  # type: ignore[attr-defined]

    now = AgentTarget(meant.worker_id, 2, "127.0.0.1:2")
    executor.carry_out(ProbeAgent(now))
    await executor.stop()
    await calls.clock.settle()  # type: ignore[attr-defined]

    assert was_ended.is_set()
    with pytest.raises(AgentError):
        saying.result()


async def test_command_under_way_ends_with_whoever_says_it():
    meant = AgentTarget("w1", 1, "127.0.0.1:1")  # type: ignore[arg-type]
    calls = calls_to(lambda: meant)
    attempt, was_ended = unanswered()

    before = asyncio.all_tasks()
    saying = asyncio.create_task(calls.persist(meant, attempt, limit_s=600.0))
    await calls.clock.settle()  # type: ignore[attr-defined]
    saying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saying
    assert was_ended.is_set()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
