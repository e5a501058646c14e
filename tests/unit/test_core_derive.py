"""Replicas out of claims: sets by generation, PARTIAL, CONFLICT, FAILED, and the reasons given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.derive import ReplicaContext, derive_replica
from stagekeeper.core.ids import DeploymentName, ReplicaIndex
from stagekeeper.core.model import ReplicaView
from stagekeeper.core.operations import NO_GENERATION
from stagekeeper.core.states import Phase, ReplicaState, ShardState, WorkerState
from tests.plain import Claim, FailureNote, ReplicaKey
from tests.worlds import gen, replica_shards, shard, spec

KEY = ReplicaKey(DeploymentName("m"), ReplicaIndex(0))
KNOWN = ReplicaContext()


def derive(*claims, context: ReplicaContext = KNOWN) -> ReplicaView:
    """Derive replica 0 of m from records, (worker, record), or (worker, state, record)."""
    made = []
    for claim in claims:
        if not isinstance(claim, tuple):
            claim = "w1", claim
        worker, *state, record = claim
        made.append(Claim(worker, *(state or [WorkerState.ALIVE]), record))
    view = derive_replica(KEY, made, context)
    assert view == derive_replica(KEY, made[::-1], context), "the order of claims is no matter"
    assert view is not None
    return view


def wanted(stages=1, **changes) -> ReplicaContext:
    return replace(ReplicaContext(spec=spec(stages=stages), is_wanted=True), **changes)


def shards_of(view: ReplicaView) -> list[tuple]:
    return [(it.record.stage_id, it.record.shard_index, it.worker_id) for it in view.shards]


def test_all_shards_ready_and_committed_are_a_ready_replica_without_a_reason() -> None:
    view = derive(*replica_shards(stages=3))

    assert view.state is ReplicaState.READY
    assert (view.ready_shard_count, view.shard_count) == (3, 3)
    assert (view.reason, view.next_action) == ("", "")


def test_shards_are_ordered_by_stage_and_shard_whoever_reported_first() -> None:
    records = [
        shard(stage=stage, stage_count=2, shard_index=index, shard_count=2,
              instance_id=f"{stage}{index}")
        for stage in (1, 0) for index in (1, 0)
    ]  # fmt: skip

    view = derive(*((f"w{9 - it.shard_index}", it) for it in records))

    assert shards_of(view) == [(0, 0, "w9"), (0, 1, "w8"), (1, 0, "w9"), (1, 1, "w8")]
    assert view.state is ReplicaState.READY


def test_two_of_three_shards_back_are_partial_with_a_reason_and_a_next_action() -> None:
    view = derive(*replica_shards(stages=3)[:2])

    assert view.state is ReplicaState.PARTIAL
    assert (view.ready_shard_count, view.shard_count) == (2, 3)
    assert view.reason == "2 of 3 shards READY: stage 2 reported by no worker"
    assert "when workers report what is missing" in view.next_action


def test_a_missing_shard_of_a_stage_is_named_with_what_the_spec_calls_the_stage() -> None:
    half = shard(shard_index=1, shard_count=2)

    view = derive(half)
    missing_stage = derive(*replica_shards(stages=2)[:1], context=wanted(stages=2))

    assert view.reason == "1 of 2 shards READY: shard (0) of stage 0 (s0) reported by no worker"
    assert "stage 1 (s1) reported by no worker" in missing_stage.reason


def test_many_missing_shards_are_counted_and_the_first_ones_listed() -> None:
    view = derive(shard(shard_index=0, shard_count=1_000))

    assert "999 shards (1, 2, 3, 4, …) of stage 0 (s0)" in view.reason
    assert view.shard_count == 1_000


def test_missing_shards_are_waited_for_while_recovering() -> None:
    view = derive(*replica_shards(stages=2)[:1], context=wanted(stages=2, is_recovering=True))

    assert view.state is ReplicaState.PARTIAL
    assert "waiting for workers" in view.next_action


def test_a_failed_shard_fails_the_replica_naming_stage_cause_and_what_is_ready() -> None:
    records = replica_shards(stages=3)
    records[1] = replace(
        records[1], state=ShardState.FAILED, state_reason="exit code 3", phase=Phase.LOAD
    )

    view = derive(*records)

    assert view.state is ReplicaState.FAILED
    expected = "2 of 3 shards READY: stage 1 (s1) on worker w1 FAILED in LOAD: exit code 3"
    assert view.reason == expected
    assert "deploy again" in view.next_action


@pytest.mark.parametrize(
    "state", [ShardState.ADOPTING, ShardState.STALLED, ShardState.DRAINING, ShardState.STOPPING]
)
def test_a_shard_that_is_not_ready_and_has_not_failed_makes_it_partial(state) -> None:
    view = derive(shard(state=state, state_reason="because"))

    assert view.state is ReplicaState.PARTIAL
    assert f"is {state}: because" in view.reason


def test_uncommitted_shards_are_never_ready() -> None:
    view = derive(shard(committed=False))

    assert view.state is ReplicaState.PARTIAL
    assert view.ready_shard_count == 0
    assert "not committed" in view.reason


def test_uncommitted_shards_that_start_are_a_starting_replica() -> None:
    view = derive(shard(committed=False, state=ShardState.STARTING, phase=Phase.LOAD))

    assert view.state is ReplicaState.STARTING
    assert "STARTING (LOAD), not committed" in view.reason


def test_committed_shards_that_start_are_a_partial_replica() -> None:
    assert derive(shard(state=ShardState.STARTING)).state is ReplicaState.PARTIAL


@pytest.mark.parametrize(
    "newer",
    [
        shard(n=2, committed=False),
        shard(n=2, state=ShardState.STARTING),
        shard(n=2, state=ShardState.FAILED),
        shard(n=2, shard_count=2),
        shard(n=2, state=ShardState.ADOPTING),
    ],
)
def test_a_newer_set_that_cannot_be_routed_withdraws_nothing(newer) -> None:
    view = derive(shard(n=1), ("w2", newer))

    assert view.state is ReplicaState.READY
    assert [it.record.generation for it in view.shards] == [gen(1)]


def test_the_newest_routable_set_is_shown() -> None:
    view = derive(shard(n=1), ("w2", shard(n=3)), ("w3", shard(n=2)))

    assert [(it.record.generation, it.worker_id) for it in view.shards] == [(gen(3), "w2")]


def test_shards_of_two_generations_are_never_put_together() -> None:
    halves = [
        ("w1", shard(n=1, shard_index=0, shard_count=2)),
        ("w2", shard(n=2, shard_index=1, shard_count=2)),
    ]

    view = derive(*halves)

    assert view.state is ReplicaState.PARTIAL
    assert shards_of(view) == [(0, 1, "w2")], "the newest set is shown, alone"


def half_copies() -> list[tuple]:
    """Two starts of a replica, each READY where the other is not."""

    def stage(number, n, **changes):
        return shard(stage=number, stage_count=2, n=n, **changes)

    gone = ShardState.FAILED
    return [
        ("w1", stage(0, 5)), ("w1", stage(1, 5, state=gone, state_reason="OOM")),
        ("w2", stage(0, 4, state=gone)), ("w2", stage(1, 4)),
    ]  # fmt: skip


def test_a_replica_is_never_put_together_of_two_half_copies() -> None:
    view = derive(*half_copies())

    assert view.state is ReplicaState.FAILED
    assert {it.worker_id for it in view.shards} == {"w1"}, "the newer start is shown, alone"
    assert view.reason == "1 of 2 shards READY: stage 1 (s1) on worker w1 FAILED: OOM"


def test_a_stage_that_only_another_start_has_is_shown_and_counts_as_missing() -> None:
    view = derive(half_copies()[0], half_copies()[3])

    assert view.state is ReplicaState.PARTIAL
    assert (view.ready_shard_count, view.shard_count) == (1, 2)
    assert shards_of(view) == [(0, 0, "w1"), (1, 0, "w2")]
    assert "stage 1 (s1) reported of another start only (operation 4-x-4)" in view.reason
    assert "when workers report what is missing" in view.next_action


def test_a_stage_that_failed_in_another_start_fails_a_replica_that_misses_it() -> None:
    failed = replace(half_copies()[3][1], state=ShardState.FAILED)

    assert derive(half_copies()[0], ("w2", failed)).state is ReplicaState.FAILED


def test_an_older_start_that_is_whole_stands_for_a_replica_beside_half_a_newer_one() -> None:
    view = derive(*half_copies()[:2], *(("w3", it) for it in replica_shards(stages=2, n=3)))

    assert view.state is ReplicaState.READY
    assert {it.record.generation for it in view.shards} == {gen(3)}


@pytest.mark.parametrize(
    ("change", "said"), [({"stage_count": 3}, "say 2 and 3 stages"), ({"operation_id": "x"}, "'x'")]
)
def test_stages_of_one_generation_that_contradict_each_other_are_a_conflict(change, said) -> None:
    first, second = replica_shards(stages=2)

    view = derive(first, replace(second, **change))

    assert view.state is ReplicaState.PARTIAL
    assert "CONFLICT" in view.reason
    assert said.strip("'") in view.reason


def test_a_failed_start_does_not_hide_what_was_committed_before_it() -> None:
    adopting = shard(n=1, state=ShardState.ADOPTING)

    view = derive(adopting, ("w2", shard(n=2, committed=False, state=ShardState.FAILED)))

    assert view.state is ReplicaState.PARTIAL
    assert [it.record.generation for it in view.shards] == [gen(1)]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (shard(instance_id="other"), "both claim shard 0"),
        (shard(shard_index=1, shard_count=3), "say 2 and 3 shards"),
        (shard(shard_index=1, shard_count=2, stage_count=2), "say 1 and 2 stages"),
        (shard(shard_index=1, shard_count=2, stage_name="else"), "call it 's0' and 'else'"),
        (shard(shard_index=1, shard_count=2, operation_id="else"), "operations"),
    ],
)
def test_disagreement_inside_a_generation_is_shown_as_conflict_and_not_routed(theirs, said) -> None:
    ours = shard(shard_count=1 if theirs.shard_index == 0 else 2)

    view = derive(("w1", ours), ("w2", theirs))

    assert view.state is ReplicaState.PARTIAL
    assert {it.record.state for it in view.shards} == {ShardState.CONFLICT}
    assert len(view.shards) == 2, "both claims are shown"
    assert view.ready_shard_count == 0
    assert "CONFLICT" in view.reason
    assert said in view.reason
    assert "nothing is repaired by guessing" in view.next_action


def test_a_conflict_is_told_though_another_stage_is_starting() -> None:
    start = shard(stage=1, stage_count=2, committed=False, state=ShardState.STARTING)
    twins = [("w1", shard(stage_count=2)), ("w2", shard(stage_count=2, instance_id="x"))]

    view = derive(*twins, ("w3", start))

    assert view.state is ReplicaState.PARTIAL
    assert "nothing is repaired by guessing" in view.next_action


def test_a_conflict_in_a_newer_set_withdraws_nothing() -> None:
    view = derive(shard(n=1), ("w2", shard(n=2)), ("w3", shard(n=2, instance_id="x")))

    assert view.state is ReplicaState.READY
    assert shards_of(view) == [(0, 0, "w1")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (shard(stage_count=2), "says 2 stages, the spec 1"),
        (shard(stage_name="else"), "calls it 'else', the spec 's0'"),
        (shard(shard_count=2), "says 2 shards, the spec 1"),
        (shard(stage=4, stage_count=5), "says 5 stages, the spec 1"),
    ],
)
def test_a_set_of_another_shape_than_the_spec_is_a_conflict(record, said) -> None:
    view = derive(record, context=wanted())

    assert view.state is ReplicaState.PARTIAL
    assert said in view.reason


@pytest.mark.parametrize("silent", [WorkerState.SUSPECT, WorkerState.UNREACHABLE, WorkerState.LOST])
def test_silence_of_a_worker_takes_nothing_out_of_the_routes(silent) -> None:
    view = derive(("w1", silent, shard()))

    assert view.state is ReplicaState.READY
    assert [it.worker_state for it in view.shards] == [silent]


def test_a_stopped_shard_is_no_claim() -> None:
    assert derive_replica(KEY, [Claim("w1", WorkerState.ALIVE, shard(state=ShardState.STOPPED))],
                          KNOWN) is None  # fmt: skip


def test_a_wanted_replica_that_nobody_reports_is_pending() -> None:
    view = derive(context=wanted(stages=3))
    recovering = derive(context=wanted(is_recovering=True))

    assert (view.state, view.shard_count) == (ReplicaState.PENDING, 3)
    assert view.reason == "no worker that is registered reports it"
    assert view.next_action.startswith(
        "if a worker that is not registered holds it, start its agent"
    )
    assert "waiting for workers" in recovering.next_action


def test_a_running_operation_makes_it_starting_whatever_is_left_of_an_earlier_start() -> None:
    context = wanted(starting_on="worker w7")

    nothing = derive(context=context)
    leftover = derive(shard(state=ShardState.FAILED), context=context)

    assert nothing.state is leftover.state is ReplicaState.STARTING
    assert "starts on worker w7" in nothing.reason
    assert "starts on worker w7" in leftover.reason


def test_a_ready_replica_stays_ready_while_an_operation_runs() -> None:
    assert derive(shard(), context=wanted(starting_on="worker w7")).state is ReplicaState.READY


def test_a_failed_start_is_told_while_nothing_newer_is_committed() -> None:
    note = FailureNote(gen(2), "w1", "m replica 0 did not start")

    unreported = derive(context=wanted(note=note))
    rolling_back = derive(
        shard(n=2, committed=False, state=ShardState.STOPPING), context=wanted(note=note)
    )
    older = derive(shard(n=1, state=ShardState.FAILED), context=wanted(note=note))

    for view in (unreported, rolling_back, older):
        assert view.state is ReplicaState.FAILED
        assert view.reason.startswith("m replica 0 did not start")
        assert "deploy again" in view.next_action


@pytest.mark.parametrize("generation", [gen(2), gen(1), NO_GENERATION])
def test_a_failed_start_is_not_told_of_what_was_committed_since(generation) -> None:
    note = FailureNote(generation, "w1", "old story")

    view = derive(shard(n=2, state=ShardState.ADOPTING), context=wanted(note=note))

    assert view.state is ReplicaState.PARTIAL
    assert "old story" not in view.reason


def test_a_replica_of_a_deployment_being_deleted_is_draining_though_all_is_ready() -> None:
    view = derive(shard(), context=wanted(is_deleting=True))

    assert view.state is ReplicaState.DRAINING


def test_what_is_deleted_is_not_waited_for_on_a_lost_worker() -> None:
    deleting = wanted(is_deleting=True)

    for state, is_shown in ((WorkerState.UNREACHABLE, True), (WorkerState.LOST, False)):
        view = derive_replica(KEY, [Claim("w1", state, shard())], deleting)
        assert (view is not None) is is_shown


def test_shards_up_to_the_ceiling_of_a_deletion_are_only_being_taken_away() -> None:
    at_ceiling = derive(shard(n=3), context=ReplicaContext(ceiling=gen(3)))
    above = derive(shard(n=4), context=ReplicaContext(ceiling=gen(3)))

    assert at_ceiling.state is ReplicaState.DRAINING
    assert above.state is ReplicaState.READY


def test_a_deployment_made_anew_does_not_get_shards_of_its_deleted_namesake() -> None:
    view = derive(shard(n=3), context=wanted(ceiling=gen(3)))

    assert view.state is ReplicaState.PENDING
    assert view.shards == ()
