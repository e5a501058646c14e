"""The order of a start over several workers, under every order of words and every failure."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.core.ids import StageId, WorkerId
from stagekeeper.core.planner import init_groups
from stagekeeper.core.start_run import Order, Reserve, StartRun, StartStages, Undo


@st.composite
def starts(draw):
    """A replica: for each stage its shards (on the first so many workers) and its cards."""
    worker_count = draw(st.integers(1, 4))
    stage_count = draw(st.integers(1, 6))
    shards = [draw(st.integers(1, worker_count)) for _ in range(stage_count)]
    cards = [draw(st.sets(st.integers(0, 3), max_size=3)) for _ in range(stage_count)]
    count = max(shards)
    parts = {
        WorkerId(f"w{worker}"): [StageId(it) for it in range(stage_count) if shards[it] > worker]
        for worker in range(count)
    }
    groups = init_groups({StageId(it): sorted(cards[it]) for it in range(stage_count)})
    return parts, groups


class World:
    """Carries orders out in any order, and notes what it saw."""

    def __init__(self, parts, groups) -> None:
        self.parts, self.groups = parts, groups
        self.run = StartRun(parts, groups)
        self.open: list[Order] = []
        self.seen: list[Order] = []
        self.up: set[tuple[str, int]] = set()
        self.reserved: set[str] = set()
        self.dirty: set[str] = set()
        self.undone: list[str] = []
        self.closed: set[str] = set()
        self.failed_stages: set[int] = set()
        self.has_failed = False
        self.is_given_up = False
        self.take()

    def take(self) -> None:
        for order in self.run.next_orders():
            self.check(order)
            self.seen.append(order)
            self.open.append(order)

    def check(self, order: Order) -> None:
        if isinstance(order, StartStages):
            assert not self.has_failed, "a start after the first failure"
            assert self.reserved == set(self.parts), "a start before everybody has reserved"
            self.check_alone(order)
        elif isinstance(order, Reserve):
            assert not self.has_failed
        else:
            assert self.has_failed
            assert order.worker_id not in self.undone, "undone twice"
            self.undone.append(order.worker_id)
            starting = [it for it in self.open if isinstance(it, StartStages | Reserve)]
            if order.is_urgent:
                here = {
                    stage
                    for it in starting
                    if isinstance(it, StartStages) and it.worker_id == order.worker_id
                    for stage in it.stage_ids
                }
                assert self.is_given_up or here & self.failed_stages, "cut short without need"
            else:
                assert not starting, "undone while something was in flight"

    def check_alone(self, order: StartStages) -> None:
        """Stages that share a card, on any worker, never start side by side, and start in order."""
        for group in self.groups:
            mine = set(order.stage_ids) & set(group)
            if not mine:
                continue
            for other in self.open:
                if isinstance(other, StartStages):
                    assert set(other.stage_ids) & set(group) <= mine
            if (
                len({worker for worker, stages in self.parts.items() if set(stages) & set(group)})
                == 1
            ):
                continue
            assert len(mine) == 1
            for earlier in group:
                if earlier < min(mine):
                    for worker, stages in self.parts.items():
                        assert earlier not in stages or (worker, earlier) in self.up

    def answer(self, order: Order, *, fails: bool, is_clean: bool) -> None:
        self.open.remove(order)
        if isinstance(order, Undo):
            # From here on its agent refuses what is late of this start.
            self.dirty.discard(order.worker_id)
            self.closed.add(order.worker_id)
            self.run.undone(order.worker_id)
        elif fails:
            self.has_failed = True
            if isinstance(order, StartStages):
                self.failed_stages |= set(order.stage_ids)
            if is_clean:
                self.dirty.discard(order.worker_id)
            else:
                self.hold(order.worker_id)
            self.run.failed(order, is_clean=is_clean)
        elif isinstance(order, Reserve):
            self.reserved.add(order.worker_id)
            self.hold(order.worker_id)
            self.run.reserved(order)
        else:
            self.up |= {(order.worker_id, stage) for stage in order.stage_ids}
            self.run.started(order)
        self.take()

    def lose(self, worker_id: WorkerId) -> None:
        """A worker that has reserved undoes its part by itself."""
        self.has_failed = True
        self.failed_stages |= set(self.parts[worker_id])
        self.hold(worker_id)
        self.run.part_lost(worker_id)
        self.take()

    def hold(self, worker_id: str) -> None:
        if worker_id not in self.closed:
            self.dirty.add(worker_id)


@settings(max_examples=200, deadline=None)
@given(starts(), st.data())
def test_a_start_is_all_or_nothing_whatever_fails_and_in_whatever_order(start, data) -> None:
    world = World(*start)
    can_fail = data.draw(st.booleans(), label="something may fail")
    for _ in range(200):
        if not world.open:
            break
        if can_fail and data.draw(st.integers(0, 20), label="give up") == 0:
            world.has_failed = world.is_given_up = True
            world.run.give_up()
            world.take()
            continue
        idle = world.reserved - {it.worker_id for it in world.open}
        if can_fail and idle and data.draw(st.integers(0, 9), label="a part is lost") == 0:
            world.lose(data.draw(st.sampled_from(sorted(idle)), label="whose"))
            continue
        order = data.draw(st.sampled_from(world.open), label="answered")
        fails = can_fail and data.draw(st.integers(0, 4), label="fails") == 0
        world.answer(order, fails=fails, is_clean=data.draw(st.booleans(), label="clean"))
    assert not world.open
    assert world.run.is_over
    assert world.run.has_failed == world.has_failed
    if world.has_failed:
        assert not world.run.is_started
        assert not world.dirty, "a worker that may hold something was never asked to undo it"
    else:
        assert world.run.is_started
        assert world.up == {(it, stage) for it, stages in start[0].items() for stage in stages}


@given(starts())
def test_disjoint_groups_start_side_by_side(start) -> None:
    parts, groups = start
    world = World(parts, groups)
    while any(isinstance(order, Reserve) for order in world.open):
        world.answer(world.open[0], fails=False, is_clean=True)
    starting = {
        stage for order in world.open if isinstance(order, StartStages) for stage in order.stage_ids
    }
    assert {min(group) for group in groups} <= starting
