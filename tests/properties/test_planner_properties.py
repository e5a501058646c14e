"""Grouping and admission against slow and obvious versions of themselves."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.core.errors import PlanError
from stagekeeper.core.model import MemoryNeed
from stagekeeper.core.planner import (
    UTILIZATION_STEPS,
    Holding,
    admission_check,
    admission_report,
    init_groups,
)

in_its_time = settings(deadline=None)  # a busy machine is no failure
stage_ids = st.integers(0, 40)
devices = st.one_of(st.integers(0, 5), st.sampled_from(["GPU-a", "GPU-b", "1"]))
plans = st.dictionaries(stage_ids, st.lists(devices, unique=True, max_size=3), max_size=14)
totals = st.dictionaries(st.integers(0, 3), st.integers(1, 10**12), min_size=1, max_size=4)
utilizations = st.floats(0, 1, exclude_min=True)


def groups_by_closure(plan: dict) -> list[list[int]]:
    """Merge any two groups that share a card until no two do."""
    groups = [({stage}, set(cards)) for stage, cards in plan.items()]
    for _ in plan:
        for one in groups:
            for other in groups:
                if one is not other and one[1] & other[1]:
                    one[0].update(other[0])
                    one[1].update(other[1])
                    groups.remove(other)
                    break
            else:
                continue
            break
    return sorted(sorted(stages) for stages, _ in groups)


@in_its_time
@given(plans)
def test_groups_are_the_transitive_closure_of_sharing_a_card(plan):
    assert init_groups(plan) == groups_by_closure(plan)


@in_its_time
@given(plans, st.randoms())
def test_groups_do_not_depend_on_the_order_of_stages_or_cards(plan, rng):
    shuffled = [(stage, rng.sample(cards, len(cards))) for stage, cards in plan.items()]
    rng.shuffle(shuffled)
    assert init_groups(shuffled) == init_groups(plan)


@st.composite
def admissions(draw) -> tuple[dict, dict, int]:
    cards = draw(totals)
    stages = draw(
        st.dictionaries(
            stage_ids,
            st.tuples(st.lists(st.sampled_from(sorted(cards)), unique=True), utilizations),
            max_size=8,
        )
    )
    return stages, cards, draw(st.integers(0, 10**11))


def need_by_hand(stages: dict, cards: dict, reserve_bytes: int) -> dict:
    return {
        device: sum(
            int(utilization * total) + reserve_bytes
            for wanted, utilization in stages.values()
            if device in wanted
        )
        for device, total in cards.items()
    }


@in_its_time
@given(admissions())
def test_a_card_is_refused_exactly_when_its_sum_is_over_its_total(admission):
    stages, cards, reserve_bytes = admission
    need = need_by_hand(stages, cards, reserve_bytes)
    over = [device for device in sorted(cards) if need[device] > cards[device]]
    refusals = admission_check(stages, cards, reserve_bytes)
    assert [refusal.split(":")[0] for refusal in refusals] == [f"device {it}" for it in over]
    assert all(str(need[it]) in refusal for it, refusal in zip(over, refusals, strict=True))


@in_its_time
@given(admissions(), st.data())
def test_what_already_holds_memory_counts_like_a_stage_that_states_bytes(admission, data):
    stages, cards, reserve_bytes = admission
    needs = {
        stage: (wanted, MemoryNeed(utilization=utilization, reserve_bytes=reserve_bytes))
        for stage, (wanted, utilization) in stages.items()
    }
    device = data.draw(st.sampled_from(sorted(cards)))
    held = data.draw(st.integers(1, 2 * cards[device]))
    by_holding = admission_report(needs, cards, [Holding(device, "pid 7", held)])
    by_stage = admission_report({**needs, 99: ([device], MemoryNeed(bytes=held))}, cards)
    assert [it.need_bytes for it in by_holding.devices] == [
        it.need_bytes for it in by_stage.devices
    ]
    asked = {it for wanted, _ in stages.values() for it in wanted}
    for card in by_holding.devices:
        expected = card.need_bytes > card.total_bytes and card.device_id in asked
        assert card.is_over == expected
        assert expected <= (card.device_id != device or "pid 7" in card.refusal())


@in_its_time
@given(admissions())
def test_nearest_utilization_fits_and_a_step_more_does_not(admission):
    stages, cards, reserve_bytes = admission
    needs = {
        stage: (wanted, MemoryNeed(utilization=utilization, reserve_bytes=reserve_bytes))
        for stage, (wanted, utilization) in stages.items()
    }
    report = admission_report(needs, cards)

    def is_refused(stage: int, utilization: float) -> bool:
        changed = {**stages, stage: (stages[stage][0], utilization)}
        need = need_by_hand(changed, cards, reserve_bytes)
        return any(need[device] > cards[device] for device in stages[stage][0])

    for stage, (wanted, utilization) in stages.items():
        nearest = report.nearest_utilization(stage)
        if not wanted:
            assert nearest is None
        elif not is_refused(stage, utilization):
            assert nearest == utilization
        else:
            step = Fraction(1, UTILIZATION_STEPS)
            if nearest is not None:
                assert 0 < nearest <= utilization
                assert not is_refused(stage, nearest)
            # An int() forgives less than a byte, so the step beyond is looked at with one to spare.
            beyond = float(Fraction(nearest or 0) + step)
            spare = max(1 / cards[device] for device in wanted)
            if beyond + spare < utilization:
                assert is_refused(stage, beyond + spare)


mistakes = st.sampled_from(
    [
        ((True, ([], 0.5)), "stage id True"),
        ((-3, ([], 0.5)), "stage id -3"),
        ((50, ([0, 0], 0.5)), "stage 50: duplicate device 0"),
        ((51, ([77], 0.5)), "stage 51: unknown device 77"),
        ((52, ([2], 0.5)), "stage 52: device 2 reports 0 bytes"),
        ((53, ([0], 0.0)), "stage 53: utilization 0.0"),
        ((54, ([0], 90)), "stage 54: utilization 90"),
        ((55, ([0], math.nan)), "stage 55: utilization nan"),
        ((56, ([0], math.inf)), "stage 56: utilization inf"),
        ((57, ([0], True)), "stage 57: utilization True"),
        ((58, ([0], "0.5")), "stage 58: utilization '0.5'"),
        ((59, ("GPU-a", 0.5)), "stage 59: devices"),
        ((60, (None, 0.5)), "stage 60: devices"),
        ((61, ([-1], 0.5)), "stage 61: device id -1"),
        ((62, ([False], 0.5)), "stage 62: device id False"),
        ((63, ([""], 0.5)), "stage 63: device id ''"),
    ]
)


@in_its_time
@given(st.lists(mistakes, unique_by=lambda it: it[1], min_size=1), st.booleans(), st.randoms())
def test_every_mistake_is_named_at_once(wrong, has_bad_reserve, rng):
    stages = [(0, ([0], 0.5)), (1, ([1], 0.5)), *(stage for stage, _ in wrong)]
    marks = [mark for _, mark in wrong]
    if has_bad_reserve:
        marks.append("reserve_bytes -1")
    rng.shuffle(stages)
    with pytest.raises(PlanError) as caught:
        admission_check(stages, {0: 100, 1: 100, 2: 0}, -1 if has_bad_reserve else 0)
    for mark in marks:
        assert sum(mark in problem for problem in caught.value.problems) == 1
    assert len(caught.value.problems) == len(marks)


@pytest.mark.parametrize(
    ("stages", "cards", "mark"),
    [
        ([(0, ([], None)), (0, ([], None))], {}, "stage 0: duplicate stage id"),
        ([(0, ([1], None))], {1: 10}, "stage 0: has devices"),
        ([(0, ([1], MemoryNeed()))], {1: 10}, "either a utilization or bytes"),
        ([(0, ([1], MemoryNeed(0.5, 5)))], {1: 10}, "either a utilization or bytes"),
        ([(0, ([1], MemoryNeed(bytes=0)))], {1: 10}, "0 is not a whole number of bytes above 0"),
        ([(0, ([1], MemoryNeed(0.5, reserve_bytes=-1)))], {1: 10}, "stage 0: reserve -1"),
        ([], [(1, 10), (1, 10)], "device 1: duplicate total"),
        ([], {1: -10}, "device 1: -10"),
        ([], {1: 1.5}, "device 1: 1.5"),
        ([], {True: 10}, "device id True"),
    ],
)
def test_mistake_in_an_admission_report_is_named(stages, cards, mark):
    with pytest.raises(PlanError) as caught:
        admission_report(stages, cards)
    assert [mark in problem for problem in caught.value.problems] == [True]


def test_holding_of_negative_bytes_pays_for_nobody():
    with pytest.raises(PlanError, match="pid 7"):
        admission_report({}, {0: 10}, [Holding(0, "pid 7", -1)])


def test_card_that_reports_nothing_and_that_nobody_wants_is_no_mistake():
    assert admission_check({0: ([0], 0.5)}, {0: 100, 1: 0}, 0) == []


def test_refusal_shows_the_sum_who_holds_memory_and_what_would_fit():
    report = admission_report(
        {
            0: ([0], MemoryNeed(utilization=0.5, reserve_bytes=10)),
            1: ([0], MemoryNeed(bytes=300)),
        },
        {0: 1000},
        [Holding(0, "pid 4711 (python)", 250)],
    )
    assert report.refusals == [
        "device 0: 1060 bytes needed, 1000 there, 60 too many: "
        "stage 0: 0.5 × 1000 + 10 = 510; stage 1: 300; pid 4711 (python): 250; "
        "free: 750; it fits with stage 0 at utilization 0.44"
    ]


def test_refusal_of_stages_that_state_bytes_is_readable_and_speaks_of_no_utilization():
    need = MemoryNeed(bytes=900 * 2**30)
    report = admission_report({0: (["cpu:1"], need)}, {"cpu:1": 2**30}, [Holding("cpu:1", "x", 5)])
    assert report.refusals == [
        "device cpu:1: 966367641605 bytes needed (900 GiB), 1073741824 there (1 GiB), "
        "965293899781 too many (899 GiB): stage 0: 966367641600 (900 GiB); x: 5; "
        "free: 1073741819 (1024 MiB)"
    ]


def test_long_refusal_stays_short():
    stages = [(stage, ([0], 0.5)) for stage in reversed(range(1000))]
    [refusal] = admission_check(stages, {0: 1000}, 0)
    assert "stage 0: 0.5 × 1000 = 500; stage 1: 0.5 × 1000 = 500; stage 2" in refusal
    assert "and 992 more" in refusal
    assert "no cut of one stage's utilization is enough" in refusal
    assert len(refusal) < 600
