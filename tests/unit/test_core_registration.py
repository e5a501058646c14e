"""Registrations, heartbeats, failure reports: what is taken, what is late, what is fenced off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagekeeper.core.commands import (
    ChangeKind,
    PublishChange,
    RegistrationAccepted,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import Epoch, Generation
from stagekeeper.core.model import ShardAddress
from stagekeeper.core.states import OperationState, ReplicaState, ShardState
from tests.plain import DeviceClaim, Failure, FailureOrigin
from tests.worlds import (
    REIGN,
    World,
    device,
    only,
    operation,
    replica_shards,
    shard,
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


def test_a_first_registration_is_answered_published_and_counted() -> None:
    world = World()

    answer, *rest = world.register(shards=replica_shards(stages=2))

    assert answer == RegistrationAccepted(epoch=REIGN, next_heartbeat_s=2.0)
    assert [(it.kind, it.name) for it in only(PublishChange, rest)] == [(ChangeKind.ADDED, "m")]
    assert world.registry.registration_count == 1
    assert world.worker().registration_count == 1
    assert world.worker().shard_count == 2
    assert world.view().state == "READY"


def test_the_same_registration_again_changes_no_view_and_publishes_nothing() -> None:
    world = World()
    world.register(shards=replica_shards(stages=2))
    before = world.registry.deployments()

    again = world.register(shards=replica_shards(stages=2))

    assert world.registry.deployments() == before
    assert only(PublishChange, again) == []
    assert world.worker().registration_count == 2


def test_a_slice_replaces_all_that_was_known_of_its_worker_and_nothing_of_others() -> None:
    world = World()
    world.register("w1", [shard("a"), shard("b")])
    world.register("w2", [shard("c")])

    told = world.register("w1", [shard("b")], revision=2)

    assert [it.name for it in world.registry.deployments()] == ["b", "c"]
    assert [(it.kind, it.name) for it in only(PublishChange, told)] == [(ChangeKind.REMOVED, "a")]


def test_a_port_that_changed_in_place_is_a_modification() -> None:
    world = World()
    world.register(shards=[shard()])
    moved = shard(addresses=(ShardAddress("stage", "grpc", "127.0.0.1:9"),))

    told = world.register(shards=[moved], revision=2)

    assert [(it.kind, it.name) for it in only(PublishChange, told)] == [(ChangeKind.MODIFIED, "m")]
    assert world.replica().shards[0].record.addresses == moved.addresses


def test_names_come_back_exactly_and_are_never_parsed() -> None:
    names = ["a-rep1", "llama", "llama-2", "x-rank0", "模型-ü"]
    world = World()

    world.register(shards=[shard(name, replica=2) for name in names])

    assert [it.name for it in world.registry.deployments()] == names
    assert [[r.key.index for r in it.replicas] for it in world.registry.deployments()] == [[2]] * 5


def test_a_lower_incarnation_is_stale_and_is_told_the_highest() -> None:
    world = World()
    world.register(shards=[shard()], incarnation=3)

    refusal = refused(world, incarnation=2, revision=99)

    assert refusal.reason is Reason.STALE_INCARNATION
    assert refusal.metadata == {"highest_incarnation": "3"}


def test_a_lower_incarnation_waits_while_the_higher_one_lives() -> None:
    world = World()
    world.register(incarnation=3)
    world.now += 9.999
    assert refused(world, incarnation=2).retry_after_s == pytest.approx(0.001)

    world.now += 0.001
    assert refused(world, incarnation=2).retry_after_s is None


def test_a_higher_incarnation_replaces_the_slice_and_begins_with_any_revision() -> None:
    world = World()
    world.register(shards=[shard()], incarnation=3, revision=50)

    world.register(shards=[shard("other")], incarnation=4, revision=1)

    assert [it.name for it in world.registry.deployments()] == ["other"]


def test_a_lower_revision_of_the_same_life_is_late_answered_like_the_newest_and_ignored() -> None:
    world = World()
    bad = shard("bad", stage=5)
    newest, *_ = world.register(shards=[shard(), bad], revision=7)
    world.now += 5.0
    before = world.registry.deployments()

    answer, *rest = world.register(shards=[], revision=6)

    assert answer == newest
    assert answer.refused, "told again what was refused of the newest"
    assert rest == []
    assert world.registry.deployments() == before
    assert world.worker().registration_count == 1
    assert world.worker().silent_for_s == 0.0, "it was heard"


@pytest.mark.parametrize(("silent_s", "is_refused"), [(9.999, True), (10.0, False)])
def test_a_worker_id_is_held_by_its_host_until_its_lease_ends(silent_s, is_refused) -> None:
    world = World()
    world.register(shards=[shard()])
    world.now += silent_s

    if is_refused:
        refusal = refused(world, host_id="elsewhere", incarnation=9)
        assert refusal.reason is Reason.WORKER_ID_IN_USE
    else:
        world.register(host_id="elsewhere", incarnation=9)
        assert world.worker().host_id == "elsewhere"


def test_another_host_is_told_that_the_id_is_in_use_before_it_is_told_an_incarnation() -> None:
    world = World()
    world.register(incarnation=5)

    assert refused(world, host_id="elsewhere", incarnation=1).reason is Reason.WORKER_ID_IN_USE


def test_another_host_still_needs_a_higher_incarnation_after_the_lease() -> None:
    world = World()
    world.register(incarnation=5)
    world.now += 10.0

    assert refused(world, host_id="elsewhere", incarnation=1).reason is Reason.STALE_INCARNATION


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"worker": ""}, "worker_id"),
        ({"worker": "a/b"}, "worker_id"),
        ({"worker": "x" * 64}, "worker_id"),
        ({"host_id": ""}, "host_id"),
        ({"incarnation": 0}, "incarnation"),
        ({"incarnation": 2**62 + 1}, "incarnation"),
        ({"revision": 2**63}, "revision"),
        ({"agent_address": "nowhere"}, "agent_address"),
        ({"agent_address": "h:0"}, "agent_address"),
        ({"agent_address": "h:65536"}, "agent_address"),
        ({"agent_address": "h:" + "1" * 5_000}, "agent_address"),
        ({"agent_address": "h:²"}, "agent_address"),
        ({"highest_epoch": Epoch(2**62 + 1, "x")}, "highest_epoch.number"),
        ({"hostname": "h" * 256}, "hostname"),
        ({"hostname": "a\nb"}, "hostname"),
        ({"devices": tuple(device(k) for k in range(1_001))}, "devices"),
    ],
)
def test_a_slice_that_makes_no_sense_is_refused_naming_the_field(changes, path) -> None:
    refusal = refused(World(), **changes)

    assert refusal.reason is Reason.BAD_FIELD
    assert [it.path for it in refusal.problems] == [path]


def test_every_wrong_field_of_a_slice_is_named_at_once() -> None:
    refusal = refused(World(), worker="", host_id="", incarnation=0)

    assert [it.path for it in refusal.problems] == ["worker_id", "host_id", "incarnation"]


@pytest.mark.parametrize(
    ("bad", "reason", "said"),
    [
        (shard("bad", shard_index=1), "SHARD_OUT_OF_RANGE", "shard_index 1 of shard_count 1"),
        (shard("bad", shard_count=0), "SHARD_OUT_OF_RANGE", "shard_count 0"),
        (shard("bad", stage=1), "SHARD_OUT_OF_RANGE", "stage_id 1 of stage_count 1"),
        (shard("bad", replica=100_000), "SHARD_OUT_OF_RANGE", "replica_index 100000"),
        (shard("bad", stage_count=1_001), "SHARD_OUT_OF_RANGE", "stage_count 1001"),
        (shard("a/b"), "BAD_FIELD", "deployment"),
        (shard("a\nb"), "BAD_FIELD", "deployment"),
        (shard("bad", stage_name=""), "BAD_FIELD", "stage_name"),
        (shard("bad", n=0), "BAD_FIELD", "generation"),
        (shard("bad", n=2**62 + 1), "BAD_FIELD", "generation"),
        (shard("bad", generation=Generation(Epoch(2**62 + 1, ""), 1)), "BAD_FIELD", "generation"),
        (shard("bad", state=ShardState.CONFLICT), "BAD_FIELD", "CONFLICT"),
        (shard("bad", instance_id=""), "BAD_FIELD", "instance_id"),
        (shard("bad", devices=(DeviceClaim("gpu-0", -1),)), "BAD_FIELD", "cannot hold -1 bytes"),
        (shard("bad", instance_id="i" * 256), "BAD_FIELD", "id of more than 255"),
        (shard("bad", operation_id="a\nb"), "BAD_FIELD", "operation_id"),
        (shard("bad", spec_revision=2**62 + 1), "BAD_FIELD", "spec_revision"),
        (shard("bad", restart_ages_s=(float("nan"),)), "BAD_FIELD", "restart_ages_s: nan"),
        (shard("bad", restart_ages_s=(1.0,) * 1_001), "BAD_FIELD", "restart_ages_s: has 1001"),
        (shard("bad", busy_for_s=float("inf")), "BAD_FIELD", "busy_for_s: inf"),
        (shard("bad", busy_for_s=-0.1), "BAD_FIELD", "busy_for_s: -0.1"),
        (shard("bad", devices=(DeviceClaim("g", 1, 2**63),)), "BAD_FIELD", "cannot use"),
        (shard("bad", generation=Generation(Epoch(1, "x" * 256), 1)), "BAD_FIELD", "generation"),
        (shard("x" * 100_000), "BAD_FIELD", "is 100000 characters long"),
        (
            shard("good", instance_id="twin"),
            "BAD_FIELD",
            "there twice, also as instance 'good/0/0/1'",
        ),
        (
            shard("bad", instance_id="good/0/0/1"),
            "BAD_FIELD",
            "is that of 'good' replica 0 stage 0 shard 0 too",
        ),
    ],
)
def test_a_bad_entry_is_refused_alone_with_its_place(bad, reason, said) -> None:
    world = World()

    answer, *_ = world.register(shards=[shard("good"), bad, shard("fine")])

    (entry,) = answer.refused
    assert (entry.index, entry.reason) == (1, reason)
    assert said in entry.message
    assert [it.name for it in world.registry.deployments()] == ["fine", "good"]
    assert "1 of its shards were refused" in world.worker().reason


def test_what_is_said_of_a_bad_entry_is_short_however_long_the_entry_is() -> None:
    answer, *_ = World().register(
        shards=[shard("🦙" * 60_000), shard("m", instance_id="i" * 9_999)]
    )

    assert all(len(it.message) < 400 for it in answer.refused)


def test_an_incarnation_that_nobody_believes_locks_no_worker_out() -> None:
    world = World()
    world.register(incarnation=2**62)

    world.register(incarnation=2**62 + 1)
    assert refused(world, incarnation=2**62 + 3).reason is Reason.BAD_FIELD
    assert world.worker().incarnation == 2**62 + 1


@pytest.mark.parametrize("state", [ShardState.FAILED, ShardState.PENDING, ShardState.STOPPED])
def test_a_shard_without_a_process_needs_no_instance_id(state) -> None:
    answer, *_ = World().register(shards=[shard(instance_id="", state=state)])

    assert answer.refused == ()


def test_the_same_shard_in_three_generations_is_no_repetition() -> None:
    answer, *_ = World().register(shards=[shard(n=1), shard(n=2), shard(n=3)])

    assert answer.refused == ()


def test_a_repetition_is_found_among_many_generations() -> None:
    answer, *_ = World().register(
        shards=[shard(n=1), shard(n=2), shard(n=3), shard(n=2, instance_id="x")]
    )

    assert [it.index for it in answer.refused] == [3]
    assert "m/0/0/2" in answer.refused[0].message


def test_bad_devices_operations_and_failures_are_left_out_alone_and_shown() -> None:
    world = World()

    world.register(
        devices=(device(0), device(0), device(1, total_bytes=-1), device(2)),
        operations=(operation(1), operation(1), operation(2, deployment="")),
        failures=(failure("f1"), failure(""), failure("f1")),
    )

    view = world.worker()
    assert [it.index for it in view.devices] == [0, 2]
    assert "devices[1] was left out: device_id 'gpu-0' is there twice" in view.reason
    assert len(world.registry.failures()) == 1


def test_a_stage_that_dies_between_two_reports_is_failed_with_its_cause() -> None:
    world = World()
    world.register(shards=replica_shards(stages=2))
    dead = replica_shards(stages=2)
    dead[1] = replace(dead[1], state=ShardState.FAILED, state_reason="signal 9")

    world.register(shards=dead, revision=2)

    assert world.replica().state is ReplicaState.FAILED
    assert "signal 9" in world.replica().reason
    assert world.view().state == "FAILED"
    assert "signal 9" in world.view().reason


def test_a_registration_derives_only_what_its_old_or_new_slice_names() -> None:
    world = World()
    world.register("big", [shard("m", replica=k) for k in range(500)])
    before = world.registry.derivation_count

    world.register("w1", [shard("m", replica=900), shard("other")])
    assert world.registry.derivation_count - before == 2
    world.register("w1", [shard("m", replica=901)], revision=2)
    assert world.registry.derivation_count - before == 2 + 3
    world.beat("w1", revision=2)
    assert world.registry.derivation_count - before == 5


def test_operations_that_ended_are_settled_and_others_are_kept() -> None:
    states = list(OperationState)
    world = World(roster=["w1", "away"])

    answer, *_ = world.register(
        operations=tuple(operation(n, state, replica=n) for n, state in enumerate(states, 1))
    )

    settled = {states[int(it.rsplit("-", 1)[1]) - 1] for it in answer.settled_operations}
    assert settled == {OperationState.ROLLED_BACK, OperationState.COMMITTED}
