"""The registry against everything that order, repetition and lies can do to it.

The clever registry keeps indexes and derives what was touched; the dumb one here looks at the last
report of each worker and at nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import Generation
from stagekeeper.core.model import DeviceClaim, WorkerReport
from stagekeeper.core.states import (
    ReplicaState,
    ShardState,
)
from tests.worlds import (
    EARLIER,
    World,
    desired,
    device,
    report,
    shard,
    spec,
    timeless,
)

# A busy machine is no failure.
in_its_time = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

WORKERS = ("w1", "w2", "w3")
NAMES = ("m", "m-1", "模型")
REPORTED = [it for it in ShardState if it is not ShardState.CONFLICT]
MOSTLY_READY = st.one_of(st.just(ShardState.READY), st.sampled_from(REPORTED))


@st.composite
def records(draw: Any, worker: str) -> Any:
    """A shard that is sound in itself; it may contradict any other worker's."""
    stage_count = draw(st.sampled_from([1, 2, 2, 3]))
    shard_count = draw(st.sampled_from([1, 1, 1, 2]))
    deployment = draw(st.sampled_from(NAMES))
    replica, stage = draw(st.integers(0, 2)), draw(st.integers(0, stage_count - 1))
    index, n = draw(st.integers(0, shard_count - 1)), draw(st.integers(1, 3))
    return shard(
        deployment,
        replica,
        stage,
        n,
        stage_count=stage_count,
        shard_index=index,
        shard_count=shard_count,
        state=draw(MOSTLY_READY),
        committed=draw(st.sampled_from([True, True, True, False])),
        instance_id=f"{worker}:{deployment}/{replica}/{stage}/{index}/{n}",
    )


@st.composite
def starts(draw: Any, worker: str) -> list:
    """What is left of one start of a replica with two stages: several workers may have one."""
    n = draw(st.integers(1, 3))
    return [
        shard(
            stage=stage,
            stage_count=2,
            n=n,
            state=draw(st.sampled_from([ShardState.READY, ShardState.FAILED])),
            instance_id=f"{worker}:m/0/{stage}/0/{n}",
        )
        for stage in draw(st.sampled_from([[0, 1], [0, 1], [0], [1]]))
    ]


@st.composite
def slices(draw: Any, worker: str) -> Any:
    """The shards of one report, each once."""
    drawn = draw(st.one_of(st.lists(records(worker), max_size=4), starts(worker)))
    return tuple({it.instance_id: it for it in drawn}.values())


@st.composite
def histories(draw: Any) -> dict[str, list[WorkerReport]]:
    """For each worker its reports, oldest first: revisions ascend, some begin a new life."""
    made: dict[str, list[WorkerReport]] = {}
    for worker in WORKERS:
        incarnation, reports = 1, []
        for revision in range(1, draw(st.integers(0, 3)) + 1):
            incarnation += draw(st.sampled_from([0, 0, 1]))
            reports.append(
                report(worker, draw(slices(worker)), incarnation=incarnation, revision=revision)
            )
        made[worker] = reports
    return made


def tell(world: World, reports: Iterable[WorkerReport]) -> None:
    for one in reports:
        try:
            world.register(
                one.worker_id, one.shards, incarnation=one.incarnation, revision=one.revision
            )
        except Refused as refusal:
            assert refusal.reason == "STALE_INCARNATION"


def seen(world: World) -> tuple:
    """All that can be read of a registry, but for how often it was told."""
    return (
        timeless(world.registry.deployments()),
        [replace(it, registration_count=0) for it in world.registry.workers(world.now)],
        world.registry.failures(),
        (world.registry.mode, world.registry.epoch),
    )


def wishes() -> list:
    """One of the names is wanted, one is being deleted, one is only known from reports."""
    return [
        desired(spec(NAMES[0], stages=2, replicas=2)),
        desired(spec(NAMES[1]), is_deleting=True),
    ]


