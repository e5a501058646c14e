"""Heartbeats and their verdicts, reigns and what is above them, failures and who reports them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.commands import (
    HeartbeatVerdict,
    LookForReign,
    SaveEpoch,
    SaveFailure,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import ChangeRevision, Epoch, Generation
from stagekeeper.core.states import WorkerState
from tests.plain import Failure, FailureOrigin, FailureReported
from tests.worlds import (
    REIGN,
    World,
    gen,
    only,
    shard,
    spec,
    started_shards,
)


def failure(failure_id="f1", worker="w1", deployment="m") -> Failure:
    return Failure(
        failure_id=failure_id,
        kind="EXITED",
        origin=FailureOrigin(worker, deployment, 0, 0, "s0", 0, "i1"),
        message="exit code 3",
    )


def refused(world: World, *arguments, **changes) -> Refused:
    before = snapshot(world)
    with pytest.raises(Refused) as caught:
        world.register(*arguments, **changes)
    assert snapshot(world) == before, "what is refused changes nothing"
    return caught.value


def snapshot(world: World) -> tuple:
    registry = world.registry
    return (
        registry.deployments(),
        registry.workers(world.now),
        registry.failures(),
        registry.revision,
        registry.epoch,
        registry.registration_count,
    )


def test_a_reign_that_a_worker_has_seen_is_gone_above_and_others_register_anew() -> None:
    world = World()
    world.register("w1")

    answer, *rest = world.register("w2", highest_epoch=Epoch(8, "other"))

    ours = Epoch(9, REIGN.supervisor_id)
    assert answer.epoch == world.registry.epoch == ours
    assert only(SaveEpoch, rest) == [SaveEpoch(ours)]
    assert only(LookForReign, rest) == [LookForReign(above=REIGN)], "it may live"
    assert world.beat("w1").verdict is HeartbeatVerdict.REGISTER
    assert world.beat("w1").epoch == ours
    assert world.beat("w2").verdict is HeartbeatVerdict.OK
    world.register("w1")
    assert world.beat("w1").verdict is HeartbeatVerdict.OK


@pytest.mark.parametrize(
    ("seen", "is_above"),
    [
        (Epoch(REIGN.number, REIGN.supervisor_id), False),
        (Epoch(REIGN.number, "a"), False),
        (Epoch(REIGN.number, "z"), True),
        (Epoch(REIGN.number - 1, "z"), False),
    ],
)
def test_reigns_are_compared_as_pairs(seen, is_above) -> None:
    world = World()
    world.register(highest_epoch=seen)

    assert (world.registry.epoch > REIGN) is is_above


def test_a_generation_above_the_reign_raises_it_too() -> None:
    world = World()

    world.register(shards=[shard(generation=Generation(Epoch(7, "x"), 3))])

    assert world.registry.epoch == Epoch(8, REIGN.supervisor_id)


def test_what_is_minted_is_above_every_generation_of_this_reign_that_is_reported() -> None:
    world = World()
    world.register(shards=[shard("other", generation=Generation(REIGN, 41))])

    (plan,) = world.deploy(spec())

    assert plan.generation == Generation(REIGN, 42)


def test_numbers_at_the_end_of_the_believable_can_still_be_followed() -> None:
    world = World()
    world.register(shards=[shard("other", generation=Generation(Epoch(2**62, "x"), 2**62))])
    ours = world.registry.epoch
    assert ours.number == 2**62 + 1

    answer, *_ = world.register(
        shards=[shard("other", generation=Generation(ours, 2**62))], revision=2, highest_epoch=ours
    )
    assert answer.refused == ()
    (plan,) = world.deploy(spec())
    world.end(plan)
    answer, *_ = world.register(shards=started_shards(plan), revision=3, highest_epoch=ours)

    assert answer.refused == ()
    assert world.view().state == "READY"


def test_positions_in_the_change_log_end_with_the_reign() -> None:
    world = World()
    world.register(shards=[shard()])
    known = world.registry.revision

    world.register("w2", highest_epoch=Epoch(8, "other"))

    with pytest.raises(Refused) as caught:
        world.registry.changes_since(known)
    assert caught.value.reason is Reason.REVISION_GONE
    assert world.registry.changes_since(ChangeRevision(world.registry.epoch, 0)) == []


@pytest.mark.parametrize(
    ("beat", "verdict"),
    [
        ({}, HeartbeatVerdict.OK),
        ({"worker": "unknown"}, HeartbeatVerdict.REGISTER),
        ({"incarnation": 1}, HeartbeatVerdict.SUPERSEDED),
        ({"incarnation": 3}, HeartbeatVerdict.REGISTER),
        ({"revision": 6}, HeartbeatVerdict.REGISTER),
        ({"revision": 4}, HeartbeatVerdict.OK),
        ({"digest": b"other"}, HeartbeatVerdict.REGISTER),
    ],
)
def test_a_heartbeat_never_registers_and_gets_a_verdict(beat, verdict) -> None:
    world = World()
    world.register(incarnation=2, revision=5)
    before = world.registry.deployments()

    answer = world.beat(**{"incarnation": 2, "revision": 5, **beat})

    assert answer.verdict is verdict
    assert (answer.epoch, answer.next_heartbeat_s) == (REIGN, 2.0)
    assert world.registry.deployments() == before
    assert len(world.registry.workers(world.now)) == 1


def test_a_heartbeat_of_an_earlier_life_does_not_renew_the_lease() -> None:
    world = World()
    world.register(incarnation=2)
    world.tick(10.0)

    world.beat(incarnation=1)

    assert world.worker().state is WorkerState.UNREACHABLE


@pytest.mark.parametrize("other", [{"digest": b"other"}, {"revision": 2}, {"revision": 0}])
def test_a_heartbeat_with_another_slice_does_not_renew_the_lease(other) -> None:
    """It may come from another host that took the same worker id, and the same incarnation."""
    world = World()
    world.register()
    world.now += 9.0

    world.beat(**other)
    world.tick(1.0)

    assert world.worker().state is WorkerState.UNREACHABLE


@pytest.mark.parametrize(("silent_s", "is_refused"), [(9.999, True), (10.0, False)])
def test_a_heartbeat_renews_the_lease_of_its_host(silent_s, is_refused) -> None:
    world = World()
    world.register()
    world.now += 9.0
    world.beat()
    world.now += silent_s

    if is_refused:
        assert refused(world, host_id="b", incarnation=2).reason is Reason.WORKER_ID_IN_USE
    else:
        world.register(host_id="b", incarnation=2)


def test_a_failure_is_recorded_once_whoever_reports_it_and_settled() -> None:
    world = World()
    world.register("w1")

    first = world.apply(FailureReported("w1", 1, failure()))
    again = world.apply(FailureReported("w1", 1, failure()))
    answer, *rest = world.register("w2", failures=(failure(), failure("f2", "w2", "n")))

    assert first[0].is_settled and again[0].is_settled
    assert only(SaveFailure, first) == [SaveFailure(failure())]
    assert only(SaveFailure, again) == []
    assert answer.settled_failures == ("f1", "f2")
    assert [it.failure.failure_id for it in only(SaveFailure, rest)] == ["f2"]
    assert [it.failure_id for it in world.registry.failures()] == ["f2", "f1"]
    assert [it.failure_id for it in world.registry.failures("n")] == ["f2"]
    assert [it.failure_id for it in world.registry.failures(limit=1)] == ["f2"]


def test_failures_of_an_earlier_reign_are_known_and_not_written_again() -> None:
    world = World(failures=(failure(),), is_new=True)

    _, *rest = world.register(failures=(failure(),))

    assert only(SaveFailure, rest) == []


def test_only_so_many_failures_are_kept() -> None:
    world = World(settings=replace(World().settings, failure_limit=2))
    world.register(failures=tuple(failure(f"f{k}") for k in range(3)))

    assert [it.failure_id for it in world.registry.failures()] == ["f2", "f1"]


@pytest.mark.parametrize(
    ("worker", "incarnation", "failure_id", "reason"),
    [
        ("unknown", 2, "f", Reason.WORKER_UNKNOWN),
        ("w1", 3, "f", Reason.WORKER_UNKNOWN),
        ("w1", 1, "f", Reason.STALE_INCARNATION),
        ("w1", 2, "", Reason.BAD_FIELD),
    ],
)
def test_a_failure_report_is_fenced(worker, incarnation, failure_id, reason) -> None:
    world = World()
    world.register(incarnation=2)

    with pytest.raises(Refused) as caught:
        world.apply(FailureReported(worker, incarnation, failure(failure_id)))

    assert caught.value.reason is reason
    assert world.registry.failures() == []


def test_a_generation_is_told_apart_by_its_reign() -> None:
    newer = shard(generation=Generation(Epoch(5, "a"), 1), instance_id="newer")

    world = World()
    world.register("w1", [shard(n=9)])
    world.register("w2", [newer])

    assert world.replica().shards[0].record.generation > gen(9)
