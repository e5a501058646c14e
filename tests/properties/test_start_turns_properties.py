"""Gangs never wait for each other, whoever gets which card first and whenever a reign ends.

The agents here are as careless as they may be: a shard takes its worker's card whenever that is
free, in any order, and keeps it until all shards of its stage have theirs.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.core.commands import RemoveOperation, SavedOperation, SaveOperation
from stagekeeper.core.ids import Epoch
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import OperationState
from tests.unit.test_core_spanning_placement import sharded
from tests.unit.test_core_start_turns import Turns
from tests.worlds import World, desired, only

WORKERS = tuple(f"w{number}" for number in range(1, 5))
SHORT = RegistrySettings(recovery_window_s=3.0)


class Gangs:
    """Some gangs, and the cards that their shards have."""

    def __init__(self, wanted: list[list[str]]) -> None:
        self.cards = dict.fromkeys(WORKERS, 1)
        self.turns = Turns(cards=self.cards)
        self.reign = 5
        self.specs = {}
        self.starts = {}
        self.holder: dict[str, str] = {}  # worker → the gang that has its card
        self.up: set[str] = set()
        self.asked: dict[str, None] = {}
        for number, workers in enumerate(wanted):
            name = f"g{number}"
            gang = sharded((len(workers), (0,), 0.05))
            placement = replace(gang.placement, workers=tuple(workers))
            self.specs[name] = replace(gang, name=name, placement=placement)
            self.starts[name] = self.turns.deploy(name, self.specs[name])

    def free_steps(self) -> list[tuple[str, str]]:
        """Return which shard of a gang that was ever handed out could take its card now."""
        self.asked.update(dict.fromkeys(self.turns.begun))
        return [
            (name, worker)
            for name in self.asked
            if name not in self.up
            for worker in self.starts[name].worker_ids
            if worker not in self.holder
        ]

    def take(self, name: str, worker: str) -> None:
        self.holder[worker] = name
        start = self.starts[name]
        if any(self.holder.get(it) != name for it in start.worker_ids):
            self.turns.hold(start, OperationState.STARTING, [worker])
            return
        for it in start.worker_ids:
            del self.holder[it]
        self.up.add(name)
        self.turns.come_up(start)

    def next_reign(self, order: list[str]) -> None:
        """End the reign; the workers come back in this order."""
        written = self.turns.world.written
        removed = {it.operation_id for it in only(RemoveOperation, written)}
        saved = {it.saved.start.operation_id: it.saved for it in only(SaveOperation, written)}
        kept = [it for operation_id, it in saved.items() if operation_id not in removed]
        self.reign += 1
        world = World(
            desired=[desired(it, is_creating=True) for it in self.specs.values()],
            operations=kept,
            roster=WORKERS,
            epoch=Epoch(self.reign, f"supervisor-{self.reign}"),
            settings=SHORT,
        )
        world.written = [
            SaveOperation(SavedOperation(it.start, it.is_decided, it.peers)) for it in kept
        ]
        self.asked.update(dict.fromkeys(self.turns.begun))
        held = self.turns.held
        self.turns = Turns(world, cards=self.cards)
        self.turns.held = held
        # What was begun before goes on at the agents, whoever reigns: their cards are taken.
        for worker in order:
            self.turns.report(worker)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WORKERS), min_size=2, max_size=4, unique=True), max_size=5),
    st.data(),
)
def test_all_gangs_come_up_whoever_gets_which_card_first(wanted, data) -> None:
    gangs = Gangs(wanted)
    reigns = data.draw(st.integers(0, 2), label="reigns that end")
    while len(gangs.up) < len(gangs.specs):
        if reigns and data.draw(st.integers(0, 4), label="the reign ends") == 0:
            reigns -= 1
            gangs.next_reign(data.draw(st.permutations(WORKERS), label="who is back first"))
            continue
        steps = gangs.free_steps()
        assert steps, f"they wait for each other: {gangs.holder}"
        gangs.take(*data.draw(st.sampled_from(steps), label="who takes a card"))
