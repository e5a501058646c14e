"""Failures of meshes: values that grow on their way up, travel, and can be read."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.actor.errors import NotOwner
from stagekeeper.actor.failing import from_below
from stagekeeper.actor.failure import (
    ExitInfo,
    FailureKind,
    Hop,
    MeshFailure,
    Origin,
    failure_id,
)
from stagekeeper.actor.failure_wire import MOST_BYTES, failure_from_proto, failure_to_proto
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.host.process import ExitStatus
from stagekeeper.v1 import types_pb2 as pb2

in_its_time = settings(deadline=None, max_examples=50)

WORKER = Origin("workers", "m-1", 2, 1, "workers-a", 4711)
MANAGER = Origin("manager", "m-2", 0, 3, "manager-b", 12)
BOSS = Origin("boss", "m-3", 0, 1, "boss-c", 13)


def _killed(**more) -> MeshFailure:
    return MeshFailure.at(
        WORKER,
        FailureKind.SIGNALED,
        id=failure_id("proc-1", "end"),
        exit=ExitInfo(signal=9),
        detected_by="pidfd",
        **more,
    )


def passed_on(
    failure: MeshFailure, owner: Origin, decision: str = "refused", error: Exception | None = None
) -> MeshFailure:
    """Make the failure of an owner of this one, without what differs from run to run."""
    identity = ActorIdentity(
        owner.instance_id, owner.mesh_id, owner.mesh_name, owner.rank or 0, 1, owner.incarnation, ()
    )
    kind = FailureKind.UNHANDLED if error is None else FailureKind.SUPERVISE_RAISED
    made = from_below(identity, kind, [failure], decision, error)
    return dataclasses.replace(made, pid=owner.pid, detect_time=None)


_texts = st.text(st.characters(codec="utf-8"), max_size=12)
_hops = st.lists(st.builds(Hop, _texts, _texts), max_size=3).map(tuple)
_exits = st.builds(
    ExitInfo,
    st.none() | st.integers(-(2**31), 2**31 - 1),
    st.none() | st.integers(1, 64),
    st.booleans(),
    st.booleans(),
)


_none = st.just(())


def _failures(causes=_none):
    return st.builds(
        MeshFailure,
        id=_texts,
        kind=st.sampled_from(FailureKind),
        mesh_name=_texts,
        mesh_id=_texts,
        ranks=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
        incarnations=st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
        instance_id=_texts,
        message=_texts,
        exit=st.none() | _exits,
        detected_by=_texts,
        detect_time=st.none() | st.floats(0, 4e9),
        endpoint=_texts,
        sender=_texts,
        pid=st.integers(0, 2**22),
        path=_hops,
        causes=causes,
        remote_traceback=_texts,
        last_log_lines=st.lists(_texts, max_size=3).map(tuple),
        restarts_tried=st.integers(0, 9),
    )


_trees = _failures(st.lists(_failures(st.lists(_failures(), max_size=2)), max_size=3))


def test_an_end_that_several_report_has_one_id():
    assert failure_id("p-1", "end") == "p-1-end-1"
    assert failure_id("p-1", FailureKind.UNDELIVERABLE, 2) == "p-1-undeliverable-2"
    assert MeshFailure.at(WORKER, FailureKind.INIT_RAISED).id == "workers-a-init_raised-1"


def test_every_kind_of_the_protocol_is_known():
    assert {f"FAILURE_KIND_{kind}" for kind in FailureKind} == set(pb2.FailureKind.keys())


def test_an_exit_is_what_the_parent_was_told():
    assert ExitInfo.of(ExitStatus(code=0)) == ExitInfo(code=0)
    assert ExitInfo.of(ExitStatus(signal=9), out_of_memory=True).signal == 9
    assert ExitInfo.of(None, asked=True).is_unknown
    assert [
        str(it) for it in (ExitInfo(3), ExitInfo(signal=9), ExitInfo(signal=63), ExitInfo())
    ] == [
        "exit code 3",
        "SIGKILL",
        "signal 63",
        "exit code unknown",
    ]


def test_the_time_is_no_part_of_the_value():
    assert _killed(detect_time=1.0) == _killed(detect_time=2.0)
    assert hash(_killed(detect_time=1.0)) == hash(_killed(detect_time=2.0))
    assert _killed() != _killed(sender="manager[0]")


def test_the_rank_is_told_when_there_is_one():
    assert _killed().rank == 2
    for ranks in ((), (1, 2)):
        with pytest.raises(ValueError, match="look at `ranks`"):
            _ = dataclasses.replace(_killed(), ranks=ranks).rank


def test_a_refusal_and_then_an_error_keep_the_root_and_the_path():
    first = _killed()
    second = passed_on(first, MANAGER, "has no __supervise__")
    error = KeyError("x")
    third = passed_on(second, BOSS, "raised KeyError: 'x'", error).with_hop("root", "stopped")
    assert [(it.kind, it.where) for it in (first, second, third)] == [
        (FailureKind.SIGNALED, "workers[2]"),
        (FailureKind.UNHANDLED, "manager[0]"),
        (FailureKind.SUPERVISE_RAISED, "boss[0]"),
    ]
    assert third.root == second.root == first.root == first
    assert [it.id for it in third.causes] == [first.id, second.id]
    assert third.path == (
        ("manager[0]", "has no __supervise__"),
        ("boss[0]", "raised KeyError: 'x'"),
        ("root", "stopped"),
    )
    assert second.id == "manager-b-unhandled-1"
    assert third.remote_traceback.endswith("KeyError: 'x'\n")


def test_the_failure_of_a_deep_tree_grows_with_its_depth_only():
    failure = _killed()
    for depth in range(40):  # twice as large with each, were causes kept inside causes
        failure = passed_on(failure, Origin("m", f"m-{depth}", 0, 1, f"i-{depth}"))
    assert len(failure.causes) == 40
    assert not any(cause.causes for cause in failure.causes)
    assert failure_from_proto(failure_to_proto(failure)) == failure


def test_several_failures_that_one_owner_refused_are_all_causes():
    other = dataclasses.replace(_killed(), id="proc-2-end-1", ranks=(3,))
    both = dataclasses.replace(passed_on(_killed(), MANAGER), causes=(_killed(), other, other))
    assert [it.id for it in both.causes] == ["proc-1-end-1", "proc-2-end-1"]
    assert [line[:12] for line in str(both).splitlines() if "SIGNALED" in line] == [
        " └ SIGNALED:",
        " └ SIGNALED:",
    ]


def test_only_the_owner_has_its_mesh_and_can_respawn():
    mesh, asked = object(), []

    async def respawn(failure: MeshFailure) -> None:
        asked.append(failure)

    given = _killed().attached(mesh, respawn)
    asyncio.run(given.respawn())
    assert given.mesh is mesh
    assert asked == [given] and given == _killed() and hash(given) == hash(_killed())
    assert copy.copy(given).mesh is mesh and copy.deepcopy(given).mesh is mesh
    goes_on = (
        _killed(),
        given.with_hop("manager[0]", "refused"),
        passed_on(given, MANAGER).causes[0],
        pickle.loads(pickle.dumps(given)),
        failure_from_proto(failure_to_proto(given)),
    )
    for other in goes_on:
        assert other.mesh is None
        with pytest.raises(NotOwner, match=r"workers\[2\] can be respawned by its owner only"):
            asyncio.run(other.respawn())


def test_codecs_that_go_by_fields_never_meet_the_mesh():
    given = _killed().attached(object(), None)
    assert msgspec.json.decode(msgspec.json.encode(given))["ranks"] == [2]
    assert "_attached" not in dataclasses.asdict(given)


@in_its_time
@given(_trees)
def test_a_failure_comes_back_as_it_was(failure):
    for back in (
        failure_from_proto(pb2.Failure.FromString(failure_to_proto(failure).SerializeToString())),
        pickle.loads(pickle.dumps(failure)),
    ):
        assert back == failure and hash(back) == hash(failure)
        assert str(back).splitlines()[0] == str(failure).splitlines()[0]
        assert back.root == failure.root
        if failure.detect_time is not None:
            assert back.detect_time == pytest.approx(failure.detect_time, abs=1e-6)


@in_its_time
@given(_trees)
def test_whatever_it_says_its_tree_is_lines_that_a_terminal_shows(failure):
    assert all(line.isprintable() for line in str(failure).split("\n"))
    assert len(str(failure).split("\n")) <= 14 * (1 + len(failure.causes)) + 8
    assert failure.summary.isprintable()


def test_a_kind_of_a_later_release_is_kept_as_unspecified():
    message = failure_to_proto(_killed())
    message.kind = 99  # type: ignore[assignment]
    assert failure_from_proto(message).kind is FailureKind.UNSPECIFIED
    assert failure_from_proto(message).ranks == (2,)


def test_a_failure_of_a_deployed_stage_names_its_deployment_and_shard():
    origin = pb2.FailureOrigin(deployment="d", stage_name="talker", shard_index=1)
    failure = failure_from_proto(pb2.Failure(failure_id="i-exited-1", origin=origin))
    assert failure.where == "d/talker[1]"


def test_one_that_is_too_large_is_cut_and_keeps_its_root_and_its_ids():
    long = "ß" * 100_000
    failure = _killed(
        message="root " + long,
        remote_traceback=long + "ValueError: the end",
        last_log_lines=[long] * 50,
        endpoint=long,
        sender=long,
    )
    failure = dataclasses.replace(
        failure, ranks=tuple(range(10_000)), incarnations=(2**63,) * 10_000
    )
    for depth in range(100):
        failure = passed_on(failure, Origin("m" * 999, f"m-{depth}", 0, 1, f"i-{depth}"), long)
    message = failure_to_proto(failure)
    back = failure_from_proto(message)
    assert message.ByteSize() <= MOST_BYTES
    assert back.id == failure.id
    assert back.root.id == "proc-1-end-1" and back.root.message.startswith("root ßß")
    assert back.causes[-1].id == failure.causes[-1].id
    assert back.path[-1].decision.startswith("ßß") and back.path[-1].decision.endswith("…")
    assert any("owners left out" in hop.decision for hop in back.path)


def test_failures_of_meshes_of_any_size_fit():
    ranks, lives = tuple(range(2**28, 2**28 + 20_000)), (2**63,) * 20_000
    failure = dataclasses.replace(
        passed_on(dataclasses.replace(_killed(), ranks=ranks, incarnations=lives), MANAGER),
        ranks=ranks,
        incarnations=lives,
    )
    message = failure_to_proto(failure)
    assert message.ByteSize() <= MOST_BYTES
    assert failure_from_proto(message).ranks == failure.ranks[:2_048]


def test_of_a_long_traceback_the_end_is_kept():
    failure = _killed(remote_traceback="x" * MOST_BYTES + "ValueError: the end")
    back = failure_from_proto(failure_to_proto(failure))
    assert back.remote_traceback.startswith("…x")
    assert back.remote_traceback.endswith("ValueError: the end")
    assert back.message == failure.message


def test_text_that_no_encoding_has_and_times_out_of_range_travel_as_well_as_they_can():
    failure = _killed(message="a\udc80b", detect_time=float("nan"))
    back = failure_from_proto(failure_to_proto(failure))
    assert (back.message, back.detect_time) == ("a?b", None)


def test_the_tree_names_who_refused_what_and_the_root_last():
    failure = _killed(
        detect_time=1.7e9,
        endpoint="step",
        sender="manager[0]",
        remote_traceback="Traceback …\nValueError: bad x\n",
        last_log_lines=[*map(str, range(9)), "bye\x1b[31m"],
        restarts_tried=2,
    )
    failure = passed_on(failure, MANAGER).with_hop("root", "ended the program")
    assert str(failure) == (
        "UNHANDLED: manager[0] refused (manager-b-unhandled-1)\n"
        "   pid 12; incarnation 3; seen by __supervise__\n"
        "   then root: ended the program\n"
        " └ SIGNALED: workers[2] was ended by SIGKILL (proc-1-end-1)\n"
        "      pid 4711; SIGKILL; seen by pidfd at 22:13:20 UTC; restarts tried: 2\n"
        "      in step, sent by manager[0]\n"
        "      raised at:\n"
        "        Traceback …\n"
        "      raised ValueError: bad x\n"
        "      the last lines of its log:\n"
        "        | 5\n"
        "        | 6\n"
        "        | 7\n"
        "        | 8\n"
        "        | bye\\x1b[31m"
    )
    assert failure.summary == "manager[0] refused: workers[2] was ended by SIGKILL"


def test_of_the_root_cause_the_author_sees_where_his_code_raised():
    lines = [f'  File "a.py", line {n}, in f\n    f({n})\n    ^^^^\n' for n in range(9)]
    told = "Traceback (most recent call last):\n" + "".join(lines) + "KeyError: 'a\x1b'\n"
    root = MeshFailure.at(WORKER, FailureKind.INIT_RAISED, remote_traceback=told)
    above = dataclasses.replace(root, kind=FailureKind.SUPERVISE_RAISED, causes=(root,))
    assert str(root).splitlines()[2:] == [
        "   raised at:",
        '       File "a.py", line 5, in f',
        "         f(5)",
        '       File "a.py", line 6, in f',
        "         f(6)",
        '       File "a.py", line 7, in f',
        "         f(7)",
        '       File "a.py", line 8, in f',
        "         f(8)",
        "   raised KeyError: 'a\\x1b'",
    ]
    assert str(above).count("raised at:") == 1 and "raised KeyError" in str(above)
    said = dataclasses.replace(root, message="workers[2]: KeyError: 'a\x1b'")
    assert str(said).count("KeyError") == 1 and str(said).endswith("f(8)")


def test_ranks_in_a_row_are_shown_as_a_range():
    assert dataclasses.replace(_killed(), ranks=(0, 1, 2, 5, 7, 8)).where == "workers[0-2,5,7-8]"


@pytest.mark.parametrize("kind", list(FailureKind))
def test_one_without_a_sentence_is_given_one(kind):
    failure = MeshFailure.at(WORKER, kind, endpoint="step", sender="root")
    assert failure.message.startswith("workers[2] ")
    assert failure.message.isprintable()
