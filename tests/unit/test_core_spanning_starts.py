"""Starts over several workers: decided once, committed everywhere, joined, or stopped."""

from __future__ import annotations

import pytest

from stagekeeper.core.commands import (
    CommitOperation,
    EndRun,
    RejoinOperation,
    RemoveOperation,
    SaveDeployment,
    SavedOperation,
    SaveOperation,
    StartOperation,
    StopSlot,
)
from stagekeeper.core.ids import Epoch
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import DeploymentState, OperationState, ReplicaState, ShardState
from tests.plain import (
    CommitEnded,
    Failure,
    FailureOrigin,
    OperationCancelled,
    OperationEnded,
    OperationStarted,
    RollbackRecord,
)
from tests.unit.test_core_spanning_placement import sharded
from tests.worlds import (
    World,
    cancels,
    desired,
    only,
    record_of,
    shard,
    started_shards,
    stops,
)

SHORT = RegistrySettings(recovery_window_s=3.0)
TWO = sharded((2, (), 0.0), (1, (), 0.0))
_S = OperationState


class Span:
    """A world with one start over w1 and w2."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.revisions = {"w1": 1, "w2": 1}
        if world is None:
            for worker in self.revisions:
                self.world.register(worker)
            self.commands = self.world.deploy_commands(TWO)
            (command,) = only(StartOperation, self.commands)
            self.start = command.start

    def part(self, worker: str):
        return self.start.part_of(worker)

    def report(self, worker: str, state: OperationState | None, **changes):
        """Have a worker report its part as it is in this state; None: nothing of it."""
        self.revisions[worker] += 1
        part = self.part(worker)
        shards = []
        if state in (_S.STARTING, _S.STARTED, _S.COMMITTED):
            up = ShardState.STARTING if state is _S.STARTING else ShardState.READY
            shards = started_shards(part, committed=state is _S.COMMITTED, state=up)
        fields = {"revision": self.revisions[worker], **changes}
        records = () if state is None else (record_of(part, state),)
        return self.world.register(worker, shards, **{"operations": records, **fields})

    def all_up(self):
        for worker in ("w1", "w2"):
            self.report(worker, _S.STARTED)
        return self.world.apply(OperationStarted(self.start.operation_id))

    def commit_ends(self, worker: str, state: OperationState | None, **changes):
        return self.world.commit(self.part(worker), state, **changes)

    @property
    def decided(self) -> list[bool]:
        """What was written down of the start, one entry for each time."""
        return [it.saved.is_decided for it in only(SaveOperation, self.world.written)]

    @property
    def removed(self) -> list[str]:
        return [it.operation_id for it in only(RemoveOperation, self.world.written)]


def next_reign(span: Span, *, is_decided: bool = False, roster=("w1", "w2")) -> Span:
    """The reign after one that ended in mid-start."""
    peers = ()
    if is_decided:
        saved = [it.saved for it in only(SaveOperation, span.world.written)]
        peers = saved[-1].peers
    world = World(
        desired=[desired(TWO, is_creating=True)],
        operations=[SavedOperation(span.start, is_decided, peers)],
        roster=roster,
        epoch=Epoch(6, "supervisor-six"),
        settings=SHORT,
    )
    other = Span(world)
    other.start = span.start
    return other


# Beginning and deciding.


def test_a_start_is_written_down_with_all_of_its_parts_before_it_begins() -> None:
    span = Span()

    (saved,) = only(SaveOperation, span.commands)
    assert saved.saved == SavedOperation(span.start)
    (command,) = only(StartOperation, span.commands)
    assert [it.worker_id for it in command.targets] == ["w1", "w2"]
    assert span.world.replica().reason == "it starts on workers w1, w2"


def test_it_is_decided_when_all_is_up_and_every_worker_told_where_its_shards_serve() -> None:
    span = Span()
    span.report("w1", _S.STARTED)
    told = span.world.apply(OperationStarted(span.start.operation_id))
    assert only(CommitOperation, told) == [], "w2 has yet to say where"

    told = span.report("w2", _S.STARTED)

    assert span.decided == [False, True]
    assert {it.target.worker_id: len(it.peers) for it in only(CommitOperation, told)} == {
        "w1": 1,
        "w2": 2,
    }
    (first, _) = only(CommitOperation, told)
    (peer,) = first.peers
    assert (peer.stage_id, peer.stage_name, peer.shard_index) == (0, "s0", 1)
    assert peer.url == "w2:5000"
    assert [type(it) for it in told].index(SaveOperation) < [type(it) for it in told].index(
        CommitOperation
    )


def test_a_start_on_one_worker_writes_no_decision() -> None:
    world = World()
    world.register()
    (plan,) = world.deploy(sharded((1, (), 0.0)))

    (commit,) = only(CommitOperation, world.apply(OperationStarted(plan.operation_id)))

    assert commit.peers == ()
    assert [it.saved.is_decided for it in only(SaveOperation, world.written)] == [False]


def test_it_is_ready_when_every_worker_reports_it_committed_and_not_before() -> None:
    span = Span()
    span.all_up()
    span.commit_ends("w1", _S.COMMITTED)
    span.report("w1", _S.COMMITTED)
    assert span.world.replica().state is ReplicaState.STARTING
    assert "is committed" in span.world.replica().reason

    told = span.report("w2", _S.COMMITTED)

    assert span.world.view().state is DeploymentState.READY
    assert span.removed == [span.start.operation_id]
    assert [it.desired.is_creating for it in only(SaveDeployment, told)] == [False]
    assert span.commit_ends("w2", _S.COMMITTED) == [], "late"


def test_a_commit_that_was_not_answered_is_asked_for_again() -> None:
    span = Span()
    span.all_up()
    span.commit_ends("w1", _S.COMMITTED)

    span.commit_ends("w2", None, error="w2 does not answer")

    assert only(CommitOperation, span.world.tick(0.999)) == []
    (again,) = only(CommitOperation, span.world.tick(0.001))
    assert again.target.worker_id == "w2"


def test_a_commit_goes_to_the_next_life_of_its_worker() -> None:
    span = Span()
    span.all_up()

    told = span.report("w2", _S.STARTED, incarnation=2, revision=1)

    (again,) = only(CommitOperation, told)
    assert (again.target.worker_id, again.target.incarnation) == ("w2", 2)


def test_a_decided_start_waits_for_a_worker_that_is_lost() -> None:
    span = Span()
    span.all_up()
    span.commit_ends("w1", _S.COMMITTED)
    span.world.now += 59.0
    span.report("w1", _S.COMMITTED)
    span.world.tick(1.0)

    assert span.world.worker("w2").state == "LOST"
    assert span.world.replica().state is ReplicaState.STARTING
    assert "delete the deployment" in span.world.replica().next_action or (
        "w2 was given up on" in span.world.replica().next_action
    )
    span.commit_ends("w2", None, error="it did not answer")
    told = [*span.report("w2", _S.STARTED), *span.world.tick(1.0)]
    assert [it.target.worker_id for it in only(CommitOperation, told)] == ["w2"]


def test_reports_that_do_not_come_end_an_undecided_start() -> None:
    span = Span()
    span.report("w1", _S.STARTED)
    span.world.apply(OperationStarted(span.start.operation_id))
    span.world.now += 9.0
    span.report("w1", _S.STARTED)

    told = span.world.tick(1.0)

    assert cancels(told) == [("w1", span.start.operation_id)]
    assert "worker w2 (shard 1): its stages have started" in span.world.replica().reason


def test_a_stall_of_the_supervisors_own_is_no_time_in_which_a_report_did_not_come() -> None:
    span = Span()
    span.report("w1", _S.STARTED)
    span.world.apply(OperationStarted(span.start.operation_id))
    span.world.now += 9.0
    span.report("w1", _S.STARTED)

    assert cancels(span.world.tick(5.0, stalled_s=5.0)) == []
    assert cancels(span.world.tick(1.0)) == [("w1", span.start.operation_id)]


def test_an_end_of_a_run_that_is_over_says_nothing() -> None:
    span = Span()
    span.all_up()

    span.world.apply(OperationEnded(span.start.operation_id, None, "too late", worker_id="w1"))

    assert span.world.replica().state is ReplicaState.STARTING
    assert span.removed == []


# Failing.


def test_the_story_of_a_failure_names_the_shard_and_what_every_worker_undid() -> None:
    span = Span()
    cause = Failure(
        "f1", "INIT_RAISED", FailureOrigin("w2", "m", 0, 0, "s0", 1, "i"), "s0 raised: boom"
    )
    mine = RollbackRecord(1, False, "still there", worker_id="w1")
    theirs = RollbackRecord(0, True, worker_id="w2")
    failed = record_of(span.part("w2"), _S.ROLLED_BACK, failure=cause, rollback=(theirs,))
    other = record_of(span.part("w1"), _S.ROLLED_BACK, rollback=(mine,))

    span.world.apply(
        OperationEnded(span.start.operation_id, failed, worker_id="w2", others=(("w1", other),))
    )

    (told,) = span.world.registry.creation_of("m").failures
    assert told.worker_id == "w2"
    assert "did not start on worker w2 (shard 1): s0 raised: boom" in told.message
    assert "the rollback left stage 1 on w1 (still there)" in told.message
    assert (told.failure, told.rollback) == (cause, (theirs, mine))
    assert span.removed == [span.start.operation_id]


def test_what_a_worker_undid_is_told_also_when_it_comes_late() -> None:
    span = Span()
    span.report("w1", _S.STARTED)
    span.report("w2", None, incarnation=2, revision=1)
    undone = RollbackRecord(0, True, worker_id="w1")
    record = record_of(span.part("w1"), _S.ROLLED_BACK, rollback=(undone,))

    span.report("w1", _S.ROLLED_BACK, operations=(record,))

    (told,) = span.world.registry.creation_of("m").failures
    assert "worker w2 (shard 1) was interrupted (its agent was restarted" in told.message
    assert told.rollback == (undone,)


def test_a_new_life_without_its_part_ends_the_start_on_every_worker() -> None:
    span = Span()
    span.report("w1", _S.STARTED)

    told = span.report("w2", None, incarnation=2, revision=1)

    assert only(EndRun, told) == [EndRun(span.start.operation_id)]
    assert cancels(told) == [("w1", span.start.operation_id)]
    assert span.world.replica().state is ReplicaState.FAILED


@pytest.mark.parametrize("state", [_S.RESERVED, _S.STARTING, _S.STARTED, _S.ROLLING_BACK])
def test_a_new_life_with_its_part_is_joined(state) -> None:
    span = Span()

    told = span.report("w2", state, incarnation=2, revision=1)

    (again,) = only(RejoinOperation, told)
    assert (again.target.worker_id, again.target.incarnation) == ("w2", 2)
    assert span.world.replica().state is ReplicaState.STARTING


def test_a_part_that_is_undone_while_others_start_is_looked_at() -> None:
    span = Span()
    span.report("w1", _S.STARTED)

    told = span.report("w1", _S.ROLLING_BACK)

    assert [it.target.worker_id for it in only(RejoinOperation, told)] == ["w1"]


def test_a_part_that_is_undone_before_the_decision_undoes_the_rest() -> None:
    span = Span()
    span.report("w1", _S.STARTED)
    span.world.apply(OperationStarted(span.start.operation_id))

    told = span.report("w2", _S.ROLLED_BACK)

    assert cancels(told) == [("w1", span.start.operation_id)]
    assert span.decided == [False]
    assert span.world.replica().state is ReplicaState.FAILED


def test_a_start_on_a_lost_worker_ends_on_the_others() -> None:
    span = Span()
    span.report("w1", _S.STARTED)
    span.world.now += 59.0
    span.report("w1", _S.STARTED)

    told = span.world.tick(1.0)

    assert only(EndRun, told)
    assert cancels(told) == [("w1", span.start.operation_id)]
    assert "worker w2 (shard 1): its worker is LOST" in span.world.replica().reason


@pytest.mark.parametrize(
    ("state", "reason"),
    [(_S.ROLLED_BACK, ""), (_S.INTERRUPTED, ""), (None, "BAD_FIELD"), (None, "STALE_GENERATION")],
)
def test_a_committed_half_is_stopped_when_the_other_is_gone_for_good(state, reason) -> None:
    span = Span()
    span.all_up()
    span.commit_ends("w1", _S.COMMITTED)
    span.report("w1", _S.COMMITTED)

    told = span.commit_ends("w2", state, reason=reason)

    n = span.start.generation.n
    assert sorted(stops(told)) == [("w1", "m", 0, 0, n), ("w1", "m", 0, 1, n)]
    assert span.world.replica().state is ReplicaState.FAILED
    assert "worker w2 (shard 1)" in span.world.replica().reason
    assert span.removed == [], "it is remembered until nothing is left of it"
    assert only(StopSlot, told)[0].reason == "the rest of its start is lost"
    span.report("w2", None)
    told = span.report("w1", None)
    assert span.removed == [span.start.operation_id]
    assert span.world.replica().state is ReplicaState.FAILED


@pytest.mark.parametrize("reason", ["", "STALE_EPOCH", "STALE_INCARNATION", "DRAINING"])
def test_a_committed_half_is_left_alone_while_the_other_may_follow(reason) -> None:
    span = Span()
    span.all_up()
    span.commit_ends("w1", _S.COMMITTED)
    span.report("w1", _S.COMMITTED)

    told = span.commit_ends("w2", None, reason=reason, error="not now")

    assert stops([*told, *span.world.tick(3.0)]) == []
    assert span.world.registry.creation_of("m").starting == (0,)


def test_a_half_that_was_condemned_is_stopped_when_its_worker_returns_with_it() -> None:
    span = Span()
    span.all_up()
    span.report("w1", _S.STARTED)
    span.commit_ends("w2", _S.ROLLED_BACK)

    told = span.report("w1", _S.COMMITTED, incarnation=2, revision=1)

    assert [it[:4] for it in stops(told)] == [("w1", "m", 0, 0), ("w1", "m", 0, 1)]


def test_a_replica_can_be_deployed_again_while_its_half_is_being_stopped() -> None:
    span = Span()
    span.all_up()
    span.commit_ends("w1", _S.COMMITTED)
    span.report("w1", _S.COMMITTED)
    span.report("w2", _S.ROLLED_BACK)

    (command,) = only(StartOperation, span.world.deploy_commands(TWO))

    assert command.start.generation > span.start.generation
    assert {it.target.worker_id for it in command.stop_first} == {"w1"}


# Deleting.


def test_a_deletion_cancels_on_every_worker_and_waits_for_each_answer() -> None:
    span = Span()
    for worker in ("w1", "w2"):
        span.report(worker, _S.STARTING)

    told = span.world.delete()
    operation_id = span.start.operation_id
    assert cancels(told) == [("w1", operation_id), ("w2", operation_id)]
    span.report("w1", None)
    span.world.apply(OperationCancelled("w1", 1, operation_id))
    assert span.removed == []
    span.report("w2", None)
    span.world.apply(OperationCancelled("w2", 1, operation_id))

    assert span.removed == [operation_id]
    assert span.world.view() is None


def test_a_deletion_of_a_half_committed_start_stops_the_one_half_and_cancels_the_other() -> None:
    span = Span()
    span.all_up()
    span.report("w1", _S.COMMITTED)

    told = span.world.delete()

    assert ("w2", span.start.operation_id) in cancels(told)
    assert [it[0] for it in stops(told)] == ["w1", "w1"]
    assert only(CommitOperation, span.world.tick(5.0)) == []


# The next reign.


def test_recovery_R12_a_start_is_joined_once_all_of_its_workers_are_back() -> None:
    span = next_reign(Span(), roster=("w1", "w2", "w3"))
    told = span.report("w1", _S.STARTED)
    assert only(StartOperation, told) == []

    told = span.report("w2", _S.STARTING, incarnation=7)

    (command,) = only(StartOperation, told)
    assert command.start == span.start
    assert [it.incarnation for it in command.targets] == [1, 7]
    assert cancels(told) == []
    assert span.world.registry.creation_of("m").starting == (0,)


def test_a_start_that_nobody_has_begun_yet_is_joined_too() -> None:
    span = next_reign(Span())
    span.report("w1", None)

    assert only(StartOperation, span.report("w2", None))


def test_a_start_that_misses_a_worker_when_the_window_is_over_is_cancelled() -> None:
    span = next_reign(Span())
    span.report("w1", _S.STARTED)

    told = span.world.tick(3.0)

    assert cancels(told) == [("w1", span.start.operation_id)]
    assert "worker w2 (shard 1) was interrupted" in span.world.replica().reason
    assert span.removed == [span.start.operation_id]
    told = span.report("w2", _S.STARTED)
    assert cancels(told) == [("w2", span.start.operation_id)]


def test_a_part_that_was_undone_meanwhile_ends_the_start_and_nothing_is_cancelled_in_hold() -> None:
    span = next_reign(Span(), roster=("w1", "w2", "w3"))
    span.report("w1", _S.STARTED)

    told = span.report("w2", _S.ROLLED_BACK)

    assert cancels(told) == []
    assert span.world.replica().state is ReplicaState.FAILED
    told = span.world.tick(3.0)
    assert cancels(told) == [("w1", span.start.operation_id)]


def test_a_decision_is_carried_out_worker_by_worker_also_in_hold() -> None:
    before = Span()
    before.all_up()
    span = next_reign(before, is_decided=True)

    told = span.report("w1", _S.STARTED)

    (commit,) = only(CommitOperation, told)
    assert commit.target.worker_id == "w1"
    assert [it.url for it in commit.peers] == ["w2:5000"], "as it was written down"
    assert only(StartOperation, told) == []
    told = span.report("w2", _S.COMMITTED)
    assert only(CommitOperation, told) == []
    span.report("w1", _S.COMMITTED)
    assert span.world.view().state is DeploymentState.READY


def test_a_decided_start_outlasts_the_window_without_its_worker() -> None:
    before = Span()
    before.all_up()
    span = next_reign(before, is_decided=True)
    span.report("w1", _S.COMMITTED)

    told = span.world.tick(3.0)

    assert stops(told) == cancels(told) == []
    assert span.removed == []
    assert [it.target.worker_id for it in only(CommitOperation, span.report("w2", _S.STARTED))] == [
        "w2"
    ]


def test_leftovers_of_an_earlier_start_go_before_a_joined_one_and_not_in_hold() -> None:
    span = next_reign(Span(), roster=("w1", "w2", "w3"))
    old = shard(n=1, stage_count=2, shard_count=2, state=ShardState.FAILED)
    span.world.register("w1", [old], revision=9)
    told = span.report("w2", None)
    assert only(StartOperation, told) == []

    told = span.world.tick(3.0)

    (command,) = only(StartOperation, told)
    assert [(it.target.worker_id, it.up_to.n) for it in command.stop_first] == [("w1", 1)]


def test_a_start_of_what_is_being_deleted_is_cancelled_and_not_joined() -> None:
    before = Span()
    world = World(
        desired=[desired(TWO, is_deleting=True)],
        operations=[SavedOperation(before.start)],
        roster=("w1", "w2"),
    )
    span = Span(world)
    span.start = before.start
    span.report("w1", _S.STARTED)

    told = span.report("w2", _S.STARTED)

    operation_id = span.start.operation_id
    assert cancels(told) == [("w1", operation_id), ("w2", operation_id)]
    assert only(StartOperation, told) == []


def test_a_start_of_no_wish_is_never_joined() -> None:
    before = Span()
    world = World(operations=[SavedOperation(before.start)], roster=("w1", "w2"))
    span = Span(world)
    span.start = before.start
    span.report("w1", _S.STARTED)

    told = span.report("w2", _S.STARTED)

    assert only(StartOperation, told) == []
    assert len(cancels(told)) == 2
    assert span.removed == [span.start.operation_id]


def test_of_two_starts_of_a_replica_the_older_one_is_condemned() -> None:
    before = Span()
    before.all_up()
    before.commit_ends("w2", _S.ROLLED_BACK)
    (command,) = only(StartOperation, before.world.deploy_commands(TWO))
    world = World(
        desired=[desired(TWO, is_creating=True)],
        operations=[SavedOperation(command.start), SavedOperation(before.start, True)],
        roster=("w1", "w2", "w3"),
        settings=SHORT,
    )
    span = Span(world)
    span.start = before.start

    told = [*span.report("w1", _S.COMMITTED), *span.report("w2", None)]

    assert only(CommitOperation, told) == []
    assert [it[:4] for it in stops(span.world.tick(3.0))] == [
        ("w1", "m", 0, 0),
        ("w1", "m", 0, 1),
    ]


def test_a_late_word_on_a_commit_of_an_unknown_start_is_ignored() -> None:
    span = Span()
    before = span.world.registry.deployments()

    assert span.world.apply(CommitEnded("w1", 1, "nobody", None)) == []
    assert span.world.apply(OperationStarted("nobody")) == []
    assert span.world.registry.deployments() == before
