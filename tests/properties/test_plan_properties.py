"""A creation does what the plan of that moment says, on any cluster; and a plan's sums are right.

The dumb planner here knows the rule of admission and tries everything.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagekeeper.core.commands import CreationAccepted, StartOperation
from stagekeeper.core.errors import Refused
from stagekeeper.core.events import DeploymentRequested
from stagekeeper.core.model import MemoryNeed
from stagekeeper.core.plan import Plan
from stagekeeper.core.plan_id import plan_id_of
from stagekeeper.core.states import OperationState, ShardState
from tests.plain import AgentProbed, DeviceClaim
from tests.worlds import World, device, only, shard, spec, stage_spec, started_shards

in_its_time = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

WORKERS = ("w1", "w2", "w3")
MEMORY = st.integers(0, 40)
NEEDS = st.one_of(
    st.builds(MemoryNeed, bytes=st.integers(1, 40), reserve_bytes=st.integers(0, 3)),
    st.builds(
        MemoryNeed,
        utilization=st.floats(0.05, 1.0, allow_nan=False),
        reserve_bytes=st.integers(0, 3),
    ),
)


@st.composite
def cards(draw: Any) -> tuple:
    """Cards of one worker: of any size, also unknown, some seen by other workers too."""
    return tuple(
        device(
            index,
            draw(st.sampled_from([0, 30, 40, 40, 80])),
            lock_domain_id=draw(st.sampled_from(["", "", "shared"])) if index == 0 else "",
        )
        for index in range(draw(st.integers(0, 3)))
    )


@st.composite
def held(draw: Any, worker: str, count: int) -> list:
    """Shards that hold memory of a worker's cards; some are of the deployment that is planned."""
    return [
        shard(
            draw(st.sampled_from(["other", "other", "m"])),
            replica=number,
            state=draw(st.sampled_from([ShardState.READY, ShardState.FAILED, ShardState.STARTING])),
            committed=draw(st.booleans()),
            devices=(DeviceClaim(f"gpu-{draw(st.integers(0, count - 1))}", draw(MEMORY)),),
            instance_id=f"{worker}-{number}",
        )
        for number in range(draw(st.integers(0, 2)))
        if count
    ]


@st.composite
def specs(draw: Any) -> Any:
    stages = []
    for number in range(draw(st.integers(1, 3))):
        wanted = tuple(draw(st.lists(st.integers(0, 2), unique=True, max_size=2)))
        need = draw(NEEDS) if wanted else None
        count = draw(st.sampled_from([1, 1, 1, 2, 3]))
        stages.append(stage_spec(f"s{number}", devices=wanted, memory=need, shard_count=count))
    return replace(spec(replicas=draw(st.integers(1, 4))), stages=tuple(stages))


@st.composite
def worlds(draw: Any) -> World:
    """A cluster in some state: recovering or not, with silent, deaf and blind workers."""
    recovers = draw(st.sampled_from([False, False, False, True]))
    world = World(roster=WORKERS if recovers else ())
    for worker in draw(st.lists(st.sampled_from(WORKERS), unique=True)):
        owned = draw(cards())
        world.register(
            worker,
            draw(held(worker, len(owned))),
            devices=owned,
            inventory_unknown=draw(st.sampled_from([False] * 5 + [True])),
        )
        if draw(st.sampled_from([False] * 5 + [True])):
            world.apply(AgentProbed(worker, 1, False))
        if draw(st.sampled_from([False] * 5 + [True])):
            world.now += 4.0
    world.tick()
    for earlier in draw(st.lists(specs(), max_size=2)):
        name = draw(st.sampled_from(["m", "n"]))
        try:
            (_, *started) = world.deploy_commands(replace(earlier, name=name))
        except Refused:
            continue
        ends = draw(st.sampled_from([None, OperationState.ROLLED_BACK]))
        for start in only(StartOperation, started):
            if ends is not None:
                world.end(start.start.parts[0], ends)
    if draw(st.sampled_from([False, False, True])) and world.view("m") is not None:
        world.delete("m")
    return world


def start_of(world: World, index: int) -> Any:
    """Return the start of a replica that is on the books."""
    book = world.registry._cluster.operations
    return next(it.start for it in book.by_id.values() if it.start.replica.index == index
                and it.start.replica.deployment == "m")  # fmt: skip


def plan_of(world: World, made: Any) -> Plan:
    plan: Plan = world.registry.plan(made, world.now)
    return plan


