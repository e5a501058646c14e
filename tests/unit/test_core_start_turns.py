"""Starts whose stages have shards on the same cards of several workers: one at a time, by age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stagekeeper.core.commands import SavedOperation, SaveOperation, StartOperation
from stagekeeper.core.ids import Epoch
from stagekeeper.core.model import ReplicaStart
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import DeploymentState, OperationState, ShardState
from tests.plain import OperationCancelled, OperationEnded, OperationStarted
from tests.unit.test_core_spanning_placement import sharded
from tests.worlds import World, cancels, desired, device, only, record_of, started_shards

_S = OperationState
GANG = sharded((2, (0,), 0.2))
"""One stage with a shard on each of two workers."""

CARDS = {"w1": 1, "w2": 1}


class Turns:
    """A world of workers with one card each, and what was handed out in it."""

    def __init__(
        self,
        world: World | None = None,
        *,
        cards: dict[str, int] = CARDS,
        domains: dict[tuple[str, int], str] | None = None,
    ) -> None:
        self.world = world or World()
        self.cards = cards
        self.revisions = dict.fromkeys(cards, 0)
        self.held: dict[str, dict[str, tuple[ReplicaStart, _S]]] = {it: {} for it in cards}
        self.domains = domains or {}
        self.begun: list[str] = []
        if world is None:
            for worker in cards:
                self.report(worker)

    def report(self, worker: Any, **changes: Any) -> list[Any]:
        """Have a worker report all of what it holds."""
        self.revisions[worker] += 1
        held = self.held[worker].values()
        shards: list[Any] = []
        for start, state in held:
            if state is not _S.RESERVED:
                up = ShardState.STARTING if state is _S.STARTING else ShardState.READY
                part = start.part_of(worker)
                shards += started_shards(part, state=up, committed=state is _S.COMMITTED)
        records = tuple(record_of(start.part_of(worker), state) for start, state in held)
        fields = {"revision": self.revisions[worker], "operations": records, **changes}
        fields["devices"] = tuple(
            device(number, lock_domain_id=self.domains.get((worker, number), ""))
            for number in range(self.cards[worker])
        )
        return self.note(self.world.register(worker, shards, **fields))

    def note(self, commands: list[Any]) -> list[Any]:
        self.begun += [it.start.replica.deployment for it in only(StartOperation, commands)]
        return commands

    def deploy(self, name: str, spec=GANG) -> ReplicaStart:
        """Return the start of what is deployed, handed out or not."""
        commands = self.note(self.world.deploy_commands(replace(spec, name=name)))
        return only(SaveOperation, commands)[0].saved.start

    def hold(self, start: ReplicaStart, state: _S, workers: Iterable[str] = ()) -> None:
        """Have the workers of a start report their parts in a state."""
        for worker in workers or start.worker_ids:
            self.held[worker][start.operation_id] = (start, state)
            self.report(worker)

    def come_up(self, start: ReplicaStart) -> None:
        """Have all of a start come up, which decides it."""
        self.hold(start, _S.STARTED)
        self.note(self.world.apply(OperationStarted(start.operation_id)))

    def apply(self, event: Any) -> list[Any]:
        return self.note(self.world.apply(event))

    def reason(self, name: str) -> str:
        (view,) = [it for it in self.world.registry.deployments() if it.name == name]
        return view.reason


def test_the_second_gang_on_the_cards_begins_when_the_first_one_is_up() -> None:
    turns = Turns()
    first = turns.deploy("a")
    second = turns.deploy("b")
    assert turns.begun == ["a"]
    assert second.worker_ids == first.worker_ids
    assert "it starts on workers w1, w2 after a replica 0" in turns.reason("b")

    turns.hold(first, _S.STARTING)
    assert turns.begun == ["a"]

    turns.come_up(first)
    assert turns.begun == ["a", "b"]
    assert "after" not in turns.reason("b")


def test_gangs_of_other_workers_on_the_same_cards_go_by_age_too() -> None:
    """Two agents of one host see the same cards, under names that each of them chose."""
    cards = dict.fromkeys(("w1", "w2", "w3", "w4"), 1)
    domains = {("w1", 0): "h1/GPU-a", ("w3", 0): "h1/GPU-a"}
    turns = Turns(cards=cards, domains=domains)
    placed = {}
    for name, workers in (("a", ("w1", "w2")), ("b", ("w3", "w4"))):
        placement = replace(GANG.placement, workers=workers)
        placed[name] = turns.deploy(name, replace(GANG, placement=placement))
    assert turns.begun == ["a"]

    turns.come_up(placed["a"])

    assert turns.begun == ["a", "b"]


def test_a_gang_begins_when_the_one_before_it_has_failed() -> None:
    turns = Turns()
    first = turns.deploy("a")
    turns.deploy("b")
    assert turns.begun == ["a"]

    turns.apply(OperationEnded(first.operation_id, None, "no", worker_id="w1"))

    assert turns.begun == ["a", "b"]


def test_a_gang_begins_when_the_one_before_it_is_deleted() -> None:
    turns = Turns()
    first = turns.deploy("a")
    turns.deploy("b")
    assert turns.begun == ["a"]

    turns.note(turns.world.delete("a"))

    assert turns.begun == ["a", "b"]
    assert turns.world.registry.deployment("a").state is DeploymentState.DELETING
    for worker in first.worker_ids:
        turns.apply(OperationCancelled(worker, 1, first.operation_id, ""))
    assert turns.begun == ["a", "b"]


def test_gangs_go_by_age_and_each_waits_for_all_before_it() -> None:
    turns = Turns()
    starts = [turns.deploy(name) for name in "abc"]
    for number, start in enumerate(starts):
        assert turns.begun == list("abc")[: number + 1]
        turns.come_up(start)


def test_a_gang_that_waits_is_deleted_without_having_begun() -> None:
    turns = Turns()
    first = turns.deploy("a")
    second = turns.deploy("b")

    told = turns.note(turns.world.delete("b"))

    assert set(cancels(told)) == {(it, second.operation_id) for it in ("w1", "w2")}
    for worker in second.worker_ids:
        turns.apply(OperationCancelled(worker, 1, second.operation_id, ""))
    turns.come_up(first)
    assert turns.begun == ["a"]


def test_gangs_on_other_cards_and_workers_begin_side_by_side() -> None:
    turns = Turns(cards={"w1": 2, "w2": 2})
    turns.deploy("a", sharded((2, (0,), 0.9)))
    turns.deploy("b", sharded((2, (0,), 0.9)))
    turns.deploy("c", sharded((2, (), 0.0)))

    assert turns.begun == ["a", "b", "c"]


def test_what_lies_on_one_worker_waits_for_nobody_and_nobody_waits_for_it() -> None:
    turns = Turns()
    turns.deploy("a", sharded((1, (0,), 0.1)))
    turns.deploy("b")
    turns.deploy("c", sharded((1, (0,), 0.1)))

    assert turns.begun == ["a", "b", "c"]


def test_a_start_that_its_agent_keeps_back_says_whom_it_comes_after() -> None:
    """An agent starts stages one after another on a card, and tells nothing of what waits."""
    turns = Turns(cards={"w1": 1})
    starts = {}
    for name, spec in (
        ("a", sharded((1, (0,), 0.1))),
        ("b", sharded((1, (0,), 0.1))),
        ("c", sharded((1, (), 0.0))),
    ):
        commands = turns.note(turns.world.deploy_commands(replace(spec, name=name)))
        starts[name] = only(StartOperation, commands)[0].start
    assert turns.begun == ["a", "b", "c"]
    assert "after a replica 0, which starts on a card of both" in turns.reason("b")
    assert "after" not in turns.reason("a") + turns.reason("c")

    turns.hold(starts["b"], _S.STARTING)
    assert "after" not in turns.reason("b"), "it has begun"
    del turns.held["w1"][starts["b"].operation_id]
    turns.report("w1")
    turns.come_up(starts["a"])
    assert "after" not in turns.reason("b")


def test_another_life_of_its_worker_ends_no_start_that_has_yet_to_begin() -> None:
    turns = Turns()
    first = turns.deploy("a")
    turns.deploy("b")

    turns.hold(first, _S.STARTING)
    turns.report("w2", incarnation=2)
    assert turns.world.registry.creation_of("b").starting == (0,)

    turns.held["w2"].clear()
    turns.report("w2", incarnation=3)
    assert turns.begun == ["a", "b"], "nothing of the first one is left there"


def next_reign(*starts: ReplicaStart) -> Turns:
    """The reign after one that ended while these starts were on the books."""
    world = World(
        desired=[
            desired(replace(GANG, name=start.replica.deployment), is_creating=True)
            for start in starts
        ],
        operations=[SavedOperation(it) for it in starts],
        roster=("w1", "w2", "w3"),
        epoch=Epoch(6, "supervisor-six"),
        settings=RegistrySettings(recovery_window_s=3.0),
    )
    return Turns(world, cards={"w1": 1, "w2": 1, "w3": 1})


def three_workers() -> tuple[ReplicaStart, ReplicaStart]:
    """Two starts that share a card of w2, and no other one."""
    turns = Turns(cards={"w1": 1, "w2": 1, "w3": 1})
    placed = {"a": ("w1", "w2"), "b": ("w2", "w3")}
    starts = []
    for name, workers in placed.items():
        placement = replace(GANG.placement, workers=workers)
        starts.append(turns.deploy(name, replace(GANG, placement=placement)))
    assert turns.begun == ["a"]
    return starts[0], starts[1]


def test_the_next_reign_keeps_the_order_though_the_younger_ones_workers_are_back_first() -> None:
    first, second = three_workers()
    turns = next_reign(first, second)
    turns.hold(first, _S.STARTING, ["w2"])
    turns.report("w3")
    assert turns.begun == []

    turns.hold(first, _S.STARTING, ["w1"])
    assert turns.begun == ["a"]
    turns.come_up(first)
    assert turns.begun == ["a", "b"]


def test_the_younger_one_begins_when_the_window_is_over_for_the_older_one() -> None:
    first, second = three_workers()
    turns = next_reign(first, second)
    turns.hold(first, _S.STARTING, ["w2"])
    turns.report("w3")

    told = turns.note(turns.world.tick(3.0))

    assert turns.begun == ["b"]
    assert ("w2", first.operation_id) in cancels(told)
