"""What a caller is told instead of an answer: one tree, each with its next move."""

from __future__ import annotations

import inspect
import pickle

import pytest

from stagekeeper.actor import errors
from stagekeeper.actor.errors import (
    Died,
    MeshError,
    MeshStopped,
    NotOwner,
    NotSendable,
    NotStopped,
    RemoteError,
    UnhandledFault,
)
from stagekeeper.actor.failure import ExitInfo, FailureKind, MeshFailure, Origin
from stagekeeper.client.errors import BadRequest, StagekeeperError

KILLED = MeshFailure.at(
    Origin("workers", "m-1", 2, 1, "workers-a"), FailureKind.SIGNALED, exit=ExitInfo(signal=9)
)
EXITED = MeshFailure.at(
    Origin("workers", "m-1", 3, 1, "workers-b"), FailureKind.EXITED, exit=ExitInfo(code=0)
)


def _mesh_error() -> MeshError[str]:
    failed: dict[int, Exception] = {
        1: RemoteError("workers[1] raised X: y", remote_type="X", rank=1),
        2: Died(KILLED),
        3: Died(EXITED),
    }
    return MeshError("3 of 5 ranks of workers failed", failed, {0: "a", 4: "b"})


ALL: list[StagekeeperError] = [
    RemoteError("it raised"),
    Died(KILLED),
    MeshStopped("workers was stopped", mesh_name="workers"),
    NotSendable("x", "is a lock", target="workers.step"),
    NotOwner("ask there"),
    NotStopped([KILLED]),
    _mesh_error(),
]


@pytest.mark.parametrize("error", ALL, ids=lambda it: type(it).__name__)
def test_each_is_in_the_tree_says_the_next_move_and_survives_pickling(error):
    assert isinstance(error, StagekeeperError)
    assert error.next_move and error.reason
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.reason, again.next_move, again.never_ran, again.metadata) == (
        error.reason,
        error.next_move,
        error.never_ran,
        error.metadata,
    )


def test_each_type_is_held_to_it():
    own = [
        cls
        for cls in vars(errors).values()
        if inspect.isclass(cls) and cls.__module__ == errors.__name__
    ]
    assert {*own} == {*map(type, ALL), UnhandledFault}


def test_a_caller_of_a_dead_rank_learns_how_it_ended_and_the_failures_id():
    error = Died(KILLED)
    assert (error.signal, error.exit_code, error.rank) == (9, None, 2)
    assert error.failure is KILLED and error.failure_id == KILLED.id
    assert repr(error) == "Died(signal=9, rank=2, failure_id='workers-a-signaled-1')"
    assert str(error) == "workers[2] was ended by SIGKILL"
    assert (Died(EXITED).signal, Died(EXITED).exit_code) == (None, 0)
    assert not error.never_ran and Died(KILLED, never_ran=True).never_ran


def test_one_that_failed_without_its_process_has_neither_signal_nor_code():
    failure = MeshFailure.at(Origin("w", "m", 0, 1, "w-a"), FailureKind.BROADCAST_RAISED)
    assert (Died(failure).signal, Died(failure).exit_code) == (None, None)
    assert repr(Died(failure)) == "Died(rank=0, failure_id='w-a-broadcast_raised-1')"


def test_a_stopped_mesh_says_whether_the_call_had_begun():
    assert MeshStopped("x").never_ran
    assert not MeshStopped("x", had_begun=True).never_ran


def test_what_cannot_be_sent_is_named_and_nothing_ran():
    error = NotSendable("batch", "a lock has no form on the wire", target="workers.step")
    assert str(error) == "batch of workers.step cannot be sent: a lock has no form on the wire"
    assert issubclass(NotSendable, BadRequest)
    assert error.never_ran
    assert error.violations == (("batch", "a lock has no form on the wire"),)


def test_a_call_on_several_ranks_tells_each_rank_and_keeps_what_the_others_answered():
    error = _mesh_error()
    assert [*error.failed] == [1, 2, 3] and error.ok == {0: "a", 4: "b"}
    assert error.exceptions == tuple(error.failed.values())
    assert str(error) == "3 of 5 ranks of workers failed (3 sub-exceptions)"
    assert error.message == "3 of 5 ranks of workers failed"
    again = pickle.loads(pickle.dumps(error))
    assert again.ok == error.ok and [*again.failed] == [1, 2, 3]
    assert again.failed[2].failure == KILLED


def test_parts_of_it_know_their_ranks():
    died, rest = _mesh_error().split(Died)
    assert isinstance(died, MeshError) and isinstance(rest, MeshError)
    assert [*died.failed] == [2, 3] and [*rest.failed] == [1]
    assert died.ok == rest.ok == {0: "a", 4: "b"}
    seen = []
    try:
        raise _mesh_error()
    except* RemoteError as part:
        assert isinstance(part, MeshError)
        seen.append([*part.failed])
    except* Died as part:
        assert isinstance(part, MeshError)
        seen.append([*part.failed])
    assert seen == [[1], [2, 3]]


def test_it_never_ran_when_none_of_the_failed_did():
    stopped = MeshStopped("x")
    assert MeshError("m", {0: stopped}, {}).never_ran
    assert not MeshError("m", {0: stopped, 1: Died(KILLED)}, {}).never_ran
    assert not MeshError("m", {0: ValueError()}, {}).never_ran


def test_an_unhandled_fault_passes_by_those_who_catch_exceptions():
    fault = UnhandledFault(KILLED)
    assert issubclass(UnhandledFault, KeyboardInterrupt)
    assert not issubclass(UnhandledFault, Exception)
    assert str(fault) == str(KILLED)
    assert pickle.loads(pickle.dumps(fault)).failure == KILLED