@in_its_time
@given(histories(), st.data(), st.booleans())
def test_any_order_and_any_repetition_of_the_same_reports_gives_the_same_registry(
    told: dict[str, list[WorkerReport]], data: st.DataObject, has_wishes: bool
) -> None:
    """Also while it holds still, and once it no longer does: deletions are carried out then."""
    known: dict[str, Any] = {"desired": wishes(), "roster": ["away"]} if has_wishes else {}
    straight, shaken = (World(is_checked=False, **known) for _ in range(2))
    everything = [one for reports in told.values() for one in reports]
    again = data.draw(st.lists(st.sampled_from(everything))) if everything else []

    tell(straight, everything)
    tell(shaken, data.draw(st.permutations(everything + again)))

    for seconds in (0.0, 10.0):
        straight.tick(seconds)
        shaken.tick(seconds)
        assert seen(shaken) == seen(straight)
        shaken.check()


@in_its_time
@given(histories(), st.data())
def test_the_same_report_again_changes_nothing_and_says_nothing(
    told: dict[str, list[WorkerReport]], data: st.DataObject
) -> None:
    world = World(desired=wishes(), is_new=True, is_checked=False)
    newest = [reports[-1] for reports in told.values() if reports]
    tell(world, newest)
    before, revision = seen(world), world.registry.revision

    for one in data.draw(st.permutations(newest + newest)):
        commands = world.register(
            one.worker_id, one.shards, incarnation=one.incarnation, revision=one.revision
        )
        assert len(commands) == 1, "the answer, and nothing else"

    assert seen(world) == before
    assert world.registry.revision == revision


@in_its_time
@given(histories(), slices("w1"), slices("w1"))
def test_one_workers_report_never_changes_anothers_shards(
    told: dict[str, list[WorkerReport]], first: tuple, second: tuple
) -> None:
    world = World(is_checked=False)
    tell(world, (one for worker in WORKERS[1:] for one in told[worker]))
    world.register("w1", first)
    cluster = world.registry._cluster
    others = {worker: cluster.workers[worker].shards for worker in WORKERS[1:] if told[worker]}

    world.register("w1", second, revision=2)

    assert {worker: cluster.workers[worker].shards for worker in others} == others
    for worker, records_ in others.items():
        for record in records_:
            assert record in cluster.claims[record.replica][worker]


def shown(world: World) -> set[tuple]:
    return {
        (it.worker_id, it.record.instance_id)
        for view in world.registry.deployments()
        for replica in view.replicas
        for it in replica.shards
    }


@in_its_time
@given(histories())
def test_a_shard_is_missing_only_when_nobody_reports_it(
    told: dict[str, list[WorkerReport]],
) -> None:
    """What is not shown lost to another set of its stage, or to another start that is READY."""
    world = World(is_checked=False)
    tell(world, (one for reports in told.values() for one in reports))
    reported = [
        record
        for reports in told.values()
        if reports
        for record in reports[-1].shards
        if record.state is not ShardState.STOPPED
    ]
    for record in reported:
        replica = world.replica(record.replica_index, record.deployment)
        of_stage = [it.record for it in replica.shards if it.record.stage_id == record.stage_id]
        generations = {it.generation for it in of_stage}
        if not of_stage:
            assert replica.state is ReplicaState.READY, "a stage that somebody reports is missing"
        else:
            assert len(generations) == 1, "one set stands for a stage"
        if record.generation in generations:
            shards = {(it.shard_index, it.instance_id) for it in of_stage}
            assert (record.shard_index, record.instance_id) in shards
    assert {instance for _, instance in shown(world)} <= {it.instance_id for it in reported}


