"""What kind of failure an end is: judged by how the process ended and by what it said before."""

from __future__ import annotations

import asyncio

import pytest

from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.failures import FailureSpool
from stagekeeper.core.ids import WorkerId
from stagekeeper.core.states import Phase, ShardState
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.process import ExitStatus, ProcessHandle, ProcessIdentity
from stagekeeper.runtime.launch import note_phase
from stagekeeper.v1 import types_pb2
from tests.fakes.held_stage import Held


class EndedProcess(ProcessHandle):
    """A hold on a process that has ended; its pid is nobody's."""

    def __init__(self, status: ExitStatus | None) -> None:
        super().__init__(ProcessIdentity(2**22, 1), -1)
        self.status = status

    @property
    def has_exited(self) -> bool:
        return True

    async def wait(self) -> None:
        pass

    def exit_status(self) -> ExitStatus | None:
        return self.status

    def reap(self) -> ExitStatus | None:
        return self.status


class Witness(OomWitness):
    saw_a_kill = False

    def look(self) -> bool:
        return self.saw_a_kill


class World(Held):
    def __init__(self, tmp_path) -> None:
        super().__init__(tmp_path)
        self.spool = FailureSpool(self.directory)
        self.oom = Witness()
        self.deaths = Deaths(
            WorkerId("w"),
            self.spool,
            self.store,
            self.oom,
            self.clock,
        )
        self.told: list[str] = []
        self.deaths.on_failure = lambda stage, failure: self.told.append(failure.failure_id)

    async def ends(self, **how):
        self.stage.handle = EndedProcess(ExitStatus(**how) if how else None)
        await asyncio.wait_for(self.deaths.watch(self.stage), 10)
        return self.spool.pending


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ({"code": 0}, "EXITED", "code 0, unasked"),
        ({"code": 3}, "EXITED", "code 3, unasked"),
        ({"signal": 11}, "SIGNALED", "SIGSEGV"),
        ({"signal": 9}, "SIGNALED", "SIGKILL"),
        ({"signal": 40}, "SIGNALED", "signal 40"),
        ({}, "EXITED", "how is not known"),
    ],
)
async def test_end_that_nobody_asked_for_is_a_failure(world, how, kind, said):
    world.is_ready()

    (failure,) = await world.ends(**how)

    assert failure.kind == kind
    assert said in failure.message
    assert failure.origin.phase is None
    assert world.stage.state is ShardState.FAILED
    assert world.stage.shard.failure_id == failure.failure_id
    assert world.told == [failure.failure_id]
    assert world.stage.gone.is_set()


async def test_end_that_was_asked_for_is_none(world):
    world.is_ready()
    world.stage.is_asked = True

    assert await world.ends(code=0) == ()
    assert world.told == []


@pytest.mark.parametrize(
    ("how", "saw_a_kill", "kind"),
    [
        ({"signal": 9}, True, "OUT_OF_MEMORY"),
        ({"signal": 9}, False, "SIGNALED"),
        ({"signal": 15}, True, "SIGNALED"),
        ({"code": 137}, True, "EXITED"),
    ],
)
async def test_sigkill_with_the_kernels_word_is_out_of_memory(world, how, saw_a_kill, kind):
    """recovery-U14"""
    world.is_ready()
    world.oom.saw_a_kill = saw_a_kill

    (failure,) = await world.ends(**how)

    assert failure.kind == kind
    assert failure.exit is not None
    assert failure.exit.out_of_memory is (kind == "OUT_OF_MEMORY")


async def test_what_its_start_raised_says_more_than_how_it_ended(world):
    world.says(
        types_pb2.SHARD_STATE_FAILED,
        phase=types_pb2.PHASE_MEASURE,
        error="RuntimeError: no weights",
        traceback="Traceback: here",
    )

    (failure,) = await world.ends(code=1)

    assert failure.kind == "INIT_RAISED"
    assert failure.message == "stage s raised in MEASURE: RuntimeError: no weights"
    assert failure.remote_traceback == "Traceback: here"
    assert failure.origin.phase is Phase.MEASURE


async def test_phase_that_a_process_had_no_time_to_tell_of_is_the_one_that_it_died_in(world):
    world.says(types_pb2.SHARD_STATE_STARTING, phase=types_pb2.PHASE_MEASURE)
    note_phase(world.directory.run_dir(world.stage.instance_id), Phase.ALLOCATE)

    (failure,) = await world.ends(signal=9)

    assert failure.origin.phase is Phase.ALLOCATE and "in ALLOCATE" in failure.message


async def test_process_that_was_never_heard_left_word_of_its_phase(world):
    """startup-15"""
    note_phase(world.directory.run_dir(world.stage.instance_id), Phase.LOAD)
    world.store.log_path(world.stage.instance_id).write_text("half a file\n")

    (failure,) = await world.ends(code=1)

    assert failure.origin.phase is Phase.LOAD
    assert "in LOAD" in failure.message
    assert failure.last_log_lines == ("half a file",)


async def test_death_that_was_spooled_before_its_agent_died_is_the_same_death(world):
    world.is_ready()
    (failure,) = await world.ends(signal=9)
    again = Held(world.directory.root.parent.parent / "again")
    spool = FailureSpool(world.directory)
    spool.load()
    deaths = Deaths(WorkerId("w"), spool, again.store, Witness(), again.clock)

    found = deaths.found_gone(again.stage)

    assert found == failure
    assert spool.pending == (failure,)
    assert again.stage.state is ShardState.FAILED
