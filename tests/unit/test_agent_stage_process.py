"""What a stage process says, and what becomes of its shard; when it is BUSY, and when STALLED."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from stagekeeper.agent.control_link import LinkError
from stagekeeper.agent.liveness import Liveness
from stagekeeper.agent.records import RecordStore
from stagekeeper.core.states import Phase, ShardState
from stagekeeper.host.process import ProcessHandle, identity_of
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.v1 import types_pb2
from tests.fakes.held_stage import Held
from tests.harness.waiting import wait_for


@pytest.fixture
def held(tmp_path) -> Held:
    return Held(tmp_path)


def starting(phase: int = types_pb2.PHASE_LOAD, counter: int = 1) -> dict:
    return {
        "state": types_pb2.SHARD_STATE_STARTING,
        "phase": phase,
        "progress": types_pb2.Progress(counter=counter),
    }


async def test_progress_makes_no_other_slice_and_a_phase_does(held):
    held.says(**starting())
    assert (held.stage.shard.phase, held.slice_changes) == (Phase.LOAD, 1)

    for counter in range(2, 50):
        held.says(**starting(counter=counter))
    assert held.slice_changes == 1
    assert held.changes == 49

    held.says(**starting(types_pb2.PHASE_MEASURE))
    assert held.slice_changes == 2


async def test_ready_is_on_disk_with_its_address(held):
    held.is_ready()

    (found,) = RecordStore(held.directory).load()
    assert found.shard.state is ShardState.READY
    assert found.shard.addresses[0].url == "127.0.0.1:1"
    assert held.stage.shard.phase is None
    assert held.stage.shard.ready_time == held.clock.wall()


async def test_adopted_stage_follows_what_it_says_and_keeps_when_it_was_ready(tmp_path):
    held = Held(tmp_path, ShardState.ADOPTING)
    held.stage.update(ready_time=5.0)

    held.is_ready()

    assert held.stage.state is ShardState.READY
    assert held.stage.shard.ready_time == 5.0


async def test_what_cannot_be_is_not_believed(held):
    held.is_ready()

    held.says(**starting())

    assert held.stage.state is ShardState.READY


async def test_stage_that_is_to_be_stopped_is_not_ready_again(held):
    held.is_ready()
    held.stage.move(ShardState.STOPPING)

    held.is_ready()

    assert held.stage.state is ShardState.STOPPING


async def test_raised_start_is_kept_with_its_phase(held):
    held.says(
        types_pb2.SHARD_STATE_FAILED,
        phase=types_pb2.PHASE_CAPTURE,
        error="RuntimeError: no",
        traceback="Traceback …",
        out_of_memory=True,
    )

    assert held.stage.raised is not None
    assert held.stage.raised.phase is Phase.CAPTURE
    assert held.stage.raised.out_of_memory
    assert held.stage.state is ShardState.STARTING  # whoever waits for it decides


class Asked:
    """A control link that answers health questions when the test says so."""

    def __init__(self) -> None:
        self.question_count = 0
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answers(self, timeout_s: float) -> None:
        self.question_count += 1
        await asyncio.shield(self.answer)


@pytest.fixture
async def looked_at(held):
    owner = TaskOwner("test")
    liveness = Liveness(owner, held.clock, busy_after_s=5.0, stall_after_s=30.0)
    held.is_ready()
    held.stage.link = link = Asked()

    async def look(seconds: float = 0.0) -> None:
        await held.clock.advance(seconds)
        liveness.look(held.stage)
        await held.clock.settle()

    yield held, link, look
    await owner.stop()


async def test_idle_stage_that_answers_is_neither_busy_nor_stalled(looked_at):
    held, link, look = looked_at
    link.answer.set_result(None)

    for _ in range(100):
        await look(2.0)

    assert held.stage.state is ShardState.READY
    assert held.stage.shard.busy_for_s is None
    assert 20 <= link.question_count <= 40  # not with every look


def waits(code: str, log: Path) -> subprocess.Popen[str]:
    """A process that waits for a signal, once it has run this code; `log` has its stderr."""
    program = f"import faulthandler, signal, time; {code} print('up', flush=True); time.sleep(600)"
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    return child


async def test_recovery_R47_stalled_stage_says_where_its_stacks_are(looked_at, tmp_path):
    """And one that has no handler for that is not ended by the asking."""
    held, _, look = looked_at
    log = tmp_path / "log"
    reasons = []
    for code in ("faulthandler.register(signal.SIGUSR1);", ""):
        child = waits(code, log)
        identity = identity_of(child.pid)
        assert identity is not None
        held.stage.handle = ProcessHandle.open(identity)
        held.stage.shows_life()
        for seconds in (6.0, 1.0, 1.0, 30.0):
            await look(seconds)
        assert held.stage.state is ShardState.STALLED
        reasons.append(held.stage.shard.state_reason)
        if code:
            await wait_for(lambda: "File" in log.read_text(), "the stacks are there")
        assert child.poll() is None
        child.kill()
        child.wait()

    assert reasons[0].endswith("; the stacks of its threads are in its log")
    assert reasons[1].endswith(" s")


async def test_stage_that_cannot_answer_is_busy_then_stalled_then_ready_again(looked_at):
    """recovery-R46, supervision-U14"""
    held, link, look = looked_at
    await look(4.9)
    assert link.question_count == 0
    await look(0.2)  # asked
    assert held.stage.shard.busy_for_s is None
    await look(1.0)
    await look(1.0)
    assert held.stage.shard.busy_for_s == pytest.approx(7.1)
    before = held.slice_changes
    await look(10.0)
    assert held.slice_changes == before  # for how long is a figure
    await look(12.8)
    states = [held.stage.state]  # silent for 29.9 s
    await look(0.2)
    states.append(held.stage.state)

    link.answer.set_result(None)
    await held.clock.settle()

    states.append(held.stage.state)
    assert states == [ShardState.READY, ShardState.STALLED, ShardState.READY]
    await look(0.1)
    assert held.stage.shard.busy_for_s is None


async def test_halt_of_the_agent_itself_is_not_blamed_on_the_stage(looked_at):
    """recovery-R43"""
    held, link, look = looked_at
    await look(6.0)  # asked just before the halt
    link.answer.set_result(None)  # and answered during it

    held.clock._now += 3_600
    await look()
    await look(0.1)

    assert held.stage.state is ShardState.READY
    assert held.stage.shard.busy_for_s is None


async def test_long_call_in_a_stage_that_lives_is_busy_and_never_stalled(looked_at):
    held, link, look = looked_at
    for second in range(1, 120):
        await held.clock.advance(1.0)
        held.is_ready(in_flight=1, busy_for_s=float(second))
        await look()

    assert held.stage.state is ShardState.READY
    assert held.stage.shard.busy_for_s == pytest.approx(119.0)
    assert link.question_count == 0


async def test_broken_line_is_no_answer(looked_at):
    held, link, look = looked_at
    link.answer.set_exception(LinkError("broken"))

    await look(6.0)
    await look(1.0)
    await look(1.0)

    assert held.stage.shard.busy_for_s is not None