def is_routable(start: Sequence[Any]) -> bool:
    """Judge all claims on one replica with one generation, the dumb way."""
    stages: dict[int, list[Any]] = {}
    for it in start:
        stages.setdefault(it.stage_id, []).append(it)
    return (
        len({(it.stage_count, it.operation_id) for it in start}) == 1
        and stages.keys() == set(range(start[0].stage_count))
        and all(it.state is ShardState.READY and it.committed for it in start)
        and all(
            len({(it.shard_count, it.stage_name) for it in stage}) == 1
            and sorted(it.shard_index for it in stage) == list(range(stage[0].shard_count))
            for stage in stages.values()
        )
    )


@in_its_time
@given(histories())
def test_a_replica_is_ready_exactly_when_a_dumb_look_at_the_last_reports_says_so(
    told: dict[str, list[WorkerReport]],
) -> None:
    world = World(is_checked=False)
    tell(world, (one for reports in told.values() for one in reports))
    claims: dict[tuple, dict[Generation, list[Any]]] = {}
    for reports in told.values():
        for it in reports[-1].shards if reports else ():
            if it.state is not ShardState.STOPPED:
                starts = claims.setdefault((it.deployment, it.replica_index), {})
                starts.setdefault(it.generation, []).append(it)
    views = {
        (view.name, replica.key.index): replica
        for view in world.registry.deployments()
        for replica in view.replicas
    }
    assert views.keys() == claims.keys()
    for key, starts in claims.items():
        chosen = max((it for it in starts if is_routable(starts[it])), default=None)
        view = views[key]
        assert (view.state is ReplicaState.READY) is (chosen is not None)
        if chosen is not None:
            got = {it.record.instance_id for it in view.shards}
            assert got == {it.instance_id for it in starts[chosen]}
        ordered = [(it.record.stage_id, it.record.shard_index) for it in view.shards]
        assert ordered == sorted(ordered)


def spoilt(record: Any, how: int) -> Any:
    """Make a record wrong in itself, in one of several ways."""
    ways: list[dict] = [
        {"shard_index": record.shard_count},
        {"shard_count": 0},
        {"stage_id": record.stage_count},
        {"deployment": "a/b"},
        {"stage_name": "x" * 64},
        {"state": ShardState.CONFLICT},
        {"instance_id": "", "state": ShardState.READY},
        {"generation": Generation(EARLIER, 0)},
        {"devices": (DeviceClaim(device(0).device_id, 2**63),)},
    ]
    return replace(record, **ways[how])


@in_its_time
@given(slices("w1"), slices("w1"), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8))))
def test_a_bad_entry_is_refused_alone(
    good: tuple, models_: tuple, bad: list[tuple[int, int]]
) -> None:
    """Bad entries anywhere among good ones: exactly they are refused, by their places."""
    mixed: list[tuple[bool, Any]] = [(True, it) for it in good]
    for place, how in bad if models_ else ():
        mixed.insert(place, (False, spoilt(models_[place % len(models_)], how)))
    clean, dirty = World(), World()

    clean.register(shards=good)
    answer, *_ = dirty.register(shards=[it for _, it in mixed])

    assert [it.index for it in answer.refused] == [
        place for place, (is_good, _) in enumerate(mixed) if not is_good
    ]
    assert dirty.registry.deployments() == clean.registry.deployments()


@in_its_time
@given(slices("w1"), st.integers(0, 60), st.booleans())
def test_a_registrations_cost_does_not_grow_with_the_cluster(
    mine: tuple, others: int, is_shared: bool
) -> None:
    """Counted in replicas derived: the same beside nobody and beside many, of the same name too."""
    alone, crowded = World(is_checked=False), World(is_checked=False)
    for number in range(others):
        name = NAMES[0] if is_shared else "other"
        record = shard(name, replica=100 + number, instance_id=f"i{number}")
        crowded.register(f"o{number}", [record])

    costs = []
    for world in (alone, crowded):
        before = world.registry.derivation_count
        world.register("w1", mine)
        world.register("w1", (), revision=2)
        costs.append(world.registry.derivation_count - before)

    assert costs[0] == costs[1]
    assert costs[0] <= 2 * len({it.replica for it in mine})