@in_its_time
@given(worlds(), specs())
def test_a_creation_is_accepted_exactly_when_its_plan_has_no_refusal_and_starts_just_that(
    world: World, made: Any
) -> None:
    before = world.registry.deployments(), world.registry.revision
    plan = plan_of(world, made)
    assert plan == plan_of(world, made)
    assert (world.registry.deployments(), world.registry.revision) == before
    world.check()

    try:
        commands = world.apply(DeploymentRequested(made, 2_000.0, plan_id_of(plan)))
    except Refused as refused:
        assert plan.refusals, refused
        assert refused.reason is plan.obstacles[0].reason
        assert (world.registry.deployments(), world.registry.revision) == before
        return

    assert plan.refusals == []
    assert commands[0] == CreationAccepted(plan.starting)
    begun = [start_of(world, index) for index in plan.starting]
    handed_out = {it.start.operation_id for it in only(StartOperation, commands)}
    assert handed_out <= {it.operation_id for it in begun}
    assert sorted((*plan.starting, *plan.kept)) == list(range(made.replicas))
    for start in begun:
        places = plan.placing.places[start.replica.index]
        assert start.worker_ids == tuple(it.worker_id for it in places)
        assert len(set(start.worker_ids)) == len(places) == made.worker_count
        for shard_index, (part, place) in enumerate(zip(start.parts, places, strict=True)):
            assert [it.stage_id for it in part.stages] == [
                number for number, it in enumerate(made.stages) if it.shard_count > shard_index
            ]
            for stage in part.stages:
                assert stage.shard_index == shard_index
                where = tuple(place.devices[number] for number in stage.spec.devices)
                assert stage.device_ids == where


@in_its_time
@given(worlds(), specs())
def test_the_sums_of_a_plan_are_those_of_its_places(world: World, made: Any) -> None:
    """Each new stage is on its cards once, nothing that fits is over, and nothing over fits."""
    plan = plan_of(world, made)
    sums = {(it.worker_id, it.device.device_id): it for it in plan.placing.sums}
    parts = [
        (index, shard_index, place)
        for index, places in plan.placing.places.items()
        for shard_index, place in enumerate(places)
    ]
    for index, shard_index, place in parts:
        assert len(set(place.devices.values())) == len(place.devices), "a card for each number"
        for stage_id, stage in enumerate(made.stages):
            for number in stage.devices if stage.shard_count > shard_index else ():
                card = sums[place.worker_id, place.devices[number]]
                which = index, stage_id, shard_index
                terms = [
                    it
                    for it in card.terms
                    if (it.replica_index, it.stage_id, it.shard_index) == which
                ]
                assert [it.memory_bytes for it in terms] == [
                    stage.memory.on_card(card.device.total_bytes)
                ]
    for card in sums.values():
        new_bytes = sum(it.memory_bytes for it in card.terms)
        assert card.need_bytes == new_bytes + sum(it.memory_bytes for it in card.holdings)
    if plan.placing.shortage is None:
        assert not any(it.is_over for it in sums.values())


@in_its_time
@given(st.lists(st.tuples(st.sampled_from([30, 40, 80]), MEMORY), max_size=4), specs())
def test_one_replica_finds_a_place_exactly_where_trying_everything_finds_one(
    owned: list[tuple[int, int]], made: Any
) -> None:
    made = replace(made, replicas=1, stages=tuple(replace(it, shard_count=1) for it in made.stages))
    world = World()
    world.register(
        "w1",
        [
            shard("other", number, devices=(DeviceClaim(f"gpu-{number}", held_bytes),))
            for number, (_, held_bytes) in enumerate(owned)
        ],
        devices=tuple(device(number, total) for number, (total, _) in enumerate(owned)),
    )
    numbers = sorted({number for stage in made.stages for number in stage.devices})

    def holds(number: int, card: int) -> bool:
        total, held_bytes = owned[card]
        needs = [it.memory for it in made.stages if number in it.devices]
        return held_bytes + sum(need.on_card(total) for need in needs) <= total

    fits = any(
        all(holds(number, card) for number, card in zip(numbers, chosen, strict=True))
        for chosen in permutations(range(len(owned)), len(numbers))
    )

    assert (not plan_of(world, made).refusals) == fits


@in_its_time
@given(specs())
def test_what_a_plan_started_is_kept_by_the_next_one(made: Any) -> None:
    world = World()
    owned = tuple(device(number, 400) for number in range(3))
    for worker in WORKERS:
        world.register(worker, devices=owned)
    plan = plan_of(world, made)
    if plan.refusals:
        return
    parts = world.deploy(made)

    under_way = plan_of(world, made)
    for worker in WORKERS:
        shards = [it for part in parts if part.worker_id == worker for it in started_shards(part)]
        world.register(worker, shards, revision=2, devices=owned)
    running = plan_of(world, made)

    assert under_way.kept == running.kept == plan.starting
    assert plan_id_of(under_way) == plan_id_of(running)
